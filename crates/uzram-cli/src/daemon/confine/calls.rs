//! The system call filter of a serving daemon.
//!
//! [`TABLE`] lists all allowed calls, in groups with a reason; extend it when the daemon needs a new call. Any other
//! call fails with ENOSYS, as on a kernel without it, so that a library that starts to use a new call falls back and no
//! pages are lost. The filter is seccomp(2)'s, for all threads.

use std::collections::BTreeMap;
use std::io;

use rustix::thread::CapabilitySet;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

/// What a daemon may need to do while it serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// It unmounts its files at the end.
    pub unmounts: bool,
    /// Its memory is locked, including future mappings.
    pub locks_memory: bool,
    /// A device has a backing file or device.
    pub has_backing: bool,
    /// A device's backing device is in a store on other machines.
    pub has_remote: bool,
    /// It reloads certificates, which may belong to another user.
    pub reads_certificates: bool,
    /// Its devices' memory outlives it.
    pub survives: bool,
    /// It runs other programs at the end, to unmount its files.
    pub runs_programs: bool,
}

impl Needs {
    /// Returns the capabilities to keep.
    pub fn capabilities(&self) -> CapabilitySet {
        let needed = [
            (self.unmounts, CapabilitySet::SYS_ADMIN),
            (self.locks_memory, CapabilitySet::IPC_LOCK),
            (self.reads_certificates, CapabilitySet::DAC_READ_SEARCH),
        ];
        needed.into_iter().filter(|(is_needed, _)| *is_needed).map(|(_, capability)| capability).collect()
    }
}

/// Calls allowed for one reason.
struct Group {
    /// Whether a daemon with these needs may make them.
    when: fn(&Needs) -> bool,
    calls: &'static [Call],
}

