//! The cost of idle clients.

use std::time::Duration;

use crate::alone::alone;
use crate::common::secure::Secure;

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
    if !alone("nbd_idle::idle_clients_wake_nobody") {
        return;
    }
    let secure = Secure::new();
    let mut steady = secure.steady();
    let mut clients: Vec<_> = (0..5).map(|_| secure.ready()).collect();
    clients.iter_mut().for_each(|client| assert_eq!(client.write(0, b"awake").error, 0));
    // The server's threads may still have work after a reply.
    crate::common::eventually(|| {
        let before = wakeups();
        std::thread::sleep(Duration::from_millis(500));
        wakeups() == before
    });
    clients.iter_mut().for_each(|client| assert_eq!(client.write(0, b"again").error, 0));
    assert_eq!(steady.write(0, b"too").error, 0);
}
