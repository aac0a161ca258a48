//! A process without rights: as another user, with no way to get more, and a seccomp filter such as container
//! runtimes set.

use std::collections::BTreeMap;
use std::os::unix::fs::chown;
use std::time::Duration;

use rustix::process::geteuid;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use uzram::ErrorKind;
use uzram_pager::{Pager, TrapKind};

use crate::common::{Ended, MIB, NOBODY, drop_privileges, in_child, stress};

/// `MADV_GUARD_INSTALL`.
const GUARD_INSTALL: u64 = 102;

/// Has system calls fail with EPERM that containers seldom have, and guard pages, too, if wanted.
fn filter_calls(with_guard_pages: bool) {
    let calls = [
        libc::SYS_userfaultfd,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_ptrace,
    ];
    let mut rules: BTreeMap<_, _> = calls.into_iter().map(|call| (call, Vec::new())).collect();
    if !with_guard_pages {
        let is_guard = SeccompCondition::new(2, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, GUARD_INSTALL);
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
fn guard_pages_are_used_without_rights_and_with_a_filter() {
    for with_spill in [false, true] {
        let ended = in_child(if with_spill { "with a spill file" } else { "in memory" }, || {
            let dir = tempfile::tempdir().unwrap();
            if geteuid().is_root() {
                chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
            }
            drop_privileges();
            filter_calls(true);
            if let Err(error) = TrapKind::Guard.check() {
                return println!("skipped: {error}");
            }
            let mut builder = Pager::builder().limit(8 << 20).capacity(1 << 30);
            if with_spill {
                builder = builder.spill(dir.path(), 64 << 20);
            }
            let pager = builder.build().unwrap();
            assert_eq!(pager.trap(), TrapKind::Guard);
            stress(&pager, 4, 1, Duration::from_secs(2));
        });
        ended.iter().for_each(Ended::assert_success);
    }
}

#[test]
fn a_pager_is_refused_where_touches_cannot_be_trapped() {
    let ended = in_child("build", || {
        drop_privileges();
        if std::fs::File::options().read(true).write(true).open("/dev/userfaultfd").is_ok() {
            return println!("skipped: this system allows userfaultfd to all");
        }
        filter_calls(false);
        let error = Pager::builder().limit(8 << 20).build().unwrap_err();
        let text = error.to_string();
        assert_eq!((error.kind(), error.setting()), (ErrorKind::Permission, Some("trap")), "{text}");
        for way in ["Linux 6.15", "root", "CAP_SYS_PTRACE", "/dev/userfaultfd"] {
            assert!(text.contains(way), "{text}");
        }
        println!("{text}");
    });
    ended.iter().for_each(Ended::assert_success);
}

#[test]
fn without_rights_uffd_is_refused_and_says_what_it_needs() {
    let ended = in_child("check", || {
        drop_privileges();
        let sysctl = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
        let device = std::fs::File::options().read(true).write(true).open("/dev/userfaultfd");
        if sysctl.trim() == "1" || device.is_ok() {
            return println!("skipped: this system allows userfaultfd to all");
        }
        let Err(error) = TrapKind::Uffd.check() else { panic!("userfaultfd is allowed") };
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Permission, "{text}");
        for way in ["root", "CAP_SYS_PTRACE", "/dev/userfaultfd", "vm.unprivileged_userfaultfd=1"] {
            assert!(text.contains(way), "{text}");
        }
        assert_eq!(error.setting(), Some("trap"));
        let builder = Pager::builder().limit((8 * MIB) as u64).trap(TrapKind::Uffd);
        assert_eq!(builder.build().err().map(|error| error.kind()), Some(ErrorKind::Permission));
    });
    ended.iter().for_each(Ended::assert_success);
}