/// A call (its number) and the condition on one argument (its index) under which it is allowed.
#[derive(Clone, Copy)]
enum Call {
    /// Always.
    Any(i64),
    /// If the argument is one of these values.
    OneOf(i64, u8, &'static [u64]),
    /// If the argument has none of these bits.
    Without(i64, u8, u64),
    /// If the argument has all of these bits.
    With(i64, u8, u64),
    /// If the argument is a null pointer.
    Null(i64, u8),
}

use Call::{Any, Null, OneOf, With, Without};

const ALWAYS: fn(&Needs) -> bool = |_| true;
const EXECUTABLE: u64 = libc::PROT_EXEC as u64;
/// Names anonymous memory, as allocators do: `<linux/prctl.h>`.
const PR_SET_VMA: u64 = 0x5356_4d41;

#[allow(clippy::unnecessary_cast, reason = "with musl, the numbers of ioctl(2) are signed")]
const TABLE: &[Group] = &[
    // Requests and replies: I/O on open descriptors.
    Group {
        when: ALWAYS,
        calls: &[
            Any(libc::SYS_read),
            Any(libc::SYS_write),
            Any(libc::SYS_readv),
            Any(libc::SYS_writev),
            Any(libc::SYS_close),
            Any(libc::SYS_recvfrom),
            Any(libc::SYS_sendto),
            Any(libc::SYS_recvmsg),
            Any(libc::SYS_sendmsg),
            Any(libc::SYS_shutdown),
            Any(libc::SYS_accept4),
            Any(libc::SYS_getsockopt),
            Any(libc::SYS_setsockopt),
            Any(libc::SYS_getsockname),
            Any(libc::SYS_getpeername),
            Any(libc::SYS_fcntl),
            Any(libc::SYS_dup),
            Any(libc::SYS_dup3),
            OneOf(libc::SYS_ioctl, 1, &[libc::FIONBIO as u64, libc::FIONREAD as u64, libc::FIOCLEX as u64]),
        ],
    },
    // Notifying the service manager; only AF_UNIX, so no network connections.
    Group {
        when: ALWAYS,
        calls: &[OneOf(libc::SYS_socket, 0, &[libc::AF_UNIX as u64]), Any(libc::SYS_socketpair)],
    },
    // Waiting: for clients, for other threads, for time-outs.
    Group {
        when: ALWAYS,
        calls: &[
            Any(libc::SYS_futex),
            Any(libc::SYS_ppoll),
            Any(libc::SYS_pselect6),
            Any(libc::SYS_epoll_create1),
            Any(libc::SYS_epoll_ctl),
            Any(libc::SYS_epoll_pwait),
            Any(libc::SYS_eventfd2),
            Any(libc::SYS_pipe2),
            Any(libc::SYS_nanosleep),
            Any(libc::SYS_clock_nanosleep),
            Any(libc::SYS_clock_gettime),
            Any(libc::SYS_clock_getres),
            Any(libc::SYS_gettimeofday),
            Any(libc::SYS_restart_syscall),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_poll),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_select),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_epoll_wait),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_pipe),
        ],
    },
    // Mapping and unmapping memory, never executable.
    Group {
        when: ALWAYS,
        calls: &[
            Without(libc::SYS_mmap, 2, EXECUTABLE),
            Without(libc::SYS_mprotect, 2, EXECUTABLE),
            Any(libc::SYS_munmap),
            Any(libc::SYS_mremap),
            Any(libc::SYS_madvise),
            Any(libc::SYS_mincore),
            Any(libc::SYS_mlock),
            Any(libc::SYS_mlock2),
            Any(libc::SYS_munlock),
            Any(libc::SYS_brk),
            Any(libc::SYS_membarrier),
        ],
    },
    // Creating and ending threads, but no processes (clone3 passes its flags in memory, which a filter cannot read; it
    // fails, and libc falls back to clone).
    Group {
        when: ALWAYS,
        calls: &[
            With(libc::SYS_clone, 0, libc::CLONE_THREAD as u64),
            Any(libc::SYS_set_robust_list),
            Any(libc::SYS_rseq),
            Any(libc::SYS_sigaltstack),
            Any(libc::SYS_rt_sigaction),
            Any(libc::SYS_rt_sigprocmask),
            Any(libc::SYS_rt_sigreturn),
            Any(libc::SYS_gettid),
            Any(libc::SYS_sched_getaffinity),
            // Threads that find contents again move to a CPU each. 0 is the calling thread.
            OneOf(libc::SYS_sched_setaffinity, 0, &[0]),
            Any(libc::SYS_sched_yield),
            // Short time slices for connection threads that share CPUs.
            Any(libc::SYS_sched_getattr),
            Any(libc::SYS_sched_setattr),
            Any(libc::SYS_getcpu),
            OneOf(libc::SYS_prctl, 0, &[libc::PR_SET_NAME as u64, PR_SET_VMA]),
            Any(libc::SYS_exit),
            Any(libc::SYS_exit_group),
            // Only for abort(3): with glibc the first, with musl the second.
            OneOf(libc::SYS_tgkill, 2, &[libc::SIGABRT as u64]),
            OneOf(libc::SYS_tkill, 1, &[libc::SIGABRT as u64]),
            // A late thread still drops its capabilities (`capabilities`); neither call can add any.
            Any(libc::SYS_capget),
            Any(libc::SYS_capset),
        ],
    },
    // Facts: limits, owners, entropy, the machine's memory.
    Group {
        when: ALWAYS,
        calls: &[
            Any(libc::SYS_getrandom),
            Any(libc::SYS_getpid),
            Any(libc::SYS_getppid),
            Any(libc::SYS_getuid),
            Any(libc::SYS_geteuid),
            Any(libc::SYS_getgid),
            Any(libc::SYS_getegid),
            Any(libc::SYS_sysinfo),
            Any(libc::SYS_uname),
            Any(libc::SYS_getrusage),
            // Only reading limits.
            Null(libc::SYS_prlimit64, 2),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_getrlimit),
        ],
    },
    // Files: the daemon's record and sockets, dictionaries, certificates, backing files that are set later, /proc and
    // /sys.
    Group {
        when: ALWAYS,
        calls: &[
            Any(libc::SYS_openat),
            Any(libc::SYS_openat2),
            Any(libc::SYS_fstat),
            Any(libc::SYS_newfstatat),
            Any(libc::SYS_statx),
            Any(libc::SYS_fstatfs),
            Any(libc::SYS_statfs),
            Any(libc::SYS_lseek),
            Any(libc::SYS_pread64),
            Any(libc::SYS_pwrite64),
            Any(libc::SYS_preadv),
            Any(libc::SYS_pwritev),
            Any(libc::SYS_preadv2),
            Any(libc::SYS_pwritev2),
            Any(libc::SYS_fsync),
            Any(libc::SYS_fdatasync),
            Any(libc::SYS_fallocate),
            Any(libc::SYS_ftruncate),
            Any(libc::SYS_flock),
            Any(libc::SYS_getdents64),
            Any(libc::SYS_readlinkat),
            Any(libc::SYS_faccessat),
            Any(libc::SYS_faccessat2),
            Any(libc::SYS_getcwd),
            Any(libc::SYS_mkdirat),
            Any(libc::SYS_unlinkat),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_renameat),
            // renameat, which libc does not define here.
            #[cfg(target_arch = "aarch64")]
            Any(38),
            Any(libc::SYS_renameat2),
            Any(libc::SYS_fchmod),
            Any(libc::SYS_umask),
            // The size and identity of a block device.
            OneOf(libc::SYS_ioctl, 1, &[BLKGETSIZE64, BLKGETDISKSEQ]),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_open),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_stat),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_lstat),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_access),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_readlink),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_mkdir),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_rmdir),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_unlink),
            #[cfg(target_arch = "x86_64")]
            Any(libc::SYS_rename),
        ],
    },
    // The live line in a terminal.
    Group {
        when: ALWAYS,
        calls: &[OneOf(libc::SYS_ioctl, 1, &[libc::TCGETS as u64, libc::TIOCGWINSZ as u64])],
    },
    // Backing device I/O. io_uring requests, such as opening files and sockets, bypass the filter: so these calls are
    // allowed only if a device has a backing device at the start; one that is set later uses threads.
    Group {
        when: |needs| needs.has_backing,
        calls: &[
            Any(libc::SYS_io_uring_setup),
            Any(libc::SYS_io_uring_enter),
            Any(libc::SYS_io_uring_register),
        ],
    },
    // Connections to a store on other machines, and looking up its name. A daemon that was started without one cannot
    // make any.
    Group {
        when: |needs| needs.has_remote,
        calls: &[
            OneOf(libc::SYS_socket, 0, &[libc::AF_INET as u64, libc::AF_INET6 as u64]),
            Any(libc::SYS_connect),
            Any(libc::SYS_sendmmsg),
        ],
    },
    // Unmounting root's mount at the end.
    Group {
        when: |needs| needs.unmounts,
        calls: &[Any(libc::SYS_umount2), OneOf(libc::SYS_ioctl, 1, &[FUSE_DEV_IOC_CLONE])],
    },
    // Memory that outlives the process: making it, and mapping that of another process ahead.
    Group {
        when: |needs| needs.survives,
        calls: &[
            Any(libc::SYS_memfd_create),
            Any(libc::SYS_userfaultfd),
            Any(CACHESTAT),
            OneOf(libc::SYS_ioctl, 1, &[UFFDIO_API, UFFDIO_REGISTER, UFFDIO_CONTINUE, PAGEMAP_SCAN]),
        ],
    },
];

