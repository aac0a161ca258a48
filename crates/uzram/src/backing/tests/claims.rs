//! Which files and devices are accepted as backings, by owner and contents.

use std::fmt::Display;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use super::model::LoopDevice;
use super::*;

/// The user `nobody`, who stands for another user.
const OTHER_USER: u32 = 65534;

/// Opens a backing; retries while another program has the device open briefly.
fn open_soon(options: &FileOptions) -> Result<FileBacking> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        match FileBacking::open(options) {
            Err(error) if error.to_string().contains("otherwise in use") && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            answer => return answer,
        }
    }
}

#[track_caller]
fn refused(case: impl Display, options: &FileOptions, kind: ErrorKind, hints: &[&str]) {
    let Err(error) = open_soon(options) else { panic!("{case}: it is accepted") };
    let setting = if kind == ErrorKind::Busy { "backing_force" } else { "backing_dev" };
    assert_eq!((error.kind(), error.setting()), (kind, Some(setting)), "{case}: {error}");
    let text = error.to_string();
    assert!(hints.iter().all(|hint| text.contains(hint)), "{case}: {text}");
}

fn sized(path: &Path) -> FileOptions {
    options(path, 1 << 20, Engine::Threads)
}

fn forced(path: &Path) -> FileOptions {
    FileOptions { force: true, ..sized(path) }
}

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("ours");
}

#[test]
fn a_file_that_others_may_reach_is_refused_and_left_alone() {
    let directory = directory();
    let path = directory.path().join("file");
    for (mode, shown) in [(0o644, "0644"), (0o620, "0620"), (0o601, "0601"), (0o666, "0666")] {
        own_file(&path, b"");
        chmod(&path, mode);
        for options in [sized(&path), forced(&path)] {
            refused("", &options, ErrorKind::Permission, &[shown, "chmod 600"]);
            assert_eq!(file_bytes(&path), 0);
        }
    }
    std::fs::remove_file(&path).expect("ours");
    own_file(&path, b"");
    let second = directory.path().join("second");
    std::fs::hard_link(&path, &second).expect("a link");
    refused("", &forced(&path), ErrorKind::Permission, &["2 names"]);
    std::fs::remove_file(second).expect("ours");
    FileBacking::open(&sized(&path)).expect("ours alone");
    if let Err(error) = std::os::unix::fs::chown(&path, Some(OTHER_USER), None) {
        return println!("skipped: giving a file away: {error}");
    }
    refused("", &forced(&path), ErrorKind::Permission, &["belongs to user 65534"]);
}

#[test]
fn a_link_is_followed_in_directories_of_ours_only() {
    let directory = directory();
    let at = |name: &str| directory.path().join(name);
    own_file(&at("target"), b"");
    std::fs::create_dir(at("dir")).expect("a directory");
    symlink("../target", at("dir/link")).expect("a link");
    symlink("../none", at("dir/dangling")).expect("a link");
    chmod(&at("dir"), 0o1777);
    let dir = format!("'{}'", at("dir").display());
    for name in ["dir/link", "dir/dangling"] {
        refused("", &forced(&at(name)), ErrorKind::Permission, &[&at(name).display().to_string(), &dir]);
    }
    assert!(file_bytes(&at("target")) == 0 && !at("none").exists());
    chmod(&at("dir"), 0o755);
    drop(FileBacking::open(&sized(&at("dir/link"))).expect("our own link"));
    drop(FileBacking::open(&sized(&at("dir/dangling"))).expect("our own link"));
    assert_eq!([at("target"), at("none")].map(|path| file_bytes(&path)), [(1 << 20) + HEADER_BYTES; 2]);
}

