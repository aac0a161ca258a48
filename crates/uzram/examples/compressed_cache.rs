//! A cache of compressed pages that evicts the coldest when its memory is full.
//!
//! `cargo run --release --example compressed_cache [MEMORY_MIB]`
//!
//! A map leads from keys to [`Handle`]s of objects, lz4's output, in a [`Pool`] with a limit. When the limit
//! is reached, [`Pool::reclaim`] names the entries to evict: those that share the least recently filled
//! pages, so that evicting them frees whole pages. (Evicting as many entries in any order would only leave
//! holes.)

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use uzram::codec::{Algorithm, Decoder, Encoder, ROOM_BYTES};
use uzram::random::Random;
use uzram::units::{PAGE_SIZE, Page};
use uzram::{ErrorKind, Handle, Object, Pool, Result};

/// Maps that the keys are spread over, each with a lock, so that threads seldom wait for each other.
const SHARDS: usize = 16;
/// Pages freed at a time.
const RECLAIM_PAGES: u64 = 32;

/// Pages by number. All methods can be called from any number of threads.
struct Cache {
    pool: Pool,
    shards: [Mutex<HashMap<u32, Handle>>; SHARDS],
    /// Held while a thread makes room: others wait, and then find some.
    evicting: Mutex<()>,
    hits: AtomicU64,
    evicted: AtomicU64,
}

/// An encoder and a decoder, one set per thread.
struct Codec {
    encoder: Encoder,
    decoder: Decoder,
    compressed: [u8; ROOM_BYTES],
}

impl Cache {
    /// Creates an empty cache that takes at most `limit_bytes`, not counting the map of its keys.
    fn new(limit_bytes: u64) -> Result<Self> {
        Ok(Cache {
            pool: Pool::builder("cache").limit_bytes(limit_bytes).reclaim(true).build()?,
            shards: Default::default(),
            evicting: Mutex::default(),
            hits: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        })
    }

    fn shard(&self, key: u32) -> MutexGuard<'_, HashMap<u32, Handle>> {
        self.shards[key as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a page. Returns whether it was cached.
    fn get(&self, key: u32, codec: &mut Codec, page: &mut Page) -> Result<bool> {
        let shard = self.shard(key);
        let Some(handle) = shard.get(&key) else { return Ok(false) };
        let bytes = self.pool.read(handle)?;
        if bytes.len() == PAGE_SIZE {
            page.copy_from_slice(&bytes);
        } else {
            codec.decoder.decode(&bytes, page)?;
        }
        self.hits.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    }

    /// Writes a page, and evicts others if there is no room.
    fn insert(&self, key: u32, page: &Page, codec: &mut Codec) -> Result<()> {
        let len = codec.encoder.encode(page, &mut codec.compressed).filter(|len| *len < PAGE_SIZE);
        let bytes = len.map_or(&page[..], |len| &codec.compressed[..len]);
        let handle = loop {
            match self.pool.store_for(bytes, key).map(Object::into_handle) {
                Err(error) if error.kind() == ErrorKind::NoSpace && self.make_room()? => {}
                stored => break stored?,
            }
        };
        // No lock is held while the pool allocates: making room locks any shard.
        if let Some(old) = self.shard(key).insert(key, handle) {
            self.pool.free(old)?;
        }
        Ok(())
    }

    /// Evicts the coldest pages. Returns whether there were any.
    fn make_room(&self) -> Result<bool> {
        let _alone = self.evicting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut evicted = 0;
        self.pool.reclaim(RECLAIM_PAGES, |key| {
            // The entry may be gone, or may have been rewritten just now and lie elsewhere: that does no
            // harm in a cache.
            if let Some(handle) = self.shard(key).remove(&key) {
                evicted += u64::from(self.pool.free(handle).is_ok());
            }
        })?;
        self.evicted.fetch_add(evicted, Ordering::Relaxed);
        Ok(evicted > 0)
    }
}

/// Stands for a slow source that is worth caching: most pages are lines of text, some are noise.
fn fetch(key: u32) -> Page {
    let (mut page, mut random) = ([0; PAGE_SIZE], Random::new(u64::from(key)));
    if key.is_multiple_of(16) {
        random.fill(&mut page);
        return page;
    }
    for line in page.chunks_mut(32) {
        let text = format!("object {} of class {}\n", random.below(10_000), random.below(200));
        line[..text.len()].copy_from_slice(text.as_bytes());
    }
    page
}

/// Looks up pages, small keys far more often than others, and fetches those that are not cached.
fn work(cache: &Cache, seed: u64) -> Result<()> {
    let algorithm = Algorithm::default();
    let (encoder, decoder) = (Encoder::new(&algorithm)?, Decoder::new(&algorithm)?);
    let mut codec = Codec { encoder, decoder, compressed: [0; ROOM_BYTES] };
    let (mut random, mut page) = (Random::new(seed), [0; PAGE_SIZE]);
    for _ in 0..8000 {
        let below = 1 + random.below(10_000);
        let key = random.below(below) as u32;
        if cache.get(key, &mut codec, &mut page)? {
            assert!(page == fetch(key), "the cache returned another page");
        } else {
            cache.insert(key, &fetch(key), &mut codec)?;
        }
    }
    Ok(())
}

/// Runs several threads on one cache, and prints what it did.
fn work_together(cache: &Cache) -> Result<()> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|seed| scope.spawn(move || work(cache, seed))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    let entries: usize = (0..SHARDS as u32).map(|key| cache.shard(key).len()).sum();
    println!("{:10} of 32000 look-ups hit", cache.hits.load(Ordering::Relaxed));
    println!("{entries:10} pages cached, {} evicted", cache.evicted.load(Ordering::Relaxed));
    let (charged, limit) = (cache.pool.charged_bytes() >> 10, cache.pool.limit_bytes() >> 10);
    println!("{charged:10} KiB in memory, of {limit} KiB, for {} KiB of pages", entries * PAGE_SIZE / 1024);
    Ok(())
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let memory_mib: u64 = std::env::args().nth(1).map_or(Ok(8), |text| text.parse())?;
    if !(1..=1 << 20).contains(&memory_mib) {
        return Err("the memory is 1 to 1048576 MiB".into());
    }
    Ok(work_together(&Cache::new(memory_mib << 20)?)?)
}

#[test]
fn it_stays_within_its_limit() {
    let cache = Cache::new(2 << 20).expect("address space");
    work_together(&cache).expect("memory");
    assert!(cache.hits.load(Ordering::Relaxed) > 1000 && cache.evicted.load(Ordering::Relaxed) > 1000);
    assert!(cache.pool.charged_bytes() <= cache.pool.limit_bytes());
}
