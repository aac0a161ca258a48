//! Opening files and devices: sizes, locks, space, and refusals.

use std::os::unix::fs::MetadataExt;
use std::os::unix::fs::PermissionsExt;

use super::model::agrees;
use super::*;
use crate::backing::file::engine::{PanicPoint, QUEUE_DEPTH};
use crate::base::units::PAGE_SIZE;

fn refused(options: &FileOptions) -> Error {
    let error = FileBacking::open(options).map(|_| ()).expect_err("refused");
    assert_eq!(error.setting(), Some("backing_dev"), "{error}");
    error
}

fn block(buffers: &Buffers, byte: u8) -> Buffer {
    let mut buffer = buffers.take().expect("a free buffer");
    buffer.fill(byte);
    buffer
}

/// Carries out a transfer by the engine and again by this thread, and checks that the results are equal.
fn both_ways(backing: &FileBacking, at: Where, len_bytes: usize, buffer: Buffer) -> Done {
    let ends = Ends::new();
    ends.start_part(backing, at, len_bytes, buffer, 0);
    let (buffer, by_engine) = ends.wait(0);
    let (buffer, by_caller) = backing.carry_out(at.0, at.1, len_bytes, buffer);
    assert_eq!(by_engine, by_caller);
    (buffer, by_caller)
}

#[test]
fn buffers_are_zeros_apart_from_each_other_and_come_back() {
    let buffers = Buffers::new(3, 2 * PAGE_SIZE).expect("memory");
    let mut taken: Vec<Buffer> = (0..3).map(|_| buffers.take().expect("free")).collect();
    assert!(buffers.take().is_none() && buffers.free() == 0);
    for (byte, buffer) in (1..).zip(&mut taken) {
        assert_eq!((buffer.as_ptr() as usize) % PAGE_SIZE, 0);
        assert!(buffer.iter().all(|byte| *byte == 0));
        buffer.fill(byte);
    }
    for (byte, buffer) in (1..).zip(&taken) {
        assert!(buffer.iter().all(|at| *at == byte));
    }
    // Buffers outlive the pool.
    drop(buffers);
    assert_eq!(taken[2][0], 3);
    for bad in [0, 100, MAX_BUFFER_BYTES + PAGE_SIZE] {
        assert_eq!(Buffers::new(1, bad).map(|_| ()).expect_err("bad").kind(), ErrorKind::Invalid);
    }
    let huge = Buffers::new(u32::MAX, MAX_BUFFER_BYTES).map(|_| ()).expect_err("more than there is");
    assert_eq!(huge.kind(), ErrorKind::NoMemory);
}

#[test]
fn a_file_is_made_reserved_kept_and_extended() {
    let directory = directory();
    let path = directory.path().join("file");
    let buffers = Buffers::new(1, PAGE_SIZE).expect("memory");
    {
        let backing = open(&path, (1 << 20) + 17, Engine::Auto);
        assert_eq!(backing.len_bytes(), 1 << 20, "whole blocks");
        let data = std::fs::metadata(&path).expect("made");
        assert_eq!(data.len(), (1 << 20) + HEADER_BYTES);
        assert_eq!(data.permissions().mode() & 0o777, 0o600);
        assert!(backing.is_reserved() && data.blocks() * 512 >= 1 << 20, "{} blocks", data.blocks());
        let (_, result) = both_ways(&backing, (Direction::Write, 0), PAGE_SIZE, block(&buffers, 7));
        assert_eq!(result, Ok(()));
    }
    let backing = open(&path, 2 << 20, Engine::Auto);
    assert_eq!((backing.len_bytes(), file_bytes(&path)), (2 << 20, (2 << 20) + HEADER_BYTES));
    let (read, result) = both_ways(&backing, (Direction::Read, 0), PAGE_SIZE, block(&buffers, 0));
    assert!(result.is_ok() && read.iter().all(|byte| *byte == 7), "what was in it is kept");
    drop((backing, read));
    let part = open(&path, 1 << 20, Engine::Auto);
    assert_eq!((part.len_bytes(), file_bytes(&path)), (1 << 20, (2 << 20) + HEADER_BYTES));
    let shared = refused(&options(&path, 4 << 20, Engine::Auto));
    assert!(shared.kind() == ErrorKind::Busy && file_bytes(&path) < 4 << 20, "{shared}");
    drop(part);
    let all = FileBacking::open(&FileOptions::new(&path)).expect("all of it");
    assert_eq!(all.len_bytes(), 2 << 20);
}

