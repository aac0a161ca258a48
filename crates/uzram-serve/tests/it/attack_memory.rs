//! The memory that clients over TLS can make a server hold. Alone in its process, whose memory it measures.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::alone::alone;
use crate::common::cmd;
use crate::common::secure::{Secure, client_config, start_tls};
use uzram_serve::nbd::SHARED_BYTES;

const CLIENTS: usize = 60;

fn anonymous_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
}

#[test]
fn unread_replies_over_tls_take_no_more_than_there_is_for_all() {
    if !alone("attack_memory::unread_replies_over_tls_take_no_more_than_there_is_for_all") {
        return;
    }
    let secure = Secure::new();
    let before_bytes = anonymous_bytes();
    let deaf: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let config = client_config(&secure.authority, None, &rustls::version::TLS13);
            let mut client = start_tls(secure.tcp(), config);
            client.go(false);
            client.request(0, cmd::READ, 0, 32 << 20, &[]);
            client.stream.flush().unwrap();
            client
        })
        .collect();
    let (began, mut most_bytes) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs(3) {
        most_bytes = most_bytes.max(anonymous_bytes());
        std::thread::sleep(Duration::from_millis(10));
    }
    let grown = most_bytes - before_bytes;
    // The minimum of each connection, and the same again for its client, which is in this process, too.
    let least = CLIENTS * (512 << 10);
    assert!(grown < SHARED_BYTES + least + (16 << 20), "{} MiB more than before", grown >> 20);
    assert_eq!(secure.steady().write(0, b"meanwhile").error, 0);
    drop(deaf);
}
