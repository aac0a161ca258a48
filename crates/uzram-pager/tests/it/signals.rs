//! Signals, each case in a process of its own: other users of SIGBUS beside the trap that uses it, and
//! touches of evicted memory on small alternate stacks, and in handlers of other signals.

use std::os::unix::process::ExitStatusExt;
use std::os::unix::thread::JoinHandleExt;
use std::process::ExitStatus;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use libc::{c_int, c_void, siginfo_t};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use uzram::random::Random;
use uzram::units::PAGE_SIZE;
use uzram_pager::{Region, Trap};

use crate::common::{MIB, each, each_succeeds, expect_pages, filled, in_child, set_action};

const PAGES: usize = 4096;

/// What the test's handlers are to open, and what they saw.
static CLOSED_PAGE: AtomicUsize = AtomicUsize::new(0);
static SEEN_ADDRESS: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// Maps a page behind the end of a file: a touch is a SIGBUS.
fn map_closed_page() -> *mut u8 {
    let (file, access) = (tempfile::tempfile().unwrap(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping affects no existing memory.
    unsafe { mmap(null_mut(), PAGE_SIZE, access, MapFlags::SHARED, &file, 0) }.unwrap().cast()
}

/// Opens the page; ends the process if it is not the page's turn.
extern "C" fn on_signal(_: c_int) {
    let page = CLOSED_PAGE.load(Ordering::Relaxed) as *mut c_void;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the page is the test's; the calls are allowed in handlers.
    unsafe {
        let is_open = libc::mmap(page, PAGE_SIZE, access, flags, -1, 0) == page;
        if CALLS.fetch_add(1, Ordering::Relaxed) > 100 || !is_open {
            libc::_exit(9);
        }
    }
}

extern "C" fn on_signal_with_info(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel's information.
    SEEN_ADDRESS.store(unsafe { (*info).si_addr().addr() }, Ordering::Relaxed);
    on_signal(signal);
}

/// What [`on_signal_after`] calls for what is not its own.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

extern "C" fn on_signal_after(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let page = CLOSED_PAGE.load(Ordering::Relaxed);
    // SAFETY: the kernel's information.
    if (page..page + PAGE_SIZE).contains(&unsafe { (*info).si_addr().addr() }) {
        return on_signal(signal);
    }
    let before = BEFORE.get().unwrap().sa_sigaction;
    // SAFETY: the pager's handler, which takes these.
    let before: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = unsafe { std::mem::transmute(before) };
    before(signal, info, context);
}

fn on_sigbus(action: usize, flags: c_int) -> libc::sigaction {
    set_action(libc::SIGBUS, action, flags | libc::SA_ONSTACK)
}

fn touch(address: *mut u8) {
    // SAFETY: a mapped byte, or the test wants a signal.
    unsafe { address.write_volatile(address.read_volatile() | 1) };
}

fn send() {
    // SAFETY: sends this thread a signal.
    assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0);
}

fn check(region: &Region) {
    region.pageout(..).unwrap();
    expect_pages(region, 0, 1);
}

#[test]
fn other_handlers_get_what_is_not_the_pagers() {
    let with_info = on_signal_with_info as extern "C" fn(_, _, _) as usize;
    let without = on_signal as extern "C" fn(_) as usize;
    for (case, action, flags) in [("with", with_info, libc::SA_SIGINFO), ("without", without, 0)] {
        let body = |trap: Trap| {
            let expect_calls = |count| assert_eq!(CALLS.load(Ordering::Relaxed), count);
            on_sigbus(action, flags);
            let page = map_closed_page();
            CLOSED_PAGE.store(page.addr(), Ordering::Relaxed);
            let (pager, region) = filled(trap, 8 * MIB, PAGES);
            check(&region);
            expect_calls(0);
            touch(page.wrapping_add(123));
            expect_calls(1);
            if flags == libc::SA_SIGINFO {
                assert_eq!(SEEN_ADDRESS.load(Ordering::Relaxed), page.addr() + 123);
            }
            send();
            expect_calls(2);
            check(&region);
            // One that is installed later, and calls the pager's.
            let page = map_closed_page();
            CLOSED_PAGE.store(page.addr(), Ordering::Relaxed);
            let after = on_signal_after as extern "C" fn(_, _, _) as usize;
            assert!(BEFORE.set(on_sigbus(after, libc::SA_SIGINFO)).is_ok());
            check(&region);
            touch(page);
            expect_calls(3);
            // Another pager does not install a handler again.
            let (_other, more) = filled(trap, 8 * MIB, PAGES);
            check(&more);
            assert!(pager.stats().faults > 0);
            // What the handler opens is another page: the signal comes again.
            println!("ready");
            touch(map_closed_page());
        };
        let check = |status: ExitStatus, text: &str| {
            assert!(status.code() == Some(9) && text.contains("ready"), "{status}: {text}");
        };
        each(&[Trap::Signal], |trap| in_child(case, || body(trap), check));
    }
}

#[test]
fn the_default_action_still_ends_the_process() {
    let kill = || {
        // SAFETY: sends this process a signal.
        unsafe { libc::kill(libc::getpid(), libc::SIGBUS) };
        std::thread::sleep(Duration::from_secs(20));
    };
    let beyond = || touch(map_closed_page());
    let ignored = || {
        send();
        println!("goes on");
        beyond();
    };
    let cases: [(_, _, &dyn Fn(), _); 4] = [
        ("beyond a file", Some(libc::SIG_DFL), &beyond, "ready"),
        ("ignored", Some(libc::SIG_IGN), &ignored, "goes on"),
        ("a signal that was sent", Some(libc::SIG_DFL), &kill, "ready"),
        // The handler of Rust's standard library.
        ("beyond a file, Rust's", None, &beyond, "ready"),
    ];
    for (case, action, end, said) in cases {
        let body = |trap| {
            action.map(|action| on_sigbus(action, 0));
            let (_pager, region) = filled(trap, 8 * MIB, PAGES);
            check(&region);
            println!("ready");
            end();
        };
        let check = |status: ExitStatus, text: &str| {
            assert!(status.signal() == Some(libc::SIGBUS) && text.contains(said), "{case}, {status}: {text}");
        };
        each(&[Trap::Signal], |trap| in_child(case, || body(trap), check));
    }
}

/// With none, and with one of hardly more than what the kernel puts there: the CPU's registers.
#[test]
fn a_small_alternate_stack_is_enough() {
    each_succeeds(&[Trap::Signal], |trap| {
        let (_pager, region) = filled(trap, 8 * MIB, PAGES);
        // SAFETY: reads a number.
        let frame = (unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) } as usize).max(libc::MINSIGSTKSZ);
        for (ss_size, ss_flags) in [(0, libc::SS_DISABLE), (frame + 1024, 0)] {
            let mut memory = vec![7u8; PAGE_SIZE + ss_size];
            let stack = libc::stack_t { ss_sp: memory[PAGE_SIZE..].as_mut_ptr().cast(), ss_flags, ss_size };
            // SAFETY: the memory is this thread's alternate stack until the one of before is that again.
            unsafe {
                let mut before = std::mem::zeroed();
                assert_eq!(libc::sigaltstack(&raw const stack, &raw mut before), 0);
                check(&region);
                assert_eq!(libc::sigaltstack(&raw const before, null_mut()), 0);
            }
            assert!(std::hint::black_box(&memory)[..PAGE_SIZE].iter().all(|byte| *byte == 7), "{ss_size}");
        }
    });
}