#[test]
fn what_is_no_backing_is_refused_with_a_reason() {
    let directory = directory();
    let at = |name: &str| directory.path().join(name);
    own_file(&at("empty"), b"");
    own_file(&at("small"), b"x");
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).expect("a socket");
    rustix::fs::mkfifoat(rustix::fs::CWD, at("pipe"), rustix::fs::Mode::RUSR).expect("a pipe");
    for (name, kind, why) in [
        ("", ErrorKind::Invalid, "is a directory"),
        ("socket", ErrorKind::Invalid, "is a socket"),
        ("pipe", ErrorKind::Invalid, "is a pipe"),
        ("empty", ErrorKind::Invalid, "give it a size"),
        ("small", ErrorKind::Invalid, "no room for a block"),
        ("none", ErrorKind::NotFound, "would be made"),
        ("none/file", ErrorKind::NotFound, "none"),
    ] {
        let error = refused(&FileOptions { force: true, ..FileOptions::new(at(name)) });
        assert_eq!(error.kind(), kind, "{name}: {error}");
        assert!(error.to_string().contains(why), "{name}: {error}");
    }
    assert_eq!(refused(&FileOptions::new("/dev/null")).kind(), ErrorKind::Invalid);
    for size in [0, 100] {
        refused(&options(&at("new"), size, Engine::Auto));
        assert!(!at("new").exists(), "what was made is removed");
    }
    assert_eq!(refused(&options(&at("new"), u64::MAX, Engine::Auto)).kind(), ErrorKind::Invalid);
    // Larger than ext4's largest file, and than the disk with other file systems.
    let error = refused(&options(&at("new"), 1 << 60, Engine::Auto));
    assert!(matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Invalid), "{error}");
    assert!(!at("new").exists(), "what was made is removed");
    refused(&FileOptions { force: true, ..options(&at("small"), 1 << 60, Engine::Auto) });
    assert_eq!(file_bytes(&at("small")), 1, "it was left alone");
}

#[test]
fn a_bad_transfer_ends_with_an_error() {
    let directory = directory();
    for engine in ENGINES {
        let backing = open(&directory.path().join("file"), 1 << 20, engine);
        let buffers = Buffers::new(1, 2 * PAGE_SIZE).expect("memory");
        for (offset, len_bytes, kind) in [
            (0, 0, ErrorKind::Invalid),
            (0, 3 * PAGE_SIZE, ErrorKind::Invalid),
            (1, PAGE_SIZE, ErrorKind::Invalid),
            (0, 100, ErrorKind::Invalid),
            (1 << 20, PAGE_SIZE, ErrorKind::OutOfRange),
            ((1 << 20) - PAGE_SIZE as u64, 2 * PAGE_SIZE, ErrorKind::OutOfRange),
            (u64::MAX - 4095, PAGE_SIZE, ErrorKind::OutOfRange),
        ] {
            let (buffer, result) =
                both_ways(&backing, (Direction::Write, offset), len_bytes, block(&buffers, 1));
            assert_eq!(result.expect_err("bad").kind(), kind, "{engine:?} {offset} {len_bytes}");
            drop(buffer);
        }
        backing.discard(1 << 20, 1);
        backing.discard(u64::MAX, u64::MAX);
        drop(backing);
        // A bad transfer that the engine finds only while it is being dropped.
        for _ in 0..100 {
            let backing = open(&directory.path().join("file"), 1 << 20, engine);
            let (buffers, ends) = (Buffers::new(1, PAGE_SIZE).expect("memory"), Ends::new());
            ends.start_part(&backing, (Direction::Read, 1), PAGE_SIZE, block(&buffers, 1), 0);
            drop(backing);
            assert_eq!(ends.wait(0).1.expect_err("bad").kind(), ErrorKind::Invalid);
        }
    }
}

