//! Looking programs up in `PATH`.

use std::path::PathBuf;

/// Returns the path of the program of that name, the first in `PATH`.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|program| program.is_file())
}