/// The region that handlers read, how often they did, and are to do it.
static START: AtomicUsize = AtomicUsize::new(0);
static READS: AtomicUsize = AtomicUsize::new(0);
const WANTED_READS: usize = 1000;

extern "C" fn on_other_signal(_: c_int) {
    let start = START.load(Ordering::Relaxed);
    let mut random = Random::new(READS.fetch_add(1, Ordering::Relaxed) as u64);
    for _ in 0..4 {
        let page = random.below(PAGES);
        // SAFETY: a word inside the region, which stays, and is not written to; the call is allowed in
        // handlers.
        unsafe {
            if ((start + page * PAGE_SIZE + 8) as *const u64).read_volatile() != (page as u64) << 20 | 1 {
                libc::abort();
            }
        }
    }
}

fn read_at_random(region: &Region, seed: u64) {
    let mut random = Random::new(seed);
    while READS.load(Ordering::Relaxed) < WANTED_READS {
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

/// Threads are interrupted anywhere in the pager. What is sent to the process goes to any thread that does
/// not block it: the pager's have to.
#[test]
fn handlers_of_other_signals_may_read_evicted_memory() {
    each_succeeds(&Trap::ALL, |trap| {
        let (pager, region) = filled(trap, 8 * MIB, PAGES);
        // A last signal may come late.
        let region: &Region = Box::leak(Box::new(region));
        START.store(region.as_mut_ptr().addr(), Ordering::Relaxed);
        set_action(libc::SIGUSR1, on_other_signal as extern "C" fn(_) as usize, libc::SA_RESTART);
        let readers = [0, 1].map(|seed| std::thread::spawn(move || read_at_random(region, seed)));
        while READS.load(Ordering::Relaxed) < WANTED_READS {
            // SAFETY: sends signals; the threads may have ended, but have not been joined.
            unsafe {
                readers
                    .iter()
                    .for_each(|reader| _ = libc::pthread_kill(reader.as_pthread_t(), libc::SIGUSR1));
                libc::kill(libc::getpid(), libc::SIGUSR1);
            }
            std::thread::sleep(Duration::from_micros(300));
        }
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert!(pager.stats().pages_lost == 0 && pager.stats().pages_in > 100, "{:?}", pager.stats());
    });
}
