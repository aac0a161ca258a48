//! Tests of stores that are restored from the memory of others.

use std::collections::BTreeMap;

use super::super::*;
use super::*;
use crate::base::random::Random;
use crate::base::units::PAGE_SIZE;
use crate::codec::Kind;
use crate::lru::LruDesign;
use crate::zsmalloc::PoolDesign;

/// Returns the contents of a page: one repeated word, noise, or noise followed by zeros, depending on `seed`.
fn contents(seed: u64) -> [u8; PAGE_SIZE] {
    let mut random = Random::new(seed);
    let mut page = [0; PAGE_SIZE];
    match seed % 5 {
        0 => page.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&seed.to_le_bytes())),
        1 => random.fill(&mut page),
        _ => {
            let noise = 100 + random.below(3000);
            random.fill(&mut page[..noise]);
        }
    }
    page
}

/// Reads all pages of a store.
fn read_all(store: &Store) -> Vec<Result<Box<[u8; PAGE_SIZE]>>> {
    let read = |page| {
        let mut out = Box::new([0; PAGE_SIZE]);
        store.read(PageNo::from_number(page), &mut out).map(|()| out)
    };
    (0..store.pages()).map(read).collect()
}

/// Returns a descriptor of a store's memory, as another process has it.
fn memory_of(store: &Store) -> OwnedFd {
    use std::os::fd::AsFd;
    store.memory().expect("it outlives the process").as_fd().try_clone_to_owned().expect("a descriptor")
}

/// Drops a store; returns its memory.
fn end(store: Store) -> OwnedFd {
    memory_of(&store)
}

fn attach(memory: OwnedFd) -> (Store, Attached) {
    // SAFETY: the store that had the memory was dropped.
    unsafe { Store::attach(memory, None) }.expect("attached")
}

/// Writes a page; with a reserve, as soon as that is filled.
fn write(store: &Store, page: u64, seed: u64) {
    while let Err(error) = store.write(PageNo::from_number(page), &contents(seed)) {
        assert_eq!(error.setting(), Some("reserve"), "{error}");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn check_against(store: &Store, model: &BTreeMap<u64, u64>) {
    for (page, read) in read_all(store).into_iter().enumerate() {
        let read = read.expect("nothing is damaged");
        let expected = model.get(&(page as u64)).map_or([0; PAGE_SIZE], |seed| contents(*seed));
        assert!(*read == expected, "page {page}");
    }
}

fn builders() -> Vec<StoreBuilder> {
    let new = || StoreBuilder::new("survives", 3000).checksum(true);
    let zstd = Algorithm::from(Kind::Zstd);
    vec![
        new(),
        new().pool_design(PoolDesign::ClassIndexed).lru_design(LruDesign::None),
        new().pool_design(PoolDesign::Consolidated),
        new().pool_design(PoolDesign::Split),
        new().algorithm(zstd.clone()).recompression([Some(zstd), None, None]).chain_size(4),
        new().reserve_pages(2048).lru_design(LruDesign::SingleLock),
        new().run_cache_batch_pages(0).limit_pages(4096),
        new().policy(ReclaimPolicy { order: ReclaimOrder::Zspages, ..ReclaimPolicy::default() }),
    ]
}

/// Writes, overwrites and discards at random, and attaches the store anew now and then.
#[test]
fn what_was_written_is_found_again() {
    for (case, builder) in builders().into_iter().enumerate() {
        let mut random = Random::new(case as u64);
        let mut model = BTreeMap::new();
        let mut store = Store::create_in(&builder).expect("a store");
        for round in 0..4u64 {
            for step in 0..3000u64 {
                let page = random.below(3000) as u64;
                if random.below(6) == 0 {
                    store.discard(PageNo::from_number(page));
                    model.remove(&page);
                } else {
                    let seed = round * 10_000 + step;
                    write(&store, page, seed);
                    model.insert(page, seed);
                }
            }
            if round == 2 {
                store.compact();
            }
            let before = store.stats();
            let memory = end(store);
            let attached;
            (store, attached) = attach(memory);
            assert_eq!((attached.pages, attached.pages_lost), (model.len() as u64, 0), "case {case}");
            check_against(&store, &model);
            let now = store.stats();
            let of = |stats: &StoreStats| {
                [
                    stats.pages_stored,
                    stats.compr_data_bytes,
                    stats.same_pages,
                    stats.huge_pages,
                    stats.limit_pages,
                ]
            };
            assert_eq!(of(&now), of(&before), "case {case}");
            assert!(now.pool_pages <= before.pool_pages, "case {case}");
        }
        // A second attach finds the same, and all pages can be discarded.
        let before = store.stats();
        let (again, _) = attach(end(store));
        let now = again.stats();
        assert_eq!((now.pool_pages, now.compr_data_bytes), (before.pool_pages, before.compr_data_bytes));
        (0..3000).for_each(|page| again.discard(PageNo::from_number(page)));
        let empty = again.stats();
        assert_eq!((empty.pages_stored, empty.compr_data_bytes, empty.pool_pages), (0, 0, 0), "case {case}");
    }
}
