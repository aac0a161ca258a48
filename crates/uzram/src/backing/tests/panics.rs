//! Transfers whose thread ends by a panic.

use super::*;
use crate::base::units::PAGE_SIZE;

fn start(backing: &FileBacking, ends: &Arc<Ends>, buffers: &Buffers, direction: Direction, token: u64) {
    let mut buffer = buffers.take().expect("free");
    buffer.fill(token as u8);
    ends.start(backing, direction, token * PAGE_SIZE as u64, buffer, token);
}

/// Every transfer ends, those in flight and those started later; buffers come back, and callers can still carry out
/// transfers in their own thread.
#[test]
fn nobody_waits_for_an_engine_that_died() {
    const TRANSFERS: u64 = 20;
    for (engine, panic_point) in
        ENGINES.into_iter().flat_map(|engine| [(engine, PanicPoint::Begin), (engine, PanicPoint::Advance)])
    {
        let directory = directory();
        let path = directory.path().join("file");
        let options = FileOptions { queue_depth: 6, ..options(&path, 1 << 20, engine) };
        let backing = FileBacking::open(&options).expect("a backing");
        let (ends, buffers) = (Ends::new(), Buffers::new(TRANSFERS as u32, PAGE_SIZE).expect("memory"));
        start(&backing, &ends, &buffers, Direction::Write, 7);
        assert_eq!(ends.wait(7).1, Ok(()));

        backing.panic_in_next_transfer(panic_point);
        (0..TRANSFERS).for_each(|token| start(&backing, &ends, &buffers, Direction::Read, token));
        let failed = (0..TRANSFERS).filter_map(|token| ends.wait(token).1.err()).collect::<Vec<_>>();
        assert!(!failed.is_empty(), "{engine:?}, {panic_point:?}");
        // A transfer may still end before the engine has noted the panic.
        let deadline = Instant::now() + DEADLINE;
        let error = loop {
            start(&backing, &ends, &buffers, Direction::Write, 3);
            match ends.wait(3).1 {
                Err(error) if error.to_string().contains("a test asked for it") => break error,
                other => assert!(Instant::now() < deadline, "{engine:?}, {panic_point:?}: {other:?}"),
            }
        };
        assert_eq!((error.kind(), error.setting()), (ErrorKind::Io, Some("backing_dev")), "{error}");
        assert!(
            failed.iter().all(|error| error.kind() == ErrorKind::Io && error.to_string().contains("defect"))
        );
        assert_eq!((ends.count(), buffers.free()), (0, TRANSFERS as usize));

        let offset = 7 * PAGE_SIZE as u64;
        let (read, result) = backing.carry_out(
            Direction::Read,
            offset,
            PAGE_SIZE,
            Filling::default(),
            buffers.take().expect("free"),
        );
        assert!(result.is_ok() && read.iter().all(|byte| *byte == 7));
        let dropped = std::thread::spawn(move || drop(backing));
        while !dropped.is_finished() {
            assert!(Instant::now() < deadline, "{engine:?}, {panic_point:?}: its threads do not end");
            std::thread::yield_now();
        }
    }
}
