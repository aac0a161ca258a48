//! fio on a disk of four times its memory limit, whose backing device fails: clients get an error, and no other data is
//! lost.

use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use crate::common::TestServer;
use uzram::backing::{Direction, Fault, FaultKind, Faults, FaultyBacking, FileBacking, FileOptions};
use uzram::device::{Device, NamedBacking};

const DISK: &str = "32M";

/// A served disk on a backing device that fails on demand.
struct Faulty {
    server: TestServer,
    faults: Faults,
    _directory: tempfile::TempDir,
}

impl Faulty {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let options =
            FileOptions { size_bytes: Some(64 << 20), ..FileOptions::new(directory.path().join("backing")) };
        let faulty = FaultyBacking::new(FileBacking::open(&options).unwrap(), crate::common::seed()).unwrap();
        let faults = faulty.faults();
        let device = Device::new("zram0").unwrap();
        device.set_backing(Some(NamedBacking::new("faulty", "in a test", Arc::new(faulty)))).unwrap();
        device.set("mem_limit", "8M").unwrap();
        device.set("disksize", DISK).unwrap();
        Faulty { server: TestServer::with(device, |_| {}), faults, _directory: directory }
    }

    /// Runs a fio job over the whole disk, which verifies its reads.
    fn fio(&self, more: &[&str]) -> Output {
        let uri = format!("--uri={}", self.server.uri());
        let size = format!("--size={DISK}");
        let mut command = Command::new("timeout");
        command.args(["60", "fio", "--name=test", "--ioengine=nbd", &uri, "--thread", &size, "--bs=4k"]);
        command.args(["--iodepth=16", "--verify=crc32c", "--verify_state_save=0"]);
        // The whole disk: random blocks without repetition, the same in each job.
        command.args(["--randrepeat=1", "--randseed=7", "--buffer_compress_percentage=20"]);
        command.args(more).current_dir(self.server.directory()).output().unwrap()
    }

    fn fill(&self) -> Output {
        self.fio(&["--rw=randwrite", "--do_verify=0"])
    }

    fn verify(&self) -> Output {
        self.fio(&["--rw=randwrite", "--verify_only"])
    }

    fn statistics(&self) -> uzram::device::DeviceStats {
        self.server.device.stats()
    }
}

fn has_fio() -> bool {
    let works = Command::new("fio").arg("--version").output().is_ok_and(|output| output.status.success());
    if !works {
        println!("skipped: fio is not installed");
    }
    works
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn succeed(output: &Output) {
    assert!(output.status.success(), "{}", text(output));
}

/// Checks that the client gets an error, and never wrong data.
fn fail(output: &Output, error: &str) {
    let said = text(output);
    assert!(!output.status.success() && said.contains(error), "{said}");
    assert!(!said.contains("verify:") && !said.contains("verify failed"), "{said}");
}

#[test]
fn what_cannot_be_written_stays_in_memory() {
    if !has_fio() {
        return;
    }
    for kind in [FaultKind::Error, FaultKind::Short, FaultKind::Stall(Duration::from_millis(300))] {
        let faulty = Faulty::new();
        let writes = Fault { direction: Some(Direction::Write), one_in: 4, ..Fault::always(kind) };
        faulty.faults.add(writes);
        succeed(&faulty.fill());
        assert!(faulty.faults.injected() > 0);
        let failed = faulty.statistics().backing_failed_writes;
        assert_eq!(failed > 0, !matches!(kind, FaultKind::Stall(_)), "{kind:?}: {failed}");
        succeed(&faulty.verify());
    }
}

#[test]
fn what_cannot_be_read_is_an_error_and_is_there_afterwards() {
    if !has_fio() {
        return;
    }
    for kind in [FaultKind::Error, FaultKind::FlipBit] {
        let faulty = Faulty::new();
        succeed(&faulty.fill());
        faulty.faults.add(Fault { direction: Some(Direction::Read), one_in: 50, ..Fault::always(kind) });
        fail(&faulty.verify(), "Input/output error");
        faulty.faults.clear();
        succeed(&faulty.verify());
        let stats = faulty.statistics();
        assert_eq!(
            (stats.backing_failed_reads > 0, stats.backing_corrupted > 0),
            match kind {
                FaultKind::FlipBit => (false, true),
                _ => (true, false),
            }
        );
    }
}

#[test]
fn a_device_that_is_gone_leaves_what_is_in_memory() {
    if !has_fio() {
        return;
    }
    let faulty = Faulty::new();
    faulty.faults.add(Fault::always(FaultKind::Error));
    fail(&faulty.fill(), "No space left on device");
    let stats = faulty.statistics();
    assert!(stats.backing_failed_writes > 0 && stats.failed_writes > 0, "{stats:?}");
    assert_eq!((stats.pages_backed, stats.failed_reads), (0, 0), "{stats:?}");
    assert!(stats.mem_charged_bytes <= 8 << 20, "{stats:?}");
    // The backing device works again.
    faulty.faults.clear();
    succeed(&faulty.fill());
    succeed(&faulty.verify());
}