/// `<linux/fs.h>`
const BLKGETSIZE64: u64 = 0x8008_1272;
const BLKGETDISKSEQ: u64 = 0x8008_1280;
/// The number of cachestat(2), the same on all architectures.
const CACHESTAT: i64 = 451;

/// `<linux/userfaultfd.h>`
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_CONTINUE: u64 = 0xc020_aa07;

/// `<linux/fs.h>`
const PAGEMAP_SCAN: u64 = 0xc060_6610;

/// `<linux/fuse.h>`
const FUSE_DEV_IOC_CLONE: u64 = 0x8004_e500;

/// Restricts all threads to the allowed calls, irrevocably.
///
/// # Errors
/// The kernel does not support filters, or seccompiler does not support this architecture.
pub fn filter(needs: &Needs) -> io::Result<()> {
    let program = program(needs)?;
    seccompiler::apply_filter_all_threads(&program).map_err(io::Error::other)
}

fn program(needs: &Needs) -> io::Result<BpfProgram> {
    let arch = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
    let unknown = SeccompAction::Errno(libc::ENOSYS as u32);
    let filter =
        SeccompFilter::new(rules(needs)?, unknown, SeccompAction::Allow, arch).map_err(io::Error::other)?;
    filter.try_into().map_err(io::Error::other)
}

