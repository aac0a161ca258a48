//! The disk with its usual clients: libnbd's tools, qemu's and fio on a device of the real program.

use std::path::Path;

use crate::common::clients::{
    Connected, arg, complain, fio, missing, qemu_io, random_file, run, same, succeed, text,
};
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
    assert!(place.run(&["stat", "logs", "comp_algorithm"]).ok().contains("[zstd:3]"));
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

    let taken = place.run(&["add", "logs"]);
    assert!(taken.complaint(1).contains("there is a device 'logs' already"), "{}", taken.stderr);
    let user = Connected::new(&place, uri);
    let refused = place.run(&["remove", "logs"]);
    assert!(refused.complaint(1).contains("in use (users: 1)"), "{}", refused.stderr);
    drop(user);
    wait_until("it can be removed", || place.run(&["remove", "logs"]).status.success());
    assert!(!place.run(&["list"]).ok().contains("logs"));
    complain(&place, "nbdinfo", &[uri]);
    assert_eq!(succeed(&place, "nbdinfo", &["--size", &place.uri()]).trim(), "16777216");
}

#[test]
fn qemu_reads_its_patterns_at_odd_offsets() {
    let Some(place) = Place::needing(&["qemu-io"]) else { return };
    let _daemon = place.up_sized("64M", &["--algorithm", "zstd"]);
    qemu_io(
        &place,
        &[
            "write -P 0xa1 0 1M",
            "write -P 0xb2 4095 2",
            "write -P 0xc3 12345 67890",
            "read -P 0xa1 0 4095",
            "read -P 0xb2 4095 2",
            "read -P 0xa1 4097 8248",
            "read -P 0xc3 12345 67890",
            "read -P 0xa1 80235 1",
            "write -z 5000 5001",
            "read -P 0 5000 5001",
            "read -P 0xa1 4097 903",
            "discard 16k 16k",
            "read -P 0xc3 12345 4039",
            "write -f -P 0xd4 67108863 1",
            "read -P 0xd4 67108863 1",
            "read -P 0 2M 60M",
            "flush",
        ],
    );
}

#[test]
fn qemu_converts_and_compares() {
    let Some(place) = Place::needing(&["qemu-img"]) else { return };
    let _daemon = place.up_sized("24M", &[]);
    let uri = place.uri();
    let source = random_file(&place, "source", 24 << 20);
    succeed(&place, "qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", arg(&source), &uri]);
    succeed(&place, "qemu-img", &["compare", "-f", "raw", "-F", "raw", arg(&source), &uri]);
    succeed(&place, "qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &uri, "copy.qcow2"]);
    succeed(&place, "qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &uri, "copy.qcow2"]);
}

#[test]
fn fio_verifies_what_it_wrote() {
    if missing(&["fio"]) {
        return;
    }
    for algorithm in ["lz4", "zstd"] {
        let place = Place::new();
        let _daemon = place.up_sized("64M", &["--algorithm", algorithm]);
        let uri = format!("--uri={}", place.uri());
        let verify = ["--verify=crc32c", "--do_verify=1", "--iodepth=16", "--buffer_compress_percentage=60"];
        for sizes in ["--bs=4k", "--bsrange=512-64k"] {
            let mut args = fio(&uri, &["--rw=randwrite", "--size=48M", sizes]);
            args.extend(verify);
            succeed(&place, "fio", &args);
        }
        assert_eq!(place.statistic("failed_reads") + place.statistic("failed_writes"), 0);
    }
}

#[test]
fn clients_of_one_export_do_not_disturb_each_other() {
    let Some(place) = Place::needing(&["fio", "nbdcopy"]) else { return };
    let _daemon = place.up_sized("64M", &[]);
    let uri = format!("--uri={}", place.uri());
    std::thread::scope(|scope| {
        for offset in ["--offset=0", "--offset=32M"] {
            let (place, uri) = (&place, &uri);
            scope.spawn(move || {
                let mut args = fio(uri, &["--rw=randwrite", "--bsrange=512-16k", "--size=32M", offset]);
                args.extend(["--verify=crc32c", "--do_verify=1", "--iodepth=8"]);
                succeed(place, "fio", &args);
            });
        }
        // Meanwhile, another client reads the whole disk.
        let output = run(&place, "nbdcopy", &[&place.uri(), "copy"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
    });
}
