//! Touches of evicted memory where a thread has little: in handlers of other signals, on small alternate
//! stacks, on a stack that is used up, and many at once.

use std::os::unix::thread::JoinHandleExt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use libc::c_int;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use uzram::random::Random;
use uzram::units::PAGE_SIZE;
use uzram_pager::{Pager, Region, TrapKind};

use crate::common::{
    MIB, OF_SIGNALS, each, each_in_child, each_succeeds, expect_pages, filled, part, set_action, wait_until,
};

const PAGES: usize = 4096;

/// How often handlers are called at least.
const LEAST_READS: usize = 200;

/// The region that handlers read, 0 if there is none; how many are at it; how often they were; and where they
/// found something else.
static START: AtomicUsize = AtomicUsize::new(0);
static RUNNING: AtomicUsize = AtomicUsize::new(0);
static READS: AtomicUsize = AtomicUsize::new(0);
static WRONG: AtomicUsize = AtomicUsize::new(usize::MAX);

extern "C" fn on_signal(_: c_int) {
    RUNNING.fetch_add(1, Ordering::SeqCst);
    let start = START.load(Ordering::SeqCst);
    let mut random = Random::new(READS.fetch_add(1, Ordering::Relaxed) as u64);
    for _ in 0..if start == 0 { 0 } else { 4 } {
        let page = random.below(PAGES);
        // SAFETY: a word inside the region, which stays until the signals have ended, and is not written to.
        let word = unsafe { ((start + page * PAGE_SIZE + 8) as *const u64).read_volatile() };
        if word != (page as u64) << 20 | 1 {
            WRONG.store(page, Ordering::Relaxed);
        }
    }
    RUNNING.fetch_sub(1, Ordering::SeqCst);
}

/// Returns whether handlers are to go on: until they were called often, but not for ever.
fn goes_on(start: Instant) -> bool {
    let most = if READS.load(Ordering::Relaxed) < LEAST_READS { 20_000 } else { 500 };
    start.elapsed() < Duration::from_millis(most)
}

fn read_at_random(region: &Region, seed: u64) {
    let mut random = Random::new(seed);
    let start = Instant::now();
    while goes_on(start) {
        let page = random.below(PAGES);
        expect_pages(&region[page * PAGE_SIZE..][..PAGE_SIZE], page, 1);
        let range = page * PAGE_SIZE..(page + 64).min(PAGES) * PAGE_SIZE;
        match random.below(32) {
            0 => region.pageout(range).unwrap(),
            1 => region.prefetch(range).unwrap(),
            2 => drop(region.pin(range).unwrap()),
            _ => {}
        }
    }
}

fn check_handlers(pager: &Pager) {
    START.store(0, Ordering::SeqCst);
    wait_until("no handler runs", || RUNNING.load(Ordering::SeqCst) == 0);
    let (reads, wrong) = (READS.load(Ordering::Relaxed), WRONG.load(Ordering::Relaxed));
    assert!(reads >= LEAST_READS, "{reads} reads, {:?}", pager.stats());
    assert_eq!(wrong, usize::MAX, "a handler read something else");
    assert!(pager.stats().pages_lost == 0 && pager.stats().pages_in > 100, "{:?}", pager.stats());
}

/// The signals of a timer go to any thread that does not block them: the pager's have to.
#[test]
fn handlers_of_a_timer_may_read_evicted_memory() {
    let body = |trap| {
        let (pager, region) = filled(trap, 8 * MIB, PAGES);
        START.store(region.as_mut_ptr().addr(), Ordering::SeqCst);
        set_action(libc::SIGALRM, on_signal as extern "C" fn(_) as usize, libc::SA_RESTART);
        let every = |micros| {
            let interval = libc::timeval { tv_sec: 0, tv_usec: micros };
            let timer = libc::itimerval { it_interval: interval, it_value: interval };
            // SAFETY: sets a timer of this process.
            assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, null_mut()) }, 0);
        };
        every(1000);
        std::thread::scope(|scope| {
            for seed in 0..2 {
                let region = &region;
                scope.spawn(move || read_at_random(region, seed));
            }
        });
        every(0);
        check_handlers(&pager);
    };
    each_succeeds("timer", &TrapKind::ALL, body);
}

#[test]
fn handlers_of_signals_that_are_sent_to_threads_may_read_evicted_memory() {
    let body = |trap| {
        let (pager, region) = filled(trap, 8 * MIB, PAGES);
        let region = Arc::new(region);
        START.store(region.as_mut_ptr().addr(), Ordering::SeqCst);
        set_action(libc::SIGUSR1, on_signal as extern "C" fn(_) as usize, libc::SA_RESTART);
        let readers: Vec<_> = (0..2)
            .map(|seed| {
                let region = Arc::clone(&region);
                std::thread::spawn(move || read_at_random(&region, seed))
            })
            .collect();
        let start = Instant::now();
        while goes_on(start) {
            for reader in &readers {
                // It may have ended.
                // SAFETY: the thread has not been joined.
                unsafe { libc::pthread_kill(reader.as_pthread_t(), libc::SIGUSR1) };
            }
            std::thread::sleep(Duration::from_micros(300));
        }
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        check_handlers(&pager);
    };
    each_succeeds("sent", &TrapKind::ALL, body);
}