#[test]
fn what_holds_something_else_wants_force_and_is_known_again() {
    let directory = directory();
    let path = directory.path().join("file");
    let foreign: Vec<u8> = (0..20_000u32).map(|number| number as u8).collect();
    own_file(&path, &foreign);
    refused("", &sized(&path), ErrorKind::Busy, &["--force", "19.5 KiB"]);
    assert_eq!(std::fs::read(&path).expect("a file"), foreign, "it was left alone");
    // A file of zeros is not empty.
    own_file(&path, &[0; 1 << 16]);
    refused("", &sized(&path), ErrorKind::Busy, &[]);
    own_file(&path, &foreign);
    drop(FileBacking::open(&forced(&path)).expect("forced"));
    let marked = std::fs::read(&path).expect("a file");
    let mark = Mark::parse(&marked).expect("a mark");
    for engine in ENGINES {
        drop(open(&path, 1 << 20, engine));
    }
    assert_eq!(Mark::parse(&std::fs::read(&path).expect("a file")), Some(mark), "the same file");
    // A changed mark is no longer recognised.
    let mut damaged = marked;
    damaged[3000] ^= 1;
    own_file(&path, &damaged);
    refused("", &sized(&path), ErrorKind::Busy, &[]);
}

#[test]
fn a_file_system_made_over_a_backing_is_safe() {
    let directory = directory();
    let path = directory.path().join("file");
    drop(open(&path, 8 << 20, Engine::Threads));
    let made: Vec<_> = ["mkfs.ext4", "mkfs.ext2", "mkswap"]
        .into_iter()
        .filter(|program| {
            drop(FileBacking::open(&forced(&path)).expect("forced"));
            let mut command = Command::new(program);
            command.arg(&path).env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").stdin(Stdio::null());
            let is_made = command.output().is_ok_and(|output| output.status.success());
            if is_made {
                refused(program, &sized(&path), ErrorKind::Busy, &[]);
            }
            is_made
        })
        .collect();
    if made.is_empty() {
        println!("skipped: no mkfs.ext4, mkfs.ext2 or mkswap");
    }
}

#[test]
fn a_block_device_is_taken_when_it_is_empty_or_ours() {
    use std::os::unix::fs::FileExt;
    const LEN_BYTES: u64 = 16 << 20;
    let directory = directory();
    let Some(device) = LoopDevice::attach(directory.path(), LEN_BYTES) else { return };
    let disk = std::fs::OpenOptions::new().write(true).open(device.path()).expect("root's");
    let all = sized(device.path());
    // The places of the signatures of swap, ISO 9660, btrfs, md, ZFS and the backup GPT.
    let places = [0, 1024, 4086, 4096, 32 << 10, 64 << 10, 256 << 10];
    let ends = [512, 4096, 8192, 64 << 10, 128 << 10, 512 << 10].map(|before| LEN_BYTES - before);
    let wipe = |offset: u64, len: usize| disk.write_all_at(&vec![0; len], offset).expect("room");
    for offset in places.into_iter().chain(ends) {
        disk.write_all_at(b"signature!", offset).expect("room");
        refused(offset, &all, ErrorKind::Busy, &[]);
        wipe(offset, 10);
        drop(open_soon(&all).unwrap_or_else(|error| panic!("it is empty, {offset}: {error}")));
        wipe(0, MARK_BYTES);
    }
    disk.write_all_at(b"signature!", 1024).expect("room");
    drop(open_soon(&forced(device.path())).expect("forced"));
    drop(open_soon(&all).expect("it is ours"));
    drop(disk);
    // The rules for a node are those for a file, except that its group may have access.
    let node = directory.path().join("node");
    let number = rustix::fs::stat(device.path()).expect("a device").st_rdev;
    let (mode, kind) = (rustix::fs::Mode::from_raw_mode(0o660), rustix::fs::FileType::BlockDevice);
    if let Err(error) = rustix::fs::mknodat(rustix::fs::CWD, &node, kind, mode, number) {
        return println!("skipped: making a device's node: {error}");
    }
    chmod(&node, 0o660);
    if let Err(error) = open_soon(&sized(&node)) {
        return println!("skipped: device nodes cannot be used here: {error}");
    }
    for mode in [0o664, 0o666, 0o662] {
        chmod(&node, mode);
        refused("", &sized(&node), ErrorKind::Permission, &["open to all users"]);
    }
    chmod(&node, 0o660);
    std::os::unix::fs::chown(&node, Some(OTHER_USER), None).expect("root");
    refused("", &sized(&node), ErrorKind::Permission, &["not of root"]);
}
