//! Pools of every design under loom: zspages of one page and two objects. loom tracks the accesses to each
//! object's bytes, by location: reads, writes, moves and frees must be ordered.

use super::compact::{Budget, Effort};
use super::design::PoolLocks;
use super::raw::{PoolConfig, RawPool};
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::models::{self, beside};
use crate::base::sync::{Arc, AtomicU32, Ordering};

for_every_design!(
    loom_zsmalloc_frees_against_compaction,
    loom_zsmalloc_reads_against_compaction,
    loom_zsmalloc_stores_against_compaction,
    loom_zsmalloc_frees_that_empty_a_zspage,
    loom_zsmalloc_stores_against_the_last_free,
    loom_zsmalloc_compaction_against_compaction,
    loom_zsmalloc_eviction_against_stores_and_frees,
);

/// Bytes of an object; two of them fill a zspage of one page.
const LEN: usize = 1800;

#[derive(Clone, Copy)]
struct Stored {
    handle: u32,
    owner: u32,
}

struct Model<D: PoolLocks>(RawPool<D>);

impl<D: PoolLocks> Model<D> {
    fn new(reclaim: bool) -> Arc<Self> {
        let arena = Arc::new(Arena::new(1 << 19).expect("arena"));
        // The fewest classes: loom makes all their locks again for each interleaving.
        let config = PoolConfig { max_objects: Some(8), chain_size: 1, reclaim, ..PoolConfig::new("model") };
        Arc::new(Model(RawPool::new(arena, &config).expect("pool")))
    }

    fn store(&self, owner: u32) -> Stored {
        let handle = self.0.store(&[owner as u8; LEN], owner, Gfp::MayWait).expect("memory");
        Stored { handle, owner }
    }

    /// Makes two zspages with one object each; returns the objects.
    fn two_half_full(&self) -> [Stored; 2] {
        let [one, two, three, four] = [1, 2, 3, 4].map(|owner| self.store(owner));
        self.free(two);
        self.free(four);
        [one, three]
    }

    fn read(&self, object: Stored) {
        // SAFETY: the model frees it later.
        let read = unsafe { self.0.read(object.handle, object.owner, LEN) }.expect("sound");
        assert!(read.iter().all(|byte| *byte == object.owner as u8));
    }

    fn free(&self, object: Stored) {
        // SAFETY: the model frees it once, and no thread reads it.
        unsafe { self.0.free(object.handle) };
    }

    fn compact(&self) {
        self.0.compact(Effort::Zspages, &mut Budget::unlimited());
    }

    /// Checks that exactly the objects `left` remain, on `pages` pages, and frees them.
    fn end(&self, left: &[Stored], pages: u64) {
        left.iter().for_each(|object| self.read(*object));
        let stats = self.0.class_stats();
        assert_eq!(stats.iter().map(|stat| stat.obj_used).sum::<u64>(), left.len() as u64);
        assert_eq!(stats.iter().map(|stat| stat.pages_used).sum::<u64>(), self.0.pages_used());
        assert_eq!((self.0.pages_used(), self.0.corrupted()), (pages, 0));
        left.iter().for_each(|object| self.free(*object));
        assert_eq!(self.0.pages_used(), 0);
    }
}

fn model<D: PoolLocks>(f: impl Fn(Arc<Model<D>>) + Sync + Send + 'static) {
    check(move || f(Model::new(false)));
}

/// Checks `f` with two preemptions: three take many times as long and find no more.
fn check(f: impl Fn() + Sync + Send + 'static) {
    models::model(2, f);
}

fn loom_zsmalloc_frees_against_compaction<D: PoolLocks>() {
    // Frees the object that is moved, then the one that stays.
    for freed in 0..2 {
        model::<D>(move |pool| {
            let both = pool.two_half_full();
            let freer = beside(&pool, move |pool| pool.free(both[freed]));
            pool.compact();
            freer.join().expect("no panic");
            pool.end(&[both[1 - freed]], 1);
        });
    }
}

