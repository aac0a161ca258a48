//! The measurements of a heap: three ways to allocate and free, each with a fixed number of objects.
//!
//! Work of one thread is measured in CPU time of that thread, so that other programs on its CPU do not count;
//! work of two threads by elapsed time.
//!
//! Every object is written to while it is in use, eight bytes at its start, through its address, which is
//! part of the measured work.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use uzram::{Error, ErrorKind, Result};

use crate::heap::Heap;
use crate::ring::{Consumer, Producer, Ring};

/// Objects that are allocated before they are freed, in a batch.
pub const BATCH_OBJECTS: usize = 64;

/// The number of orders in which batches are freed.
const SHUFFLES: usize = 64;

/// The length of the queue between the producer and the consumer.
const RING_OBJECTS: usize = 1024;

/// The most objects in use at a time.
pub const MAX_OBJECTS: u64 = 1 << 16;

/// A way to allocate and free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// One thread allocates an object and frees it.
    SameThread,
    /// One thread allocates 64 objects and frees them in another order.
    Batches,
    /// One thread allocates objects, another frees them.
    Handoff,
}

impl Case {
    /// All of them, in the order they are measured.
    pub const ALL: [Case; 3] = [Case::SameThread, Case::Batches, Case::Handoff];

    /// Returns its name in the report.
    pub const fn name(self) -> &'static str {
        match self {
            Case::SameThread => "same thread",
            Case::Batches => "shuffled batches",
            Case::Handoff => "producer/consumer",
        }
    }
}

/// A [`Heap`] of some type.
pub trait Measured {
    /// Returns the time to allocate and free `objects` objects, or a few more.
    fn time(&self, case: Case, objects: u64, seed: u64) -> Result<Duration>;
}

impl<H: Heap> Measured for H {
    fn time(&self, case: Case, objects: u64, seed: u64) -> Result<Duration> {
        match case {
            Case::SameThread => {
                let start = thread_time();
                same_thread(self, objects)?;
                Ok(thread_time() - start)
            }
            Case::Batches => {
                let orders = orders(seed);
                let start = thread_time();
                batches(self, objects, &orders)?;
                Ok(thread_time() - start)
            }
            Case::Handoff => handoff(self, objects),
        }
    }
}

fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing. The clock of the calling thread is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

// The cases stay separate functions, so that a profiler shows their names.

#[inline(never)]
fn same_thread<H: Heap>(heap: &H, objects: u64) -> Result<()> {
    for value in 0..objects {
        let object = heap.alloc()?;
        // SAFETY: just allocated, then freed once.
        unsafe {
            write(heap, object, value);
            heap.free(object)?;
        }
    }
    Ok(())
}

#[inline(never)]
fn batches<H: Heap>(heap: &H, objects: u64, orders: &[[u8; BATCH_OBJECTS]]) -> Result<()> {
    let mut batch = [0; BATCH_OBJECTS];
    let count = objects.div_ceil(BATCH_OBJECTS as u64) as usize;
    for order in orders.iter().cycle().take(count) {
        for object in &mut batch {
            *object = heap.alloc()?;
            // SAFETY: just allocated.
            unsafe { write(heap, *object, 1) };
        }
        for &i in order {
            // SAFETY: allocated above; an order has each place once.
            unsafe { heap.free(batch[usize::from(i)])? };
        }
    }
    Ok(())
}

/// Returns the orders, which are the same for the same seed.
fn orders(seed: u64) -> Vec<[u8; BATCH_OBJECTS]> {
    let mut random = fastrand::Rng::with_seed(seed);
    let order = |_| {
        let mut order = std::array::from_fn(|i| i as u8);
        random.shuffle(&mut order);
        order
    };
    (0..SHUFFLES).map(order).collect()
}

/// The time runs from when both threads are ready until the last object is freed.
fn handoff<H: Heap>(heap: &H, objects: u64) -> Result<Duration> {
    let mut ring = Ring::new(RING_OBJECTS);
    let (producer, consumer) = ring.ends();
    let both = Barrier::new(2);
    thread::scope(|scope| {
        let consume = || {
            both.wait();
            consume(heap, consumer, objects).map(|()| Instant::now())
        };
        let thread = thread::Builder::new().name("consumer".into()).spawn_scoped(scope, consume);
        let thread = thread.map_err(|error| {
            Error::new(ErrorKind::NoMemory, format!("cannot start the consumer: {error}"))
        })?;
        both.wait();
        let start = Instant::now();
        let produced = produce(heap, producer, objects);
        let end = thread.join().map_err(|_| Error::new(ErrorKind::Io, "the consumer panicked"))?;
        produced?;
        Ok(end? - start)
    })
}

