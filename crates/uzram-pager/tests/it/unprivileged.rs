//! A process without rights: as another user, with no way to get more, and a seccomp filter such as container
//! runtimes set.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::chown;
use std::time::Duration;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use uzram::ErrorKind;
use uzram_pager::{Pager, TrapKind};

use crate::common::{each, expect_success, in_child, stress};

/// The user and group without rights.
const NOBODY: u32 = 65534;

/// Has system calls fail with EPERM that containers seldom have, and guard pages, too, if wanted.
fn filter_calls(with_guard_pages: bool) {
    let calls = [libc::SYS_userfaultfd, libc::SYS_io_uring_setup, libc::SYS_ptrace];
    let mut rules = BTreeMap::from(calls.map(|call| (call, Vec::new())));
    if !with_guard_pages {
        // MADV_GUARD_INSTALL.
        let is_guard = SeccompCondition::new(2, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, 102);
        rules.insert(libc::SYS_madvise, vec![SeccompRule::new(vec![is_guard.unwrap()]).unwrap()]);
    }
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
fn without_rights_guard_pages_are_used_and_without_these_it_says_what_to_do() {
    let body = || {
        let dir = tempfile::tempdir().unwrap();
        if rustix::process::geteuid().is_root() {
            chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
            // SAFETY: changes the users of this process, in all threads.
            unsafe {
                assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
                assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
                assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
            }
        }
        if File::options().read(true).write(true).open("/dev/userfaultfd").is_ok() {
            return println!("skipped: this system allows userfaultfd to all");
        }
        filter_calls(true);
        let builder = Pager::builder().limit(8 << 20).capacity(1 << 30);
        each(&[TrapKind::Guard], |trap| {
            let pager = builder.clone().spill(dir.path(), 64 << 20).build().unwrap();
            assert_eq!(pager.trap(), trap);
            stress(&pager, 4, 1, Duration::from_secs(2));
        });
        filter_calls(false);
        let uffd = builder.clone().trap(TrapKind::Uffd).build();
        for (result, way) in [(uffd, "vm.unprivileged_userfaultfd=1"), (builder.build(), "Linux 6.15")] {
            let error = result.unwrap_err();
            assert_eq!((error.kind(), error.setting()), (ErrorKind::Permission, Some("trap")), "{error}");
            for way in ["root", "CAP_SYS_PTRACE", "/dev/userfaultfd", way] {
                assert!(error.to_string().contains(way), "{error}");
            }
        }
    };
    in_child("without rights", body, expect_success);
}
