//! Other users of SIGSEGV beside the traps that use it, each case in a process of its own: handlers from
//! before and after, the default action, and signals that are sent.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{c_int, c_void, siginfo_t};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use uzram::units::PAGE_SIZE;
use uzram_pager::{Pager, Region, TrapKind};

use crate::common::{MIB, OF_SIGNALS, each_in_child, each_succeeds, expect_pages, filled, set_action};

/// What the test's handlers are to open, and what they saw.
static CLOSED_PAGE: AtomicUsize = AtomicUsize::new(0);
static SEEN_ADDRESS: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// Maps a page without access, which the test's handlers open.
fn map_closed_page() -> *mut u8 {
    // SAFETY: a new mapping affects no existing memory.
    let page = unsafe { mmap_anonymous(null_mut(), PAGE_SIZE, ProtFlags::empty(), MapFlags::PRIVATE) };
    let page = page.unwrap();
    CLOSED_PAGE.store(page.addr(), Ordering::Relaxed);
    page.cast()
}

/// Opens the page; ends the process if it is not the page's turn.
fn open_closed_page() {
    let page = CLOSED_PAGE.load(Ordering::Relaxed) as *mut c_void;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the page is the test's; the calls are allowed in handlers.
    unsafe {
        if CALLS.fetch_add(1, Ordering::Relaxed) > 100 || libc::mprotect(page, PAGE_SIZE, access) != 0 {
            libc::_exit(9);
        }
    }
}

extern "C" fn on_signal(_: c_int) {
    open_closed_page();
}

extern "C" fn on_signal_with_info(_: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel's information.
    SEEN_ADDRESS.store(unsafe { (*info).si_addr().addr() }, Ordering::Relaxed);
    open_closed_page();
}

/// What the handler of [`install_after`] calls for what is not its own.
static BEFORE: std::sync::OnceLock<libc::sigaction> = std::sync::OnceLock::new();

extern "C" fn on_signal_after(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let page = CLOSED_PAGE.load(Ordering::Relaxed);
    // SAFETY: the kernel's information.
    if (page..page + PAGE_SIZE).contains(&unsafe { (*info).si_addr().addr() }) {
        return open_closed_page();
    }
    let before = BEFORE.get().unwrap().sa_sigaction;
    // SAFETY: the pager's handler, which takes these.
    let before: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = unsafe { std::mem::transmute(before) };
    before(signal, info, context);
}

fn on_sigsegv(action: usize, flags: c_int) -> libc::sigaction {
    set_action(libc::SIGSEGV, action, flags | libc::SA_ONSTACK)
}

fn touch(address: *mut u8) {
    // SAFETY: a mapped byte, or the test wants a signal.
    unsafe { address.write_volatile(address.read_volatile() | 1) };
}

fn evicted(trap: TrapKind) -> (Pager, Region) {
    let (pager, region) = filled(trap, 8 * MIB, 1024);
    region.pageout(..).unwrap();
    (pager, region)
}

fn check(region: &Region) {
    region.pageout(..).unwrap();
    expect_pages(region, 0, 1);
}

#[test]
fn a_handler_from_before_gets_what_is_not_the_pagers() {
    let body = |trap, action, flags| {
        let before = on_sigsegv(action, flags);
        assert_ne!(before.sa_sigaction, action);
        let page = map_closed_page();
        let (_pager, region) = evicted(trap);
        check(&region);
        assert_eq!(CALLS.load(Ordering::Relaxed), 0, "not for the pager's");
        touch(page.wrapping_add(123));
        assert_eq!(CALLS.load(Ordering::Relaxed), 1);
        check(&region);
    };
    let with_info = |trap| {
        body(trap, on_signal_with_info as extern "C" fn(_, _, _) as usize, libc::SA_SIGINFO);
        assert_eq!(SEEN_ADDRESS.load(Ordering::Relaxed), CLOSED_PAGE.load(Ordering::Relaxed) + 123);
    };
    each_succeeds("with SA_SIGINFO", &OF_SIGNALS, with_info);
    let without = |trap| body(trap, on_signal as extern "C" fn(_) as usize, 0);
    each_succeeds("without", &OF_SIGNALS, without);
}

