//! Which files and devices are accepted as backings, by owner and contents.

use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use super::model::LoopDevice;
use super::*;

/// The user `nobody`, who stands for another user.
const OTHER_USER: u32 = 65534;

/// Opens a backing; retries while another program has the device open briefly.
fn open_soon(options: &FileOptions) -> Result<FileBacking> {
    for _ in 0..200 {
        match FileBacking::open(options) {
            Err(error) if error.to_string().contains("otherwise in use") => {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            answer => return answer,
        }
    }
    FileBacking::open(options)
}

fn refused(options: &FileOptions) -> (Error, String) {
    let error = open_soon(options).map(|_| ()).expect_err("refused");
    let text = error.to_string();
    (error, text)
}

fn sized(path: &Path) -> FileOptions {
    options(path, 1 << 20, Engine::Threads)
}

#[test]
fn a_file_that_others_may_reach_is_refused_and_left_alone() {
    let directory = directory();
    let path = directory.path().join("file");
    for (mode, shown) in [(0o644, "0644"), (0o620, "0620"), (0o601, "0601"), (0o666, "0666")] {
        own_file(&path, b"");
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).expect("ours");
        for force in [false, true] {
            let (error, text) = refused(&FileOptions { force, ..sized(&path) });
            assert_eq!(
                (error.kind(), error.setting()),
                (ErrorKind::Permission, Some("backing_dev")),
                "{text}"
            );
            assert!(text.contains(shown) && text.contains("chmod 600"), "{text}");
            assert_eq!(file_bytes(&path), 0);
        }
    }
    std::fs::remove_file(&path).expect("ours");
    own_file(&path, b"");
    let second = directory.path().join("second");
    std::fs::hard_link(&path, &second).expect("a link");
    let (error, text) = refused(&FileOptions { force: true, ..sized(&path) });
    assert!(error.kind() == ErrorKind::Permission && text.contains("2 names"), "{text}");
    std::fs::remove_file(second).expect("ours");
    FileBacking::open(&sized(&path)).expect("ours alone");
    if let Err(error) = std::os::unix::fs::chown(&path, Some(OTHER_USER), None) {
        println!("skipped: giving a file away: {error}");
        return;
    }
    let (error, text) = refused(&FileOptions { force: true, ..sized(&path) });
    assert!(error.kind() == ErrorKind::Permission && text.contains("belongs to user 65534"), "{text}");
}

#[test]
fn a_link_is_followed_in_directories_of_ours_only() {
    let directory = directory();
    let at = |name: &str| directory.path().join(name);
    own_file(&at("target"), b"");
    std::fs::create_dir(at("dir")).expect("a directory");
    symlink("../target", at("dir/link")).expect("a link");
    symlink("../none", at("dir/dangling")).expect("a link");
    std::fs::set_permissions(at("dir"), Permissions::from_mode(0o1777)).expect("ours");
    for name in ["dir/link", "dir/dangling"] {
        let (error, text) = refused(&FileOptions { force: true, ..sized(&at(name)) });
        assert_eq!((error.kind(), error.setting()), (ErrorKind::Permission, Some("backing_dev")), "{text}");
        let (link, dir) = (at(name).display().to_string(), at("dir").display().to_string());
        assert!(text.contains(&link) && text.contains(&format!("'{dir}'")), "{text}");
    }
    assert!(file_bytes(&at("target")) == 0 && !at("none").exists());
    std::fs::set_permissions(at("dir"), Permissions::from_mode(0o755)).expect("ours");
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
    let (error, text) = refused(&sized(&path));
    assert_eq!((error.kind(), error.setting()), (ErrorKind::Busy, Some("backing_force")), "{text}");
    assert!(text.contains("--force") && text.contains("19.5 KiB"), "{text}");
    assert_eq!(std::fs::read(&path).expect("a file"), foreign, "it was left alone");
    // A file of zeros is not empty.
    own_file(&path, &[0; 1 << 16]);
    refused(&sized(&path));
    own_file(&path, &foreign);
    drop(FileBacking::open(&FileOptions { force: true, ..sized(&path) }).expect("forced"));
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
    assert_eq!(refused(&sized(&path)).0.setting(), Some("backing_force"));
}

#[test]
fn a_file_system_made_over_a_backing_is_safe() {
    let directory = directory();
    let path = directory.path().join("file");
    drop(open(&path, 8 << 20, Engine::Threads));
    let made: Vec<_> = ["mkfs.ext4", "mkfs.ext2", "mkswap"]
        .into_iter()
        .filter(|program| {
            drop(FileBacking::open(&FileOptions { force: true, ..sized(&path) }).expect("forced"));
            let mut command = Command::new(program);
            command.arg(&path).env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").stdin(Stdio::null());
            let is_made = command.output().is_ok_and(|output| output.status.success());
            if is_made {
                assert_eq!(refused(&sized(&path)).0.setting(), Some("backing_force"), "{program}");
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
    let (all, forced) = (sized(device.path()), FileOptions { force: true, ..sized(device.path()) });
    // The places of the signatures of swap, ISO 9660, btrfs, md, ZFS and the backup GPT.
    let places = [0, 1024, 4086, 4096, 32 << 10, 64 << 10, 256 << 10];
    let ends = [512, 4096, 8192, 64 << 10, 128 << 10, 512 << 10].map(|before| LEN_BYTES - before);
    let wipe = |offset: u64, len: usize| disk.write_all_at(&vec![0; len], offset).expect("room");
    for offset in places.into_iter().chain(ends) {
        disk.write_all_at(b"signature!", offset).expect("room");
        let (error, text) = refused(&all);
        assert_eq!(
            (error.kind(), error.setting()),
            (ErrorKind::Busy, Some("backing_force")),
            "{offset}: {text}"
        );
        wipe(offset, 10);
        drop(open_soon(&all).unwrap_or_else(|error| panic!("it is empty, {offset}: {error}")));
        wipe(0, MARK_BYTES);
    }
    disk.write_all_at(b"signature!", 1024).expect("room");
    drop(open_soon(&forced).expect("forced"));
    drop(open_soon(&all).expect("it is ours"));
    drop(disk);
    // The rules for a node are those for a file, except that its group may have access.
    let node = directory.path().join("node");
    let number = rustix::fs::stat(device.path()).expect("a device").st_rdev;
    let mode = rustix::fs::Mode::from_raw_mode(0o660);
    let kind = rustix::fs::FileType::BlockDevice;
    if let Err(error) = rustix::fs::mknodat(rustix::fs::CWD, &node, kind, mode, number) {
        println!("skipped: making a device's node: {error}");
        return;
    }
    let chmod = |mode| std::fs::set_permissions(&node, Permissions::from_mode(mode)).expect("ours");
    let of_node = sized(&node);
    chmod(0o660);
    match open_soon(&of_node) {
        Ok(backing) => drop(backing),
        Err(error) => {
            println!("skipped: device nodes cannot be used here: {error}");
            return;
        }
    }
    for mode in [0o664, 0o666, 0o662] {
        chmod(mode);
        let (error, text) = refused(&of_node);
        assert!(error.kind() == ErrorKind::Permission && text.contains("open to all users"), "{text}");
    }
    chmod(0o660);
    std::os::unix::fs::chown(&node, Some(OTHER_USER), None).expect("root");
    let (error, text) = refused(&of_node);
    assert!(error.kind() == ErrorKind::Permission && text.contains("not of root"), "{text}");
}
