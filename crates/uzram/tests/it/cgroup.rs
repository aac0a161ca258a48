//! A device whose reserve exceeds the cgroup's memory limit is refused, with the setting to change:
//! populating the reserve would have the process killed.
//!
//! A child of the test builds the device, in a cgroup of its own.

use std::fs;
use std::path::{Path, PathBuf};

use crate::alone::only;
use crate::wait_until;
use uzram::device::Device;

/// Tells the child which `cgroup.procs` file to write its process id to.
const PROCS: &str = "UZRAM_TEST_CGROUP_PROCS";
const LIMIT_BYTES: u64 = 128 << 20;

/// A cgroup limited to [`LIMIT_BYTES`], removed when dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    /// Creates a cgroup of version 1, or else version 2; prints a message if neither is possible.
    fn new() -> Option<Cgroup> {
        let name = format!("uzram-test-{}", std::process::id());
        for (root, file) in
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let dir = Path::new(root).join(&name);
            if fs::create_dir(&dir).is_err() {
                continue;
            }
            let cgroup = Cgroup(dir);
            if fs::write(cgroup.0.join(file), LIMIT_BYTES.to_string()).is_ok() {
                return Some(cgroup);
            }
        }
        println!("skipped: no cgroup with a limit of memory can be made here");
        None
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The cgroup is busy for a moment after its last process has ended.
        wait_until(|| fs::remove_dir(&self.0).is_ok());
    }
}

fn in_cgroup(procs: &str) {
    fs::write(procs, std::process::id().to_string()).unwrap();
    let device = Device::new("zram0").unwrap();
    device.set("reserve", "512M").unwrap();
    let error = device.set("disksize", "64M").expect_err("there is no memory for it");
    println!("refused: {error}");
    // A reserve within the limit is accepted.
    let device = Device::new("zram0").unwrap();
    device.set("reserve", "16M").unwrap();
    device.set("disksize", "64M").unwrap();
    println!("made");
}

#[test]
fn a_reserve_that_the_cgroup_does_not_allow_is_refused() {
    if let Ok(procs) = std::env::var(PROCS) {
        return in_cgroup(&procs);
    }
    let Some(cgroup) = Cgroup::new() else { return };
    let output = only("cgroup::a_reserve_that_the_cgroup_does_not_allow_is_refused")
        .env(PROCS, cgroup.0.join("cgroup.procs"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {text}{}", output.status, String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("cgroup allows it 128"), "{text}");
    assert!(text.contains("reserve") && text.contains("\nmade"), "{text}");
}
