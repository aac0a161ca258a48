//! Compressed pages as blobs of their exact length: the memory that an allocator takes for each byte stored,
//! when all are stored, and after a random half was freed and the allocator was asked to return memory.
//!
//! The pages are those of the corpus `mixed`, compressed with lz4; one that does not become smaller is stored
//! as it is. uzram's pool checks its objects and keeps 8 bytes with each of them. The program's names of
//! blobs, pointers and lengths or handles, are in arrays that do not count. Each allocator is measured in its
//! own child process ([`crate::memory`]).

use std::cell::{Cell, RefCell};

use uzram::codec::{Algorithm, Encoder};
use uzram::mem::Arena;
use uzram::sync::Arc;
use uzram::units::PAGE_SIZE;
use uzram::zsmalloc::{Handle, Pinned, Pool, PoolBuilder};
use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::Report;
use uzram_bench::harness::corpus::{self, Kind};

use crate::heap::pointer;
use crate::memory::{anonymous_bytes, in_child};
use crate::peers::{self, MIMALLOC, Peer, SYSTEM, word};
use crate::slab::PLAIN;

/// The option that selects the allocator in a child.
pub const CHILD_OPTION: &str = "--blobs-of";
/// The seed for choosing the blobs to free.
const SEED: u64 = 1;
/// What is stored: the states in which memory is measured.
pub const STATES: [&str; 2] = ["all stored", "half freed"];

const TABLE: &str = "compressed pages: bytes in memory / stored";

/// Measures uzram's pool and every other allocator of this build, each in a child process.
pub fn measure_all(pages: usize, report: &mut Report) -> Result<()> {
    let mut best = [f64::INFINITY; 2];
    let mut ours = [f64::NAN; 2];
    for allocator in [PLAIN].into_iter().chain(peers::NAMES.iter().copied()) {
        let printed = in_child(&[CHILD_OPTION, allocator, "--pages", &pages.to_string()])?;
        let numbers: Vec<f64> = printed.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [all, half] = numbers[..] else {
            let what = format!("blobs of {allocator}: the child printed '{}'", printed.trim());
            return Err(Error::new(ErrorKind::Io, what));
        };
        match allocator {
            PLAIN => ours = [all, half],
            _ => best = [best[0].min(all), best[1].min(half)],
        }
        report.row(TABLE, allocator, &[(STATES[0], all), (STATES[1], half)]);
    }
    let cells = [(STATES[0], ours[0] / best[0]), (STATES[1], ours[1] / best[1])];
    report.row(TABLE, "uzram / the best other", &cells);
    Ok(())
}

/// Run by a child: returns the resident bytes for each byte stored, in each of [`STATES`].
pub fn measure(allocator: &str, pages: usize) -> Result<[f64; 2]> {
    // In a thread, to which the C library gives memory of its own: blobs in what compressing has freed would
    // not grow the process.
    let compressing = std::thread::spawn(move || compressed(pages));
    let blobs =
        compressing.join().map_err(|_| Error::new(ErrorKind::Io, "compressing the pages failed"))??;
    match allocator {
        PLAIN => measure_of(&UzramPool::new(&blobs)?, &blobs),
        SYSTEM => measure_of(&peers::System, &blobs),
        MIMALLOC => measure_of(&peers::Mimalloc, &blobs),
        #[cfg(feature = "jemalloc")]
        peers::JEMALLOC => measure_of(&peers::Jemalloc, &blobs),
        #[cfg(feature = "snmalloc")]
        peers::SNMALLOC => measure_of(&peers::Snmalloc, &blobs),
        _ => {
            let what = format!("there is no allocator '{allocator}'");
            Err(Error::invalid(what).with_setting(CHILD_OPTION))
        }
    }
}

/// The contents of all blobs, one after the other.
struct Contents {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Contents {
    fn len(&self) -> usize {
        self.ends.len()
    }

    fn blob(&self, at: usize) -> &[u8] {
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.bytes[start..self.ends[at]]
    }
}

fn compressed(pages: usize) -> Result<Contents> {
    let mut encoder = Encoder::new(&Algorithm::default())?;
    let mut out = vec![0; 2 * PAGE_SIZE];
    let mut contents = Contents { bytes: Vec::new(), ends: Vec::new() };
    for page in corpus::build(Kind::Mixed, pages)?.pages() {
        let blob = match encoder.encode(page, &mut out) {
            Some(len) if len < PAGE_SIZE => &out[..len],
            _ => &page[..],
        };
        contents.bytes.extend_from_slice(blob);
        contents.ends.push(contents.bytes.len());
    }
    Ok(contents)
}

/// An allocator of blobs; each is named by a word.
trait Allocator {
    /// Stores a copy of a blob.
    fn store(&self, blob: &[u8]) -> Result<u64>;

