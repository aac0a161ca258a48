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

use uzram::slab::{Plain, Sheaves};
use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::usage::thread_time;

use crate::heap::{HARDENED, Heap, OfSize, PLAIN, Slab};
use crate::peers;
use crate::ring::{Consumer, Producer, Ring};

/// Objects that are allocated before they are freed, in a batch.
pub const BATCH_OBJECTS: usize = 64;

/// The number of orders in which batches are freed.
const SHUFFLES: usize = 64;

/// The length of the queue between the producer and the consumer.
const RING_OBJECTS: usize = 1024;

/// The most objects in use at a time.
pub const MAX_OBJECTS: u64 = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// One thread allocates an object and frees it.
    SameThread,
    /// One thread allocates 64 objects and frees them in another order.
    Batches,
    /// One thread allocates objects, another frees them.
    Handoff,
}

/// All of them with their names in the report, in the order they are measured.
pub const CASES: [(&str, Case); 3] = [
    ("same thread", Case::SameThread),
    ("shuffled batches", Case::Batches),
    ("producer/consumer", Case::Handoff),
];

/// Returns the heaps that this build can compare; the yardstick is the last.
pub fn names() -> Vec<&'static str> {
    [&[PLAIN, HARDENED], peers::NAMES].concat()
}

/// Opens the heap of that name, for objects of one of [`SIZES_BYTES`]; returns `None` if there is no such
/// heap.
pub fn open(name: &str, size_bytes: usize) -> Result<Option<Box<dyn Measured>>> {
    match size_bytes {
        64 => of_size::<64>(name),
        256 => of_size::<256>(name),
        _ => Ok(None),
    }
}

fn of_size<const SIZE: usize>(name: &str) -> Result<Option<Box<dyn Measured>>> {
    Ok(Some(match name {
        PLAIN => Box::new(OfSize::<_, SIZE>(Slab::<Plain<Sheaves>>::new(SIZE, MAX_OBJECTS)?)),
        HARDENED => Box::new(OfSize::<_, SIZE>(Slab::<Sheaves>::new(SIZE, MAX_OBJECTS)?)),
        peers::SYSTEM => Box::new(OfSize::<_, SIZE>(peers::System)),
        #[cfg(feature = "jemalloc")]
        peers::JEMALLOC => Box::new(OfSize::<_, SIZE>(peers::Jemalloc)),
        #[cfg(feature = "snmalloc")]
        peers::SNMALLOC => Box::new(OfSize::<_, SIZE>(peers::Snmalloc)),
        peers::MIMALLOC => Box::new(OfSize::<_, SIZE>(peers::Mimalloc)),
        _ => return Ok(None),
    }))
}

/// A [`Heap`] of some type, with objects of one size.
pub trait Measured {
    /// Returns the time to allocate and free `objects` objects, or a few more.
    fn time(&self, case: Case, objects: u64, seed: u64) -> Result<Duration>;
}

impl<H: Heap, const SIZE: usize> Measured for OfSize<H, SIZE> {
    fn time(&self, case: Case, objects: u64, seed: u64) -> Result<Duration> {
        match case {
            Case::SameThread => {
                let start = thread_time();
                same_thread::<SIZE>(&self.0, objects)?;
                Ok(thread_time() - start)
            }
            Case::Batches => {
                let orders = orders(seed);
                let start = thread_time();
                batches::<SIZE>(&self.0, objects, &orders)?;
                Ok(thread_time() - start)
            }
            Case::Handoff => handoff::<SIZE>(&self.0, objects),
        }
    }
}

// The cases stay separate functions, so that a profiler shows their names.

#[inline(never)]
fn same_thread<const SIZE: usize>(heap: &impl Heap, objects: u64) -> Result<()> {
    for value in 0..objects {
        let object = heap.alloc(SIZE)?;
        // SAFETY: just allocated, then freed once.
        unsafe {
            write(heap, object, value);
            heap.free(object, SIZE)?;
        }
    }
    Ok(())
}