#[inline(never)]
fn produce<H: Heap>(heap: &H, mut producer: Producer<'_>, objects: u64) -> Result<()> {
    for value in 0..objects {
        let object = heap.alloc()?;
        // SAFETY: just allocated; the consumer frees it.
        unsafe { write(heap, object, value) };
        if !producer.put(object) {
            // The consumer reports the error.
            break;
        }
    }
    Ok(())
}

#[inline(never)]
fn consume<H: Heap>(heap: &H, mut consumer: Consumer<'_>, objects: u64) -> Result<()> {
    for value in 0..objects {
        // The producer reports the error.
        let Some(object) = consumer.take() else { break };
        // SAFETY: the producer allocated it and has let go of it.
        unsafe {
            if read(heap, object) != value {
                return Err(damaged());
            }
            heap.free(object)?;
        }
    }
    Ok(())
}

/// Uses an object. Volatile, so that the compiler does not remove it.
///
/// # Safety
/// It is in use, and no other thread uses it.
#[inline]
unsafe fn write<H: Heap>(heap: &H, object: u64, value: u64) {
    // SAFETY: the object is the caller's, and larger than this.
    unsafe { heap.address(object).write_volatile(value) }
}

/// # Safety
/// As for [`write`].
#[inline]
unsafe fn read<H: Heap>(heap: &H, object: u64) -> u64 {
    // SAFETY: as for `write`.
    unsafe { heap.address(object).read_volatile() }
}

/// Returns the error of an object that does not hold what was written to it.
#[cold]
pub fn damaged() -> Error {
    Error::new(ErrorKind::Corrupt, "another thread changed an object in use")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::{ALIGN_BYTES, SIZES_BYTES};
    use crate::slab::{Slab, names, open};
    use std::sync::atomic::AtomicU64;
    use uzram::slab::{Plain, Sheaves};

    /// Returns the same object again and again.
    struct Broken(AtomicU64);

    impl Heap for Broken {
        fn alloc(&self) -> Result<u64> {
            Ok(0)
        }
        unsafe fn address(&self, _: u64) -> *mut u64 {
            self.0.as_ptr()
        }
        unsafe fn free(&self, _: u64) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_heap_that_damages_objects_is_found_out() {
        let broken = Broken(AtomicU64::new(0));
        let error = broken.time(Case::Handoff, 100_000, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn every_heap_does_every_case() {
        for name in names() {
            for size_bytes in SIZES_BYTES {
                let heap = open(name, size_bytes, MAX_OBJECTS).unwrap().unwrap();
                for case in Case::ALL {
                    heap.time(case, 20_000, 3).unwrap();
                }
            }
        }
        assert!(open("nobody", 64, 1).unwrap().is_none());
        assert!(open("system", 65, 1).unwrap().is_none());
    }

    #[test]
    fn objects_have_room_and_are_aligned() {
        fn check<H: Heap>(heap: &H, size_bytes: usize) {
            let objects: Vec<u64> = (0..100).map(|_| heap.alloc().unwrap()).collect();
            // SAFETY: all are in use until the end.
            let mut starts: Vec<usize> = objects.iter().map(|o| unsafe { heap.address(*o) }.addr()).collect();
            starts.sort_unstable();
            assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= size_bytes));
            assert!(starts.iter().all(|start| start.is_multiple_of(ALIGN_BYTES)));
            // SAFETY: each is freed once.
            objects.into_iter().for_each(|object| unsafe { heap.free(object).unwrap() });
        }
        for size_bytes in SIZES_BYTES {
            check(&Slab::<Sheaves>::new(size_bytes, 1000).unwrap(), size_bytes);
            check(&Slab::<Plain<Sheaves>>::new(size_bytes, 1000).unwrap(), size_bytes);
        }
        use crate::peers::{Mimalloc, OfSize, System};
        check(&OfSize::<Mimalloc, 64>(Mimalloc), 64);
        check(&OfSize::<System, 256>(System), 256);
    }

    #[test]
    fn orders_are_permutations_and_repeat() {
        let orders = orders(5);
        assert_eq!(orders, super::orders(5));
        assert_ne!(orders, super::orders(6));
        for mut order in orders {
            order.sort_unstable();
            assert!(order.iter().enumerate().all(|(i, place)| i == usize::from(*place)));
        }
    }
}