#[test]
fn a_file_that_becomes_shorter_is_an_error() {
    for (engine, through_page_cache) in
        ENGINES.into_iter().flat_map(|engine| [(engine, false), (engine, true)])
    {
        let directory = directory();
        let path = directory.path().join("file");
        let options = FileOptions { through_page_cache, ..options(&path, 1 << 20, engine) };
        let backing = FileBacking::open(&options).expect("a backing");
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("the file");
        let buffers = Buffers::new(1, 4 * PAGE_SIZE).expect("memory");
        // Within the transfer, at its start, and before it.
        for kept_pages in [2, 0] {
            file.set_len(HEADER_BYTES + kept_pages * PAGE_SIZE as u64).expect("cut");
            for offset in [0, 1 << 19] {
                let (_, result) =
                    both_ways(&backing, (Direction::Read, offset), 4 * PAGE_SIZE, block(&buffers, 1));
                let error = result.expect_err("it is not there");
                assert_eq!(error.kind(), ErrorKind::Io, "{engine:?} {error}");
                assert!(error.to_string().contains("shorter"), "{engine:?} {error}");
            }
        }
    }
}

#[test]
fn all_that_was_started_ends_before_a_backing_is_gone() {
    const TRANSFERS: u64 = 200;
    for engine in ENGINES {
        let directory = directory();
        let path = directory.path().join("file");
        let buffers = Buffers::new(TRANSFERS as u32, PAGE_SIZE).expect("memory");
        let (ends, backing) = (Ends::new(), open(&path, 1 << 20, engine));
        for token in 0..TRANSFERS {
            let offset = token * PAGE_SIZE as u64;
            ends.start(&backing, (Direction::Write, offset), block(&buffers, token as u8 + 1), token);
        }
        drop(backing);
        assert_eq!(ends.count(), TRANSFERS as usize, "{engine:?}");
        let bytes = std::fs::read(&path).expect("the file");
        for token in 0..TRANSFERS {
            assert_eq!(ends.wait(token).1, Ok(()));
            assert_eq!(
                bytes[HEADER_BYTES as usize + token as usize * PAGE_SIZE],
                token as u8 + 1,
                "{engine:?} {token}"
            );
        }
        assert_eq!(buffers.free(), TRANSFERS as usize, "{engine:?}");
    }
}

struct Chain(Arc<FileBacking>, Arc<Ends>);

impl Completion for Chain {
    fn done(&self, _token: u64, buffer: Buffer, _result: Result<()>) {
        self.1.start(&*self.0, (Direction::Read, 0), buffer, 1);
        std::panic::resume_unwind(Box::new("a completion's own fault"));
    }
}

#[test]
fn a_completion_may_start_transfers_and_its_panic_is_its_own() {
    for engine in ENGINES {
        let directory = directory();
        let backing = Arc::new(open(&directory.path().join("file"), 1 << 20, engine));
        let (ends, buffers) = (Ends::new(), Buffers::new(2, PAGE_SIZE).expect("memory"));
        let chain = Arc::new(Chain(Arc::clone(&backing), Arc::clone(&ends)));
        backing.start(transfer((Direction::Write, 0), PAGE_SIZE, block(&buffers, 1), 0, chain));
        let (buffer, result) = ends.wait(1);
        assert!(result.is_ok() && buffer[0] == 1, "{engine:?}");
        ends.start(&*backing, (Direction::Read, 0), block(&buffers, 0), 2);
        assert_eq!(ends.wait(2).1, Ok(()), "{engine:?} goes on");
    }
}

