//! Where a daemon's files are mounted, and where its backing files lie: not on each other.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::common::block::BlockPlace;
use crate::common::clients::{arg, succeed};
use crate::common::wait_until;

/// Runs a daemon that must be refused with these words, before anything is mounted.
fn refused(place: &BlockPlace, code: i32, args: &[&str], said: &str) {
    let before = place.mounts();
    let ended = place.run(&[&["up", "--size", "1M", "--log", "error", "--exec", "true"], args].concat());
    let complaint = ended.complaint(code);
    assert!(complaint.contains(said), "{args:?}: {complaint}");
    assert_eq!(place.mounts(), before, "{args:?}");
}

#[test]
fn files_are_not_mounted_over_what_the_daemon_needs() {
    let Some(place) = BlockPlace::needing(&["mount", "umount"]) else { return };
    let (root, run) = (place.root().to_owned(), place.dir());
    fs::create_dir_all(root.join("other/deep")).unwrap();
    symlink(&root, root.join("other/link")).unwrap();
    symlink(&run, root.join("other/to-run")).unwrap();
    let bound = place.mount_point("bound");
    succeed(&place, "mount", &["--bind", arg(&root), arg(&bound)]);
    let inside = |path: &str| root.join(path);
    // The runtime directory, and those above it, by any name.
    for dir in [
        run.clone(),
        root.clone(),
        inside("other/link"),
        inside("other/to-run"),
        inside("other/deep/../.."),
        bound.join("run"),
    ] {
        refused(&place, 1, &["--mount", arg(&dir)], "choose an empty directory");
    }
    succeed(&place, "umount", &[arg(&bound)]);
    // One that is made for the mount, with the runtime directory in it.
    let (new, deep) = (inside("new"), inside("new/a/run"));
    for dir in [&new, &inside("new/a"), &deep] {
        refused(&place, 1, &["--mount", arg(dir), "--runtime-dir", arg(&deep)], "choose an empty directory");
    }
    // Names that the daemon has in its own directory.
    for name in ["nbd.sock", "control.sock", "uzram.lock", "attached.json", "attached.json.new"] {
        refused(&place, 1, &["--mount", arg(&run.join(name))], "");
        assert!(!run.join(name).is_dir(), "{name}");
    }
    // What has anything in it.
    fs::write(root.join("other/deep/file"), "").unwrap();
    refused(&place, 1, &["--mount", arg(&inside("other/deep"))], "has 'file' in it");
    fs::remove_file(root.join("other/deep/file")).unwrap();
    let up = [
        "up",
        "--size",
        "1M",
        "--log",
        "error",
        "--exec",
        "uzram_name=$name; ls $UZRAM_RUNTIME_DIR/below",
        "--mount",
    ];
    assert_eq!(place.run(&[&up[..], &[arg(&run.join("below"))]].concat()).ok(), "zram0\n");
    place.assert_clean();
}

#[test]
fn a_backing_file_does_not_lie_where_files_are_mounted() {
    let Some(place) = BlockPlace::if_able() else { return };
    let root = place.root().to_owned();
    fs::create_dir_all(root.join("empty")).unwrap();
    symlink(root.join("empty"), root.join("link")).unwrap();
    let in_root = |path: &str| root.join(path).to_str().unwrap().to_owned();
    for (mount, backing) in [
        ("empty", "empty/cold:1M"),
        ("empty", "link/cold:1M"),
        ("link", "empty/../link/cold:1M"),
        ("new", "new/cold:1M"),
        ("empty/../new", "link/../new/deep/cold:1M"),
        ("new", "new:1M"),
    ] {
        let args = ["--mount", &in_root(mount), "--backing", &in_root(backing)];
        refused(&place, 2, &args, "where the devices' files are mounted");
    }
    // The default place of the mount, and a file of settings.
    let cold = format!("{}:1M", place.dir().join("mnt/cold").display());
    refused(&place, 2, &["--attach", "--backing", &cold], "where the devices' files are mounted");
    let config = root.join("uzram.toml");
    fs::write(
        &config,
        format!("mount = '{0}'\n[zram0]\nsize = '1M'\nbacking = '{0}/cold:1M'\n", in_root("new")),
    )
    .unwrap();
    for command in ["up", "check"] {
        let ended = place.run(&[command, "--config", arg(&config)]);
        assert!(ended.complaint(2).contains("where the devices' files are mounted"), "{}", ended.stderr);
    }
    assert!(!root.join("new").exists());
    place.assert_clean();
}

