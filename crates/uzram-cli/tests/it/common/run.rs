//! The programs of `programs/`, and the library of `uzram run`.

use super::*;
use std::sync::Once;

use uzram_pager::TrapKind;

/// `uzram run`, where it can be.
pub struct Run(());

impl Run {
    /// Prints why and returns `None` where it cannot; the test is then skipped.
    pub fn if_able() -> Option<Run> {
        if let Err(error) = TrapKind::Uffd.check() {
            println!("skipped: {error}");
            return None;
        }
        static BUILT: Once = Once::new();
        BUILT.call_once(|| library::build_beside(UZRAM));
        Some(Run(()))
    }

    /// Runs `uzram run args`.
    pub fn run(&self, args: &(impl Words + ?Sized)) -> Ended {
        finish(bare_command(&[&["run"], &args.words()[..]].concat()))
    }
}

/// A compiled program of `programs/`.
pub struct Program {
    _dir: tempfile::TempDir,
    pub path: PathBuf,
}

impl Program {
    /// Compiles it, where `uzram run` can be; otherwise the test is skipped.
    pub fn if_able(name: &str) -> Option<Program> {
        Run::if_able().map(|_| Program::compiled(name, ""))
    }

    pub fn compiled(name: &str, options: &str) -> Program {
        let dir = tempfile::tempdir().unwrap();
        let source = format!("{}/tests/programs/{name}.c", env!("CARGO_MANIFEST_DIR"));
        let path = dir.path().join(name);
        let mut cc = Command::new("cc");
        cc.args("-O1 -Wall -Wextra -Werror -Wno-unused-result -pthread -o".words()).arg(&path);
        finish(cc.arg(source).args(options.words()).arg("-ldl")).ok();
        Program { _dir: dir, path }
    }

    pub fn limited(&self, options: &str, args: &str) -> Ended {
        finish(bare_command(&format!("run {options} -- {} {args}", self.path.display())))
    }

    /// Runs it with and without a limit, and compares; returns what was said to standard error with it.
    pub fn behaves(&self, options: &str, args: &str) -> String {
        let plain = finish(Command::new(&self.path).args(args.words()));
        let limited = self.limited(options, args);
        assert_eq!((&limited.status, &limited.stdout), (&plain.status, &plain.stdout), "{args}: {limited}");
        limited.stderr
    }
}
