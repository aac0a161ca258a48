//! System calls, and transfers that go on by themselves, on memory that was evicted.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;
use uzram::units::PAGE_SIZE;
use uzram_pager::{Pager, Region, TrapKind};

use crate::common::{MIB, each, expect_pages, fill_pages, pager, part, wait_until};

const PAGES: usize = 64;
/// What the pages of the file are numbered from.
const OF_FILE: usize = 1000;

/// A system call between a file, from its start on, and parts of a region.
struct Call {
    name: &'static str,
    into_memory: bool,
    /// First pages and numbers of pages.
    parts: &'static [(usize, usize)],
    run: fn(&File, &mut [libc::iovec]) -> isize,
}

// SAFETY of all calls: the kernel writes to the parts of a region, which nothing else uses, or fails.
const CALLS: [Call; 6] = [
    Call {
        name: "read",
        into_memory: true,
        parts: &[(2, 5)],
        // SAFETY: see above.
        run: |file, parts| unsafe { libc::read(file.as_raw_fd(), parts[0].iov_base, parts[0].iov_len) },
    },
    Call {
        name: "write",
        into_memory: false,
        parts: &[(3, 6)],
        // SAFETY: see above.
        run: |file, parts| unsafe { libc::write(file.as_raw_fd(), parts[0].iov_base, parts[0].iov_len) },
    },
    Call {
        name: "readv",
        into_memory: true,
        parts: &[(40, 1), (8, 3), (20, 16)],
        // SAFETY: see above.
        run: |file, parts| unsafe { libc::readv(file.as_raw_fd(), parts.as_ptr(), parts.len() as i32) },
    },
    Call {
        name: "writev",
        into_memory: false,
        parts: &[(50, 3), (49, 1), (0, 7)],
        // SAFETY: see above.
        run: |file, parts| unsafe { libc::writev(file.as_raw_fd(), parts.as_ptr(), parts.len() as i32) },
    },
    Call {
        name: "io_uring read",
        into_memory: true,
        parts: &[(4, 9)],
        run: |file, parts| {
            let len = parts[0].iov_len as u32;
            by_ring(&opcode::Read::new(types::Fd(file.as_raw_fd()), parts[0].iov_base.cast(), len).build())
        },
    },
    Call {
        name: "io_uring write",
        into_memory: false,
        parts: &[(5, 9)],
        run: |file, parts| {
            let len = parts[0].iov_len as u32;
            by_ring(&opcode::Write::new(types::Fd(file.as_raw_fd()), parts[0].iov_base.cast(), len).build())
        },
    },
];

fn by_ring(operation: &io_uring::squeue::Entry) -> isize {
    let mut ring = IoUring::new(4).unwrap();
    // SAFETY: the memory stays until the operation has ended, below.
    unsafe { ring.submission().push(operation) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    let result = ring.completion().next().unwrap().result();
    if result < 0 {
        // SAFETY: this thread's.
        unsafe { *libc::__errno_location() = -result };
        return -1;
    }
    result as isize
}

/// Returns whether this system has no io_uring for this process, and prints it.
fn has_no_ring() -> bool {
    let error = IoUring::new(4).err();
    error.iter().for_each(|error| println!("skipped: io_uring: {error}"));
    error.is_some()
}

fn run(call: &Call, file: &File, start: usize) -> Result<usize, Errno> {
    let mut parts: Vec<libc::iovec> = call
        .parts
        .iter()
        .map(|(first, pages)| libc::iovec {
            iov_base: (start + first * PAGE_SIZE) as *mut libc::c_void,
            iov_len: pages * PAGE_SIZE,
        })
        .collect();
    let done = (call.run)(file, &mut parts);
    usize::try_from(done).map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap())
}

/// Runs a call on evicted memory, and checks what it did; `pinned` says whether its memory is.
fn check(call: &Call, (pager, region): (&Pager, &mut Region), file: &File, version: u64, pinned: bool) {
    let what = format!("{} with {}, pinned: {pinned}", call.name, pager.trap().name());
    let mut contents = vec![0; PAGES * PAGE_SIZE];
    fill_pages(&mut contents, OF_FILE, version);
    // With O_DIRECT, memory has to be aligned; and the call begins at the start of the file.
    fill_pages(region, OF_FILE, version);
    rustix::fs::seek(file, rustix::fs::SeekFrom::Start(0)).unwrap();
    rustix::io::pwrite(file, region, 0).unwrap();
    fill_pages(region, 0, version);
    region.pageout(..).unwrap();
    assert_eq!(pager.stats().resident_pages, 0, "{what}");
    let pins: Vec<_> = if pinned {
        let bytes = |(first, pages): &(usize, usize)| first * PAGE_SIZE..(first + pages) * PAGE_SIZE;
        call.parts.iter().map(|part| region.pin(bytes(part)).unwrap()).collect()
    } else {
        Vec::new()
    };
    let result = run(call, file, region.as_mut_ptr().addr());
    drop(pins);

    let bytes: usize = call.parts.iter().map(|(_, pages)| pages * PAGE_SIZE).sum();
    let works = pinned || pager.trap() == TrapKind::Uffd;
    assert_eq!(result, if works { Ok(bytes) } else { Err(Errno::FAULT) }, "{what}");
    let mut wanted: Vec<usize> = (0..PAGES).collect();
    let mut wanted_of_file: Vec<usize> = (OF_FILE..OF_FILE + PAGES).collect();
    let pages = call.parts.iter().flat_map(|(first, pages)| *first..first + pages);
    for (nth, page) in pages.enumerate().filter(|_| works) {
        if call.into_memory {
            wanted[page] = OF_FILE + nth;
        } else {
            wanted_of_file[nth] = page;
        }
    }
    for (page, number) in region.chunks(PAGE_SIZE).zip(wanted) {
        expect_pages(page, number, version);
    }
    // Resident, or pinned, for O_DIRECT.
    let _pin = region.pin(..).unwrap();
    // SAFETY: the whole region, of which no other reference is used below.
    let all = unsafe { part(region.as_mut_ptr().addr(), 0, PAGES) };
    rustix::io::pread(file, &mut *all, 0).unwrap();
    for (page, number) in all.chunks(PAGE_SIZE).zip(wanted_of_file) {
        expect_pages(page, number, version);
    }
}

