//! Tests that measure or change their whole process: each has one of its own.

use std::process::Command;

const ALONE: &str = "UZRAM_TEST_ALONE";

/// Runs a test, named as `--exact` names it, in a process of its own. Returns whether this is that process;
/// if not, the test has passed in it.
pub fn alone(test: &str) -> bool {
    if std::env::var_os(ALONE).is_some_and(|name| name == test) {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", test, "--nocapture"]).env(ALONE, test).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    // Without its result, which would count twice.
    text.lines().filter(|line| !line.starts_with("test result: ")).for_each(|line| println!("{line}"));
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "there is no test {test}");
    false
}
