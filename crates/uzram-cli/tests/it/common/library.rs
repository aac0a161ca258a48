//! The library of `uzram run`, for the tests of all programs that start it.

use std::path::Path;
use std::process::Command;

/// Builds the library beside a program of the workspace, which looks for it there.
pub fn build_beside(program: &str) {
    let dir = Path::new(program).parent().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "-p", "uzram-run", "--target-dir"]).arg(dir.parent().unwrap());
    if dir.ends_with("release") {
        cargo.arg("--release");
    }
    let built = cargo.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}
