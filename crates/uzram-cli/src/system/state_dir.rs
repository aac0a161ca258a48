//! `/var/lib/uzram`: where backing files lie that nobody but root is to read. It is made when a backing is to lie in it,
//! so that the examples work as they stand.

use std::path::Path;

use rustix::fs::Mode;
use rustix::io::Errno;
use uzram::trusted_path::{Place, Refused};

use crate::failure::{Context, Result};

/// The directory.
const STATE_DIR: &str = "/var/lib/uzram";

/// Makes the directory, mode 0700, if a backing, `PATH[:SIZE]`, is to lie directly in it and there is none.
///
/// # Errors
/// It cannot be made.
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
