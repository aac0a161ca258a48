//! The system call filter of a serving daemon.
//!
//! [`TABLE`] lists all allowed calls, each with a reason. Any other fails with ENOSYS, as on a kernel
//! without it, so that a library that starts to use a new call falls back. The filter is seccomp(2)'s, for
//! all threads.

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

struct Group {
    /// Whether a daemon with these needs may make them.
    when: fn(&Needs) -> bool,
    /// Those allowed with any arguments.
    any: &'static [i64],
    calls: &'static [Call],
}

/// A call (its number) and the condition on one argument (its index) under which it is allowed.
#[derive(Clone, Copy)]
enum Call {
    OneOf(i64, u8, &'static [u64]),
    /// The bits of a mask are these.
    Bits(i64, u8, u64, u64),
    Null(i64, u8),
}

use Call::{Bits, Null, OneOf};

macro_rules! numbers {
    ($($name:ident)*) => { &[$(libc::$name),*] };
}

const ALWAYS: fn(&Needs) -> bool = |_| true;
const EXECUTABLE: u64 = libc::PROT_EXEC as u64;
/// Names anonymous memory, as allocators do: `<linux/prctl.h>`.
const PR_SET_VMA: u64 = 0x5356_4d41;

#[allow(clippy::unnecessary_cast, reason = "with musl, the numbers of ioctl(2) are signed")]
const TABLE: &[Group] = &[
    Group {
        when: ALWAYS,
        any: numbers! {
            // Requests and replies: I/O on open descriptors.
            SYS_read SYS_write SYS_readv SYS_writev SYS_close SYS_recvfrom SYS_sendto SYS_recvmsg SYS_sendmsg
            SYS_shutdown SYS_accept4 SYS_getsockopt SYS_setsockopt SYS_getsockname SYS_getpeername SYS_fcntl
            SYS_dup SYS_dup3
            // Waiting: for clients, for other threads, for time-outs.
            SYS_futex SYS_ppoll SYS_pselect6 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_eventfd2 SYS_pipe2
            SYS_nanosleep SYS_clock_nanosleep SYS_clock_gettime SYS_clock_getres SYS_gettimeofday SYS_restart_syscall
            // Mapping and unmapping memory.
            SYS_munmap SYS_mremap SYS_madvise SYS_mincore SYS_mlock SYS_mlock2 SYS_brk SYS_membarrier
            // Creating and ending threads. Connection threads that share CPUs have short time slices. A late
            // thread still drops its capabilities (`capabilities`); neither call can add any.
            SYS_set_robust_list SYS_rseq SYS_sigaltstack SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn
            SYS_gettid SYS_sched_getaffinity SYS_sched_yield SYS_sched_getattr SYS_sched_setattr SYS_getcpu
            SYS_exit SYS_exit_group SYS_capget SYS_capset
            // Facts: owners, entropy, the machine's memory.
            SYS_getrandom SYS_getpid SYS_getppid SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_sysinfo SYS_uname
            SYS_getrusage
            // Files: the daemon's record and sockets, dictionaries, certificates, backing files that are set
            // later, /proc and /sys.
            SYS_openat SYS_openat2 SYS_fstat SYS_newfstatat SYS_statx SYS_fstatfs SYS_statfs SYS_lseek SYS_pread64
            SYS_pwrite64 SYS_preadv SYS_pwritev SYS_preadv2 SYS_pwritev2 SYS_fsync SYS_fdatasync SYS_fallocate
            SYS_ftruncate SYS_flock SYS_getdents64 SYS_readlinkat SYS_faccessat SYS_faccessat2 SYS_getcwd SYS_mkdirat
            SYS_unlinkat SYS_renameat2 SYS_fchmod SYS_umask
        },
        calls: &[
            // Descriptors, the live line in a terminal, and the size and identity of a block device.
            OneOf(libc::SYS_ioctl, 1, &[libc::FIONBIO as u64, libc::FIONREAD as u64, libc::FIOCLEX as u64]),
            OneOf(libc::SYS_ioctl, 1, &[libc::TCGETS as u64, libc::TIOCGWINSZ as u64]),
            OneOf(libc::SYS_ioctl, 1, &[BLKGETSIZE64, BLKGETDISKSEQ]),
            // To notify the service manager; no network connections.
            OneOf(libc::SYS_socket, 0, &[libc::AF_UNIX as u64]),
            // No memory is executable.
            Bits(libc::SYS_mmap, 2, EXECUTABLE, 0),
            Bits(libc::SYS_mprotect, 2, EXECUTABLE, 0),
            // Threads, but no processes (clone3 passes its flags in memory, which a filter cannot read; it
            // fails, and libc falls back to clone).
            Bits(libc::SYS_clone, 0, libc::CLONE_THREAD as u64, libc::CLONE_THREAD as u64),
            // Threads that find contents again move to a CPU each. 0 is the calling thread.
            OneOf(libc::SYS_sched_setaffinity, 0, &[0]),
            OneOf(libc::SYS_prctl, 0, &[libc::PR_SET_NAME as u64, PR_SET_VMA]),
            // Only for abort(3): with glibc the first, with musl the second.
            OneOf(libc::SYS_tgkill, 2, &[libc::SIGABRT as u64]),
            OneOf(libc::SYS_tkill, 1, &[libc::SIGABRT as u64]),
            // Only reading limits.
            Null(libc::SYS_prlimit64, 2),
        ],
    },
    // The same by older calls.
    #[cfg(target_arch = "x86_64")]
    Group {
        when: ALWAYS,
        any: numbers! {
            SYS_poll SYS_select SYS_epoll_wait SYS_pipe SYS_getrlimit SYS_renameat SYS_open SYS_stat SYS_lstat
            SYS_access SYS_readlink SYS_mkdir SYS_rmdir SYS_unlink SYS_rename
        },
        calls: &[],
    },
    // renameat, which libc does not define here.
    #[cfg(target_arch = "aarch64")]
    Group { when: ALWAYS, any: &[38], calls: &[] },
    // Backing device I/O. io_uring requests, such as opening files and sockets, bypass the filter: so these
    // calls are allowed only if a device has a backing device at the start; one that is set later uses
    // threads.
    Group {
        when: |needs| needs.has_backing,
        any: numbers! { SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register },
        calls: &[],
    },
    // Connections to a store on other machines, and looking up its name. A daemon that was started without
    // one cannot make any.
    Group {
        when: |needs| needs.has_remote,
        any: numbers! { SYS_connect SYS_sendmmsg },
        calls: &[OneOf(libc::SYS_socket, 0, &[libc::AF_INET as u64, libc::AF_INET6 as u64])],
    },
    // Unmounting root's mount at the end.
    Group {
        when: |needs| needs.unmounts,
        any: numbers! { SYS_umount2 },
        calls: &[OneOf(libc::SYS_ioctl, 1, &[FUSE_DEV_IOC_CLONE])],
    },
    // Memory that outlives the process: making it, and mapping that of another process ahead.
    Group {
        when: |needs| needs.survives,
        any: &[libc::SYS_memfd_create, libc::SYS_userfaultfd, CACHESTAT],
        calls: &[OneOf(libc::SYS_ioctl, 1, &[UFFDIO_API, UFFDIO_REGISTER, UFFDIO_CONTINUE, PAGEMAP_SCAN])],
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
    for group in TABLE.iter().filter(|group| (group.when)(needs)) {
        rules.extend(group.any.iter().map(|number| (*number, Vec::new())));
        for call in group.calls {
            let (number, allowed) = match *call {
                OneOf(number, argument, values) => {
                    let rule = |value: &u64| int_rule(argument, SeccompCmpOp::Eq, *value);
                    (number, values.iter().map(rule).collect::<io::Result<Vec<_>>>()?)
                }
                Bits(number, argument, mask, bits) => {
                    (number, vec![int_rule(argument, SeccompCmpOp::MaskedEq(mask), bits)?])
                }
                Null(number, argument) => {
                    (number, vec![rule(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?])
                }
            };
            rules.entry(number).or_default().extend(allowed);
        }
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
    use super::*;

    #[test]
    fn every_daemon_has_a_filter() {
        let forbidden =
            [libc::SYS_execve, libc::SYS_execveat, libc::SYS_ptrace, libc::SYS_mount, libc::SYS_bpf];
        for bits in 0..16u8 {
            let [unmounts, has_backing, has_remote, survives] = [1, 2, 4, 8].map(|bit| bits & bit != 0);
            let needs = Needs { unmounts, has_backing, has_remote, survives, ..Needs::default() };
            assert!(!program(&needs).unwrap().is_empty());
            assert!(!forbidden.iter().any(|call| rules(&needs).unwrap().contains_key(call)));
        }
        assert!(TABLE.iter().all(|group| !group.calls.is_empty() || !group.any.is_empty()));
    }

    #[test]
    fn no_call_stands_with_arguments_and_without() {
        // The unconditional rule would be lost: a list of rules that is not empty restricts the call.
        let all =
            Needs { unmounts: true, has_backing: true, has_remote: true, survives: true, ..Needs::default() };
        let rules = rules(&all).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for number in TABLE.iter().flat_map(|group| group.any) {
            assert!(rules[number].is_empty() && seen.insert(number), "call {number}");
        }
    }
}
