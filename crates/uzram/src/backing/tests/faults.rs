//! Injected faults, and how they are reported.

use super::*;
use crate::base::units::PAGE_SIZE;

const LEN_BYTES: u64 = 1 << 20;
const BUFFER_BYTES: usize = 4 * PAGE_SIZE;

struct Bench {
    backing: FaultyBacking<FileBacking>,
    faults: Faults,
    buffers: Buffers,
    _directory: tempfile::TempDir,
}

fn bench(engine: Engine, seed: u64) -> Bench {
    let directory = directory();
    let inner = open(&directory.path().join("file"), LEN_BYTES, engine);
    let backing = FaultyBacking::new(inner, seed);
    let (faults, buffers) = (backing.faults(), Buffers::new(16, BUFFER_BYTES).expect("memory"));
    Bench { backing, faults, buffers, _directory: directory }
}

impl Bench {
    fn write(&self, offset: u64, byte: u8) -> Result<()> {
        let mut buffer = self.buffers.take().expect("a free buffer");
        buffer.fill(byte);
        self.backing.carry_out(Direction::Write, offset, BUFFER_BYTES, buffer).1
    }

    fn read(&self, offset: u64) -> Result<Vec<u8>> {
        let buffer = self.buffers.take().expect("a free buffer");
        let (buffer, result) = self.backing.carry_out(Direction::Read, offset, BUFFER_BYTES, buffer);
        result.map(|()| buffer.to_vec())
    }
}

fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.expect_err("a fault").kind()
}

#[test]
fn faults_meet_what_they_are_meant_for() {
    let bench = bench(Engine::Auto, 1);
    let far = LEN_BYTES / 2;
    assert_eq!((bench.write(0, 1), bench.write(far, 2)), (Ok(()), Ok(())));
    assert_eq!(bench.faults.injected(), 0);

    // The range ends just before the second write, and starts within the first.
    let range = BUFFER_BYTES as u64 - 1..far;
    bench.faults.add(Fault { range, direction: Some(Direction::Write), ..Fault::always(FaultKind::Error) });
    assert_eq!(kind(bench.write(0, 3)), ErrorKind::Io);
    assert_eq!(bench.write(far, 3), Ok(()));
    assert_eq!(bench.read(0).expect("reads pass"), [1; BUFFER_BYTES], "nothing was written");

    bench.faults.clear();
    bench.faults.add(Fault { times: 2, ..Fault::always(FaultKind::NoSpace) });
    let results: Vec<bool> = (0..5).map(|_| bench.write(0, 4).is_ok()).collect();
    assert_eq!(results, [false, false, true, true, true]);
    assert_eq!(bench.faults.injected(), 3);

    bench.faults.clear();
    bench.faults.add(Fault { times: 1, ..Fault::always(FaultKind::NoSpace) });
    assert_eq!(kind(bench.write(0, 4)), ErrorKind::NoSpace);

    bench.faults.add(Fault { times: 1, ..Fault::always(FaultKind::Short) });
    assert_eq!(kind(bench.write(0, 5)), ErrorKind::Io);
    let read = bench.read(0).expect("readable");
    assert_eq!(read[..BUFFER_BYTES / 2], [5; BUFFER_BYTES / 2], "half of it was written");
    assert_eq!(read[BUFFER_BYTES / 2..], [4; BUFFER_BYTES / 2]);

    bench.faults.add(Fault { times: 1, ..Fault::always(FaultKind::FlipBit) });
    assert_eq!(bench.write(0, 0), Ok(()), "writes pass");
    let flipped: u32 = bench.read(0).expect("no error").iter().map(|byte| byte.count_ones()).sum();
    assert_eq!(flipped, 1);
    assert_eq!(bench.read(0).expect("no error"), [0; BUFFER_BYTES]);

    // The device fails, and recovers.
    bench.faults.add(Fault::always(FaultKind::Error));
    assert_eq!((kind(bench.read(0)), kind(bench.write(far, 1))), (ErrorKind::Io, ErrorKind::Io));
    bench.faults.clear();
    assert_eq!(bench.read(0).expect("back"), [0; BUFFER_BYTES]);
}

