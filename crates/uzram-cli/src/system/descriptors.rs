//! File descriptors: those that a process is started with, and as many as there may be clients.

use std::fs;
use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Gives this process, which has just begun, a session of its own, so that nothing typed at its caller's terminal reaches
/// it, and has it keep none of its caller's files but the standard ones: they would stay open as long as it runs.
pub fn leave_caller() {
    // It fails for one that has its own already.
    let _ = rustix::process::setsid();
    let first = libc::STDERR_FILENO + 1;
    // SAFETY: this process has opened nothing yet, so nobody in it uses what is closed. By its number: not all C libraries
    // have the function.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) };
    if closed == 0 {
        return;
    }
    // Before Linux 5.9.
    for number in inherited().unwrap_or_default().into_iter().filter(|number| *number >= first) {
        // SAFETY: as above. That by which the list was read is closed already.
        unsafe { libc::close(number) };
    }
}

/// The numbers of the files that this process has open.
fn inherited() -> io::Result<Vec<i32>> {
    let entries = fs::read_dir("/proc/self/fd")?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// Lets this process open so many files, if it may not already and the system allows it; says so if it does not. Without
/// one, nobody is let in any more, on no socket.
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
