//! `uzram bench` and `uzram lab` run a separate program: the one beside `uzram`, or the first in `PATH`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::finish;

/// Copies `uzram` into its own directory.
fn copy(dir: &Path) -> PathBuf {
    let (from, to) = (Path::new(env!("CARGO_BIN_EXE_uzram")), dir.join("uzram"));
    fs::hard_link(from, &to).or_else(|_| fs::copy(from, &to).map(drop)).unwrap();
    to
}

/// Creates a program that prints its name and arguments, and exits with status 7.
fn sibling(dir: &Path, name: &str) {
    let path = dir.join(name);
    fs::write(&path, "#!/bin/sh\necho \"$0\" \"$@\"\nexit 7\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn the_program_beside_it_comes_before_path() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let uzram = copy(dir.path());
    let run = |word: &str| {
        let mut command = Command::new(&uzram);
        command.args([word, "--help", "--json", "x y"]).env("PATH", elsewhere.path());
        finish(command)
    };
    for (word, name) in [("bench", "uzram-bench"), ("lab", "uzram-lab")] {
        let ended = run(word);
        let line = ended.complaint(1);
        assert!(line.contains(&format!("{name} is neither beside uzram nor in PATH")), "{line}");
        for dir in [elsewhere.path(), dir.path()] {
            sibling(dir, name);
            let ended = run(word);
            let wanted = format!("{} --help --json x y\n", dir.join(name).display());
            assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(7), wanted.as_str()));
        }
    }
}

#[test]
fn a_program_that_cannot_be_run_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let uzram = copy(dir.path());
    let program = dir.path().join("uzram-lab");
    fs::write(&program, "not a program").unwrap();
    let mut command = Command::new(&uzram);
    command.args(["lab", "list"]);
    let ended = finish(command);
    let line = ended.complaint(1);
    assert!(line.contains(program.to_str().unwrap()), "{line}");
}
