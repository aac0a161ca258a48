//! File descriptors: closing inherited ones, and raising the limit for many clients.

use std::fs;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Gives this process, which has just started, its own session, so that signals from its caller's terminal do
/// not reach it, and closes all inherited files but the standard ones: they would stay open as long as it
/// runs.
pub fn leave_caller() {
    // Fails for a process group leader.
    let _ = rustix::process::setsid();
    let first = libc::STDERR_FILENO + 1;
    // SAFETY: this process has opened no file yet, so nothing in it uses the closed descriptors. By syscall
    // number, as not all C libraries have the function.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) };
    if closed == 0 {
        return;
    }
    // Before Linux 5.9.
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let open: Vec<i32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for number in open.into_iter().filter(|number| *number >= first) {
        // SAFETY: as above. The descriptor by which the list was read is closed already.
        unsafe { libc::close(number) };
    }
}

/// Raises this process's limit of open files to `wanted`, or warns if the system does not allow it. Without a
/// free descriptor, no socket accepts a client.
pub fn allow(wanted: u64) {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= wanted) {
        return;
    }
    let allowed = maximum.map_or(wanted, |maximum| maximum.min(wanted));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(allowed), maximum });
    if raised.is_err() || allowed < wanted {
        let allowed = getrlimit(Resource::Nofile).current.unwrap_or(allowed);
        tracing::warn!(
            "--max-connections may need {wanted} file descriptors, and {allowed} are allowed: clients wait when they \
             are used up, on every socket (ulimit -n, or LimitNOFILE= of systemd)"
        );
    }
}
