//! Where a daemon's files are mounted, and where its backing files lie: not on each other.

use crate::common::*;

const ELSEWHERE: &str = "choose an empty directory";
const NOT_THERE: &str = "where the devices' files are mounted";

/// Runs a daemon that must be refused with these words, before anything is mounted.
fn refused(place: &BlockPlace, code: i32, options: &str, said: &str) {
    let before = place.mounts();
    place.run(&format!("up --size 1M --log error --exec true {options}")).says(code, said);
    assert_eq!(place.mounts(), before, "{options}");
}

#[test]
fn files_are_not_mounted_over_what_the_daemon_needs() {
    let Some(place) = BlockPlace::needing("mount umount") else { return };
    let (root, run) = (place.root(), place.dir());
    let deep = place.mount_point("other/deep");
    symlink(root, root.join("other/link")).unwrap();
    symlink(&run, root.join("other/to-run")).unwrap();
    let bound = place.mount_point("bound");
    succeed(&place, "mount", &["--bind", arg(root), arg(&bound)]);
    // The runtime directory, and those above it, by any name.
    for dir in ["run", "", "other/link", "other/to-run", "other/deep/../..", "bound/run"] {
        refused(&place, 1, &format!("--mount {}", place.path(dir)), ELSEWHERE);
    }
    succeed(&place, "umount", &[arg(&bound)]);
    // One that is made for the mount, with the runtime directory in it.
    for dir in ["new", "new/a", "new/a/run"] {
        let options = format!("--mount {} --runtime-dir {}", place.path(dir), place.path("new/a/run"));
        refused(&place, 1, &options, ELSEWHERE);
    }
    // Names that the daemon has in its own directory.
    for name in ["nbd.sock", "control.sock", "uzram.lock", "attached.json", "attached.json.new"] {
        refused(&place, 1, &format!("--mount {}", run.join(name).display()), "");
        assert!(!run.join(name).is_dir(), "{name}");
    }
    // What has anything in it.
    fs::write(deep.join("file"), "").unwrap();
    refused(&place, 1, &format!("--mount {}", deep.display()), "has 'file' in it");
    fs::remove_file(deep.join("file")).unwrap();
    let (below, show) = (run.join("below"), "uzram_name=$name; ls $UZRAM_RUNTIME_DIR/below");
    let up = ["up", "--size", "1M", "--log", "error", "--exec", show, "--mount", arg(&below)];
    assert_eq!(place.run(&up).ok(), "zram0\n");
    place.assert_clean();
}

#[test]
fn a_backing_file_does_not_lie_where_files_are_mounted() {
    let Some(place) = BlockPlace::if_able() else { return };
    symlink(place.mount_point("empty"), place.path("link")).unwrap();
    for (mount, backing) in [
        ("empty", "empty/cold:1M"),
        ("empty", "link/cold:1M"),
        ("link", "empty/../link/cold:1M"),
        ("new", "new/cold:1M"),
        ("empty/../new", "link/../new/deep/cold:1M"),
        ("new", "new:1M"),
    ] {
        let options = format!("--mount {} --backing {}", place.path(mount), place.path(backing));
        refused(&place, 2, &options, NOT_THERE);
    }
    // The default place of the mount, and a file of settings.
    refused(&place, 2, &format!("--attach --backing {}", place.path("run/mnt/cold:1M")), NOT_THERE);
    let text = "mount = 'NEW'\n[zram0]\nsize = '1M'\nbacking = 'NEW/cold:1M'\n";
    let config = place.write("uzram.toml", text.replace("NEW", &place.path("new")));
    for command in ["up", "check"] {
        place.run(&[command, "--config", &config]).says(2, NOT_THERE);
    }
    assert!(!place.root().join("new").exists());
    place.assert_clean();
}

#[test]
fn a_backing_file_does_not_lie_on_the_daemons_own_devices() {
    let programs = "mkfs.ext4 mount umount losetup truncate";
    let Some(place) = BlockPlace::needing(programs) else { return };
    let (daemon, device) = place.up_attached("64M", "");
    let dir = place.with_file_system(&device);
    let add = |backing: &Path| {
        place.run(&format!("add zram1 --size 1M --force --backing {}:1M", backing.display()))
    };
    let on_it = format!("lies on zram0 ({device})");
    symlink(&dir, place.root().join("link")).unwrap();
    for path in [dir.join("cold"), place.root().join("link/cold"), PathBuf::from(&device)] {
        add(&path).says(1, &on_it).says(1, "(setting: backing_dev)");
    }
    add(&place.disk()).says(1, "lies on the files in '");
    // On a block device on a file there.
    let image = dir.join("image");
    succeed(&place, "truncate", &["-s", "8M", arg(&image)]);
    let upper = succeed(&place, "losetup", &["-f", "--show", arg(&image)]);
    let refused = add(Path::new(upper.trim()));
    succeed(&place, "losetup", &["-d", upper.trim()]);
    refused.says(1, &on_it);
    assert!(!dir.join("cold").exists());
    // By the other ways of setting it.
    place.run("add zram1 --size 1M").ok();
    place.run("reset zram1").ok();
    let cold = format!("{}:1M", dir.join("cold").display());
    place.run(&format!("set zram1 backing_dev={cold}")).says(1, &on_it);
    // Of tiers, any; but not what is elsewhere.
    let tiers = format!("backing_dev={} {cold}", place.path("elsewhere:1M"));
    place.run(&["set", "zram1", &tiers]).says(1, &on_it);
    let address = place.run("set zram1 backing_dev=redis://127.0.0.1:1");
    assert!(!address.status.success() && !address.stderr.contains("lies on"), "{address}");
    let attribute = place.dir().join("mnt/zram1/backing_dev");
    assert_eq!(fs::write(&attribute, &cold).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    // Elsewhere it may lie, and the daemon ends as usual.
    fs::write(&attribute, place.path("cold:1M")).unwrap();
    succeed(&place, "umount", &[arg(&dir)]);
    place.end_clean(daemon);
}

#[test]
fn attaching_says_what_is_in_the_way() {
    let Some(place) = BlockPlace::if_able() else { return };
    let daemon = place.up_mounted("16M", "");
    let attach = || place.run("attach zram0");
    place.run("reset zram0").ok();
    attach().says(1, "it has no size").says(1, "disksize=");
    place.set("disksize=1M");
    // A client is named while it is there, and waited for when it has just left.
    let client = place.nbd();
    wait_until("it is counted", || place.run("clients").ok().contains("zram0"));
    attach().says(1, "NBD clients have it open");
    drop(client);
    attach().ok();
    place.run("detach zram0").ok();

    // Beside resets, which may come first: no client is blamed that is not there.
    thread::scope(|scope| {
        let resets = scope.spawn(|| {
            for _ in 0..15 {
                // Refused while it is attached.
                let _ = place.run("reset zram0");
                let _ = place.run("set zram0 disksize=1M");
            }
        });
        while !resets.is_finished() {
            let said = attach();
            if said.status.success() {
                let _ = place.run("detach zram0");
            } else {
                said.says(1, "it has no size");
            }
        }
    });
    wait_until("it is detached", || {
        let _ = place.run("detach zram0");
        place.loops().is_empty()
    });
    daemon.terminate();
    place.assert_clean();
}
