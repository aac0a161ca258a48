//! The clients people use: libnbd's tools, qemu's, and fio.
#![allow(clippy::unwrap_used)]

mod common;

use std::process::Command;

use common::{Random, TestServer, seed};

/// Runs a client for at most 30 seconds and returns what it printed; `None` when it isn't installed.
fn run(program: &str, arguments: &[&str]) -> Option<String> {
    let missing = Command::new(program).arg("--version").output().is_err();
    if missing {
        println!("skipped: {program} is not installed");
        return None;
    }
    let output = Command::new("timeout").arg("30").arg(program).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{text}{errors}", output.status);
    Some(text)
}

/// Pages of every kind: zeros, text-like, random; not a whole number of pages.
fn image(len: usize) -> Vec<u8> {
    let mut random = Random(seed());
    let mut image = Vec::with_capacity(len + 4096);
    while image.len() < len {
        match random.below(3) {
            0 => image.resize(image.len() + 4096, 0),
            1 => image.extend(random.bytes(64).repeat(64)),
            _ => image.extend(random.bytes(4096)),
        }
    }
    image.truncate(len);
    image
}

#[test]
fn nbdinfo() {
    let server = TestServer::new("64M");
    let Some(text) = run("nbdinfo", &[&server.uri()]) else { return };
    for line in ["export=\"zram0\"", "export-size: 67108864", "can_multi_conn: true", "can_df: true"] {
        assert!(text.contains(line), "{line} in {text}");
    }
    let list = format!("nbd+unix://?socket={}", server.path.display());
    let json = run("nbdinfo", &["--list", "--json", &list]).unwrap();
    assert!(json.contains("\"export-name\": \"zram0\"") && json.contains("\"structured\": true"), "{json}");
    assert_eq!(run("nbdinfo", &["--size", &server.uri()]).unwrap().trim(), "67108864");
}

#[test]
fn nbdcopy_in_and_out() {
    let server = TestServer::new("48M");
    let (source, copy) = (server.directory().join("in.raw"), server.directory().join("out.raw"));
    let image = image(48 << 20);
    std::fs::write(&source, &image).unwrap();
    let Some(_) = run("nbdcopy", &[source.to_str().unwrap(), &server.uri()]) else { return };
    run("nbdcopy", &["--flush", &server.uri(), copy.to_str().unwrap()]).unwrap();
    assert!(std::fs::read(&copy).unwrap() == image);
    run("nbdcopy", &["--synchronous", "--connections=1", &server.uri(), copy.to_str().unwrap()]).unwrap();
    assert!(std::fs::read(&copy).unwrap() == image);
}

#[test]
fn qemu_img() {
    let server = TestServer::new("48M");
    let (source, copy) = (server.directory().join("in.raw"), server.directory().join("out.qcow2"));
    std::fs::write(&source, image(48 << 20)).unwrap();
    let (source, copy, uri) = (source.to_str().unwrap(), copy.to_str().unwrap(), &server.uri());
    let Some(text) = run("qemu-img", &["info", uri]) else { return };
    assert!(text.contains("virtual size: 48 MiB"), "{text}");
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", source, uri]).unwrap();
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", source, uri]).unwrap();
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", uri, copy]).unwrap();
    run("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", uri, copy]).unwrap();
}

#[test]
fn qemu_io_patterns() {
    let server = TestServer::new("64M");
    let commands = [
        "write -P 0xab 1000 100000",
        "read -P 0xab 1000 100000",
        "read -P 0 0 1000",
        "write -P 0x11 0 32M",
        "read -P 0x11 0 32M",
        "write -z 4096 70000",
        "read -P 0 4096 70000",
        "read -P 0x11 74096 100",
        "write -zu 1M 8M",
        "read -P 0 1M 8M",
        "write -f -P 0x22 512 512",
        "flush",
        "discard 16M 16M",
        "read -P 0x22 512 512",
        "aio_write -P 0x33 40M 4096",
        "aio_write -P 0x34 40964k 4096",
        "aio_flush",
        "read -P 0x34 40964k 4096",
    ];
    let mut arguments = vec!["-f", "raw"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    let uri = server.uri();
    arguments.push(&uri);
    let Some(text) = run("qemu-io", &arguments) else { return };
    assert!(!text.contains("failed"), "{text}");
}

#[test]
fn fio_verifies_what_it_wrote() {
    let server = TestServer::new("64M");
    let common = [
        "--ioengine=nbd",
        &format!("--uri={}", server.uri()),
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--size=32M",
    ];
    for own in [
        &["--name=pages", "--rw=randwrite", "--bs=4k", "--iodepth=16"][..],
        &["--name=unaligned", "--rw=randwrite", "--bsrange=512-64k", "--bs_unaligned", "--iodepth=8"],
        &["--name=mixed", "--rw=randrw", "--bs=16k", "--iodepth=32", "--offset=32M"],
    ] {
        if run("fio", &[own, &common].concat()).is_none() {
            return;
        }
    }
}
