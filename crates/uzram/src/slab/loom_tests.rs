//! The caches under loom: two CPUs, slabs of two objects, CPU partial lists of one slab, sheaves of
//! one object. Restartable sequences cannot be modelled: these are the compare-exchanges.

use super::*;
use crate::base::mem::{Arena, Gfp};
use crate::base::sync::{Access, Arc};
use loom::thread;

/// A cache, and for each object what loom watches: whoever has it writes to it.
struct Model<P: Policy> {
    cache: Cache<P>,
    contents: Vec<Access>,
}

/// Objects of a slab.
const PER_SLAB: usize = 2;

impl<P: Policy> Model<P> {
    /// A cache of up to `slabs` slabs.
    fn new(slabs: usize) -> Arc<Self> {
        let arena = Arc::new(Arena::new(1 << 19).expect("arena"));
        let options = CacheConfig {
            min_partial: 0,
            cpu_partial_objects: 1,
            sheaf_objects: 1,
            free_objects_on_drop: true,
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

    /// `N` objects.
    fn alloc_many<const N: usize>(&self) -> [u32; N] {
        [(); N].map(|()| self.alloc())
    }

    /// Everything was freed: nothing is left.
    fn end(&self) {
        self.cache.shrink().expect("no damage");
        let info = self.cache.info();
        assert_eq!((info.active_objs, info.num_slabs, info.corrupted), (0, 0, 0), "{info:?}");
    }
}

/// Checks what `here` and `there` do at once, on two CPUs, with what `before` made.
fn race<P: Policy, const N: usize>(
    slabs: usize,
    before: impl Fn(&Model<P>) -> [u32; N] + Send + Sync + 'static,
    here: impl Fn(&Model<P>, [u32; N]) + Send + Sync + 'static,
    there: impl Fn(&Model<P>, [u32; N]) + Send + Sync + Copy + 'static,
) {
    let mut builder = loom::model::Builder::new();
    // What refilling can do wrong takes three.
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(move || {
        let model = Model::<P>::new(slabs);
        let objects = before(&model);
        let other = {
            let model = Arc::clone(&model);
            thread::spawn(move || there(&model, objects))
        };
        here(&model, objects);
        other.join().expect("no panic");
        model.end();
    });
}

/// The fast path takes and returns objects of the slab that another CPU frees one of.
fn fast_path_against_remote_free<P: Policy>() {
    race::<P, 1>(
        3,
        |model| model.alloc_many(),
        |model, _| {
            let object = model.alloc();
            model.free(object);
        },
        |model, [object]| model.free(object),
    );
}

/// Another CPU frees both objects of the active slab, which its owner allocates from again between
/// them: the slab stays its owner's.
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

/// Another CPU's free empties a slab while its owner lets it go.
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

/// The objects of two slabs, of which the first is free: its slab was full, and went to the CPU partial list.
fn with_cpu_partial<P: Policy>(model: &Model<P>) -> [u32; 4] {
    let objects: [u32; 4] = model.alloc_many();
    model.free(objects[0]);
    objects
}

/// A slab leaves the CPU partial list, to be allocated from, while another CPU's free empties it and
/// so would take it to or from the node's list.
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

/// A CPU partial list is moved to the node's while another CPU frees into one of its slabs.
fn draining_against_remote_free<P: Policy>() {
    race::<P, 4>(
        4,
        with_cpu_partial,
        |model, [_, _, third, fourth]| {
            // The first of the second slab: the list is full, and drained.
            model.free(third);
            model.free(fourth);
        },
        |model, [_, second, ..]| model.free(second),
    );
}

/// Slabs are taken from the CPUs and given back while another CPU allocates.
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
        |model, _| {
            let object = model.alloc();
            model.free(object);
        },
    );
}

/// Three threads on two CPUs: two share a CPU's word.
fn three_threads<P: Policy>() {
    let mut builder = loom::model::Builder::new();
    // With three it takes longer than anyone waits.
    builder.preemption_bound = Some(builder.preemption_bound.unwrap_or(1).min(2));
    builder.check(|| {
        let model = Model::<P>::new(4);
        let others = [(); 2].map(|()| {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let object = model.alloc();
                model.free(object);
            })
        });
        let object = model.alloc();
        model.free(object);
        for other in others {
            other.join().expect("no panic");
        }
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
