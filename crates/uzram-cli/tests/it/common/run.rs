//! The programs of `programs/`, and `uzram run`.

use super::*;

/// Makes a command that of a user with nothing but the right to use userfaultfd.
pub const AS_NOBODY: &str =
    "setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps +sys_ptrace --ambient-caps +sys_ptrace";

/// `uzram run`, where it can be.
pub struct Run(());

impl Run {
    /// Prints why and returns `None` where it cannot; the test is then skipped.
    pub fn if_able() -> Option<Run> {
        let check = finish(bare_command("check --for run"));
        if !check.status.success() {
            println!("skipped: {}", check.stderr.trim());
        }
        check.status.success().then_some(Run(()))
    }

    /// The same, for tests that only root can run.
    pub fn if_root() -> Option<Run> {
        if not_root() { None } else { Run::if_able() }
    }

    /// Runs `uzram run args`.
    pub fn run(&self, args: &(impl Words + ?Sized)) -> Ended {
        finish(bare_command(&[&["run"], &args.words()[..]].concat()))
    }
}

/// Returns the children of a process that have this name, by whatever thread.
pub fn children(id: u32, name: &str) -> Vec<u32> {
    let statuses = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        let id = entry.file_name().to_str()?.parse().ok()?;
        Some((id, fs::read_to_string(entry.path().join("status")).ok()?))
    });
    let (parent, name) = (id.to_string(), Some(name));
    let is_one = |status: &str| {
        status_field_if_any(status, "PPid") == Some(&parent) && status_field_if_any(status, "Name") == name
    };
    statuses.filter(|(_, status)| is_one(status)).map(|(id, _)| id).collect()
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
