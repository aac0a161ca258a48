//! Clients and daemons that end in the middle of an operation.

use std::fs;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use crate::common::clients::{complain, fio, missing, qemu_io, start, succeed};
use crate::common::{Place, connect, has_program, wait_until};
use rustix::process::{Pid, Signal, kill_process};

/// A client that writes forever, in long requests, with `iodepth` of them in flight.
struct Writer(Child);

impl Writer {
    fn start(place: &Place, uri: &str) -> Writer {
        let args =
            ["--rw=randwrite", "--bs=256k", "--iodepth=8", "--offset=32M", "--size=32M", "--time_based"];
        let mut args = fio(uri, &args);
        args.extend(["--runtime=300", "--buffer_compress_percentage=50"]);
        let written = place.statistic("pages_written");
        let writer = Writer(start(place, "writer", "fio", &args));
        wait_until("it writes", || place.statistic("pages_written") > written + 1000);
        writer
    }

    /// Waits for its end.
    fn ended(mut self) -> ExitStatus {
        let deadline = Instant::now() + crate::common::PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it still runs");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_client_killed_while_it_writes_costs_nobody_else_anything() {
    let Some(place) = Place::needing(&["fio", "qemu-io"]) else { return };
    let daemon = place.up_sized("64M", &[]);
    let uri = format!("--uri={}", place.uri());
    std::thread::scope(|scope| {
        let verifier = scope.spawn(|| {
            let mut args = fio(&uri, &["--rw=randwrite", "--bsrange=512-16k", "--size=32M", "--loops=2"]);
            args.extend(["--verify=crc32c", "--do_verify=1", "--iodepth=8"]);
            succeed(&place, "fio", &args);
        });
        for _ in 0..5 {
            let writer = Writer::start(&place, &uri);
            kill_process(Pid::from_child(&writer.0), Signal::KILL).unwrap();
            assert!(!writer.ended().success());
        }
        verifier.join().unwrap();
    });
    // Pages that killed clients were writing are whole, old or new, and their connections are gone.
    qemu_io(&place, &["read 32M 32M", "write -P 0x42 32M 32M", "read -P 0x42 32M 32M"]);
    assert_eq!(place.statistic("failed_reads") + place.statistic("failed_writes"), 0);
    wait_until("nobody is connected", || place.run(&["reset", "zram0"]).status.success());
    place.run(&["down"]).ok();
    let (status, stderr) = daemon.ended();
    assert!(status.success() && !stderr.contains("panicked"), "{stderr}");
}

#[test]
fn a_daemon_told_to_end_under_load_leaves_nothing_behind() {
    if missing(&["fio"]) {
        return;
    }
    for signal in [Signal::TERM, Signal::INT] {
        let place = Place::new();
        let daemon = place.up_sized("64M", &[]);
        let (id, uri) = (daemon.id(), format!("--uri={}", place.uri()));
        let writers = [(); 2].map(|()| Writer::start(&place, &uri));
        let idle = connect(&place.socket("nbd.sock"));

        daemon.signal(signal);
        let (status, stderr) = daemon.ended();
        assert!(status.success() && !stderr.contains("panicked"), "{signal:?} {status} {stderr}");
        // Clients get an error: they neither hang nor succeed.
        assert!(writers.into_iter().all(|writer| !writer.ended().success()));
        drop(idle);
        assert!(!fs::exists(format!("/proc/{id}")).unwrap());
        let left = fs::read_dir(place.dir()).unwrap().map(|entry| entry.unwrap().file_name());
        let sockets: Vec<_> = left.filter(|name| name.to_string_lossy().ends_with(".sock")).collect();
        assert!(sockets.is_empty(), "{sockets:?}");
        if has_program("nbdinfo") {
            complain(&place, "nbdinfo", &[&place.uri()]);
        }
        // The next daemon starts at once.
        let next = place.up(&[]);
        place.end(next);
    }
}
