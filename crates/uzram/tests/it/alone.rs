//! Tests that measure or change their whole process: each has one of its own.

use std::process::Command;
use std::time::{Duration, Instant};

const ALONE: &str = "UZRAM_TEST_ALONE";

/// Returns a command that runs only this test, named as `--exact` names it.
pub fn only(test: &str) -> Command {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]);
    child
}

/// Runs a test, named as `--exact` names it, in a process of its own. Returns whether this is that process;
/// if not, the test has passed in it.
pub fn alone(test: &str) -> bool {
    if std::env::var_os(ALONE).is_some_and(|name| name == test) {
        return true;
    }
    let output = only(test).env(ALONE, test).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    // Without its result, which would count twice.
    text.lines().filter(|line| !line.starts_with("test result: ")).for_each(|line| println!("{line}"));
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "there is no test {test}");
    false
}

/// Waits until something is so, for a minute at most. Returns whether it is.
pub fn wait_until(is_so: impl Fn() -> bool) -> bool {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}
