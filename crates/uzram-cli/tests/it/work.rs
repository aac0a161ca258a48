//! Long operations: they show their progress, and end with the client that requested them.

use crate::common::*;

const PAGES: u64 = 16384;
/// The limit of the hog, which needs 192 MiB.
const HOG_LIMIT_BYTES: u64 = 32 * MIB;
/// The number of attempts to interrupt an operation that may end too soon.
const TRIES: usize = 5;
const RECOMPRESS: &[u8] =
    b"PUT /v1/devices/zram0/attributes/recompress HTTP/1.1\r\nContent-Length: 12\r\n\r\n{\"value\":\"\"}";

/// Starts a daemon whose device's pages take minutes to recompress.
fn up(place: &Place) -> Daemon {
    let daemon = place.up_sized("64M", "--recompress zstd:22");
    fill(place);
    daemon
}

fn fill(place: &Place) {
    let (text, mut client) = (decimals(MIB as usize - 8), place.nbd());
    for part in 0..PAGES * 4096 / MIB {
        assert_eq!(client.write(part * MIB, format!("{part:8}{text}").as_bytes()).error, 0);
    }
}

fn recompressed(place: &Place) -> u64 {
    place.statistic("pages_recompressed")
}

fn wait_for_more(place: &Place) {
    let before = recompressed(place);
    wait_until("it works", || recompressed(place) > before);
}

fn assert_stops(place: &Place) {
    wait_until("it stops", || place.get("progress").is_empty());
    let count = recompressed(place);
    assert!(count < PAGES, "{count} pages");
}

#[test]
fn it_ends_with_whoever_asked_for_it() {
    let place = Place::new();
    let daemon = up(&place);
    // A client disconnects.
    let mut gone = connect(&place.socket("control.sock"));
    gone.write_all(RECOMPRESS).unwrap();
    wait_for_more(&place);
    drop(gone);
    assert_stops(&place);
    // A command is interrupted.
    let command = place.start("set zram0 recompress= mem_limit=1G");
    wait_for_more(&place);
    let progress = place.get("progress");
    let words = progress.words();
    let [done, all] = [1, 2].map(|word| words[word].parse::<u64>().unwrap());
    assert!(words[0] == "recompress" && done < all && all <= PAGES, "{progress}");
    command.signal(Signal::INT);
    let (status, said) = command.ended();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("cannot set recompress to '': interrupted: "), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!said.contains('\r') && said.contains(" pages done"), "no terminal, no progress: {said}");
    assert_stops(&place);
    assert_eq!(place.number("mem_limit"), 0, "nothing more was done");
    // A device is reset while a client waits.
    let mut waiting = connect(&place.socket("control.sock"));
    waiting.write_all(RECOMPRESS).unwrap();
    wait_for_more(&place);
    assert_eq!(place.run("reset zram0").ok(), "");
    let mut answer = String::new();
    waiting.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 409 ") && answer.contains("\"errno\":4"), "{answer}");
    // The daemon is told to end.
    place.set("recomp_algorithm=algo=zstd:22 disksize=64M");
    fill(&place);
    let command = place.start("set zram0 recompress=");
    wait_for_more(&place);
    place.end(daemon);
    assert_eq!(command.ended().0.code(), Some(1));
}

#[test]
fn a_terminal_shows_how_far_it_has_come() {
    let Some(place) = Place::needing("script timeout") else { return };
    let _daemon = up(&place);
    let (code, shown) = in_a_terminal(&place, "set zram0 recompress=", " pages, ");
    assert_eq!(code, Some(1), "{shown}");
    assert!(shown.contains("recompress: "), "{shown}");
    // The status line is erased before the last line is printed.
    assert!(shown.contains("\r\u{1b}[Kuzram: cannot set recompress"), "{shown}");
    assert_stops(&place);
}

#[test]
fn swap_stays_on_when_switching_it_off_is_interrupted() {
    let Some(cgroup) = Cgroup::new("interrupted", HOG_LIMIT_BYTES) else { return };
    let Some(place) = BlockPlace::alone("") else { return };
    // Swapoff may be done before the signal arrives.
    let interrupted = (0..TRIES).any(|_| is_interrupted_in_time(&place, &cgroup));
    assert!(interrupted, "{TRIES} times it was done before");
    place.assert_clean();
}

/// Interrupts `swap off`, which must then leave everything in order; returns false if it had ended before.
fn is_interrupted_in_time(place: &BlockPlace, cgroup: &Cgroup) -> bool {
    cgroup.set_limit(HOG_LIMIT_BYTES);
    let device = place.swap_on("--size 512M");
    let hog = Hog::start(cgroup, 192, 120).swaps_out(&device, 128 * MIB);
    cgroup.set_limit(1 << 30);
    // The stopped hog brings no pages back itself.
    hog.signal(Signal::STOP);
    let before = swapped_bytes(&device);
    let off = place.start("swap off");
    wait_until("it comes back", || swapped_bytes_if_on(&device).is_none_or(|bytes| bytes + MIB < before));
    off.signal(Signal::INT);
    let (status, said) = off.ended();
    let in_time = swapped_bytes_if_on(&device).is_some();
    if in_time {
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("swap on {device} stays on")), "{said}");
        assert!(said.contains("interrupted"), "{said}");
        assert_eq!(place.swap_areas(), [device.as_str()]);
    }
    hog.signal(Signal::CONT);
    hog.verified(Duration::from_secs(60), true);
    // `swap off` also ends the daemon, unless that was done before.
    if !status.success() {
        place.run("swap off").ok();
    }
    in_time
}
