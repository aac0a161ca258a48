//! Reads and overwrites of a warm device allocate nothing and make no system call.
//!
//! A child process fills a device, overwrites all of it a few times, and then forbids itself system
//! calls: a seccomp filter turns each into SIGSYS, whose handler reports its number. Then comes the
//! steady state: pages are read, overwritten with contents that compress as before, or partly changed.
//! Allocations are counted during that time.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::alone::alone;
use uzram::device::{Device, OpenDevice};
use uzram::random::Random;
use uzram::units::{PAGE_SIZE, Page};

const PAGES: u64 = 4096;
/// Times that every page is overwritten before the device counts as warm.
const WARM_ROUNDS: u64 = 4;

/// The pipe to the parent.
static REPORT_TO: AtomicI32 = AtomicI32::new(-1);

/// Returns the contents of page `number`: one page in 16 is same-filled, the others have a share of
/// random bytes from none to all.
fn contents(number: u64) -> Page {
    let mut page = [number as u8; PAGE_SIZE];
    if number.is_multiple_of(16) {
        return page;
    }
    let mut random = Random::new(number + 1);
    let random_bytes = (number % 101) as usize * PAGE_SIZE / 100;
    page.iter_mut().take(random_bytes).for_each(|byte| *byte = random.next() as u8);
    page.iter_mut().skip(random_bytes).step_by(97).for_each(|byte| *byte ^= 0x5a);
    page
}

/// Reads or overwrites a random page or a part of it. Returns whether that succeeded.
fn one_operation(disk: &OpenDevice, pages: &[Page], random: &mut Random) -> bool {
    let number = random.below_u64(PAGES);
    let (page, offset) = (&pages[number as usize], number * PAGE_SIZE as u64);
    let from = random.below_u64(PAGE_SIZE as u64) as usize;
    let mut read = [0; PAGE_SIZE];
    match random.below_u64(8) {
        0..3 => disk.write(offset, page).is_ok(),
        3..6 => disk.read(offset, &mut read).is_ok() && read == *page,
        6 => disk.write(offset + from as u64, &page[from..]).is_ok(),
        _ => disk.read(offset + from as u64, &mut read[from..]).is_ok() && read[from..] == page[from..],
    }
}

/// Writes without allocating, as a signal handler must.
fn report(text: &[u8]) {
    // SAFETY: `text` is readable; write(2) is safe in a signal handler.
    unsafe { libc::write(REPORT_TO.load(Ordering::Relaxed), text.as_ptr().cast(), text.len()) };
}

fn report_number(what: &[u8], number: u64) {
    report(what);
    let mut digits = [0; 20];
    let (mut at, mut rest) = (digits.len(), number);
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    report(&digits[at..]);
    report(b"\n");
}

extern "C" fn on_system_call(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    /// Where `siginfo_t` has `si_syscall`, on 64-bit machines (`<asm-generic/siginfo.h>`).
    const SI_SYSCALL_BYTE: usize = 24;
    // SAFETY: the kernel passes a siginfo_t of SIGSYS; _exit is safe in a handler.
    unsafe {
        report_number(b"system call ", *info.byte_add(SI_SYSCALL_BYTE).cast::<u32>() as u64);
        libc::_exit(1);
    }
}

/// From now on every system call but write, exit_group and the return from a signal handler ends
/// in [`on_system_call`].
fn forbid_system_calls() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let row = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        // `seccomp_data` begins with the number.
        row(LOAD, 0, 0, 0),
        row(JUMP_IF_EQUAL, 3, 0, libc::SYS_write as u32),
        row(JUMP_IF_EQUAL, 2, 0, libc::SYS_exit_group as u32),
        row(JUMP_IF_EQUAL, 1, 0, libc::SYS_rt_sigreturn as u32),
        row(RETURN, 0, 0, libc::SECCOMP_RET_TRAP),
        row(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the structures are as the kernel's headers declare them and live through the calls.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_system_call as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        let done = libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()) == 0
            && libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program, 0, 0) == 0;
        if !done {
            report(b"this kernel has no seccomp filters\n");
            libc::_exit(1);
        }
    }
}

/// Runs in the child. It must not panic, which would unwind into the copy of the parent's test harness.
fn child(disk: &OpenDevice, pages: &[Page], operations: u64) -> ! {
    let mut random = Random::new(0x5eed);
    let mut well = true;
    for round in 0..=WARM_ROUNDS {
        for number in 0..PAGES {
            well &= disk.write(number * PAGE_SIZE as u64, &pages[number as usize]).is_ok();
            well &= round == 0 || one_operation(disk, pages, &mut random);
        }
    }
    let allocated_before = crate::allocations::count();
    forbid_system_calls();
    for _ in 0..operations {
        well &= one_operation(disk, pages, &mut random);
    }
    report_number(b"allocations ", crate::allocations::count() - allocated_before);
    report(if well { b"all went well\n" } else { b"an operation failed or read something else\n" });
    // SAFETY: _exit ends the process, and runs no handlers of the parent.
    unsafe { libc::_exit(0) }
}

fn report_of(settings: &[(&str, &str)], operations: u64) -> String {
    let device: Arc<Device> = Device::new("zram0").unwrap();
    settings.iter().for_each(|(name, value)| device.set(name, value).unwrap());
    device.set("disksize", &(PAGES * PAGE_SIZE as u64).to_string()).unwrap();
    let disk = device.open().unwrap();
    let pages: Vec<Page> = (0..PAGES).map(contents).collect();
    let (mut reader, writer) = std::io::pipe().unwrap();
    REPORT_TO.store(writer.as_raw_fd(), Ordering::Relaxed);
    // SAFETY: the child uses only what this thread has made, and ends only by _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
    if pid == 0 {
        child(&disk, &pages, operations);
    }
    drop(writer);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    // SAFETY: `pid` is this process's own child, not waited for before.
    assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
    text
}

/// One test, so that no other thread runs while this one forks.
#[test]
fn a_warm_device_allocates_nothing_and_makes_no_system_call() {
    if !alone("hot_path::a_warm_device_allocates_nothing_and_makes_no_system_call") {
        return;
    }
    for (settings, operations) in [
        (&[][..], 100_000),
        (&[("checksum", "1")], 20_000),
        (&[("comp_algorithm", "zstd:1")], 20_000),
        (&[("comp_algorithm", "lz4hc:2")], 20_000),
        (&[("comp_algorithm", "deflate:1")], 20_000),
        (&[("comp_algorithm", "memory")], 20_000),
        (&[("comp_algorithm", "zstd"), ("mem_limit", "64M")], 20_000),
        #[cfg(feature = "designs")]
        (&[("chain_size", "4"), ("run_cache_batch", "0"), ("streams", "2")], 20_000),
    ] {
        assert_eq!(report_of(settings, operations), "allocations 0\nall went well\n", "{settings:?}");
    }
}