    /// Frees a blob of that length.
    ///
    /// # Safety
    /// `store` returned that name for that length, and it was not freed since.
    unsafe fn free(&self, name: u64, len: usize) -> Result<()>;

    /// Returns as much memory to the system as it can.
    fn give_back(&self) -> Result<()>;
}

fn measure_of(allocator: &impl Allocator, blobs: &Contents) -> Result<[f64; 2]> {
    // Touched before the first measurement, as is the memory that reading /proc needs.
    let mut names = vec![1u64; blobs.len()];
    let mut order: Vec<usize> = (0..blobs.len()).collect();
    fastrand::Rng::with_seed(SEED).shuffle(&mut order);
    anonymous_bytes()?;
    Peer::give_back(&peers::System);
    let before_bytes = anonymous_bytes()?;
    let resident = |stored_bytes: usize| -> Result<f64> {
        Ok(anonymous_bytes()?.saturating_sub(before_bytes) as f64 / stored_bytes as f64)
    };
    for (at, name) in names.iter_mut().enumerate() {
        *name = allocator.store(blobs.blob(at))?;
    }
    let all = resident(blobs.bytes.len())?;
    let (freed, kept) = order.split_at(blobs.len() / 2);
    for &at in freed {
        // SAFETY: each index is in `order` once, so each blob is freed once, with its length.
        unsafe { allocator.free(names[at], blobs.blob(at).len()) }?;
    }
    allocator.give_back()?;
    let half = resident(kept.iter().map(|at| blobs.blob(*at).len()).sum())?;
    Ok([all, half])
}

/// Its names are addresses.
impl<P: Peer> Allocator for P {
    fn store(&self, blob: &[u8]) -> Result<u64> {
        let address = self.alloc(blob.len());
        let name = word(address)?;
        // SAFETY: the allocator returned memory of the blob's length, which nothing else uses.
        unsafe { std::ptr::copy_nonoverlapping(blob.as_ptr(), address.cast(), blob.len()) };
        Ok(name)
    }

    unsafe fn free(&self, name: u64, len: usize) -> Result<()> {
        // SAFETY: the caller's blob came from `store`, with this length, and is in use.
        unsafe { Peer::free(self, pointer(name), len) };
        Ok(())
    }

    fn give_back(&self) -> Result<()> {
        Peer::give_back(self);
        Ok(())
    }
}

struct UzramPool {
    pool: Pool<Pinned>,
    arena: Arc<Arena>,
    /// The handles, by name; one that was freed is `None`. In memory from the start, as the other allocators'
    /// names are.
    handles: RefCell<Vec<Option<Handle>>>,
    stored: Cell<usize>,
}

impl UzramPool {
    fn new(blobs: &Contents) -> Result<UzramPool> {
        // Room for objects that were freed and not yet compacted.
        let arena = Arc::new(Arena::new(4 * blobs.bytes.len() as u64 + (64 << 20))?);
        let pool = PoolBuilder::new("bench").build_in(Arc::clone(&arena))?;
        let handles = RefCell::new((0..blobs.len()).map(|_| None).collect());
        Ok(UzramPool { pool, arena, handles, stored: Cell::new(0) })
    }
}

impl Allocator for UzramPool {
    fn store(&self, blob: &[u8]) -> Result<u64> {
        let handle = self.pool.store(blob)?.into_handle();
        let name = self.stored.replace(self.stored.get() + 1);
        self.handles.borrow_mut()[name] = Some(handle);
        Ok(name as u64)
    }

    unsafe fn free(&self, name: u64, _: usize) -> Result<()> {
        match self.handles.borrow_mut()[name as usize].take() {
            Some(handle) => self.pool.free(handle),
            None => Err(Error::invalid("the blob was freed before")),
        }
    }

    fn give_back(&self) -> Result<()> {
        self.pool.compact();
        self.arena.release_free();
        Ok(())
    }
}
