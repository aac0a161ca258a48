//! What a daemon's log says, at its default level, of what goes wrong while it serves: a warning at the first
//! failure, and one at the end.

use std::io::{Read, Write};
use std::time::Duration;

use crate::common::nbd::{Raw, WRITE};
use crate::common::{Place, Started, status_field, wait_until};
use crate::nbd::pki::Authority;
use uzram::random::Random;

const MIB: u64 = 1 << 20;
/// The command NBD_CMD_TRIM.
const TRIM: u16 = 4;

/// Starts a daemon whose log can be read while it serves.
fn start(place: &Place, args: &[&str]) -> Started {
    let started = place.start(&[&["up"], args].concat());
    wait_until("it serves", || place.run(&["status"]).status.success());
    started
}

/// Returns how many lines of the log have these words.
fn lines(daemon: &Started, level: &str, words: &str) -> usize {
    daemon.said().lines().filter(|line| line.contains(level) && line.contains(words)).count()
}

/// Writes random bytes to the disk, a MiB at a time; returns how many could be written, at most `most`.
fn write_random(place: &Place, seed: u64, most: u64) -> u64 {
    let mut client = Raw::unix(place).enter().unwrap();
    let mut random = Random::new(seed);
    let mut written = || {
        let bytes = random.bytes(MIB as usize);
        (0..most).find(|nth| {
            client.request(WRITE, nth * MIB, MIB as u32, &bytes).unwrap();
            client.reply(0).is_none()
        })
    };
    written().unwrap_or(most)
}

/// Returns how often the thread that reports has waited.
fn waits(place: &Place) -> u64 {
    let worker = place.worker_id().as_raw_nonzero();
    let tasks = std::fs::read_dir(format!("/proc/{worker}/task")).unwrap();
    let statuses = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).unwrap());
    let status = statuses.into_iter().find(|status| status.starts_with("Name:\tconditions")).unwrap();
    status_field(&status, "voluntary_ctxt_switches").parse().unwrap()
}

#[test]
fn writes_that_are_refused_are_logged_at_the_first_and_at_the_end() {
    let place = Place::new();
    let daemon = start(&place, &["--size", "32M", "--mem-limit", "8M"]);
    wait_until("nothing is wrong, and it sleeps", || {
        let before = waits(&place);
        std::thread::sleep(Duration::from_millis(1100));
        waits(&place) == before
    });
    assert!(write_random(&place, 1, 32) < 32);
    let refused = || {
        lines(
            &daemon,
            "WARN",
            "zram0: writes are refused: memory is at mem_limit (8 MiB): raise mem_limit, or add",
        )
    };
    wait_until("it is logged", || refused() == 1);
    // The next process goes on.
    place.take_over();
    assert!(write_random(&place, 2, 32) < 32);
    place.run(&["set", "zram0", "mem_limit=64M"]).ok();
    assert_eq!(write_random(&place, 3, 16), 16);
    let accepted = || lines(&daemon, "WARN", "zram0: writes are accepted again after ");
    wait_until("the end is logged", || accepted() == 1);
    assert!(lines(&daemon, "WARN", "; refused: ") == 1, "{}", daemon.said());
    place.down();
    assert_eq!((refused(), accepted()), (1, 1), "{}", daemon.said());
    assert!(daemon.ended().0.success());
}

#[test]
fn a_full_backing_device_is_logged_once_and_its_end_too() {
    let place = Place::new();
    let backing = format!("{}:16M", place.root().join("cold").display());
    let daemon = start(&place, &["--size", "64M", "--mem-limit", "8M", "--backing", &backing]);
    assert!(write_random(&place, 4, 64) < 64);
    let full = || lines(&daemon, "WARN", "zram0: the backing device is full: ");
    let refused = || {
        let words = "zram0: writes are refused: memory is at mem_limit (8 MiB), and no more pages leave it: raise mem_limit";
        lines(&daemon, "WARN", words)
    };
    wait_until("it is logged", || (full(), refused()) == (1, 1));
    let mut client = Raw::unix(&place).enter().unwrap();
    client.request(TRIM, 0, 64 << 20, &[]).unwrap();
    assert!(client.reply(0).is_some());
    drop(client);
    let ended = || {
        lines(&daemon, "WARN", "zram0: the backing device is ok again after ")
            + lines(&daemon, "WARN", "zram0: writes are accepted again after ")
    };
    wait_until("the end is logged", || ended() == 2);
    place.down();
    assert_eq!((full(), refused(), ended()), (1, 1, 2), "{}", daemon.said());
    assert!(daemon.ended().0.success());
}

#[test]
fn clients_that_are_turned_away_are_logged_at_the_first_and_at_the_end() {
    let place = Place::new();
    Authority::new("authority").write_all(place.root());
    let file = |name: &str| place.root().join(name).to_str().unwrap().to_owned();
    let (cert, key, ca) = (file("server-cert.pem"), file("server-key.pem"), file("ca-cert.pem"));
    let tls = ["--tls-cert", &cert, "--tls-key", &key, "--tls-client-ca", &ca];
    let args = [&["--size", "16M", "--listen", "tcp:127.0.0.1:0"], &tls[..]].concat();
    let daemon = start(&place, &args);
    let list = place.json(&["list"]);
    let uris = list["devices"][0]["uris"].as_array().unwrap();
    let uri = uris.iter().find_map(|uri| uri.as_str().unwrap().strip_prefix("nbds://")).unwrap();
    let port = uri.split_once('/').unwrap().0.to_owned();
    for _ in 0..3 {
        assert!(Raw::tcp(&port).enter().is_none(), "TLS is required");
        let mut client = Raw::tcp(&port);
        client.0.read_exact(&mut [0; 18]).unwrap();
        // NBD_OPT_STARTTLS, and what is no TLS.
        client
            .0
            .write_all(&[&3u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 5, 0, 0, 0, 0]].concat())
            .unwrap();
        client.0.read_exact(&mut [0; 20]).unwrap();
        client.0.write_all(&[0x16, 3, 1, 0, 4, 9, 9, 9, 9]).unwrap();
        assert!(client.ends());
    }
    for (begun, ended) in [
        ("clients without TLS are turned away", "no more clients without TLS after "),
        ("clients are turned away, as TLS fails (", "TLS handshakes do not fail any more after "),
    ] {
        wait_until("the end is logged", || lines(&daemon, "WARN", ended) == 1);
        assert_eq!(lines(&daemon, "WARN NBD at tcp:127.0.0.1:", begun), 1, "{}", daemon.said());
        let counted = daemon.said().lines().any(|line| line.contains(ended) && line.ends_with(": 3"));
        assert!(counted, "{}", daemon.said());
    }
    place.down();
    assert!(daemon.ended().0.success());
}
