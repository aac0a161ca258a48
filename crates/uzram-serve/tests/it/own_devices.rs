//! Backing files on block devices that are attached to a daemon's files. For root, with loop devices.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use uzram::device::Device;
use uzram_serve::loop_device::LoopAttachment;
use uzram_serve::own_devices::way_out;

/// A file system on a loop device, removed when dropped.
struct FileSystem {
    root: tempfile::TempDir,
    attachment: LoopAttachment,
}

fn run(program: &str, args: &[&Path]) -> bool {
    let path = "/usr/sbin:/sbin:/usr/bin:/bin";
    Command::new(program).args(args).env("PATH", path).status().is_ok_and(|status| status.success())
}

impl FileSystem {
    /// Prints why there can be none.
    fn new() -> Option<FileSystem> {
        let is_root = rustix::process::geteuid().is_root();
        if !is_root || !Path::new("/dev/loop-control").exists() || !run("mkfs.ext4", &[Path::new("-V")]) {
            println!("skipped: it takes root, loop devices and mkfs.ext4");
            return None;
        }
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("fs")).unwrap();
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).custom_flags(libc::O_DIRECT);
        let image = options.open(root.path().join("image")).unwrap();
        image.set_len(16 << 20).unwrap();
        let made = FileSystem { root, attachment: LoopAttachment::attach(&image.into()).unwrap() };
        assert!(run("mkfs.ext4", &[Path::new("-q"), &made.attachment.path()]));
        assert!(run("mount", &[&made.attachment.path(), &made.dir()]));
        Some(made)
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("fs")
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        let unmounted = run("umount", &[&self.dir()]);
        let detached = self.attachment.detach();
        assert!(std::thread::panicking() || unmounted && detached.is_ok());
    }
}

#[test]
fn what_keeps_a_block_device_busy_is_named() {
    let Some(file_system) = FileSystem::new() else { return };
    let attachment = file_system.attachment;
    let device = |name: &str, dir: &Path| {
        let device = Device::new(name).unwrap();
        device.set("backing_dev", &format!("{}:1M", dir.join(name).display())).unwrap();
        device.set("disksize", "1M").unwrap();
        device
    };
    let devices = [device("zram1", &file_system.dir()), device("zram2", file_system.root.path())];
    let text = way_out(&devices, attachment);
    let path = file_system.dir().join("zram1");
    assert!(text.contains(&format!("the backing file of zram1, '{}'", path.display())), "{text}");
    assert!(text.contains("`uzram remove zram1`") && !text.contains("zram2"), "{text}");
}
