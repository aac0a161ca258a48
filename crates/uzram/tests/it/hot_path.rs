//! Reads and overwrites of a warm device allocate nothing and make no system call.
//!
//! A child process fills a device, overwrites all of it a few times, and then forbids itself system
//! calls: a seccomp filter turns each into SIGSYS, whose handler reports its number. Then comes the
//! steady state: pages are read, overwritten with contents that compress as before, or partly changed.
//! Allocations are counted during that time.

use crate::alone::alone;
use crate::crash::memory::{in_child, report};
use uzram::device::{Device, OpenDevice};
use uzram::random::Random;
use uzram::units::{PAGE_SIZE, Page};

const PAGES: u64 = 4096;
/// Times that every page is overwritten before the device counts as warm.
const WARM_ROUNDS: u64 = 4;

/// The exit status of a process that made a system call.
const CALLED: i32 = 42;
/// What a process reports in which an operation failed, or read something else.
const WRONG: u64 = u64::MAX;

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

extern "C" fn on_system_call(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    /// Where `siginfo_t` has `si_syscall`, on 64-bit machines (`<asm-generic/siginfo.h>`).
    const SI_SYSCALL_BYTE: usize = 24;
    // SAFETY: the kernel passes a siginfo_t of SIGSYS; _exit is safe in a handler.
    unsafe {
        report((*info.byte_add(SI_SYSCALL_BYTE).cast::<u32>()).into());
        libc::_exit(CALLED);
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
        assert!(done, "this kernel has no seccomp filters");
    }
}

/// Returns the number of allocations in the steady state, or [`WRONG`]. Runs in the child.
fn operate(disk: &OpenDevice, pages: &[Page], operations: u64) -> u64 {
    let mut random = Random::new(0x5eed);
    for round in 0..=WARM_ROUNDS {
        for number in 0..PAGES {
            disk.write(number * PAGE_SIZE as u64, &pages[number as usize]).unwrap();
            assert!(round == 0 || one_operation(disk, pages, &mut random));
        }
    }
    let allocated_before = crate::allocations::count();
    forbid_system_calls();
    // A panic would make system calls.
    let is_well = (0..operations).all(|_| one_operation(disk, pages, &mut random));
    if is_well { crate::allocations::count() - allocated_before } else { WRONG }
}

/// Returns the exit status of a child, and the number of its allocations or of its system call.
fn outcome(settings: &[(&str, &str)], operations: u64) -> (i32, u64) {
    let device = Device::new("zram0").unwrap();
    settings.iter().for_each(|(name, value)| device.set(name, value).unwrap());
    device.set("disksize", &(PAGES * PAGE_SIZE as u64).to_string()).unwrap();
    let disk = device.open().unwrap();
    let pages: Vec<Page> = (0..PAGES).map(contents).collect();
    in_child(|| report(operate(&disk, &pages, operations)))
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
        let means = format!("{CALLED} is for a system call, {WRONG} for a failure or wrong contents");
        assert_eq!(outcome(settings, operations), (0, 0), "{settings:?}; {means}");
    }
}
