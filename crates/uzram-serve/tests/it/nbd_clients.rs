//! Common clients: libnbd's tools and qemu's.

use std::process::Command;

use crate::common::{Random, TestServer, seed};

/// Runs a client for at most 30 seconds and returns what it printed; `None` when it isn't installed.
fn run(program: &str, arguments: &[&str]) -> Option<String> {
    let works = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !works {
        println!("skipped: {program} is not installed");
        return None;
    }
    let output = Command::new("timeout").arg("30").arg(program).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{text}{errors}", output.status);
    Some(text)
}

/// A program's map of a disk: offset, length and status of each part.
type Map = Vec<(u64, u64, u32)>;

/// Returns a disk with a page of each kind at 1 MiB, and its `base:allocation` and `uzram:state`.
fn mapped() -> (TestServer, Map, Map) {
    let server = TestServer::new("64M");
    let disk = server.device.open().unwrap();
    let at = 1 << 20;
    let noise = Random::new(seed()).bytes(8192);
    disk.write(at, &[[0; 4096], [7; 4096]].concat()).unwrap();
    disk.write(at + 8192, &b"sixteen of text.".repeat(256)).unwrap();
    disk.write(at + 12288, &noise).unwrap();
    let rest = (at + 20480, (64 << 20) - at - 20480);
    let allocation = vec![(0, at, 3), (at, 4096, 2), (at + 4096, 16384, 0), (rest.0, rest.1, 3)];
    let state = vec![
        (0, at, 0),
        (at, 4096, 1),
        (at + 4096, 4096, 2),
        (at + 8192, 4096, 3),
        (at + 12288, 8192, 4),
        (rest.0, rest.1, 0),
    ];
    (server, allocation, state)
}

#[test]
fn nbdinfo_map() {
    let (server, allocation, state) = mapped();
    for (map, expected) in [("--map", allocation), ("--map=uzram:state", state)] {
        let Some(text) = run("nbdinfo", &[map, &server.uri()]) else { return };
        let told: Map = text
            .lines()
            .map(|line| {
                let mut words = line.split_whitespace();
                let mut number = || words.next().unwrap().parse::<u64>().unwrap();
                (number(), number(), number() as u32)
            })
            .collect();
        assert_eq!(told, expected, "{map}\n{text}");
    }
    for can in ["cache", "df", "fast-zero", "flush", "fua", "multi-conn", "trim", "zero", "structured-reply"]
    {
        run("nbdinfo", &["--can", can, &server.uri()]).unwrap();
    }
    let json = run("nbdinfo", &["--json", &server.uri()]).unwrap();
    assert!(json.contains("\"base:allocation\"") && json.contains("\"uzram:state\""), "{json}");
}

/// Data at a few places of 1 GiB: nothing else is read, sent, written or stored.
#[test]
fn nbdcopy_of_a_sparse_disk_moves_only_its_data() {
    const DATA_PAGES: u64 = 24 * 64;
    let server = TestServer::new("1G");
    let disk = server.device.open().unwrap();
    let mut random = Random::new(seed());
    for place in 0..24u64 {
        disk.write(place * (41 << 20), &random.bytes(256 << 10)).unwrap();
    }
    let copy = server.directory().join("out.raw");
    let Some(_) = run("nbdcopy", &[&server.uri(), copy.to_str().unwrap()]) else { return };
    assert_eq!(server.device.stats().pages_read, DATA_PAGES, "and no hole was read");
    assert_eq!(std::fs::metadata(&copy).unwrap().len(), 1 << 30);
    let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&copy).unwrap());
    assert!(blocks * 512 <= 2 * DATA_PAGES * 4096, "{blocks} blocks: the copy is sparse");

    let back = TestServer::new("1G");
    run("nbdcopy", &[copy.to_str().unwrap(), &back.uri()]).unwrap();
    let stats = back.device.stats();
    assert_eq!((stats.pages_written, stats.orig_data_bytes), (DATA_PAGES, DATA_PAGES * 4096));
    let (source, target) = (server.uri(), back.uri());
    if run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &source, &target]).is_some() {
        assert_eq!(server.device.stats().pages_read, 2 * DATA_PAGES, "comparing skips holes too");
    }
}

/// Compares the output of `qemu-img map` with the disk: offset, length, whether it is zeros, whether it is
/// data.
fn qemu_img_map(program: &str) -> Option<()> {
    let (server, allocation, _) = mapped();
    let text = run(program, &["map", "--output=json", "-f", "raw", &server.uri()])?;
    let maps: serde_json::Value = serde_json::from_str(&text).unwrap();
    let told: Vec<_> = maps
        .as_array()
        .unwrap()
        .iter()
        .map(|map| {
            let flags = u32::from(map["zero"] == true) << 1 | u32::from(map["data"] == false);
            (map["start"].as_u64().unwrap(), map["length"].as_u64().unwrap(), flags)
        })
        .collect();
    assert_eq!(told, allocation, "{text}");
    Some(())
}

/// Copies a sparse image in and out with `program`, a `qemu-img`.
fn qemu_img_convert_sparse(program: &str) -> Option<()> {
    let server = TestServer::new("1G");
    let (source, copy) = (server.directory().join("in.raw"), server.directory().join("out.raw"));
    let file = std::fs::File::create(&source).unwrap();
    file.set_len(1 << 30).unwrap();
    let mut random = Random::new(seed());
    for place in 0..5u64 {
        std::os::unix::fs::FileExt::write_all_at(&file, &random.bytes(1 << 20), place * (200 << 20)).unwrap();
    }
    let (source, copy, uri) = (source.to_str().unwrap(), copy.to_str().unwrap(), &server.uri());
    run(program, &["convert", "-n", "-f", "raw", "-O", "raw", source, uri])?;
    let stats = server.device.stats();
    assert!(stats.orig_data_bytes == 5 << 20 && stats.pages_written <= 2 * 1280, "{stats:?}");
    run(program, &["compare", "-f", "raw", "-F", "raw", source, uri]).unwrap();
    let read_before = server.device.stats().pages_read;
    run(program, &["convert", "-f", "raw", "-O", "raw", uri, copy]).unwrap();
    assert_eq!(server.device.stats().pages_read - read_before, 1280, "no hole was read");
    run(program, &["compare", "-f", "raw", "-F", "raw", copy, uri]).unwrap();
    Some(())
}

#[test]
fn qemu_img_knows_the_holes() {
    if qemu_img_map("qemu-img").is_some() {
        qemu_img_convert_sparse("qemu-img");
    }
}

/// With a qemu that negotiates extended headers: tools/install-programs unpacks Debian's backport of it.
#[test]
fn qemu_with_extended_headers() {
    let programs = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("programs");
    let bin = programs.join("qemu-backport/usr/bin");
    let (img, io) = (bin.join("qemu-img"), bin.join("qemu-io"));
    let (img, io) = (img.to_str().unwrap(), io.to_str().unwrap());
    if !bin.exists() {
        println!("skipped: no qemu with extended headers; tools/install-programs qemu-backport");
        return;
    }
    if qemu_img_map(img).is_none() || qemu_img_convert_sparse(img).is_none() {
        return;
    }
    // One request that compact headers cannot carry.
    let server = TestServer::new("8G");
    server.device.open().unwrap().write((5 << 30) + 5, b"gone").unwrap();
    let arguments =
        ["-f", "raw", "-c", "write -zun 0 6G", "-c", "read -P 0 5G 1M", "-c", "discard 1M 1G", &server.uri()];
    let text = run(io, &arguments).unwrap();
    assert!(!text.contains("failed"), "{text}");
    assert_eq!(server.device.stats().orig_data_bytes, 0);
}
