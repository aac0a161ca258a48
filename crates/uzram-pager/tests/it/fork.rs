//! A child of a process with a pager: it has none of the memory, and can do it no harm.

use std::panic::{AssertUnwindSafe, catch_unwind};

use uzram::ErrorKind;
use uzram::units::PAGE_SIZE;
use uzram_pager::TrapKind;

use crate::common::{MIB, each_succeeds, expect_pages, fill_pages, filled, wait_until};

struct Fork(libc::pid_t);

#[derive(Debug, PartialEq, Eq)]
enum Ended {
    Exit(i32),
    Signal(i32),
}

impl Fork {
    /// Starts a child that runs `body` and ends; with 0 if that does not panic.
    fn start(body: impl FnOnce()) -> Fork {
        // SAFETY: the child uses nothing of threads that it does not have: it allocates, which glibc allows,
        // and ends.
        match unsafe { libc::fork() } {
            0 => {
                let result = catch_unwind(AssertUnwindSafe(body));
                // SAFETY: ends the process, without what other threads have registered for its end.
                unsafe { libc::_exit(if result.is_ok() { 0 } else { 101 }) }
            }
            child => {
                assert!(child > 0);
                Fork(child)
            }
        }
    }

    fn ended(&self) -> Option<Ended> {
        let mut status = 0;
        // SAFETY: waits for this process's child.
        match unsafe { libc::waitpid(self.0, &raw mut status, libc::WNOHANG) } {
            0 => None,
            child => {
                assert_eq!(child, self.0);
                Some(if libc::WIFSIGNALED(status) {
                    Ended::Signal(libc::WTERMSIG(status))
                } else {
                    Ended::Exit(libc::WEXITSTATUS(status))
                })
            }
        }
    }

    fn wait(&self) -> Ended {
        let mut ended = None;
        wait_until("the child has ended", || {
            ended = self.ended();
            ended.is_some()
        });
        ended.unwrap()
    }
}

const PAGES: usize = 4096;

fn each_forks(body: impl Fn(TrapKind)) {
    each_succeeds("forks", &TrapKind::ALL, body);
}

#[test]
fn a_touch_in_a_child_is_a_sigsegv() {
    each_forks(|trap| {
        let (_pager, mut region) = filled(trap, 8 * MIB, PAGES);
        region.pageout(..PAGES / 2 * PAGE_SIZE).unwrap();
        for page in [0, PAGES / 2 - 1, PAGES - 1] {
            let child = Fork::start(|| assert_eq!(std::hint::black_box(region[page * PAGE_SIZE]), 0));
            assert_eq!(child.wait(), Ended::Signal(libc::SIGSEGV), "{trap:?}, page {page}");
        }
        let child = Fork::start(|| region[7] = 1);
        assert_eq!(child.wait(), Ended::Signal(libc::SIGSEGV), "{trap:?}");
        expect_pages(&region, 0, 1);
    });
}

#[test]
fn a_child_gets_errors() {
    each_forks(|trap| {
        let (pager, mut region) = filled(trap, 8 * MIB, PAGES);
        let child = Fork::start(|| {
            assert_eq!(pager.map(PAGE_SIZE).err().map(|error| error.kind()), Some(ErrorKind::Busy));
            let busy = |result: uzram::Result<()>| result.is_err_and(|error| error.kind() == ErrorKind::Busy);
            assert!(busy(region.pageout(..)) && busy(region.prefetch(..)) && busy(region.discard(..)));
            assert!(busy(region.pin(..).map(drop)));
            assert_eq!(pager.trap(), trap);
            assert!(pager.stats().mapped_pages >= PAGES as u64);
        });
        assert_eq!(child.wait(), Ended::Exit(0), "{trap:?}");
        expect_pages(&region, 0, 1);
    });
}

#[test]
fn a_child_that_drops_all_does_no_harm() {
    each_forks(|trap| {
        let (pager, region) = filled(trap, 8 * MIB, PAGES);
        let (pager, region) = (Some(pager), Some(region));
        // The parent keeps them: what a child drops is a copy.
        let child = Fork::start(|| {
            // SAFETY: each is read once in this process, which ends without dropping it again.
            unsafe {
                drop(std::ptr::read(&raw const region));
                drop(std::ptr::read(&raw const pager));
            }
        });
        assert_eq!(child.wait(), Ended::Exit(0), "{trap:?}");
        let (mut region, pager) = (region.unwrap(), pager.unwrap());
        expect_pages(&region, 0, 1);
        fill_pages(&mut region, 0, 2);
        region.pageout(..).unwrap();
        expect_pages(&region, 0, 2);
        let mut other = pager.map(MIB).unwrap();
        other.fill(3);
        assert_eq!(other[MIB - 1], 3);
    });
}

#[test]
fn a_child_that_unwinds_to_its_end_exits() {
    each_forks(|trap| {
        let (pager, region) = filled(trap, 8 * MIB, PAGES);
        let pin = region.pin(..MIB).unwrap();
        let child = Fork::start(|| {
            // SAFETY: as above.
            drop(unsafe { std::ptr::read(&raw const pin) });
            drop(pager.clone());
        });
        assert_eq!(child.wait(), Ended::Exit(0), "{trap:?}");
        region.pageout(..).unwrap();
        assert_eq!(pager.stats().resident_pages as usize, MIB / PAGE_SIZE, "still pinned");
        drop(pin);
        expect_pages(&region, 0, 1);
    });
}

#[test]
fn the_parent_goes_on_while_children_live_and_end() {
    each_forks(|trap| {
        let (pager, mut region) = filled(trap, 8 * MIB, PAGES);
        for version in 2..12 {
            let child = Fork::start(|| std::thread::sleep(std::time::Duration::from_millis(30)));
            let touching = Fork::start(|| region[(version * 100 + 5) * PAGE_SIZE] = 77);
            while child.ended().is_none() {
                fill_pages(&mut region, 0, version as u64);
                expect_pages(&region, 0, version as u64);
            }
            assert_eq!(touching.wait(), Ended::Signal(libc::SIGSEGV), "{trap:?}");
        }
        let stats = pager.stats();
        assert!(stats.pages_out > PAGES as u64 && stats.pages_lost == 0, "{stats:?}");
    });
}