#[test]
fn a_handler_from_before_gets_touches_of_a_dropped_region() {
    let body = |trap| {
        let action = on_signal_with_info as extern "C" fn(_, _, _) as usize;
        on_sigsegv(action, libc::SA_SIGINFO);
        let (pager, region) = evicted(trap);
        let (_other, page) = (pager.map(MIB).unwrap(), region.as_mut_ptr());
        drop(region);
        // What the handler opens is not the page: the signal comes again.
        map_closed_page();
        CALLS.store(90, Ordering::Relaxed);
        println!("ready");
        touch(page);
    };
    each_in_child("dropped", &OF_SIGNALS, body, |_, ended| {
        assert_eq!(ended.status.code(), Some(9), "{}: {}", ended.status, ended.text);
        assert!(ended.text.contains("ready"));
    });
}

#[test]
fn a_handler_from_after_that_calls_the_pagers_works() {
    let body = |trap| {
        let (pager, region) = evicted(trap);
        let page = map_closed_page();
        let action = on_signal_after as extern "C" fn(_, _, _) as usize;
        assert!(BEFORE.set(on_sigsegv(action, libc::SA_SIGINFO)).is_ok());
        check(&region);
        touch(page);
        assert_eq!(CALLS.load(Ordering::Relaxed), 1);
        check(&region);
        // Another pager does not install a handler again.
        let (_other, more) = evicted(trap);
        check(&more);
        assert!(pager.stats().faults > 0);
    };
    each_succeeds("after", &OF_SIGNALS, body);
}

#[test]
fn the_default_action_still_ends_the_process() {
    let kill = || {
        // SAFETY: sends this process a signal.
        unsafe { libc::kill(libc::getpid(), libc::SIGSEGV) };
        std::thread::sleep(std::time::Duration::from_secs(20));
    };
    let dereference = || touch(std::hint::black_box(null_mut()));
    let cases: [(_, _, &dyn Fn()); 4] = [
        ("a null pointer", Some(libc::SIG_DFL), &dereference),
        ("a null pointer, ignored", Some(libc::SIG_IGN), &dereference),
        // The handler of Rust's standard library.
        ("a null pointer, Rust's", None, &dereference),
        ("a signal that was sent", Some(libc::SIG_DFL), &kill),
    ];
    for (case, action, end) in cases {
        let body = |trap| {
            action.map(|action| on_sigsegv(action, 0));
            let (_pager, region) = evicted(trap);
            check(&region);
            end();
        };
        each_in_child(case, &OF_SIGNALS, body, |_, ended| ended.assert_signal(libc::SIGSEGV));
    }
}

#[test]
fn a_signal_that_is_sent_reaches_the_handler_from_before_or_is_ignored() {
    let send = |region: &Region| {
        for _ in 0..3 {
            // SAFETY: sends this thread a signal.
            assert_eq!(unsafe { libc::raise(libc::SIGSEGV) }, 0);
            check(region);
        }
    };
    let handled = |trap| {
        on_sigsegv(on_signal as extern "C" fn(_) as usize, 0);
        let (_pager, region) = evicted(trap);
        map_closed_page();
        send(&region);
        assert_eq!(CALLS.load(Ordering::Relaxed), 3);
    };
    each_succeeds("handled", &OF_SIGNALS, handled);
    let ignored = |trap| {
        on_sigsegv(libc::SIG_IGN, 0);
        let (_pager, region) = evicted(trap);
        send(&region);
    };
    each_succeeds("ignored", &OF_SIGNALS, ignored);
}

/// The kernel ends a process whose thread blocks the signal of its own touch.
#[test]
fn a_thread_that_blocks_the_signal_must_not_touch_evicted_memory() {
    let body = |trap| {
        let (_pager, region) = evicted(trap);
        // SAFETY: a set of this function's.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut set, libc::SIGSEGV);
            assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, null_mut()), 0);
        }
        // Pinned memory works.
        let pin = region.pin(..PAGE_SIZE).unwrap();
        expect_pages(&region[..PAGE_SIZE], 0, 1);
        println!("ready");
        drop(pin);
        check(&region);
    };
    each_in_child("blocked", &OF_SIGNALS, body, |_, ended| {
        ended.assert_signal(libc::SIGSEGV);
        assert!(ended.text.contains("ready"), "{}", ended.text);
    });
}
