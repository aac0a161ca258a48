//! Looking programs up, as a shell does.

use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::{env, fs};

use rustix::fs::Access;

/// Finds a program: at this path, if the name has a slash, else the first in `PATH` that can be executed. An
/// error has the first place where it is, and why it cannot be executed there.
pub fn find_program(name: &OsStr) -> Result<PathBuf, (PathBuf, io::Error)> {
    let places = match name.as_encoded_bytes().contains(&b'/') {
        true => vec![PathBuf::from(name)],
        false if name.is_empty() => Vec::new(),
        false => env::var_os("PATH").iter().flat_map(env::split_paths).map(|dir| below(&dir, name)).collect(),
    };
    let mut failure = None;
    for place in places {
        match check_executable(&place) {
            Ok(()) => return Ok(place),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => failure = failure.or(Some((place, error))),
        }
    }
    Err(failure.unwrap_or_else(|| (name.into(), ErrorKind::NotFound.into())))
}

/// Returns the path of a file of a directory in `PATH`: an empty one is the current directory.
fn below(dir: &Path, name: &OsStr) -> PathBuf {
    if dir.as_os_str().is_empty() { Path::new(".").join(name) } else { dir.join(name) }
}

fn check_executable(path: &Path) -> io::Result<()> {
    if !fs::metadata(path)?.is_file() {
        // As execve(2) says of a directory.
        return Err(ErrorKind::PermissionDenied.into());
    }
    Ok(rustix::fs::access(path, Access::EXEC_OK)?)
}
