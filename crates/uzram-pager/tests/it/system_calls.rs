//! System calls, and transfers that go on by themselves, on memory that was evicted.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;
use uzram::units::PAGE_SIZE;
use uzram_pager::{Pager, Region, Trap};

use crate::common::{MIB, each, expect_pages, fill_pages, pager, part, wait_until};

const PAGES: usize = 64;
/// What the pages of the file are numbered from.
const OF_FILE: usize = 1000;
/// The parts of a region that a call transfers: their first pages, and how many.
const PARTS: [(usize, usize); 4] = [(40, 1), (8, 3), (0, 7), (20, 16)];

/// Reads the parts of evicted memory from the begin of a file, or writes them there; checks what that did.
fn check((pager, region): (&Pager, &mut Region), file: &File, version: u64, reads: bool, pinned: bool) {
    let what = format!("{}, reads: {reads}, pinned: {pinned}", pager.trap().name());
    fill_pages(region, OF_FILE, version);
    rustix::io::pwrite(file, region, 0).unwrap();
    fill_pages(region, 0, version);
    region.pageout(..).unwrap();
    assert_eq!(pager.stats().resident_pages, 0, "{what}");
    let bytes = |(first, pages): (usize, usize)| first * PAGE_SIZE..(first + pages) * PAGE_SIZE;
    let pins = PARTS.map(|part| pinned.then(|| region.pin(bytes(part)).unwrap()));
    let start = region.as_mut_ptr().addr();
    // SAFETY: the parts are the region's, none overlaps another, and nothing else uses them meanwhile.
    let mut parts = PARTS.map(|(first, pages)| IoSliceMut::new(unsafe { part(start, first, pages) }));
    let result = if reads {
        rustix::io::preadv(file, &mut parts, 0)
    } else {
        rustix::io::pwritev(file, &parts.each_ref().map(|part| IoSlice::new(part)), 0)
    };
    drop(pins);

    let pages: Vec<usize> = PARTS.iter().flat_map(|(first, pages)| *first..first + pages).collect();
    let works = pinned || pager.trap() == Trap::Message;
    assert_eq!(result, if works { Ok(pages.len() * PAGE_SIZE) } else { Err(Errno::FAULT) }, "{what}");
    let mut in_memory: Vec<usize> = (0..PAGES).collect();
    let mut in_file: Vec<usize> = (OF_FILE..OF_FILE + PAGES).collect();
    for (nth, page) in pages.into_iter().enumerate().filter(|_| works) {
        let (from, to) = if reads { (in_file[nth], &mut in_memory[page]) } else { (page, &mut in_file[nth]) };
        *to = from;
    }
    let expect = |region: &Region, numbers: Vec<usize>| {
        for (page, number) in region.chunks(PAGE_SIZE).zip(numbers) {
            expect_pages(page, number, version);
        }
    };
    expect(region, in_memory);
    // All of it is in memory, also for O_DIRECT.
    drop(region.pin(..).unwrap());
    rustix::io::pread(file, &mut region[..], 0).unwrap();
    expect(region, in_file);
}

#[test]
fn calls_work_or_fail_and_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    // With O_DIRECT, memory has to be aligned; and the call begins at the start of the file.
    for flags in [0, libc::O_DIRECT] {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true).custom_flags(flags);
        let file = match options.open(dir.path().join("file")) {
            Ok(file) => file,
            Err(error) => return println!("skipped: {} has no O_DIRECT: {error}", dir.path().display()),
        };
        each(&Trap::ALL, |trap| {
            let pager = pager(trap, 32 * MIB);
            let mut region = pager.map(PAGES * PAGE_SIZE).unwrap();
            for case in 0..4 {
                check((&pager, &mut region), &file, 1 + case, case & 1 == 0, case & 2 == 0);
            }
        });
    }
}

/// A read into a registered buffer that would end after its page has left.
#[test]
fn a_page_under_a_transfer_stays() {
    const BYTES: Range<usize> = 17 * PAGE_SIZE..18 * PAGE_SIZE;
    if let Err(error) = IoUring::new(4) {
        return println!("skipped: io_uring: {error}");
    }
    each(&Trap::ALL, |trap| {
        let pager = pager(trap, 32 * MIB);
        let mut region = pager.map(PAGES * PAGE_SIZE).unwrap();
        for pinned in [true, false] {
            region.fill(b'o');
            let pin = pinned.then(|| region.pin(BYTES).unwrap());
            let (ours, theirs) = rustix::pipe::pipe().unwrap();
            let mut ring = IoUring::new(4).unwrap();
            let start = region.as_mut_ptr().wrapping_add(BYTES.start);
            let buffer = libc::iovec { iov_base: start.cast(), iov_len: PAGE_SIZE };
            let read = opcode::ReadFixed::new(types::Fd(ours.as_raw_fd()), start, 8, 0).build();
            // SAFETY: the region lives longer than the ring.
            unsafe {
                ring.submitter().register_buffers(&[buffer]).unwrap();
                ring.submission().push(&read).unwrap();
            }
            assert_eq!(ring.submit().unwrap(), 1);
            assert!(ring.completion().next().is_none(), "the pipe is empty");
            let before = pager.stats();
            region.pageout(..).unwrap();
            let stats = pager.stats();
            if !pinned {
                assert!(stats.busy > before.busy && stats.resident_pages == 1, "{stats:?}");
            }
            rustix::io::write(&theirs, b"late data").unwrap();
            ring.submit_and_wait(1).unwrap();
            assert_eq!(ring.completion().next().unwrap().result(), 8);
            ring.submitter().unregister_buffers().unwrap();
            drop((ring, pin));
            assert_eq!(&region[BYTES][..8], b"late dat", "{trap:?}, pinned: {pinned}");
        }
        wait_until("the kernel has let go of the page", || {
            region.pageout(..).unwrap();
            pager.stats().resident_pages == 0
        });
    });
}