struct Gate(Arc<Ends>, std::sync::Mutex<std::sync::mpsc::Receiver<()>>);

impl Completion for Gate {
    fn done(&self, token: u64, buffer: Buffer, result: Result<()>) {
        let _ = self.1.lock().map(|open| open.recv_timeout(DEADLINE));
        self.0.done(token, buffer, result);
    }
}

#[test]
fn transfers_that_fail_to_begin_hold_up_nothing() {
    const BAD: u64 = QUEUE_DEPTH as u64 + 66;
    for engine in ENGINES {
        let directory = directory();
        let path = directory.path().join("file");
        let backing = open(&path, 1 << 20, engine);
        let (ends, buffers) = (Ends::new(), Buffers::new(BAD as u32 + 2, PAGE_SIZE).expect("memory"));
        let (open, gate) = std::sync::mpsc::channel();
        let gate = Arc::new(Gate(Arc::clone(&ends), gate.into()));
        // The first transfer blocks the engine's thread, so that all others are in the queue when it goes on.
        backing.start(transfer((Direction::Read, 1), PAGE_SIZE, block(&buffers, 1), 0, gate));
        for token in 1..=BAD {
            ends.start_part(&backing, (Direction::Read, 1), PAGE_SIZE, block(&buffers, 1), token);
        }
        ends.start(&backing, (Direction::Write, 0), block(&buffers, 7), BAD + 1);
        open.send(()).expect("it waits");
        assert_eq!(ends.wait(BAD + 1).1, Ok(()), "{engine:?}");
        for token in 0..=BAD {
            assert_eq!(ends.wait(token).1.expect_err("bad").kind(), ErrorKind::Invalid, "{engine:?}");
        }
    }
}

/// Forbids io_uring to this thread and those it starts, as a container's seccomp profile does.
fn forbid_io_uring() {
    // Loads the number of the call, compares it with io_uring_setup's, and answers EPERM or allows it.
    let load = libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 };
    let compare = libc::sock_filter { code: 0x15, jt: 0, jf: 1, k: libc::SYS_io_uring_setup as u32 };
    let answer = |k| libc::sock_filter { code: 0x06, jt: 0, jf: 0, k };
    let refuse = answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32);
    let mut filter = [load, compare, refuse, answer(libc::SECCOMP_RET_ALLOW)];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    rustix::thread::set_no_new_privs(true).expect("any thread may");
    // SAFETY: the program and its filter outlive the call.
    let installed = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) };
    assert_eq!(installed, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn where_io_uring_is_forbidden_threads_do_its_work() {
    let directory = directory();
    let path = directory.path().join("file");
    let forbidden = std::thread::spawn(move || {
        forbid_io_uring();
        let error = refused(&options(&path, 1 << 20, Engine::Uring));
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(!path.exists(), "what was made is removed");
        let backing = open(&path, 1 << 20, Engine::Auto);
        assert_eq!(backing.engine(), Engine::Threads);
        assert_eq!(backing.fallback(), Some(&error));
        let buffers = Buffers::new(1, PAGE_SIZE).expect("memory");
        let (_, result) = both_ways(&backing, (Direction::Write, 0), PAGE_SIZE, block(&buffers, 1));
        assert_eq!(result, Ok(()));
    });
    forbidden.join().expect("no failure");
    let path = directory.path().join("file");
    assert_eq!(open(&path, 1 << 20, Engine::Auto).engine(), Engine::Uring, "elsewhere it is used");
}

struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(kind: &std::ffi::CStr) -> Option<Self> {
        let on = directory();
        match rustix::mount::mount(kind, on.path(), kind, rustix::mount::MountFlags::empty(), None) {
            Ok(()) => Some(Mounted(on)),
            Err(errno) => {
                println!("skipped: mounting a {}: {errno}", kind.to_string_lossy());
                None
            }
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(errno) = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH) {
            eprintln!("{} is still mounted: {errno}", self.0.path().display());
        }
    }
}

