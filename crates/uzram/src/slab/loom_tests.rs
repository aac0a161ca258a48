//! The caches under loom: two CPUs, slabs of two objects, CPU partial lists of one slab, sheaves of one
//! object (three in the last model). loom cannot model restartable sequences: these tests use the
//! compare-exchanges.

use super::*;
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::models::{beside, model, together};
use crate::base::sync::{Access, Arc};

/// A cache, and an access that loom checks for each object: its owner writes to it.
struct Model<P: Policy> {
    cache: Cache<P>,
    contents: Vec<Access>,
}

const PER_SLAB: usize = 2;

impl<P: Policy> Model<P> {
    fn new(slabs: usize) -> Arc<Self> {
        Model::with_sheaves(slabs, 1)
    }

    fn with_sheaves(slabs: usize, sheaf_objects: usize) -> Arc<Self> {
        let arena = Arc::new(Arena::new(1 << 19).expect("arena"));
        let options = CacheConfig {
            min_partial: 0,
            cpu_partial_objects: 1,
            sheaf_objects,
            ..CacheConfig::new("model", 8, 8, (slabs * PER_SLAB) as u64)
        };
        let contents = (0..slabs * PER_SLAB).map(|_| Access::default()).collect();
        Arc::new(Model { cache: Cache::new(arena, options).expect("cache"), contents })
    }

    fn touch(&self, object: u32) {
        // Objects are one unit apart, and slabs 512.
        self.contents[(object / 512) as usize * PER_SLAB + object as usize % 512].write();
    }

    fn alloc(&self) -> u32 {
        let object = self.cache.alloc(Gfp::MayWait).expect("room");
        self.touch(object);
        object
    }

    fn free(&self, object: u32) {
        self.touch(object);
        self.cache.free(object).expect("in use");
    }

    fn alloc_many<const N: usize>(&self) -> [u32; N] {
        [(); N].map(|()| self.alloc())
    }

    fn alloc_and_free(&self) {
        self.free(self.alloc());
    }

    fn end(&self) {
        self.cache.shrink().expect("no damage");
        let info = self.cache.info();
        assert_eq!((info.active_objs, info.num_slabs, info.corrupted), (0, 0, 0), "{info:?}");
    }
}

/// Runs `here` and `there` concurrently, on two CPUs, with the objects that `before` allocated.
fn race<P: Policy, const N: usize>(
    slabs: usize,
    before: impl Fn(&Model<P>) -> [u32; N] + Send + Sync + 'static,
    here: impl Fn(&Model<P>, [u32; N]) + Send + Sync + 'static,
    there: impl Fn(&Model<P>, [u32; N]) + Send + Sync + Copy + 'static,
) {
    // Errors in refilling take three preemptions to show.
    model(3, move || {
        let model = Model::<P>::new(slabs);
        let objects = before(&model);
        let other = beside(&model, move |model| there(model, objects));
        here(&model, objects);
        other.join().expect("no panic");
        model.end();
    });
}

fn fast_path_against_remote_free<P: Policy>() {
    race::<P, 1>(
        3,
        |model| model.alloc_many(),
        |model, _| model.alloc_and_free(),
        |model, [object]| model.free(object),
    );
}

/// Another CPU frees both objects of the active slab, and its owner allocates from it in between: the
/// slab still belongs to its owner.
fn refill_against_remote_frees<P: Policy>() {
    race::<P, 2>(
        3,
        |model| model.alloc_many(),
        |model, _| {
            let objects: [u32; 2] = model.alloc_many();
            objects.into_iter().for_each(|object| model.free(object));
        },
        |model, objects| objects.into_iter().for_each(|object| model.free(object)),
    );
}

fn remote_free_against_deactivation<P: Policy>() {
    race::<P, 1>(
        2,
        |model| model.alloc_many(),
        |model, _| {
            model.cache.shrink().expect("no damage");
        },
        |model, [object]| model.free(object),
    );
}

/// Allocates the objects of two slabs and frees the first: its slab was full, and goes to the CPU partial
/// list.
fn with_cpu_partial<P: Policy>(model: &Model<P>) -> [u32; 4] {
    let objects: [u32; 4] = model.alloc_many();
    model.free(objects[0]);
    objects
}

/// The free may add the slab to the node's list or remove it from there.
fn leaving_cpu_partial_against_remote_free<P: Policy>() {
    race::<P, 4>(
        4,
        with_cpu_partial,
        |model, [_, _, third, fourth]| {
            let object = model.alloc();
            [object, third, fourth].into_iter().for_each(|object| model.free(object));
        },
        |model, [_, second, ..]| model.free(second),
    );
}

fn draining_against_remote_free<P: Policy>() {
    race::<P, 4>(
        4,
        with_cpu_partial,
        |model, [_, _, third, fourth]| {
            // The first free in the second slab: the list is full, and is drained.
            model.free(third);
            model.free(fourth);
        },
        |model, [_, second, ..]| model.free(second),
    );
}

fn shrink_against_alloc<P: Policy>() {
    race::<P, 1>(
        3,
        |model| {
            let [object, kept] = model.alloc_many();
            model.free(object);
            [kept]
        },
        |model, [kept]| {
            model.cache.shrink().expect("no damage");
            model.free(kept);
        },
        |model, _| model.alloc_and_free(),
    );
}

/// Three threads on two CPUs: two of them share a CPU's word.
fn three_threads<P: Policy>() {
    let mut builder = loom::model::Builder::new();
    // Three preemptions take too long.
    builder.preemption_bound = Some(builder.preemption_bound.unwrap_or(1).min(2));
    builder.check(|| {
        let model = Model::<P>::new(4);
        together(3, &model, Model::alloc_and_free);
        model.end();
    });
}

#[test]
fn sheaf_refill_against_remote_frees() {
    model(3, || {
        // Half a sheaf is two objects.
        let model = Model::<Sheaves>::with_sheaves(4, 3);
        let [first, second, third, fourth] = model.alloc_many();
        [first, third].into_iter().for_each(|object| model.free(object));
        model.cache.shrink().expect("no damage");
        let other = beside(&model, move |model| {
            [second, fourth].into_iter().for_each(|object| model.touch(object));
            model.cache.free_to_slabs(&mut [second, fourth]).expect("in use");
        });
        model.alloc_and_free();
        other.join().expect("no panic");
        model.end();
    });
}

for_every_policy!(
    fast_path_against_remote_free,
    refill_against_remote_frees,
    remote_free_against_deactivation,
    leaving_cpu_partial_against_remote_free,
    draining_against_remote_free,
    shrink_against_alloc,
    three_threads,
);
