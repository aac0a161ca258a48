//! What a daemon's log says, at its default level, of what goes wrong while it serves: a warning at the first
//! failure, and one at the end.

use crate::common::*;
use crate::nbd::info_request;
use crate::nbd::pki::Authority;
use uzram_serve::nbd::proto::{option, reply};

fn up(place: &Place, args: &str) -> Daemon {
    let started = place.start(&format!("up {args}"));
    wait_until("it serves", || place.run("status").status.success());
    started
}

fn warnings(daemon: &Daemon, words: &str) -> usize {
    daemon.said().lines().filter(|line| line.contains("WARN") && line.contains(words)).count()
}

/// Writes random bytes to the disk, a MiB at a time; returns how many could be written, at most `most`.
fn write_random(place: &Place, seed: u64, most: u64) -> u64 {
    let (mut client, mut random) = (place.nbd(), Random::new(seed));
    let bytes = random.bytes(MIB as usize);
    (0..most).find(|nth| client.write(nth * MIB, &bytes).error != 0).unwrap_or(most)
}

/// Returns how often the thread that reports has waited.
fn waits(place: &Place) -> u64 {
    let status = thread_status(place.worker_id(), "conditions");
    status_field(&status, "voluntary_ctxt_switches").parse().unwrap()
}

#[test]
fn writes_that_are_refused_are_logged_at_the_first_and_at_the_end() {
    let place = Place::new();
    let daemon = up(&place, "--size 32M --mem-limit 8M");
    wait_until("nothing is wrong, and it sleeps", || {
        let before = waits(&place);
        thread::sleep(Duration::from_millis(1100));
        waits(&place) == before
    });
    assert!(write_random(&place, 1, 32) < 32);
    let why = "zram0: writes are refused: memory is at mem_limit (8 MiB): raise mem_limit, or add";
    let refused = || warnings(&daemon, why);
    wait_until("it is logged", || refused() == 1);
    // The next process goes on.
    place.take_over();
    assert!(write_random(&place, 2, 32) < 32);
    place.set("mem_limit=64M");
    assert_eq!(write_random(&place, 3, 16), 16);
    let accepted = || warnings(&daemon, "zram0: writes are accepted again after ");
    wait_until("the end is logged", || accepted() == 1);
    assert_eq!(warnings(&daemon, "; refused: "), 1, "{}", daemon.said());
    place.down();
    assert_eq!((refused(), accepted()), (1, 1), "{}", daemon.said());
    daemon.succeeds();
}

#[test]
fn a_full_backing_device_is_logged_once_and_its_end_too() {
    let place = Place::new();
    let daemon = up(&place, &format!("--size 64M --mem-limit 8M --backing {}", place.path("cold:16M")));
    assert!(write_random(&place, 4, 64) < 64);
    let said = || {
        [
            "the backing device is full: ",
            "writes are refused: memory is at mem_limit (8 MiB), and no more pages leave it: raise mem_limit",
            "the backing device is ok again after ",
            "writes are accepted again after ",
        ]
        .map(|words| warnings(&daemon, &format!("zram0: {words}")))
    };
    wait_until("it is logged", || said()[..2] == [1, 1]);
    place.run("stat zram0").shows(&["the backing device is full: "]);
    assert_eq!(place.nbd().call(0, cmd::TRIM, 0, 64 << 20, &[]).error, 0);
    wait_until("the end is logged", || said()[2..] == [1, 1]);
    place.down();
    assert_eq!(said(), [1; 4], "{}", daemon.said());
    daemon.succeeds();
}

#[test]
fn clients_that_are_turned_away_are_logged_at_the_first_and_at_the_end() {
    let place = Place::new();
    Authority::new("authority").write_all(place.root());
    let tls = place.tls_options(true);
    let daemon = up(&place, &format!("--size 16M --listen tcp:127.0.0.1:0 {tls}"));
    let list = place.json("list");
    let uris = list["devices"][0]["uris"].as_array().unwrap();
    let uri = uris.iter().find_map(|uri| uri.as_str().unwrap().strip_prefix("nbds://")).unwrap();
    let port = uri.split_once('/').unwrap().0;
    for _ in 0..3 {
        let refused = tcp(port).option(option::GO, &info_request(b"", &[])).pop().unwrap();
        assert_eq!(refused.0, reply::ERR_TLS_REQD);
        let mut client = tcp(port);
        assert_eq!(client.option(option::STARTTLS, &[])[0].0, reply::ACK);
        // What is no TLS.
        client.send(&[0x16, 3, 1, 0, 4, 9, 9, 9, 9]);
        let end = client.stream.read_to_end(&mut Vec::new());
        assert!(end.map_or_else(|why| why.kind() == ErrorKind::ConnectionReset, |_| true));
    }
    for (begun, ended) in [
        ("clients without TLS are turned away", "no more clients without TLS after "),
        ("clients are turned away, as TLS fails (", "TLS handshakes do not fail any more after "),
    ] {
        wait_until("the end is logged", || warnings(&daemon, ended) == 1);
        let said = daemon.said();
        let of_port = |line: &&str| line.contains("WARN NBD at tcp:127.0.0.1:") && line.contains(begun);
        assert_eq!(said.lines().filter(of_port).count(), 1, "{said}");
        assert!(said.lines().any(|line| line.contains(ended) && line.ends_with(": 3")), "{said}");
    }
    place.end(daemon);
}
