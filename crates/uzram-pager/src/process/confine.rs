//! What the pager gives up when it has opened all that it needs: the program can write its memory, and so has
//! it do anything that it may do itself.
//!
//! The user and the groups stay: a process of another user could be opened, traced and killed by that user's
//! others. But no capability is left, none comes back, and [`CALLS`] lists what may still be called: nothing
//! takes a path, makes a socket, signals or traces another process than the program. Any other call fails
//! with ENOSYS.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use uzram::Result;

use super::{keeper, scan, system};

/// Lists the numbers of calls.
macro_rules! numbers {
    ($($name:ident)*) => { &[$(libc::$name),*] };
}

/// Those that are allowed with any arguments.
const CALLS: &[i64] = numbers! {
    // I/O on open descriptors: userfaultfd, the spill file, pipes, files of /proc.
    SYS_read SYS_write SYS_pread64 SYS_pwrite64 SYS_lseek SYS_fallocate SYS_ftruncate SYS_fstat SYS_close SYS_dup SYS_dup3
    SYS_pipe2 SYS_eventfd2 SYS_timerfd_settime
    // Waiting.
    SYS_poll SYS_ppoll SYS_futex SYS_futex_waitv SYS_nanosleep SYS_clock_nanosleep SYS_clock_gettime SYS_sched_yield
    SYS_restart_syscall
    // Memory, which is the program's own.
    SYS_mmap SYS_munmap SYS_mprotect SYS_madvise SYS_munlock SYS_mincore SYS_brk SYS_membarrier
    // Threads.
    SYS_set_robust_list SYS_rseq SYS_sigaltstack SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_gettid
    SYS_getpid SYS_getcpu SYS_sched_getaffinity SYS_exit SYS_exit_group SYS_setsid SYS_getrandom
};

/// The type of the calls of <linux/userfaultfd.h>, and `PAGEMAP_SCAN` of <linux/fs.h>.
const UFFD_TYPE: u64 = 0xaa;
const PAGEMAP_SCAN: u64 = 0xc060_6610;
const PR_SET_VMA: u64 = 0x5356_4d41;

/// Gives all up, in this thread, and in those that it starts. Errors: the system refuses.
pub(super) fn confine(program: &OwnedFd) -> Result<()> {
    let filter = filter(program).map_err(|error| system("the list of system calls", error))?;
    let none = CapabilitySet::empty();
    let capabilities = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, capabilities).map_err(|error| system("capset", error))?;
    // It sets no_new_privs.
    seccompiler::apply_filter(&filter).map_err(|error| system("seccomp", error))
}

fn filter(program: &OwnedFd) -> std::result::Result<BpfProgram, BackendError> {
    use SeccompCmpOp::{Eq, MaskedEq};
    let (thread, program) = (libc::CLONE_THREAD as u64, program.as_raw_fd() as u64);
    let commands =
        [libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_SETFD, libc::F_GETFL].map(|command| command as u64);
    let options = [libc::PR_SET_NAME as u64, libc::PR_GET_DUMPABLE as u64, PR_SET_VMA];
    // A spill file without a name, for what a child shares: nobody comes to have more by it. (With O_PATH the
    // kernel forgets O_TMPFILE.)
    let (unnamed, flags) = (libc::O_TMPFILE as u64, (libc::O_TMPFILE | libc::O_PATH) as u64);
    // A call, which of its arguments counts, and what that may be.
    let by_argument: [(i64, u8, SeccompCmpOp, &[u64]); 10] = [
        (libc::SYS_ioctl, 1, MaskedEq(0xff00), &[UFFD_TYPE << 8]),
        (libc::SYS_ioctl, 1, Eq, &[PAGEMAP_SCAN, scan::QUERY]),
        // Not F_SETOWN: a pipe signals whom it names.
        (libc::SYS_fcntl, 1, Eq, &commands),
        // Threads, and the keeper. clone3 passes its flags in memory, which a filter cannot read: libc falls
        // back to clone.
        (libc::SYS_clone, 0, MaskedEq(thread), &[thread]),
        (libc::SYS_clone, 0, Eq, &[keeper::FLAGS as u64]),
        (libc::SYS_sched_setaffinity, 0, Eq, &[0]),
        (libc::SYS_prctl, 0, Eq, &options),
        (libc::SYS_openat, 2, MaskedEq(flags), &[unnamed]),
        (libc::SYS_open, 1, MaskedEq(flags), &[unnamed]),
        (libc::SYS_pidfd_send_signal, 0, Eq, &[program]),
    ];
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = CALLS.iter().map(|call| (*call, Vec::new())).collect();
    for (call, argument, operation, values) in by_argument {
        for value in values {
            let (length, operation) = (SeccompCmpArgLen::Dword, operation.clone());
            let condition = SeccompCondition::new(argument, length, operation, *value)?;
            rules.entry(call).or_default().push(SeccompRule::new(vec![condition])?);
        }
    }
    // Its own limits may be read, and no process's set. rustix takes it that this works, and would return
    // what was on the stack.
    let own = SeccompCondition::new(0, SeccompCmpArgLen::Dword, Eq, 0)?;
    let nothing = SeccompCondition::new(2, SeccompCmpArgLen::Qword, Eq, 0)?;
    rules.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![own, nothing])?]);
    let unknown = SeccompAction::Errno(libc::ENOSYS as u32);
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, unknown, SeccompAction::Allow, arch)?.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_allowed_that_reaches_others() {
        let reaching: &[i64] = numbers! {
            SYS_open SYS_openat2 SYS_execve SYS_execveat SYS_ptrace SYS_kill SYS_tkill SYS_tgkill SYS_socket SYS_connect
            SYS_process_vm_readv SYS_process_vm_writev SYS_pidfd_open SYS_pidfd_getfd SYS_linkat SYS_unlinkat
            SYS_io_uring_setup SYS_fcntl SYS_ioctl SYS_prctl SYS_prlimit64 SYS_clone SYS_openat SYS_bpf
            SYS_mount SYS_setns SYS_keyctl SYS_memfd_create
        };
        reaching.iter().for_each(|call| assert!(!CALLS.contains(call), "{call}"));
    }
}
