//! Regions that end while they are in use, and children of a process with a pager: they have none of the
//! memory, and can do it no harm.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::{Pid, WaitOptions, waitpid};
use uzram::ErrorKind;
use uzram::random::Random;
use uzram::units::PAGE_SIZE;
use uzram_pager::Trap;

use crate::common::{MIB, each_succeeds, expect_pages, fill_pages, filled, pager, set_action, wait_until};

const PAGES: usize = 4096;

/// Threads whose touch has failed.
static FAILED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_signal(_: libc::c_int) {
    FAILED.fetch_add(1, Ordering::SeqCst);
    // SAFETY: ends this thread, which nobody joins, and which holds nothing.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
}

fn touch_for_ever(start: usize, seed: usize) {
    let mut random = Random::new(seed as u64);
    loop {
        let byte = (start + random.below(PAGES) * PAGE_SIZE + seed) as *mut u8;
        // SAFETY: a byte of the region, or the thread ends.
        unsafe { byte.write_volatile(byte.read_volatile().wrapping_add(1)) };
    }
}

#[test]
fn touches_of_a_region_that_is_dropped_fail_and_the_pager_goes_on() {
    const THREADS: usize = 6;
    each_succeeds(&Trap::ALL, |trap| {
        for signal in [libc::SIGSEGV, libc::SIGBUS] {
            set_action(signal, on_signal as extern "C" fn(_) as usize, libc::SA_ONSTACK);
        }
        let pager = pager(trap, 4 * MIB);
        for round in 1..=5 {
            let region = pager.map(PAGES * PAGE_SIZE).unwrap();
            let start = region.as_mut_ptr().addr();
            for seed in 0..THREADS {
                std::thread::spawn(move || touch_for_ever(start, seed));
            }
            std::thread::sleep(Duration::from_millis(30 * round as u64));
            drop(region);
            wait_until("all threads have ended", || FAILED.load(Ordering::SeqCst) == round * THREADS);
            assert_eq!(pager.stats().mapped_pages, 0);
            let mut other = pager.map(8 * MIB).unwrap();
            expect_pages(&other, 0, 0);
            fill_pages(&mut other, 0, 1);
            expect_pages(&other, 0, 1);
        }
        assert_eq!(pager.stats().pages_lost, 0);
    });
}

/// Starts a child that runs `body` and ends: with 0 if that does not panic.
fn fork(body: impl FnOnce()) -> Option<Pid> {
    // SAFETY: the child uses nothing of threads that it does not have: it allocates, which glibc allows, and
    // ends, without what other threads have registered for its end.
    unsafe {
        match libc::fork() {
            0 => libc::_exit(catch_unwind(AssertUnwindSafe(body)).is_err().into()),
            child => Pid::from_raw(child),
        }
    }
}

/// Waits for a child, which ends by a signal, or with 0.
#[track_caller]
fn expect_end(child: Option<Pid>, signal: Option<i32>) {
    let (_, status) = waitpid(child, WaitOptions::empty()).unwrap().unwrap();
    let wanted = (signal, signal.is_none().then_some(0));
    assert_eq!((status.terminating_signal(), status.exit_status()), wanted);
}

#[test]
fn a_child_has_none_of_the_memory_and_does_no_harm() {
    each_succeeds(&Trap::ALL, |trap| {
        let (pager, mut region) = filled(trap, 8 * MIB, PAGES);
        region.pageout(..PAGES / 2 * PAGE_SIZE).unwrap();
        for page in [0, PAGES / 2 - 1, PAGES - 1] {
            expect_end(fork(|| _ = std::hint::black_box(region[page * PAGE_SIZE])), Some(libc::SIGSEGV));
        }
        let errors = fork(|| {
            assert_eq!(pager.map(PAGE_SIZE).err().map(|error| error.kind()), Some(ErrorKind::Busy));
            let busy = |result: uzram::Result<()>| result.is_err_and(|error| error.kind() == ErrorKind::Busy);
            assert!(busy(region.pageout(..)) && busy(region.prefetch(..)) && busy(region.discard(..)));
            assert!(busy(region.pin(..).map(drop)));
            assert_eq!(pager.trap(), trap);
            assert!(pager.stats().mapped_pages >= PAGES as u64);
        });
        expect_end(errors, None);
        let own = fork(|| {
            let (_pager, region) = filled(trap, 8 * MIB, 100);
            region.pageout(..).unwrap();
            expect_pages(&region, 0, 1);
        });
        expect_end(own, None);
        let pin = region.pin(..MIB).unwrap();
        // SAFETY: each is read once in the child, whose copies they are, and which ends without dropping them
        // again.
        let drops = fork(|| unsafe {
            drop(std::ptr::read(&raw const pin));
            drop(std::ptr::read(&raw const region));
            drop(std::ptr::read(&raw const pager));
        });
        expect_end(drops, None);
        region.pageout(..).unwrap();
        assert_eq!(pager.stats().resident_pages as usize, MIB / PAGE_SIZE, "still pinned");
        drop(pin);
        expect_pages(&region, 0, 1);
        // It goes on while children live and end.
        for version in 2..12 {
            let sleeps = fork(|| std::thread::sleep(Duration::from_millis(30)));
            let touches = fork(|| region[(version * 100 + 5) * PAGE_SIZE] = 77);
            fill_pages(&mut region, 0, version as u64);
            expect_pages(&region, 0, version as u64);
            expect_end(touches, Some(libc::SIGSEGV));
            expect_end(sleeps, None);
        }
        let stats = pager.stats();
        assert!(stats.pages_out > PAGES as u64 && stats.pages_lost == 0, "{stats:?}");
        let mut other = pager.map(MIB).unwrap();
        fill_pages(&mut other, 0, 1);
        expect_pages(&other, 0, 1);
    });
}
