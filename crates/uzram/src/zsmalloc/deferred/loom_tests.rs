//! The lists under loom, without a pool: what is pushed is freed exactly once, after it was pushed, and a flush returns
//! when it is. loom tracks the accesses to each handle's object.

use super::lists::DeferredLists;
use crate::base::sync::{Access, Arc, AtomicU32, Ordering};
use loom::thread;

/// The lists, and what becomes of the handles from 0 on.
struct Model {
    lists: DeferredLists,
    objects: Vec<Access>,
    freed: AtomicU32,
}

/// Lists and batches of one handle, or of two, with one spare batch.
const LIMITS: [u64; 2] = [3, 6];

impl Model {
    fn new(limit: u64, handles: usize) -> Arc<Self> {
        let objects = (0..handles).map(|_| Access::default()).collect();
        let lists = DeferredLists::new(limit).expect("above the number of CPUs");
        Arc::new(Model { lists, objects, freed: AtomicU32::new(0) })
    }

    /// Frees handles, each for the first time.
    fn free(&self, handles: &[u32]) {
        for handle in handles {
            self.objects[*handle as usize].write();
            let bit = 1 << handle;
            assert_eq!(self.freed.fetch_or(bit, Ordering::Relaxed) & bit, 0, "{handle} is freed twice");
        }
    }

    fn defer(&self, handle: u32) {
        self.objects[handle as usize].write();
        self.lists.defer(handle, |handles| self.free(handles));
    }

    fn flush(&self) -> bool {
        self.lists.flush(|handles| self.free(handles))
    }

    /// Checks that handles are freed, and that it happened before.
    fn assert_freed(&self, handles: std::ops::Range<u32>) {
        for handle in handles {
            self.objects[handle as usize].write();
            assert_ne!(self.freed.load(Ordering::Relaxed) & 1 << handle, 0, "{handle} still waits");
        }
    }

    fn end(&self) {
        self.flush();
        assert_eq!(self.lists.waiting(), 0);
        self.assert_freed(0..self.objects.len() as u32);
    }
}

/// Runs `here` and `there` concurrently, on two CPUs, on lists of each size.
fn race(handles: usize, here: fn(&Model), there: fn(&Model)) {
    for limit in LIMITS {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.or(Some(3));
        builder.check(move || {
            let model = Model::new(limit, handles);
            let other = {
                let model = Arc::clone(&model);
                thread::spawn(move || there(&model))
            };
            here(&model);
            other.join().expect("no panic");
            model.end();
        });
    }
}

#[test]
fn loom_zs_deferred_pushes_against_a_freer() {
    race(
        3,
        |model| (0..3).for_each(|handle| model.defer(handle)),
        |model| {
            for _ in 0..2 {
                model.lists.free_queued(|handles| model.free(handles));
            }
        },
    );
}

/// Two CPUs push more than their lists and the spare batch have room for.
#[test]
fn loom_zs_deferred_pushes_that_find_no_room() {
    race(
        5,
        |model| (0..3).for_each(|handle| model.defer(handle)),
        |model| (3..5).for_each(|handle| model.defer(handle)),
    );
}

/// What a thread has pushed is freed when its flush returns, whoever frees it.
#[test]
fn loom_zs_deferred_flush_waits_for_others() {
    let push_and_flush = |model: &Model| {
        (0..2).for_each(|handle| model.defer(handle));
        model.flush();
        model.assert_freed(0..2);
    };
    race(2, push_and_flush, |model| {
        model.lists.free_queued(|handles| model.free(handles));
    });
    race(3, push_and_flush, |model| {
        model.defer(2);
        model.flush();
        model.assert_freed(2..3);
    });
}
