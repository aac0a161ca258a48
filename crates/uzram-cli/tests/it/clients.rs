//! The disk with its usual clients: libnbd's tools, qemu's and fio on a device of the real program.

use std::path::Path;

use crate::common::clients::{Connected, arg, complain, random_file, same, succeed};
use crate::common::{Place, wait_until};

#[test]
fn a_file_system_comes_back_whole() {
    let Some(place) = Place::needing(&["mkfs.ext4", "e2fsck", "nbdcopy", "nbdinfo"]) else { return };
    let _daemon = place.up_sized("64M", &[]);
    let (image, copy) = (place.root().join("image"), place.root().join("copy"));
    // The sources of all crates: a real tree.
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    succeed(&place, "mkfs.ext4", &["-q", "-d", arg(tree), arg(&image), "64M"]);
    assert_eq!(succeed(&place, "nbdinfo", &["--size", &place.uri()]).trim(), "67108864");

    succeed(&place, "nbdcopy", &["--flush", arg(&image), &place.uri()]);
    succeed(&place, "nbdcopy", &[&place.uri(), arg(&copy)]);
    assert!(same(&image, &copy));
    succeed(&place, "e2fsck", &["-f", "-n", arg(&copy)]);
    let (stored, charged) = (place.statistic("orig_data_bytes"), place.statistic("mem_charged_bytes"));
    assert!(stored > 0 && charged < stored, "{charged} bytes for {stored}");
}

#[test]
fn devices_are_added_used_and_removed() {
    let Some(place) = Place::needing(&["nbdcopy", "nbdinfo", "qemu-io"]) else { return };
    let _daemon = place.up(&[]);
    let added =
        place.run(&["add", "logs", "--size", "8M", "--algorithm", "zstd:3", "--mem-limit", "4M"]).ok();
    let uri = added.trim();
    assert!(uri.starts_with("nbd+unix:///logs?socket="), "{added}");
    assert_eq!(succeed(&place, "nbdinfo", &["--size", uri]).trim(), "8388608");
    assert_eq!(place.run(&["stat", "logs", "mem_limit"]).ok(), "4194304\n");
    place.run(&["stat", "logs", "comp_algorithm"]).shows(&["[zstd:3]"]);
    assert!(succeed(&place, "nbdinfo", &["--list", &place.uri()]).contains("\"logs\""));

    // Each device has its own contents for every client.
    let (first, second) = (random_file(&place, "first", 2 << 20), random_file(&place, "second", 3 << 20));
    succeed(&place, "nbdcopy", &[arg(&first), &place.uri()]);
    succeed(&place, "nbdcopy", &[arg(&second), uri]);
    for (uri, file) in [(place.uri().as_str(), &first), (uri, &second)] {
        let copy = place.root().join("copy");
        succeed(&place, "nbdcopy", &[uri, arg(&copy)]);
        assert!(std::fs::read(&copy).unwrap().starts_with(&std::fs::read(file).unwrap()));
    }

    place.run(&["add", "logs"]).says(1, "there is a device 'logs' already");
    let user = Connected::new(&place, uri);
    place.run(&["remove", "logs"]).says(1, "in use (users: 1)");
    drop(user);
    wait_until("it can be removed", || place.run(&["remove", "logs"]).status.success());
    assert!(!place.run(&["list"]).ok().contains("logs"));
    complain(&place, "nbdinfo", &[uri]);
    assert_eq!(succeed(&place, "nbdinfo", &["--size", &place.uri()]).trim(), "16777216");
}
