//! Children that have ended, those included that this process has not started: orphans of a container are left to its PID 1.

use rustix::process::Pid;

/// Returns a child that has ended, without reaping it; `None` if there is none.
pub fn ended_child() -> Option<Pid> {
    let options = libc::WEXITED | libc::WNOWAIT | libc::WNOHANG;
    loop {
        // SAFETY: all fields are integers and pointers that are not followed: zeros are valid.
        let mut ended: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the call only writes to `ended`, which is valid for that.
        match unsafe { libc::waitid(libc::P_ALL, 0, &raw mut ended, options) } {
            // SAFETY: the call has filled in the fields of a child, or left them 0.
            0 => return Pid::from_raw(unsafe { ended.si_pid() }),
            _ if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
            _ => return None,
        }
    }
}