/// ramfs supports neither O_DIRECT nor fallocate; what files in other memory support depends on the kernel.
#[test]
fn a_file_system_without_direct_io_is_used_through_the_page_cache() {
    let used = |directory: &Path, check: &dyn Fn(&FileBacking)| {
        for engine in ENGINES {
            let backing = open(&directory.join("file"), 1 << 20, engine);
            check(&backing);
            agrees(&backing, 2, 3000);
        }
    };
    match tempfile::tempdir_in("/dev/shm") {
        Ok(in_memory) => used(in_memory.path(), &|_| ()),
        Err(error) => println!("skipped: no /dev/shm: {error}"),
    }
    let Some(ramfs) = Mounted::new(c"ramfs") else { return };
    used(ramfs.0.path(), &|backing| {
        assert_eq!((backing.is_direct(), backing.is_reserved()), (false, false));
        assert_eq!((backing.block_bytes(), backing.len_bytes()), (PAGE_SIZE, 1 << 20));
    });
}

#[test]
fn a_sparse_file_gives_discarded_space_back() {
    let directory = directory();
    let path = directory.path().join("file");
    let mut backing = open(&path, 1 << 20, Engine::Auto);
    let blocks = || std::fs::metadata(&path).expect("a file").blocks();
    let before = blocks();
    backing.discard(0, 1 << 19);
    assert_eq!(blocks(), before, "what was reserved stays");
    backing.pretend_sparse(true);
    backing.discard(0, 1 << 19);
    if blocks() == before {
        return println!("skipped: this file system punches no holes");
    }
    assert!(blocks() <= before - (1 << 19) / 512, "{} of {before}", blocks());
}

fn start_one(backing: &FileBacking, ends: &Arc<Ends>, buffers: &Buffers, direction: Direction, token: u64) {
    ends.start(backing, (direction, token * PAGE_SIZE as u64), block(buffers, token as u8), token);
}

#[test]
fn nobody_waits_for_an_engine_that_died() {
    const TRANSFERS: u64 = QUEUE_DEPTH as u64 + 70;
    for (engine, panic_point) in
        ENGINES.into_iter().flat_map(|engine| [(engine, PanicPoint::Begin), (engine, PanicPoint::Advance)])
    {
        let directory = directory();
        let path = directory.path().join("file");
        let backing = open(&path, 1 << 20, engine);
        let (ends, buffers) = (Ends::new(), Buffers::new(TRANSFERS as u32, PAGE_SIZE).expect("memory"));
        start_one(&backing, &ends, &buffers, Direction::Write, 7);
        assert_eq!(ends.wait(7).1, Ok(()));

        backing.panic_in_next_transfer(panic_point);
        (0..TRANSFERS).for_each(|token| start_one(&backing, &ends, &buffers, Direction::Read, token));
        let failed = (0..TRANSFERS).filter_map(|token| ends.wait(token).1.err()).collect::<Vec<_>>();
        assert!(!failed.is_empty(), "{engine:?}, {panic_point:?}");
        // A transfer may still end before the engine has noted the panic.
        let deadline = Instant::now() + DEADLINE;
        let error = loop {
            start_one(&backing, &ends, &buffers, Direction::Write, 3);
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
        let (read, result) =
            backing.carry_out(Direction::Read, offset, PAGE_SIZE, buffers.take().expect("free"));
        assert!(result.is_ok() && read.iter().all(|byte| *byte == 7));
        let dropped = std::thread::spawn(move || drop(backing));
        while !dropped.is_finished() {
            assert!(Instant::now() < deadline, "{engine:?}, {panic_point:?}: its threads do not end");
            std::thread::yield_now();
        }
    }
}
