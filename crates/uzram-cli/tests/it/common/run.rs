//! The programs of `programs/`, and the library of `uzram run`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use uzram_pager::TrapKind;

use super::{Ended, bare_command, finish, library};

/// Returns whether the tests can run here; says why not.
pub fn can_run() -> bool {
    match TrapKind::Uffd.check() {
        Ok(()) => {
            library();
            true
        }
        Err(error) => {
            println!("skipped: {error}");
            false
        }
    }
}

/// Builds the library, beside the program.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| library::build_beside(env!("CARGO_BIN_EXE_uzram")))
}

/// A compiled program of `programs/`.
pub struct Program {
    _dir: tempfile::TempDir,
    pub path: PathBuf,
}

impl Program {
    pub fn new(name: &str) -> Program {
        Program::compiled(name, &[])
    }

    pub fn compiled(name: &str, options: &[&str]) -> Program {
        let dir = tempfile::tempdir().unwrap();
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name).with_extension("c");
        let path = dir.path().join(name);
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-result", "-pthread", "-o"]).arg(&path);
        let built = cc.arg(source).args(options).arg("-ldl").output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Program { _dir: dir, path }
    }

    pub fn plain(&self, args: &[&str]) -> Ended {
        let mut command = Command::new(&self.path);
        command.args(args);
        finish(command)
    }

    pub fn limited(&self, options: &[&str], args: &[&str]) -> Ended {
        let path = self.path.to_str().unwrap();
        finish(bare_command(&[&["run"], options, &["--", path], args].concat()))
    }

    /// Runs it both ways, and compares; returns what was said to standard error with the limit.
    pub fn behaves(&self, options: &[&str], args: &[&str]) -> String {
        let (plain, limited) = (self.plain(args), self.limited(options, args));
        assert_eq!(limited.status, plain.status, "{args:?}: {}", limited.stderr);
        assert_eq!(limited.stdout, plain.stdout, "{args:?}: {}", limited.stderr);
        limited.stderr
    }
}
