//! Loom tests of every design, in several sizes. Loom reports a lost wake-up as a deadlock.

use super::*;
use crate::base::sync::models::{model, together};
use crate::base::sync::{Arc, AtomicU32, Counter, Guarded, Ordering};

type Tested = AnyStreams<(Guarded<u32>, u32)>;
type Make = Box<dyn Fn() -> Result<(Guarded<u32>, u32), ()> + Send + Sync>;

/// Each thread gets a stream each time, exclusively, and no more are lent at once than exist.
fn lending(design: StreamDesign, threads: u32, uses: u32) {
    lending_of(threads, uses, move |make| AnyStreams::new(design, make).expect("infallible"));
}

/// As [`lending`], for the streams that `streams` creates.
fn lending_of(threads: u32, uses: u32, streams: impl Fn(Make) -> Tested + Send + Sync + 'static) {
    // With a bound of two, loom does not find the wake-up that four threads could lose.
    model(3, move || {
        let count = Arc::new(Counter::new(0));
        let made = Arc::clone(&count);
        let make = move || {
            made.add(1);
            Ok::<_, ()>((Guarded::new(0), 0))
        };
        let shared = Arc::new((streams(Box::new(make)), AtomicU32::new(0), AtomicU32::new(0)));
        together(threads, &shared, move |(streams, lent, done)| {
            for _ in 0..uses {
                let stream = streams.lend();
                // SAFETY: the stream is lent to this thread alone; loom would detect another access.
                unsafe { stream.0.with_mut(|used| *used += 1) };
                let others = lent.fetch_add(1, Ordering::Relaxed);
                assert!(u64::from(others) < count.get(), "more lent than there are");
                lent.fetch_sub(1, Ordering::Relaxed);
                drop(stream);
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert_eq!(shared.2.load(Ordering::Relaxed), threads * uses);
    });
}

#[test]
fn loom_streams_per_cpu_one_each() {
    lending(StreamDesign::PerCpu, 2, 1);
}

/// The third thread creates a spare stream, or gets one that was returned.
#[test]
fn loom_streams_per_cpu_with_a_spare() {
    lending(StreamDesign::PerCpu, 3, 1);
}

#[test]
fn loom_streams_per_cpu_fewer_than_threads() {
    lending_of(3, 1, |make| AnyStreams::PerCpu(PerCpu::with_spares(0, make).expect("infallible")));
}

#[test]
fn loom_streams_idle_list_of_one() {
    lending(StreamDesign::IdleList(1), 2, 2);
}

#[test]
fn loom_streams_idle_list_of_one_wakes_each() {
    lending(StreamDesign::IdleList(1), 3, 1);
}

#[test]
fn loom_streams_idle_list_of_two() {
    lending(StreamDesign::IdleList(2), 3, 1);
}

/// Two threads return a stream before any of the two waiting threads has run: both must be woken.
#[test]
fn loom_streams_idle_list_of_two_wakes_each() {
    lending(StreamDesign::IdleList(2), 4, 1);
}
