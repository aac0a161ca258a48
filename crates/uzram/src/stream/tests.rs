//! The same tests for every design.

use super::*;
use crate::base::cpu;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, mpsc};
use std::time::{Duration, Instant};

fn designs() -> Vec<(StreamDesign, usize)> {
    let list = |count: u16| (StreamDesign::IdleList(count), usize::from(count));
    vec![(StreamDesign::PerCpu, (1 + SPARES_PER_CPU) * cpu::possible()), list(1), list(2), list(5)]
}

fn numbered(design: StreamDesign) -> AnyStreams<(usize, bool)> {
    let made = AtomicUsize::new(0);
    let stream = move || Ok::<_, ()>((made.fetch_add(1, Ordering::Relaxed), false));
    AnyStreams::new(design, stream).expect("infallible")
}

#[test]
fn a_lent_stream_is_nobody_elses() {
    const ROUNDS: usize = 3000;
    for (design, count) in designs() {
        let (streams, lent, done) = (numbered(design), AtomicUsize::new(0), AtomicUsize::new(0));
        let threads = 4 * count.max(cpu::possible());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for round in 0..ROUNDS {
                        let mut stream = streams.lend();
                        let (number, in_use) = &mut *stream;
                        assert!(!std::mem::replace(in_use, true), "{design}: stream {number} has two");
                        assert!(lent.fetch_add(1, Ordering::Relaxed) < count, "{design}: too many lent");
                        if round % 50 == 0 {
                            std::thread::yield_now();
                        }
                        lent.fetch_sub(1, Ordering::Relaxed);
                        *in_use = false;
                        drop(stream);
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(done.into_inner(), threads * ROUNDS, "{design}");
    }
}

#[test]
fn every_stream_can_be_lent_at_once() {
    for (design, count) in designs() {
        let streams = numbered(design);
        let all_hold = Barrier::new(count);
        std::thread::scope(|scope| {
            for _ in 0..count {
                scope.spawn(|| {
                    let _lent = streams.lend();
                    all_hold.wait();
                });
            }
        });
        assert_eq!(streams.sleeps(), 0, "{design}: nobody sleeps while a stream is free");
    }
}

#[test]
fn who_finds_none_sleeps_until_one_is_returned() {
    for (design, count) in designs() {
        let streams = numbered(design);
        let all_hold = Barrier::new(count + 1);
        std::thread::scope(|scope| {
            let (mut let_go, mut holders) = (Vec::new(), Vec::new());
            for _ in 0..count {
                let (sender, told) = mpsc::channel::<()>();
                let (streams, all_hold) = (&streams, &all_hold);
                let_go.push(sender);
                holders.push(scope.spawn(move || {
                    let _lent = streams.lend();
                    all_hold.wait();
                    // Ends when the sender is dropped.
                    let _ = told.recv();
                }));
            }
            all_hold.wait();
            let (sender, lent_at_last) = mpsc::channel();
            let streams = &streams;
            scope.spawn(move || {
                let _lent = streams.lend();
                sender.send(()).expect("the test waits");
            });
            let until = Instant::now() + Duration::from_secs(60);
            while streams.sleeps() == 0 && Instant::now() < until {
                std::thread::yield_now();
            }
            assert_eq!(lent_at_last.try_recv(), Err(mpsc::TryRecvError::Empty), "{design}");
            drop(let_go);
            lent_at_last.recv().expect("the stream that was returned");
        });
        assert_eq!(streams.sleeps(), 1, "{design}");
    }
}

#[test]
fn a_panic_returns_the_stream() {
    for (design, count) in designs() {
        let streams = numbered(design);
        for _ in 0..2 * count {
            let panics = std::panic::AssertUnwindSafe(|| {
                let _lent = streams.lend();
                panic!("on purpose")
            });
            std::panic::catch_unwind(panics).expect_err("it panics");
        }
        (0..2 * count).for_each(|_| drop(streams.lend()));
        assert_eq!(streams.sleeps(), 0, "{design}: none was lost");
    }
}

#[test]
fn a_stream_that_cannot_be_made_is_an_error() {
    for (design, count) in designs() {
        let first = if design == StreamDesign::PerCpu { cpu::possible() } else { count };
        assert_eq!(AnyStreams::new(design, at_most(first - 1)).err(), Some("no memory"), "{design}");
        assert!(AnyStreams::new(design, at_most(first)).is_ok(), "{design}");
    }
}

fn at_most(count: usize) -> impl Fn() -> Result<(), &'static str> {
    let made = AtomicUsize::new(0);
    move || if made.fetch_add(1, Ordering::Relaxed) < count { Ok(()) } else { Err("no memory") }
}

/// Without memory for a spare stream the thread waits.
#[test]
fn spare_streams_are_made_when_all_are_lent() {
    for memory_for in [cpu::possible(), cpu::possible() + 1] {
        let streams = AnyStreams::new(StreamDesign::PerCpu, at_most(memory_for)).expect("enough for these");
        for _ in 0..3 {
            let all_hold = Barrier::new(memory_for);
            std::thread::scope(|scope| {
                for _ in 0..memory_for {
                    scope.spawn(|| {
                        let _lent = streams.lend();
                        all_hold.wait();
                    });
                }
            });
        }
        assert_eq!(streams.sleeps(), 0);
        let all_hold = Barrier::new(memory_for + 1);
        std::thread::scope(|scope| {
            let (streams, all_hold) = (&streams, &all_hold);
            for _ in 0..memory_for {
                scope.spawn(move || {
                    let _lent = streams.lend();
                    all_hold.wait();
                    while streams.sleeps() == 0 {
                        std::thread::yield_now();
                    }
                });
            }
            all_hold.wait();
            drop(streams.lend());
        });
        assert_eq!(streams.sleeps(), 1);
    }
}

#[test]
fn spare_streams_can_be_made_beforehand() {
    for (design, count) in designs() {
        let streams = AnyStreams::new(design, at_most(count)).expect("enough for these");
        assert!(streams.make_spares() && streams.make_spares(), "{design}");
    }
    let streams =
        AnyStreams::new(StreamDesign::PerCpu, at_most(2 * cpu::possible())).expect("enough for these");
    assert!(!streams.make_spares(), "there is no memory for all");
}