#[test]
fn a_stall_lasts_and_ends_with_the_backing() {
    let bench = bench(Engine::Auto, 1);
    let stall = Duration::from_millis(50);
    bench.faults.add(Fault { times: 1, ..Fault::always(FaultKind::Stall(stall)) });
    let begun = Instant::now();
    assert_eq!(bench.write(0, 1), Ok(()));
    assert!(begun.elapsed() >= stall);
    // A transfer that stalls forever does not delay others.
    bench.faults.add(Fault { times: 1, ..Fault::always(FaultKind::Stall(Duration::MAX)) });
    let ends = Ends::new();
    let buffer = bench.buffers.take().expect("free");
    ends.start(&bench.backing, (Direction::Read, 0), buffer, 1);
    assert_eq!(bench.read(0).expect("no error"), [1; BUFFER_BYTES]);
    assert_eq!(ends.count(), 0);
    drop(bench.backing);
    let (buffer, result) = ends.wait(1);
    assert!(result.is_ok() && buffer.iter().all(|byte| *byte == 1));
}

#[test]
fn what_is_held_begins_when_the_faults_are_cleared() {
    let bench = bench(Engine::Auto, 1);
    let ends = Ends::new();
    let start = |token| {
        let mut buffer = bench.buffers.take().expect("free");
        buffer.fill(token as u8);
        let offset = token * BUFFER_BYTES as u64;
        ends.start(&bench.backing, (Direction::Write, offset), buffer, token);
    };
    for first in [1, 5] {
        let injected = bench.faults.injected();
        bench.faults.add(Fault { times: 3, ..Fault::always(FaultKind::Hold) });
        (first..first + 3).for_each(start);
        assert_eq!(bench.write(0, 1), Ok(()), "three are held, and others pass");
        assert_eq!((ends.count(), bench.faults.injected()), (0, injected + 3));
        bench.faults.clear();
        for token in first..first + 3 {
            assert_eq!(ends.wait(token).1, Ok(()));
            let read = bench.read(token * BUFFER_BYTES as u64).expect("no error");
            assert_eq!(read, [token as u8; BUFFER_BYTES]);
        }
    }
    // Other faults apply after the hold; and dropping the backing ends the hold.
    bench.faults.add(Fault::always(FaultKind::Hold));
    bench.faults.add(Fault::always(FaultKind::Error));
    start(1);
    bench.faults.clear();
    assert_eq!(kind(ends.wait(1).1), ErrorKind::Io);
    bench.faults.add(Fault::always(FaultKind::Hold));
    start(2);
    drop(bench.backing);
    assert_eq!(ends.wait(2).1, Ok(()));
}

#[test]
fn every_transfer_ends_once_whatever_happens() {
    for (seed, engine) in (1..5).zip(ENGINES.into_iter().cycle()) {
        let bench = bench(engine, seed);
        for kind in [
            FaultKind::Error,
            FaultKind::NoSpace,
            FaultKind::Short,
            FaultKind::Stall(Duration::from_micros(300)),
            FaultKind::FlipBit,
        ] {
            bench.faults.add(Fault { one_in: 7, ..Fault::always(kind) });
        }
        let (ends, places) = (Ends::new(), LEN_BYTES / BUFFER_BYTES as u64);
        let mut outcomes = [0u64; 2];
        let mut end = |token| {
            let result = ends.wait(token).1;
            if let Err(error) = &result {
                assert!(error.to_string().contains("injected"), "seed {seed}: {error}");
            }
            outcomes[usize::from(result.is_err())] += 1;
        };
        const TRANSFERS: u64 = 2000;
        const AT_A_TIME: u64 = 12;
        for token in 0..TRANSFERS {
            let buffer = bench.buffers.take().expect("free: at most 12 are in flight");
            let direction = if token % 2 == 0 { Direction::Write } else { Direction::Read };
            ends.start(&bench.backing, (direction, token % places * BUFFER_BYTES as u64), buffer, token);
            if token >= AT_A_TIME - 1 {
                end(token + 1 - AT_A_TIME);
            }
        }
        // The last ones end when the backing is dropped.
        drop(bench.backing);
        assert_eq!(ends.count() as u64, AT_A_TIME - 1, "seed {seed}");
        (TRANSFERS + 1 - AT_A_TIME..TRANSFERS).for_each(end);
        assert!(outcomes.iter().all(|count| *count > 300), "seed {seed}: {outcomes:?}");
        assert!(bench.faults.injected() >= outcomes[1]);
        assert_eq!(bench.buffers.free(), 16, "seed {seed}");
    }
}

#[test]
fn the_same_seed_fails_in_the_same_places() {
    let run = || {
        let bench = bench(Engine::Auto, 42);
        bench.faults.add(Fault { one_in: 3, ..Fault::always(FaultKind::Error) });
        (0..60).map(|_| bench.write(0, 1).is_ok()).collect::<Vec<bool>>()
    };
    let first = run();
    assert!(first.contains(&true) && first.contains(&false));
    assert_eq!(first, run());
}
