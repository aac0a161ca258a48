//! `/proc/PID/status`, read field by field.

/// A field of the status of a process or thread, as proc_pid_status(5) has it.
pub fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
}
