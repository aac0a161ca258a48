//! A file of figures. An existing one is replaced atomically when everything has been measured: a reader
//! finds the old figures or all of the new ones.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;
use uzram::{Error, ErrorKind, Result};

/// A file that is to be written.
pub struct OutFile<'a> {
    path: &'a Path,
    target: Target,
}

enum Target {
    /// A new file beside the one that it will replace.
    Replacing(NamedTempFile, PathBuf),
    /// A pipe or a device, which can only be written to.
    Open(File),
}

impl<'a> OutFile<'a> {
    /// Makes the new file.
    pub fn create(path: &'a Path) -> Result<OutFile<'a>> {
        let create = || -> io::Result<Target> {
            // Replace the target of a symbolic link, not the link.
            let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
            if fs::metadata(&real).is_ok_and(|metadata| !metadata.is_file()) {
                return OpenOptions::new().write(true).open(&real).map(Target::Open);
            }
            let dir = real.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
            // Those of a usual file, which the user's mask narrows.
            let permissions = Permissions::from_mode(0o666);
            let file = tempfile::Builder::new().permissions(permissions).tempfile_in(dir)?;
            Ok(Target::Replacing(file, real))
        };
        create().map(|target| OutFile { path, target }).map_err(|error| failed(path, &error))
    }

    /// Writes all of it.
    pub fn write(self, text: &str) -> Result<()> {
        let write = match self.target {
            Target::Open(mut file) => file.write_all(text.as_bytes()),
            Target::Replacing(mut file, real) => file
                .write_all(text.as_bytes())
                .and_then(|()| file.persist(real).map(drop).map_err(|error| error.error)),
        };
        write.map_err(|error| failed(self.path, &error))
    }
}

pub(crate) fn failed(path: &Path, error: &io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot write '{}': {error}", path.display()))
}
