//! A server that runs out of file descriptors. Alone in its process, which is left with none.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::alone::alone;
use crate::common::{Client, TestServer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn a_server_without_descriptors_serves_on_and_waits_in_peace() {
    if !alone("nbd_descriptors::a_server_without_descriptors_serves_on_and_waits_in_peace") {
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