fn check_all(file: &File) {
    let without_ring = has_no_ring();
    each(&TrapKind::ALL, |trap| {
        let pager = pager(trap, 32 * MIB);
        let mut region = pager.map(PAGES * PAGE_SIZE).unwrap();
        let calls = CALLS.iter().filter(|call| !(without_ring && call.name.contains("ring")));
        for (nth, call) in calls.enumerate() {
            for pinned in [false, true] {
                let version = 1 + 2 * nth as u64 + u64::from(pinned);
                check(call, (&pager, &mut region), file, version, pinned);
            }
        }
    });
}

#[test]
fn calls_work_or_fail_and_lose_nothing() {
    check_all(&tempfile::tempfile().unwrap());
}

#[test]
fn direct_calls_work_or_fail_and_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("direct");
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
    match options.open(&path) {
        Ok(file) => check_all(&file),
        Err(error) => println!("skipped: {} has no O_DIRECT: {error}", dir.path().display()),
    }
}

#[test]
fn a_failed_read_leaves_the_data_in_a_pipe() {
    each(&TrapKind::ALL, |trap| {
        let pager = pager(trap, 32 * MIB);
        let mut region = pager.map(PAGES * PAGE_SIZE).unwrap();
        fill_pages(&mut region, 0, 1);
        region.pageout(..).unwrap();
        let (ours, theirs) = rustix::pipe::pipe().unwrap();
        assert_eq!(rustix::io::write(&theirs, b"from the pipe"), Ok(13));
        // SAFETY: the region, which nothing else uses meanwhile.
        let into = unsafe { part(region.as_mut_ptr().addr(), 7, 1) };
        if rustix::io::read(&ours, &mut *into) != Ok(13) {
            assert_ne!(trap, TrapKind::Uffd);
            let _pin = region.pin(7 * PAGE_SIZE..8 * PAGE_SIZE).unwrap();
            assert_eq!(rustix::io::read(&ours, &mut *into), Ok(13));
        }
        assert_eq!(&into[..13], b"from the pipe");
        expect_pages(&region[..7 * PAGE_SIZE], 0, 1);
    });
}

/// A read into a registered buffer that ends after its page was evicted. Returns what the page begins with
/// then.
fn late_read(region: &mut Region, pager: &Pager, pinned: bool) -> [u8; 8] {
    const PAGE: usize = 17;
    region.fill(b'o');
    let pin = pinned.then(|| region.pin(PAGE * PAGE_SIZE..(PAGE + 1) * PAGE_SIZE).unwrap());
    let (ours, theirs) = rustix::pipe::pipe().unwrap();
    let mut ring = IoUring::new(4).unwrap();
    let start = region.as_mut_ptr().wrapping_add(PAGE * PAGE_SIZE);
    let buffer = libc::iovec { iov_base: start.cast(), iov_len: PAGE_SIZE };
    // SAFETY: the region lives longer than the ring.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    let read = opcode::ReadFixed::new(types::Fd(ours.as_raw_fd()), start, 8, 0).build();
    // SAFETY: as above.
    unsafe { ring.submission().push(&read) }.unwrap();
    assert_eq!(ring.submit().unwrap(), 1);
    assert!(ring.completion().next().is_none(), "the pipe is empty");
    let busy = pager.stats().busy;
    region.pageout(..).unwrap();
    if pager.trap() == TrapKind::Uffd && !pinned {
        assert!(pager.stats().busy > busy, "{:?}", pager.stats());
        assert_eq!(pager.stats().resident_pages, 1);
    }
    rustix::io::write(&theirs, b"late data").unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), 8);
    ring.submitter().unregister_buffers().unwrap();
    drop((ring, pin));
    region[PAGE * PAGE_SIZE..][..8].try_into().unwrap()
}

/// With the traps by SIGSEGV, this loses data: the kernel does not say that it transfers to the page.
#[test]
fn a_transfer_that_ends_after_the_eviction_needs_a_pin_without_uffd() {
    if has_no_ring() {
        return;
    }
    each(&TrapKind::ALL, |trap| {
        let pager = pager(trap, 32 * MIB);
        let mut region = pager.map(PAGES * PAGE_SIZE).unwrap();
        assert_eq!(&late_read(&mut region, &pager, true), b"late dat", "{trap:?}, pinned");
        let without_pin = late_read(&mut region, &pager, false);
        let wanted = if trap == TrapKind::Uffd { b"late dat" } else { b"oooooooo" };
        assert_eq!(&without_pin, wanted, "{trap:?}");
        wait_until("the kernel has let go of the page", || {
            region.pageout(..).unwrap();
            pager.stats().resident_pages == 0
        });
    });
}