/// A file system on a block device of the daemon, mounted.
fn with_file_system(place: &BlockPlace) -> (crate::common::Daemon, String, PathBuf) {
    let daemon = place.up_sized("64M", &["--attach"]);
    let device = place.loops().remove(0);
    succeed(place, "mkfs.ext4", &["-q", &device]);
    let dir = place.mount_point("fs");
    succeed(place, "mount", &[&device, arg(&dir)]);
    (daemon, device, dir)
}

#[test]
fn a_backing_file_does_not_lie_on_the_daemons_own_devices() {
    let Some(place) = BlockPlace::needing(&["mkfs.ext4", "mount", "umount", "losetup", "truncate"]) else {
        return;
    };
    let (daemon, device, dir) = with_file_system(&place);
    let add = |backing: &Path| {
        let sized = format!("{}:1M", backing.display());
        let ended = place.run(&["add", "zram1", "--size", "1M", "--force", "--backing", &sized]);
        ended.complaint(1).to_owned()
    };
    let on_it = format!("lies on zram0 ({device})");
    symlink(&dir, place.root().join("link")).unwrap();
    for path in [dir.join("cold"), place.root().join("link/cold"), PathBuf::from(&device)] {
        let said = add(&path);
        assert!(said.contains(&on_it) && said.contains("(setting: backing_dev)"), "{said}");
    }
    let said = add(&place.disk());
    assert!(said.contains("lies on the files in '"), "{said}");
    // On a block device on a file there.
    let image = dir.join("image");
    succeed(&place, "truncate", &["-s", "8M", arg(&image)]);
    let upper = succeed(&place, "losetup", &["-f", "--show", arg(&image)]);
    let said = add(Path::new(upper.trim()));
    succeed(&place, "losetup", &["-d", upper.trim()]);
    assert!(said.contains(&on_it), "{said}");
    assert!(!dir.join("cold").exists());
    // By the other ways of setting it.
    place.run(&["add", "zram1", "--size", "1M"]).ok();
    place.run(&["reset", "zram1"]).ok();
    let cold = format!("{}:1M", dir.join("cold").display());
    let set = place.run(&["set", "zram1", &format!("backing_dev={cold}")]);
    assert!(set.complaint(1).contains(&on_it), "{}", set.stderr);
    let attribute = place.dir().join("mnt/zram1/backing_dev");
    assert_eq!(fs::write(&attribute, &cold).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    // Elsewhere it may lie, and the daemon ends as usual.
    let elsewhere = format!("{}:1M", place.root().join("cold").display());
    fs::write(&attribute, &elsewhere).unwrap();
    succeed(&place, "umount", &[arg(&dir)]);
    place.end_clean(daemon);
}

#[test]
fn attaching_says_what_is_in_the_way() {
    let Some(place) = BlockPlace::if_able() else { return };
    let daemon = place.up(&["--mount", arg(&place.dir().join("mnt"))]);
    let attach = || place.run(&["attach", "zram0"]);
    place.run(&["reset", "zram0"]).ok();
    let said = attach();
    assert!(
        said.complaint(1).contains("it has no size") && said.stderr.contains("disksize="),
        "{}",
        said.stderr
    );
    place.run(&["set", "zram0", "disksize=1M"]).ok();
    // A client is named while it is there, and waited for when it has just left.
    let client = crate::common::nbd::Raw::unix(&place).enter().unwrap();
    wait_until("it is counted", || place.run(&["clients"]).ok().contains("zram0"));
    assert!(attach().complaint(1).contains("NBD clients have it open"));
    drop(client);
    attach().ok();
    place.run(&["detach", "zram0"]).ok();

    // Beside resets, which may come first: no client is blamed that is not there.
    std::thread::scope(|scope| {
        let resets = scope.spawn(|| {
            for _ in 0..15 {
                // Refused while it is attached.
                let _ = place.run(&["reset", "zram0"]);
                let _ = place.run(&["set", "zram0", "disksize=1M"]);
            }
        });
        while !resets.is_finished() {
            let said = attach();
            if said.status.success() {
                let _ = place.run(&["detach", "zram0"]);
            } else {
                assert!(said.complaint(1).contains("it has no size"), "{}", said.stderr);
            }
        }
    });
    wait_until("it is detached", || {
        let _ = place.run(&["detach", "zram0"]);
        place.loops().is_empty()
    });
    daemon.terminate();
    place.assert_clean();
}
