//! A device whose reserve exceeds the cgroup's memory limit is refused, with the setting to change:
//! populating the reserve would have the process killed.

use std::fs;
use std::path::{Path, PathBuf};

use crate::alone::alone;
use crate::wait_until;
use uzram::device::Device;

const LIMIT_BYTES: u64 = 128 << 20;

/// A cgroup limited to [`LIMIT_BYTES`]. Dropping this takes the process out of it and removes it.
struct Cgroup(PathBuf);

fn enter(cgroup: &Path) -> std::io::Result<()> {
    fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string())
}

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
        let _ = self.0.parent().map(enter);
        // The cgroup is busy for a moment after its last process has left.
        wait_until(|| fs::remove_dir(&self.0).is_ok());
    }
}

#[test]
fn a_reserve_that_the_cgroup_does_not_allow_is_refused() {
    if !alone("cgroup::a_reserve_that_the_cgroup_does_not_allow_is_refused") {
        return;
    }
    let Some(cgroup) = Cgroup::new() else { return };
    enter(&cgroup.0).unwrap();
    let device = Device::new("zram0").unwrap();
    device.set("reserve", "512M").unwrap();
    let error = device.set("disksize", "64M").expect_err("there is no memory for it");
    assert_eq!(error.setting(), Some("reserve"));
    assert!(error.to_string().contains("cgroup allows it 128"), "{error}");
    // A reserve within the limit is accepted.
    let device = Device::new("zram0").unwrap();
    device.set("reserve", "16M").unwrap();
    device.set("disksize", "64M").unwrap();
}
