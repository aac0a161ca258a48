//! `/var/lib/uzram`: a directory for backing files that only root can read. Created when a backing file is to
//! be in it, so that the examples work as written.

use std::path::Path;

use rustix::fs::Mode;
use rustix::io::Errno;
use uzram::trusted_path::{Place, Refused};

use crate::failure::{Context, Result};

const STATE_DIR: &str = "/var/lib/uzram";

/// Creates the directory (0700), unless it exists, if a backing file, `PATH[:SIZE]`, is to be directly in it.
pub fn make_for(backing: &str) -> Result<()> {
    if Path::new(backing).parent() != Some(Path::new(STATE_DIR)) {
        return Ok(());
    }
    let made = Place::resolve(Path::new(STATE_DIR)).and_then(|place| match place.make_dir(Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(Refused::from(errno)),
    });
    made.context(|| format!("cannot make the directory '{STATE_DIR}'"))
}
