//! A disk of four times its memory limit, whose backing device fails: clients get an error, and no other data
//! is lost.

use std::time::{Duration, Instant};

use crate::common::gate::{Gate, gated};
use crate::common::{Client, Random, TestServer};
use uzram::backing::{Direction, Fault, FaultKind};
use uzram::device::DeviceStats;
use uzram_serve::nbd::proto::NbdError;

const PIECES: u64 = 512;
const PIECE_BYTES: usize = 64 << 10;
const NONE: [u32; 0] = [];

/// A served disk on a backing device that fails on demand.
struct Faulty {
    server: TestServer,
    gate: Gate,
    client: Client,
}

impl Faulty {
    fn new() -> Self {
        let (device, gate) = gated("zram0", "32M", &[("mem_limit", "8M")]);
        let server = TestServer::with(device, |_| {});
        let client = server.ready(true);
        Faulty { server, gate, client }
    }

    /// Returns the offset and the contents of a piece, which hardly compress; the pieces are in no order.
    fn piece(number: u64) -> (u64, Vec<u8>) {
        let number = number * 77 % PIECES;
        (number * PIECE_BYTES as u64, Random::new(number).bytes(PIECE_BYTES))
    }

    /// Writes the whole disk; returns the errors.
    fn fill(&mut self) -> Vec<u32> {
        let write = |number| {
            let (offset, data) = Faulty::piece(number);
            self.client.write(offset, &data).error
        };
        (0..PIECES).map(write).filter(|error| *error != 0).collect()
    }

    /// Reads the whole disk, and checks what it gets; returns the errors.
    fn verify(&mut self) -> Vec<u32> {
        let read = |number| {
            let (offset, data) = Faulty::piece(number);
            let reply = self.client.read(0, offset, PIECE_BYTES as u32);
            assert!(reply.error != 0 || reply.data() == data, "wrong data at {offset}");
            reply.error
        };
        (0..PIECES).map(read).filter(|error| *error != 0).collect()
    }

    fn stats(&self) -> DeviceStats {
        self.server.device.stats()
    }
}

#[test]
fn what_cannot_be_written_stays_in_memory() {
    for kind in [FaultKind::Error, FaultKind::Short, FaultKind::Stall(Duration::from_millis(30))] {
        let mut faulty = Faulty::new();
        let writes = Fault { direction: Some(Direction::Write), one_in: 4, ..Fault::always(kind) };
        faulty.gate.faults.add(writes);
        assert_eq!(faulty.fill(), NONE);
        assert!(faulty.gate.faults.injected() > 0);
        let failed = faulty.stats().backing_failed_writes;
        assert_eq!(failed > 0, !matches!(kind, FaultKind::Stall(_)), "{kind:?}: {failed}");
        assert_eq!(faulty.verify(), NONE);
    }
}

#[test]
fn what_cannot_be_read_is_an_error_and_is_there_afterwards() {
    for kind in [FaultKind::Error, FaultKind::FlipBit] {
        let mut faulty = Faulty::new();
        assert_eq!(faulty.fill(), NONE);
        faulty.gate.faults.add(Fault { direction: Some(Direction::Read), one_in: 5, ..Fault::always(kind) });
        let errors = faulty.verify();
        assert!(!errors.is_empty() && errors.iter().all(|error| *error == NbdError::Io as u32));
        faulty.gate.faults.clear();
        assert_eq!(faulty.verify(), NONE);
        let (stats, flips) = (faulty.stats(), matches!(kind, FaultKind::FlipBit));
        assert_eq!((stats.backing_failed_reads > 0, stats.backing_corrupted > 0), (!flips, flips));
    }
}

#[test]
fn a_device_that_is_gone_leaves_what_is_in_memory() {
    let mut faulty = Faulty::new();
    faulty.gate.faults.add(Fault::always(FaultKind::Error));
    let errors = faulty.fill();
    assert!(!errors.is_empty() && errors.iter().all(|error| *error == NbdError::NoSpc as u32));
    let stats = faulty.stats();
    assert!(stats.backing_failed_writes > 0 && stats.failed_writes > 0, "{stats:?}");
    assert_eq!((stats.pages_backed, stats.failed_reads), (0, 0), "{stats:?}");
    assert!(stats.mem_charged_bytes <= 8 << 20, "{stats:?}");
    // The backing device works again.
    faulty.gate.faults.clear();
    let started = Instant::now();
    while faulty.fill() != NONE {
        assert!(started.elapsed() < Duration::from_secs(60), "it is used again after a while");
    }
    assert_eq!(faulty.verify(), NONE);
}