/// Returns the rules of each call, one of which must match; an empty list allows the call unconditionally.
fn rules(needs: &Needs) -> io::Result<BTreeMap<i64, Vec<SeccompRule>>> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let calls = TABLE.iter().filter(|group| (group.when)(needs)).flat_map(|group| group.calls);
    for call in calls {
        let (number, allowed) = match *call {
            Any(number) => (number, Vec::new()),
            OneOf(number, argument, values) => {
                (number, values.iter().map(|value| int_rule(argument, SeccompCmpOp::Eq, *value)).collect())
            }
            Without(number, argument, bits) => {
                (number, vec![int_rule(argument, SeccompCmpOp::MaskedEq(bits), 0)])
            }
            With(number, argument, bits) => {
                (number, vec![int_rule(argument, SeccompCmpOp::MaskedEq(bits), bits)])
            }
            Null(number, argument) => {
                (number, vec![rule(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)])
            }
        };
        let allowed = allowed.into_iter().collect::<io::Result<Vec<_>>>()?;
        rules.entry(number).or_default().extend(allowed);
    }
    Ok(rules)
}

/// Creates a rule for an argument of which the kernel uses only the lower 32 bits.
fn int_rule(argument: u8, operation: SeccompCmpOp, value: u64) -> io::Result<SeccompRule> {
    rule(argument, SeccompCmpArgLen::Dword, operation, value & u64::from(u32::MAX))
}

fn rule(argument: u8, len: SeccompCmpArgLen, operation: SeccompCmpOp, value: u64) -> io::Result<SeccompRule> {
    SeccompCondition::new(argument, len, operation, value)
        .and_then(|condition| SeccompRule::new(vec![condition]))
        .map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn every_daemon_has_a_filter() {
        for bits in 0..8u8 {
            let is_set = |bit: u8| bits & 1 << bit != 0;
            let needs = Needs {
                unmounts: is_set(0),
                has_backing: is_set(1),
                has_remote: is_set(2),
                ..Needs::default()
            };
            assert!(!program(&needs).unwrap().is_empty());
            for forbidden in
                [libc::SYS_execve, libc::SYS_execveat, libc::SYS_ptrace, libc::SYS_mount, libc::SYS_bpf]
            {
                assert!(!rules(&needs).unwrap().contains_key(&forbidden));
            }
        }
        assert!(TABLE.iter().all(|group| !group.calls.is_empty()));
    }

    #[test]
    fn a_late_thread_may_still_give_up_capabilities() {
        let rules = rules(&Needs::default()).unwrap();
        for call in [libc::SYS_capget, libc::SYS_capset, libc::SYS_rt_sigreturn] {
            assert!(rules.get(&call).is_some_and(Vec::is_empty), "call {call}");
        }
    }

    #[test]
    fn no_call_stands_with_arguments_and_without() {
        // The unconditional rule would be lost: a list of rules that is not empty restricts the call.
        let all =
            Needs { unmounts: true, has_backing: true, has_remote: true, survives: true, ..Needs::default() };
        let any = TABLE.iter().flat_map(|group| group.calls).filter_map(|call| match call {
            Any(number) => Some(*number),
            _ => None,
        });
        let rules = rules(&all).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for number in any {
            assert!(rules[&number].is_empty() && seen.insert(number), "call {number}");
        }
    }

    #[test]
    fn capabilities_are_those_of_what_is_still_to_be_done() {
        assert!(Needs::default().capabilities().is_empty());
        let swap = Needs { unmounts: true, locks_memory: true, ..Needs::default() };
        assert_eq!(swap.capabilities(), CapabilitySet::SYS_ADMIN | CapabilitySet::IPC_LOCK);
    }
}
