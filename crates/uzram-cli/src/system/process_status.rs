//! `/proc/PID/status`, read field by field.

/// Returns a field of the status of a process or thread, proc_pid_status(5).
pub fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
}
