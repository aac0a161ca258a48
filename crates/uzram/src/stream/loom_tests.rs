//! Loom tests of every design, in several sizes. Loom reports a lost wake-up as a deadlock.

use super::*;
use crate::base::sync::{Arc, AtomicU32, Counter, Guarded, Ordering};

type Tested = AnyStreams<(Guarded<u32>, u32)>;
type Make = Box<dyn Fn() -> Result<(Guarded<u32>, u32), ()> + Send + Sync>;

/// `threads` threads each use a stream `uses` times: each gets one each time, exclusively, and no more are
/// lent at once than exist.
fn lending(design: StreamDesign, threads: u32, uses: u32) {
    lending_of(threads, uses, move |make| AnyStreams::new(design, make).expect("infallible"));
}

/// As [`lending`], for the streams that `streams` creates.
fn lending_of(threads: u32, uses: u32, streams: impl Fn(Make) -> Tested + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    // With a bound of two, loom does not find the wake-up that four threads could lose.
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(move || {
        let count = std::sync::Arc::new(Counter::new(0));
        let made = std::sync::Arc::clone(&count);
        let make = move || {
            made.add(1);
            Ok::<_, ()>((Guarded::new(0), 0))
        };
        let streams: Arc<Tested> = Arc::new(streams(Box::new(make)));
        let (lent, done) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let work = move |streams: &Tested, lent: &AtomicU32, done: &AtomicU32| {
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
        };
        let others: Vec<_> = (1..threads)
            .map(|_| {
                let (streams, lent, done) = (Arc::clone(&streams), Arc::clone(&lent), Arc::clone(&done));
                let work = work.clone();
                loom::thread::spawn(move || work(&streams, &lent, &done))
            })
            .collect();
        work(&streams, &lent, &done);
        for other in others {
            other.join().expect("no panic");
        }
        assert_eq!(done.load(Ordering::Relaxed), threads * uses);
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
