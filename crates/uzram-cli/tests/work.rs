//! Commands that work long: they say how far they have come, and end with whoever asked for it.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::block::{BlockPlace, Cgroup, Hog, be_a_hog, swapped_bytes, unable};
use common::clients::missing;
use common::nbd::{Raw, WRITE};
use common::{Daemon, Place, connect, program_path, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use uzram::base::random::Random;

const MIB: u64 = 1 << 20;
const PAGES: u64 = 16384;
/// Far less than compressing all pages again takes.
const SOON: Duration = Duration::from_secs(10);
const RECOMPRESS: &[u8] =
    b"PUT /v1/devices/zram0/attributes/recompress HTTP/1.1\r\nContent-Length: 12\r\n\r\n{\"value\":\"\"}";

#[test]
#[ignore = "the process that another test starts"]
fn hog() {
    be_a_hog();
}

/// A daemon whose device's pages take minutes to be compressed again.
fn up(place: &Place) -> Daemon {
    let daemon = place.up_sized("64M", &["--recompress", "zstd:22"]);
    fill(place);
    daemon
}

/// Numbers in decimal, which lz4 makes smaller and zstd more so.
fn fill(place: &Place) {
    let (mut random, mut text) = (Random::new(1), String::new());
    while text.len() < MIB as usize {
        text += &format!("{} ", random.below(10_000));
    }
    let mut client = Raw::unix(place).enter().unwrap();
    for part in 0..PAGES * 4096 / MIB {
        let part_text = format!("{part:8}{}", &text[..MIB as usize - 8]);
        client.request(WRITE, part * MIB, MIB as u32, part_text.as_bytes()).unwrap();
        client.reply(0).unwrap();
    }
}

fn recompressed(place: &Place) -> u64 {
    place.statistic("pages_recompressed")
}

/// Waits until some pages more were compressed again.
fn wait_for_more(place: &Place) {
    let before = recompressed(place);
    wait_until("it works", || recompressed(place) > before);
}

/// Whether it soon ends that pages are compressed again.
fn stops(place: &Place) -> bool {
    let deadline = Instant::now() + SOON;
    while Instant::now() < deadline {
        let before = recompressed(place);
        thread::sleep(Duration::from_millis(300));
        if recompressed(place) == before {
            return place.run(&["stat", "zram0", "progress"]).ok().trim().is_empty() && before < PAGES;
        }
    }
    false
}

#[test]
fn it_ends_with_whoever_asked_for_it() {
    let place = Place::new();
    let daemon = up(&place);
    // A client that is gone.
    let mut gone = connect(&place.socket("control.sock"));
    gone.write_all(RECOMPRESS).unwrap();
    wait_for_more(&place);
    drop(gone);
    assert!(stops(&place));
    // A command that is interrupted.
    let command = place.start(&["set", "zram0", "recompress=", "mem_limit=1G"]);
    wait_for_more(&place);
    let progress = place.run(&["stat", "zram0", "progress"]).ok();
    let words: Vec<&str> = progress.split_whitespace().collect();
    let [done, all] = [1, 2].map(|word| words[word].parse::<u64>().unwrap());
    assert!(words[0] == "recompress" && done < all && all <= PAGES, "{progress}");
    command.signal(Signal::INT);
    let (status, said) = command.ended();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(
        said.contains("cannot set recompress to '': interrupted: ") && said.lines().count() == 1,
        "{said}"
    );
    assert!(!said.contains('\r') && said.contains(" pages done"), "no terminal, no progress: {said}");
    assert!(stops(&place));
    assert_eq!(place.number("mem_limit"), 0, "nothing more was done");
    // A device that is reset beneath a client that waits.
    let mut waiting = connect(&place.socket("control.sock"));
    waiting.write_all(RECOMPRESS).unwrap();
    wait_for_more(&place);
    let asked = Instant::now();
    assert_eq!(place.run(&["reset", "zram0"]).ok(), "");
    assert!(asked.elapsed() < SOON);
    let mut answer = String::new();
    waiting.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 409 ") && answer.contains("\"errno\":4"), "{answer}");
    // A daemon that is told to end.
    place.run(&["set", "zram0", "recomp_algorithm=algo=zstd:22", "disksize=64M"]).ok();
    fill(&place);
    let command = place.start(&["set", "zram0", "recompress="]);
    wait_for_more(&place);
    let asked = Instant::now();
    place.run(&["down"]).ok();
    assert!(asked.elapsed() < SOON && daemon.ended().0.success());
    assert_eq!(command.ended().0.code(), Some(1));
}

#[test]
fn a_terminal_shows_how_far_it_has_come() {
    if missing(&["script", "timeout"]) {
        return;
    }
    let place = Place::new();
    let _daemon = up(&place);
    let output = place.root().join("terminal");
    let file = File::create(&output).unwrap();
    let shown = || String::from_utf8_lossy(&fs::read(&output).unwrap()).into_owned();
    let mut terminal = Command::new("timeout");
    terminal.args(["60", "script", "-qefc", "exec \"$UZRAM\" set zram0 recompress=", "/dev/null"]);
    terminal.env("UZRAM", env!("CARGO_BIN_EXE_uzram")).env("UZRAM_RUNTIME_DIR", place.dir());
    terminal.env("PATH", program_path()).env("SHELL", "/bin/sh");
    let mut terminal = terminal.stdin(Stdio::piped()).stdout(file).spawn().unwrap();
    wait_until("it says how far it has come", || shown().contains(" pages, "));
    // ^C, of which the terminal makes a signal.
    terminal.stdin.as_mut().unwrap().write_all(b"\x03").unwrap();
    let status = terminal.wait().unwrap();
    let shown = shown();
    assert_eq!(status.code(), Some(1), "{shown}");
    assert!(shown.contains("recompress: "), "{shown}");
    // The line is gone before the last one is printed.
    assert!(shown.contains("\r\u{1b}[Kuzram: cannot set recompress"), "{shown}");
    assert!(stops(&place));
}

#[test]
fn swap_stays_on_when_switching_it_off_is_interrupted() {
    if unable() {
        return;
    }
    let Some(cgroup) = Cgroup::new("interrupted", 32 * MIB) else { return };
    let place = BlockPlace::new();
    place.place.run(&["swap", "on", "--size", "512M"]).ok();
    let device = place.swap_areas().remove(0);
    let hog = Hog::start(&cgroup, 192, 20);
    wait_until("much is swapped out", || swapped_bytes(&device) > 128 * MIB);
    cgroup.set_limit(1 << 30);
    // It brings nothing back itself.
    let hog_id = Pid::from_raw(hog.id() as i32).unwrap();
    kill_process(hog_id, Signal::STOP).unwrap();
    let before = swapped_bytes(&device);
    let off = place.place.start(&["swap", "off"]);
    wait_until("it comes back", || swapped_bytes(&device) + MIB < before);
    off.signal(Signal::INT);
    let (status, said) = off.ended();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("swap on {device} stays on")) && said.contains("interrupted"), "{said}");
    assert_eq!(place.swap_areas(), [device.as_str()]);
    kill_process(hog_id, Signal::CONT).unwrap();
    let ended = hog.ended(Duration::from_secs(60));
    assert!(ended.status.success(), "{}", ended.stderr);
    place.place.run(&["swap", "off"]).ok();
    place.assert_clean();
}
