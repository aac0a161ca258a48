//! A process without rights: as another user, with no way to get more, and a seccomp filter such as container
//! runtimes set.

use std::collections::BTreeMap;
use std::os::unix::fs::chown;
use std::time::Duration;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use uzram::ErrorKind;
use uzram_pager::{Pager, Trap};

use crate::common::{expect_success, in_child, stress};

/// The user and group without rights.
const NOBODY: u32 = 65534;

/// Has system calls fail with EPERM that containers seldom have.
fn filter_calls() {
    let calls = [libc::SYS_userfaultfd, libc::SYS_io_uring_setup, libc::SYS_ptrace];
    let rules = BTreeMap::from(calls.map(|call| (call, Vec::new())));
    let (allowed, refused) = (SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32));
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, allowed, refused, arch).unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    // Sets no_new_privs first.
    seccompiler::apply_filter_all_threads(&program).unwrap();
    // SAFETY: the call is refused.
    assert_eq!(unsafe { libc::syscall(libc::SYS_userfaultfd, 0) }, -1);
}

#[test]
fn without_rights_touches_are_signals_and_without_userfaultfd_it_says_what_to_do() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        if rustix::process::geteuid().is_root() {
            chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
            // SAFETY: changes the users of this process, in all threads.
            unsafe {
                assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
                assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
                assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
                // As a program has been that was started by this user: its files of /proc are its own.
                assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1), 0);
            }
        }
        if Trap::Message.check().is_ok() {
            return println!("skipped: this system allows userfaultfd to all");
        }
        let builder = Pager::builder().limit(8 << 20).capacity(1 << 30);
        let pager = builder.clone().spill(dir.path(), 64 << 20).build().unwrap();
        assert_eq!(pager.trap(), Trap::Signal);
        stress(&pager, 4, 1, Duration::from_secs(2));
        drop(pager);
        filter_calls();
        let ways = ["root", "CAP_SYS_PTRACE", "/dev/userfaultfd", "vm.unprivileged_userfaultfd=1"];
        let message = builder.clone().trap(Trap::Message).build();
        for (result, ways) in [(message, &ways[..]), (builder.build(), &["seccomp", "/dev/userfaultfd"])] {
            let error = result.unwrap_err();
            assert_eq!((error.kind(), error.setting()), (ErrorKind::Permission, Some("trap")), "{error}");
            assert!(ways.iter().all(|way| error.to_string().contains(way)), "{error}");
        }
    };
    in_child("without rights", body, expect_success);
}
