//! The limit of the length of files, RLIMIT_FSIZE of getrlimit(2). The system answers what goes beyond it
//! with SIGXFSZ, which ends a program; so it is asked before.

use rustix::process::{Resource, getrlimit};

use super::error::{Error, ErrorKind, Result};
use super::units::format_size;

/// Checks that a file may be so long. Fails with `NoSpace`, with `what` the file is, and what to set.
pub fn check_file_size(what: &str, len_bytes: u64) -> Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(most_bytes) if most_bytes < len_bytes => Err(Error::new(
            ErrorKind::NoSpace,
            format!(
                "{what} of {} is longer than RLIMIT_FSIZE allows, {}: raise that (`ulimit -f unlimited`, LimitFSIZE= of a \
                 service)",
                format_size(len_bytes),
                format_size(most_bytes)
            ),
        )),
        _ => Ok(()),
    }
}
