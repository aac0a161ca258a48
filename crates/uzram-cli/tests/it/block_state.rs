//! `block_state` of a large disk: a text that grows with the disk, but that the daemon never holds as a
//! whole.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;

use crate::common::block::BlockPlace;
use crate::common::clients::qemu_io;
use crate::common::{Place, ask, connect};
use uzram::random::Random;

/// Readers that stop in the middle; a whole text for each would take 20 MB.
const READERS: usize = 8;
const SIZE: &str = "2G";
const LINES: usize = 2 << 18;
/// The most memory for all of them together.
const MOST_BYTES: u64 = 16 << 20;
const GET: &[u8] = b"GET /v1/devices/zram0/attributes/block_state HTTP/1.1\r\n\r\n";

/// Writes zeros to all pages, so that each has a slot.
fn fill(place: &Place) {
    qemu_io(place, &["write -z 0 1G", "write -z 1G 1G"]);
}

/// Returns the command's output, which is more than a pipe holds.
fn shown(place: &Place) -> String {
    let path = place.root().join("shown");
    let mut command = place.command(&["stat", "zram0", "block_state"]);
    assert!(command.stdout(File::create(&path).unwrap()).status().unwrap().success());
    std::fs::read_to_string(&path).unwrap()
}

#[test]
fn clients_that_stop_reading_hold_neither_memory_nor_the_device() {
    let Some(place) = Place::needing(&["qemu-io"]) else { return };
    let daemon = place.up_sized(SIZE, &[]);
    fill(&place);
    let before = daemon.anonymous_bytes();
    let mut readers = Vec::new();
    for _ in 0..READERS {
        let mut reader = connect(&place.socket("control.sock"));
        reader.write_all(GET).unwrap();
        reader.read_exact(&mut [0; 1000]).unwrap();
        readers.push(reader);
    }
    let more = daemon.anonymous_bytes().saturating_sub(before);
    assert!(more < MOST_BYTES, "{more} bytes more");
    let text = shown(&place);
    assert_eq!(text.lines().count(), LINES);
    for (page, line) in text.lines().enumerate() {
        assert!(line.len() == 39 && line[..12].trim() == page.to_string(), "{page}: {line}");
        assert!(line.ends_with(".000000 s....."), "{line}");
    }
    assert_eq!(place.run(&["reset", "zram0"]).ok(), "");
    // They are disconnected, and their responses are incomplete.
    for mut reader in readers {
        let mut rest = String::new();
        let _ = reader.read_to_string(&mut rest);
        assert!(rest.len() < LINES * 40, "{}", rest.len());
    }
    let empty = ask(&place.socket("control.sock"), GET);
    assert!(empty.ends_with("\r\n\r\n{\"name\":\"block_state\",\"text\":\"\"}\n"), "{empty}");
}

#[test]
fn open_files_hold_no_memory_and_are_read_at_any_offset() {
    let Some(place) = BlockPlace::needing(&["qemu-io"]) else { return };
    let mount = place.dir().join("mnt");
    let daemon = place.up_sized(SIZE, &["--mount", mount.to_str().unwrap()]);
    fill(&place);
    let whole = shown(&place);
    let before = daemon.anonymous_bytes();
    let path = place.files().join("block_state");
    let files: Vec<_> = (0..READERS).map(|_| File::open(&path).unwrap()).collect();
    for file in &files {
        file.read_exact_at(&mut [0; 1000], 0).unwrap();
    }
    let more = daemon.anonymous_bytes().saturating_sub(before);
    assert!(more < MOST_BYTES, "{more} bytes more");
    assert!(std::fs::read_to_string(&path).unwrap() == whole);
    let mut random = Random::new(1);
    for _ in 0..20 {
        let (offset, len) = (random.below(whole.len()) as u64, random.below(10_000));
        let len = len.min(whole.len() - offset as usize);
        let mut part = vec![0; len];
        files[0].read_exact_at(&mut part, offset).unwrap();
        assert!(part == whole.as_bytes()[offset as usize..][..len], "{offset} {len}");
    }
}
