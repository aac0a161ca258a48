//! Backing files on block devices that are attached to a daemon's files. For root, with loop devices.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use uzram::device::Device;
use uzram_serve::Exports;
use uzram_serve::loop_device::LoopAttachment;
use uzram_serve::own_devices::way_out;
use uzram_serve::record::{AttachedDevice, Recorder};

/// A file system on a loop device, removed when dropped.
struct FileSystem {
    root: tempfile::TempDir,
    attachment: LoopAttachment,
}

fn run(program: &str, args: &[&Path]) -> bool {
    let mut command = Command::new(program);
    command
        .args(args)
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .status()
        .is_ok_and(|status| status.success())
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
        let image = options
            .read(true)
            .write(true)
            .create(true)
            .custom_flags(libc::O_DIRECT)
            .open(root.path().join("image"));
        let image = image.unwrap();
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
fn what_keeps_a_block_device_busy_is_named_and_refused_before() {
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

    let run_dir = file_system.root.path().join("run");
    std::fs::create_dir(&run_dir).unwrap();
    let recorder = Recorder::start(File::open(&run_dir).unwrap().into(), &run_dir).unwrap();
    recorder.add(AttachedDevice { name: "zram0".to_owned(), attachment }).unwrap();
    let exports = Exports::new(devices).recorded_by(Arc::new(recorder));
    let device = Device::new("zram3").unwrap();
    let set =
        |value: &str| exports.set(&device, "backing_dev", value, &|| true).map_err(|error| error.to_string());
    let [new, elsewhere] =
        [&file_system.dir(), file_system.root.path()].map(|dir| format!("{}:1M", dir.join("new").display()));
    let refused = set(&format!("{elsewhere} {new}")).unwrap_err();
    assert!(refused.contains(&format!("lies on zram0 ({})", attachment.path().display())), "{refused}");
    assert_eq!((set(&elsewhere), set("none")), (Ok(()), Ok(())));
    assert!(!set("redis://host:1").unwrap_err().contains("lies on"));
    // The devices go first.
    drop(exports);
}
