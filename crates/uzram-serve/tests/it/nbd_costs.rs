//! What clients cost the server's process. Each test is alone in its process, which it measures or leaves
//! without descriptors.

use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::alone::alone;
use crate::common::secure::Secure;
use crate::common::{Client, TestServer, cmd, eventually};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use uzram_serve::nbd::SHARED_BYTES;

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn a_server_without_descriptors_serves_on_and_waits_in_peace() {
    if !alone("nbd_costs::a_server_without_descriptors_serves_on_and_waits_in_peace") {
        return;
    }
    let server = TestServer::new("1M");
    let mut served = server.ready(true);
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), maximum: limit.maximum }).unwrap();
    let mut hoard = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        hoard.push(file);
    }
    hoard.pop();
    let waiting = UnixStream::connect(&server.path).unwrap();

    let (started, used) = (Instant::now(), processor_time());
    assert_eq!(served.write(0, b"served").error, 0);
    std::thread::sleep(Duration::from_millis(300));
    let used = processor_time() - used;
    assert!(used < started.elapsed() / 2, "waiting for descriptors took {used:?} of processor time");

    hoard.clear();
    let mut waiting = Client::over(waiting);
    assert_eq!(waiting.take::<8>(), *b"NBDMAGIC");
}

/// Returns the voluntary context switches of this process's connection threads.
fn wakeups() -> u64 {
    let mut sum = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let dir = task.unwrap().path();
        let name = std::fs::read_to_string(dir.join("comm")).unwrap_or_default();
        if name.starts_with("nbd-") {
            let status = std::fs::read_to_string(dir.join("status")).unwrap_or_default();
            let switches = status.lines().filter_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            sum += switches.filter_map(|count| count.trim().parse::<u64>().ok()).sum::<u64>();
        }
    }
    sum
}

#[test]
fn idle_clients_wake_nobody() {
    if !alone("nbd_costs::idle_clients_wake_nobody") {
        return;
    }
    let secure = Secure::new();
    let mut steady = secure.steady();
    let mut clients: Vec<_> = (0..5).map(|_| secure.ready()).collect();
    clients.iter_mut().for_each(|client| assert_eq!(client.write(0, b"awake").error, 0));
    // The server's threads may still have work after a reply.
    eventually(|| {
        let before = wakeups();
        std::thread::sleep(Duration::from_millis(500));
        wakeups() == before
    });
    clients.iter_mut().for_each(|client| assert_eq!(client.write(0, b"again").error, 0));
    assert_eq!(steady.write(0, b"too").error, 0);
}

const CLIENTS: usize = 60;

fn anonymous_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
}

#[test]
fn unread_replies_over_tls_take_no_more_than_there_is_for_all() {
    if !alone("nbd_costs::unread_replies_over_tls_take_no_more_than_there_is_for_all") {
        return;
    }
    let secure = Secure::new();
    let before_bytes = anonymous_bytes();
    let deaf: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let mut client = secure.over(&rustls::version::TLS13);
            client.go(false);
            client.request(0, cmd::READ, 0, 32 << 20, &[]);
            client.stream.flush().unwrap();
            client
        })
        .collect();
    // Until it has grown no more for a while.
    let (mut grew, mut most_bytes) = (Instant::now(), 0);
    while grew.elapsed() < Duration::from_secs(1) {
        let now_bytes = anonymous_bytes();
        if now_bytes > most_bytes {
            (grew, most_bytes) = (Instant::now(), now_bytes);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let grown = most_bytes - before_bytes;
    // The minimum of each connection, and the same again for its client, which is in this process, too.
    let least = CLIENTS * (512 << 10);
    assert!(grown < SHARED_BYTES + least + (16 << 20), "{} MiB more than before", grown >> 20);
    assert_eq!(secure.steady().write(0, b"meanwhile").error, 0);
    drop(deaf);
}