#[inline(never)]
fn batches<const SIZE: usize>(heap: &impl Heap, objects: u64, orders: &[[u8; BATCH_OBJECTS]]) -> Result<()> {
    let mut batch = [0; BATCH_OBJECTS];
    let count = objects.div_ceil(BATCH_OBJECTS as u64) as usize;
    for order in orders.iter().cycle().take(count) {
        for object in &mut batch {
            *object = heap.alloc(SIZE)?;
            // SAFETY: just allocated.
            unsafe { write(heap, *object, 1) };
        }
        for &i in order {
            // SAFETY: allocated above; an order has each place once.
            unsafe { heap.free(batch[usize::from(i)], SIZE)? };
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
fn handoff<const SIZE: usize>(heap: &impl Heap, objects: u64) -> Result<Duration> {
    let mut ring = Ring::new(RING_OBJECTS);
    let (producer, consumer) = ring.ends();
    let both = Barrier::new(2);
    thread::scope(|scope| {
        let consume = || {
            both.wait();
            consume::<SIZE>(heap, consumer, objects).map(|()| Instant::now())
        };
        let thread = thread::Builder::new().name("consumer".into()).spawn_scoped(scope, consume);
        let thread = thread.map_err(|error| {
            Error::new(ErrorKind::NoMemory, format!("cannot start the consumer: {error}"))
        })?;
        both.wait();
        let start = Instant::now();
        let produced = produce::<SIZE>(heap, producer, objects);
        let end = thread.join().map_err(|_| Error::new(ErrorKind::Io, "the consumer panicked"))?;
        produced?;
        Ok(end? - start)
    })
}

#[inline(never)]
fn produce<const SIZE: usize>(heap: &impl Heap, mut producer: Producer<'_>, objects: u64) -> Result<()> {
    for value in 0..objects {
        let object = heap.alloc(SIZE)?;
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
fn consume<const SIZE: usize>(heap: &impl Heap, mut consumer: Consumer<'_>, objects: u64) -> Result<()> {
    for value in 0..objects {
        // The producer reports the error.
        let Some(object) = consumer.take() else { break };
        // SAFETY: the producer allocated it and has let go of it.
        unsafe {
            if read(heap, object) != value {
                return Err(damaged());
            }
            heap.free(object, SIZE)?;
        }
    }
    Ok(())
}

/// Uses an object. Volatile, so that the compiler does not remove it.
///
/// # Safety
/// It is in use, and no other thread uses it.
#[inline]
unsafe fn write(heap: &impl Heap, object: u64, value: u64) {
    // SAFETY: the object is the caller's, and larger than this.
    unsafe { heap.address(object).cast::<u64>().write_volatile(value) }
}

/// # Safety
/// As for [`write`].
#[inline]
unsafe fn read(heap: &impl Heap, object: u64) -> u64 {
    // SAFETY: as for `write`.
    unsafe { heap.address(object).cast::<u64>().read_volatile() }
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
    use crate::peers::{Mimalloc, System};
    use std::sync::atomic::AtomicU64;
    use uzram::slab::{Plain, Sheaves};

    /// Returns the same object again and again.
    struct Broken(AtomicU64);

    impl Heap for Broken {
        fn alloc(&self, _: usize) -> Result<u64> {
            Ok(0)
        }
        unsafe fn address(&self, _: u64) -> *mut u8 {
            self.0.as_ptr().cast()
        }
        unsafe fn free(&self, _: u64, _: usize) -> Result<()> {
            Ok(())
        }
        fn give_back(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_heap_that_damages_objects_is_found_out() {
        let broken = OfSize::<_, 8>(Broken(AtomicU64::new(0)));
        let error = broken.time(Case::Handoff, 100_000, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn every_heap_does_every_case() {
        for name in names() {
            for size_bytes in SIZES_BYTES {
                let heap = open(name, size_bytes).unwrap().unwrap();
                for (_, case) in CASES {
                    heap.time(case, 20_000, 3).unwrap();
                }
            }
        }
        assert!(open("nobody", 64).unwrap().is_none());
        assert!(open("system", 65).unwrap().is_none());
    }

    #[test]
    fn objects_have_room_and_are_aligned() {
        fn check(heap: &impl Heap, size_bytes: usize) {
            let objects: Vec<u64> = (0..100).map(|_| heap.alloc(size_bytes).unwrap()).collect();
            // SAFETY: all are in use until the end.
            let mut starts: Vec<usize> = objects.iter().map(|o| unsafe { heap.address(*o) }.addr()).collect();
            starts.sort_unstable();
            assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= size_bytes));
            assert!(starts.iter().all(|start| start.is_multiple_of(ALIGN_BYTES)));
            // SAFETY: each is freed once.
            objects.into_iter().for_each(|object| unsafe { heap.free(object, size_bytes).unwrap() });
        }
        for size_bytes in SIZES_BYTES {
            check(&Slab::<Sheaves>::new(size_bytes, 1000).unwrap(), size_bytes);
            check(&Slab::<Plain<Sheaves>>::new(size_bytes, 1000).unwrap(), size_bytes);
            check(&Mimalloc, size_bytes);
            check(&System, size_bytes);
        }
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