/// Runs `body` with an alternate signal stack of so many bytes, below which there is no memory.
fn with_alternate_stack(bytes: usize, body: impl FnOnce()) {
    let len = bytes.next_multiple_of(PAGE_SIZE) + PAGE_SIZE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, of which the lowest page is closed; the stack is this thread's until it is
    // replaced.
    unsafe {
        let start = mmap_anonymous(null_mut(), len, protection, MapFlags::PRIVATE).unwrap();
        mprotect(start, PAGE_SIZE, MprotectFlags::empty()).unwrap();
        let low = start.byte_add(PAGE_SIZE);
        let mut before: libc::stack_t = std::mem::zeroed();
        let stack = libc::stack_t { ss_sp: low, ss_flags: 0, ss_size: bytes };
        assert_eq!(libc::sigaltstack(&raw const stack, &raw mut before), 0);
        body();
        assert_eq!(libc::sigaltstack(&raw const before, null_mut()), 0);
        rustix::mm::munmap(start, len).unwrap();
    }
}

#[test]
fn a_small_alternate_stack_is_enough() {
    let body = |trap| {
        let (_pager, region) = filled(trap, 8 * MIB, PAGES);
        // What the kernel puts on the stack, by the CPU's registers.
        // SAFETY: reads a number.
        let frame = (unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) } as usize).max(libc::MINSIGSTKSZ);
        for bytes in [frame + 1024, frame + 2048, 8192, 16384].into_iter().filter(|bytes| *bytes > frame) {
            println!("{bytes} bytes, of which the kernel uses {frame}");
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    with_alternate_stack(bytes, || {
                        region.pageout(..).unwrap();
                        expect_pages(&region, 0, 1);
                    });
                });
            });
        }
    };
    each_succeeds("small", &OF_SIGNALS, body);
}

#[test]
fn a_thread_without_an_alternate_stack_faults() {
    each(&OF_SIGNALS, |trap| {
        let (_pager, region) = filled(trap, 8 * MIB, PAGES);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: disables this thread's; the standard library's is put back, as that frees it.
                unsafe {
                    let mut before: libc::stack_t = std::mem::zeroed();
                    let none = libc::stack_t { ss_sp: null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
                    assert_eq!(libc::sigaltstack(&raw const none, &raw mut before), 0);
                    region.pageout(..).unwrap();
                    expect_pages(&region, 0, 1);
                    assert_eq!(libc::sigaltstack(&raw const before, null_mut()), 0);
                }
            });
        });
    });
}

#[allow(unconditional_recursion)]
fn recurse(depth: u64) -> u64 {
    let local = std::hint::black_box([depth; 64]);
    recurse(depth + 1) + local[3]
}

#[test]
fn rusts_message_for_a_stack_overflow_still_comes() {
    let body = |trap| {
        let (_pager, region) = filled(trap, 8 * MIB, PAGES);
        region.pageout(..).unwrap();
        expect_pages(&region, 0, 1);
        let thread = std::thread::Builder::new().name("deep".into()).spawn(|| recurse(0)).unwrap();
        let _ = thread.join();
    };
    each_in_child("deep", &OF_SIGNALS, body, |_, ended| {
        ended.assert_signal(libc::SIGABRT);
        assert!(ended.text.contains("'deep'") && ended.text.contains("overflowed"), "{}", ended.text);
    });
}

#[test]
fn many_threads_fault_at_once() {
    const THREADS: usize = 64;
    each(&TrapKind::ALL, |trap| {
        let (pager, region) = filled(trap, 8 * MIB, PAGES);
        let start = region.as_mut_ptr().addr();
        for same in [false, true] {
            region.pageout(..).unwrap();
            let barrier = Barrier::new(THREADS);
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        // SAFETY: inside the region, which outlives the scope, and is not written to.
                        let all = unsafe { part(start, 0, PAGES) };
                        for nth in 0..20 {
                            let page = if same { nth * 100 } else { nth * THREADS + thread };
                            barrier.wait();
                            expect_pages(&all[page * PAGE_SIZE..][..PAGE_SIZE], page, 1);
                        }
                    });
                }
            });
        }
        assert_eq!(pager.stats().pages_lost, 0);
        expect_pages(&region, 0, 1);
    });
}

/// One page that threads touch and evict, again and again: each of them waits for others that move it, and
/// none for ever.
#[test]
fn threads_that_fight_for_a_page_all_go_on() {
    let body = |trap| {
        let (_pager, region) = filled(trap, 8 * MIB, PAGES);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for thread in 0..6 {
                let region = &region;
                scope.spawn(move || {
                    while start.elapsed() < Duration::from_millis(1000) {
                        match thread {
                            0..2 => region.pageout(..16 * PAGE_SIZE).unwrap(),
                            2 => drop(region.pin(..PAGE_SIZE).unwrap()),
                            _ => expect_pages(&region[..PAGE_SIZE], 0, 1),
                        }
                    }
                });
            }
        });
    };
    each_succeeds("fight", &TrapKind::ALL, body);
}