fn loom_zsmalloc_reads_against_compaction<D: PoolLocks>() {
    model::<D>(|pool| {
        let both = pool.two_half_full();
        let reader = beside(&pool, move |pool| both.iter().for_each(|object| pool.read(*object)));
        pool.compact();
        reader.join().expect("no panic");
        // An object that is read stays in place, and compaction gives up on it after some tries.
        pool.compact();
        pool.end(&both, 1);
    });
}

fn loom_zsmalloc_stores_against_compaction<D: PoolLocks>() {
    model::<D>(|pool| {
        let [one, two] = pool.two_half_full();
        let writer = beside(&pool, |pool| pool.store(5));
        pool.compact();
        let three = writer.join().expect("no panic");
        pool.end(&[one, two, three], 2);
    });
}

fn loom_zsmalloc_frees_that_empty_a_zspage<D: PoolLocks>() {
    model::<D>(|pool| {
        let (one, two) = (pool.store(1), pool.store(2));
        let freer = beside(&pool, move |pool| pool.free(one));
        pool.free(two);
        freer.join().expect("no panic");
        pool.end(&[], 0);
    });
}

fn loom_zsmalloc_stores_against_the_last_free<D: PoolLocks>() {
    model::<D>(|pool| {
        let one = pool.store(1);
        let freer = beside(&pool, move |pool| pool.free(one));
        let two = pool.store(2);
        freer.join().expect("no panic");
        pool.end(&[two], 1);
    });
}

fn loom_zsmalloc_compaction_against_compaction<D: PoolLocks>() {
    model::<D>(|pool| {
        let both = pool.two_half_full();
        let other = beside(&pool, |pool| pool.compact());
        pool.compact();
        other.join().expect("no panic");
        pool.end(&both, 1);
    });
}

fn loom_zsmalloc_eviction_against_stores_and_frees<D: PoolLocks>() {
    check(|| {
        let pool = Model::<D>::new(true);
        let (one, two) = (pool.store(1), pool.store(2));
        let other = beside(&pool, move |pool| {
            pool.free(one);
            pool.store(3)
        });
        let mut two_is_left = true;
        let evict = |owner: u32| {
            if owner == 2 && std::mem::take(&mut two_is_left) {
                pool.free(two);
            }
        };
        pool.0.reclaim(2, evict).expect("it keeps the order");
        let three = other.join().expect("no panic");
        let left = if two_is_left { vec![two, three] } else { vec![three] };
        pool.end(&left, 1);
    });
}

/// Each value is freed once, after it was deferred: loom tracks the accesses to it.
#[cfg(feature = "designs")]
#[test]
fn loom_zs_deferred_frees_happen_once() {
    use super::deferred::DeferredFrees;
    use crate::base::sync::Access;
    struct Frees {
        frees: DeferredFrees<u32>,
        values: [(Access, AtomicU32); 5],
    }
    impl Frees {
        fn free(&self, value: u32) {
            let (access, freed) = &self.values[value as usize];
            access.write();
            assert_eq!(freed.fetch_add(1, Ordering::Relaxed), 0, "{value} is freed twice");
        }

        fn defer(&self, values: std::ops::Range<u32>) {
            for value in values {
                self.values[value as usize].0.write();
                self.frees.defer(value, |value| self.free(value));
            }
        }
    }
    for spare in [0, 1] {
        check(move || {
            let frees = Arc::new(Frees { frees: DeferredFrees::new(spare), values: Default::default() });
            let other = beside(&frees, |frees| {
                frees.defer(3..5);
                frees.frees.flush(|value| frees.free(value));
            });
            frees.defer(0..3);
            other.join().expect("no panic");
            frees.frees.flush(|value| frees.free(value));
            assert_eq!(frees.frees.waiting(), 0);
            assert!(frees.values.iter().all(|(_, freed)| freed.load(Ordering::Relaxed) == 1));
        });
    }
}
