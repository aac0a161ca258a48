//! Memory files that are kept out of swap, beside those that are not. Needs root; one test makes a swap area
//! on a zram device of the kernel.

use std::ffi::CString;
use std::fs;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::wait_until;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::Advice;
use uzram::mem::{MappedAhead, MemoryFile, ZeroedPages, keep_memory_out_of_swap};
use uzram::random::Random;
use uzram::store::{PageNo, StandBy, StoreBuilder};
use uzram::units::PAGE_SIZE;
use uzram::{ErrorKind, Store};

const PAGES: usize = 1024;
const FILE_BYTES: usize = PAGES * PAGE_SIZE;

fn is_kept_out() -> bool {
    match keep_memory_out_of_swap() {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            println!("skipped: {error}");
            false
        }
    }
}

/// A swap area on a zram device of its own; both end when this is dropped.
struct SwapArea {
    device: u32,
    is_on: bool,
}

impl SwapArea {
    /// Returns why there is none, if so.
    fn new() -> Result<SwapArea, String> {
        let failed = |what: &'static str| move |error: std::io::Error| format!("{what}: {error}");
        let device =
            fs::read_to_string("/sys/class/zram-control/hot_add").map_err(failed("the kernel's zram"))?;
        let mut area = SwapArea { device: device.trim().parse().unwrap(), is_on: false };
        fs::write(format!("/sys/block/zram{}/disksize", area.device), "32M").map_err(failed("disksize"))?;
        // Version 1, the last page, and the signature.
        let mut header = [0; PAGE_SIZE];
        header[1024..1028].copy_from_slice(&1u32.to_le_bytes());
        header[1028..1032].copy_from_slice(&((32 << 20) / PAGE_SIZE as u32 - 1).to_le_bytes());
        header[PAGE_SIZE - 10..].copy_from_slice(b"SWAPSPACE2");
        let disk = fs::OpenOptions::new().write(true).open(area.path());
        disk.and_then(|disk| disk.write_all_at(&header, 0).and_then(|()| disk.sync_all()))
            .map_err(failed("a swap header"))?;
        // SAFETY: swapon(2) changes no memory of this process.
        if unsafe { libc::swapon(area.c_path().as_ptr(), 0) } != 0 {
            return Err(failed("swapon")(std::io::Error::last_os_error()));
        }
        area.is_on = true;
        Ok(area)
    }

    fn path(&self) -> String {
        format!("/dev/zram{}", self.device)
    }

    fn c_path(&self) -> CString {
        CString::new(self.path()).unwrap()
    }
}

impl Drop for SwapArea {
    fn drop(&mut self) {
        // SAFETY: swapoff(2) changes no contents of memory.
        if self.is_on && unsafe { libc::swapoff(self.c_path().as_ptr()) } != 0 {
            println!("{} is still used for swap: {}", self.path(), std::io::Error::last_os_error());
            return;
        }
        // Others may have it open for a moment.
        let remove = || fs::write("/sys/class/zram-control/hot_remove", self.device.to_string());
        if !wait_until(|| remove().is_ok()) {
            println!("{} is left behind", self.path());
        }
    }
}

/// Writes noise to all pages of a file, and has the system take them out of memory, if it does.
fn fill_and_page_out(file: &Arc<MemoryFile>) {
    let all = file.region(0, FILE_BYTES as u64).unwrap();
    // SAFETY: nobody else uses the file.
    let mut pages = unsafe { ZeroedPages::of_region(&all) }.unwrap();
    Random::new(1).fill(&mut pages);
    // SAFETY: the advice changes no contents.
    unsafe { rustix::mm::madvise(pages.as_mut_ptr().cast(), FILE_BYTES, Advice::LinuxPageOut) }.unwrap();
}

fn count(fd: BorrowedFd<'_>) -> (u64, u64) {
    // cachestat(2): offset and length; then pages in memory, dirty, under writeback, evicted, and evicted
    // recently.
    let (range, mut found) = ([0u64, FILE_BYTES as u64], [0u64; 5]);
    // SAFETY: both arrays are as long as the call's structs, and it writes to the second only.
    let answer = unsafe { libc::syscall(451, fd.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0) };
    assert_eq!(answer, 0, "cachestat: {}", std::io::Error::last_os_error());
    (found[0], found[3])
}

fn duplicate(file: &MemoryFile) -> OwnedFd {
    file.as_fd().try_clone_to_owned().unwrap()
}

fn memfd() -> Arc<MemoryFile> {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, FILE_BYTES as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    MemoryFile::from_fd(fd).unwrap()
}

#[test]
fn a_memfd_is_swapped_out_and_a_file_that_is_kept_out_is_not() {
    if !is_kept_out() {
        return;
    }
    let _area = match SwapArea::new() {
        Ok(area) => area,
        Err(why) => return println!("skipped: no swap area: {why}"),
    };
    let (swapped, kept) = (memfd(), MemoryFile::create("test", FILE_BYTES as u64).unwrap());
    [&swapped, &kept].into_iter().for_each(fill_and_page_out);
    // Some come back, also those around them.
    assert_eq!(rustix::io::pread(swapped.as_fd(), &mut [0], 300 * PAGE_SIZE as u64).unwrap(), 1);
    let (in_memory, in_swap) = count(swapped.as_fd());
    assert!(in_memory > 0);
    assert_eq!((in_memory + in_swap, count(kept.as_fd())), (PAGES as u64, (PAGES as u64, 0)));
    assert!(in_swap > PAGES as u64 / 2, "{in_swap} pages are in swap");
    println!("{in_swap} of {PAGES} pages of a memfd are in swap, and none of a file that is kept out");
    for (file, in_memory, in_swap) in [(&swapped, in_memory, in_swap), (&kept, PAGES as u64, 0)] {
        let ahead = match MappedAhead::new(Arc::clone(file)) {
            Ok(ahead) => ahead,
            Err(error) => return println!("skipped: {error}"),
        };
        let mapped_bytes = ahead.catch_up(&|| true).unwrap();
        assert_eq!(mapped_bytes, in_memory * PAGE_SIZE as u64);
        assert_eq!(count(file.as_fd()), (in_memory, in_swap), "pages in swap stay there");
        assert_eq!(ahead.catch_up(&|| true).unwrap(), 0);
        let (mut noise, mut read) = (vec![0; FILE_BYTES], vec![0; FILE_BYTES]);
        Random::new(1).fill(&mut noise);
        drop(ahead);
        assert_eq!(rustix::io::pread(file.as_fd(), &mut read, 0).unwrap(), FILE_BYTES);
        assert!(read == noise);
    }
}

#[test]
fn only_a_nameless_file_of_this_user_alone_is_taken() {
    if !is_kept_out() {
        return;
    }
    let file = MemoryFile::create("test", 1 << 40).unwrap();
    let again = MemoryFile::from_fd(duplicate(&file)).unwrap();
    assert_eq!(again.len_bytes(), 1 << 40);
    let refused = |fd: OwnedFd| {
        assert_eq!(MemoryFile::from_fd(fd).unwrap_err().kind(), ErrorKind::Invalid);
    };
    rustix::fs::fchmod(&*file, 0o660.into()).unwrap();
    refused(duplicate(&file));
    rustix::fs::fchmod(&*file, 0o600.into()).unwrap();
    rustix::fs::fchown(&*file, Some(rustix::process::Uid::from_raw(65534)), None).unwrap();
    refused(duplicate(&file));
    for (directory, what) in [("/dev/shm", "it has a name"), ("/var/tmp", "it is on a disk, or has a name")] {
        if let Ok(named) = tempfile::NamedTempFile::new_in(directory) {
            println!("{what}");
            refused(named.reopen().unwrap().into());
        }
    }
}

fn contents(page: u64, version: u64) -> [u8; PAGE_SIZE] {
    let mut contents = [version as u8; PAGE_SIZE];
    let noise = page as usize % 5 * 1000;
    Random::new(page << 8 | version).fill(&mut contents[..noise]);
    contents
}

/// All that is done with a memfd works with such a file: holes, seeking, mapping ahead, attaching.
#[test]
fn a_store_lives_in_such_a_file() {
    if !is_kept_out() {
        return;
    }
    let builder = StoreBuilder::new("survives", 4000).checksum(true);
    let mut store = Store::create_in(&builder).unwrap();
    let memory = |store: &Store| duplicate(store.memory().unwrap());
    let write = |store: &Store, pages: Range<u64>, version| {
        pages.for_each(|page| store.write(PageNo::from_number(page), &contents(page, version)).unwrap());
    };
    let check_charged = |store: &Store, memory: &OwnedFd| {
        let pages = || rustix::fs::fstat(memory).unwrap().st_blocks as u64 / (PAGE_SIZE as u64 / 512);
        let charged = || store.stats().charged_pages;
        // Beside the arena there are slots, tables and settings.
        let is_charged = || (charged()..charged() + 200).contains(&pages());
        assert!(wait_until(is_charged), "{} in memory, {} charged", pages(), charged());
    };
    for version in 0..3 {
        write(&store, 0..4000, version);
        store.discard_pages(1000..3000);
        store.compact();
        check_charged(&store, &memory(&store));
        write(&store, 2000..4000, version + 10);
        let stand_by = StandBy::new(memory(&store));
        let left = memory(&store);
        // SAFETY: the store that had the memory is dropped before.
        let attached = unsafe {
            match stand_by {
                Ok(stand_by) => {
                    assert!(stand_by.catch_up().unwrap() > 4 << 20);
                    write(&store, 3000..4000, version + 10);
                    stand_by.catch_up().unwrap();
                    drop(store);
                    Store::attach(stand_by, None, |_| ())
                }
                Err(error) => {
                    println!("not mapped ahead: {error}");
                    drop(store);
                    Store::attach(left.try_clone().unwrap(), None, |_| ())
                }
            }
        };
        let found;
        (store, found) = attached.unwrap();
        assert_eq!((found.pages, found.pages_lost), (3000, 0));
        check_charged(&store, &left);
        for page in 0..4000 {
            let mut read = [1; PAGE_SIZE];
            store.read(PageNo::from_number(page), &mut read).unwrap();
            let expected = match page {
                0..1000 => contents(page, version),
                1000..2000 => [0; PAGE_SIZE],
                _ => contents(page, version + 10),
            };
            assert!(read == expected, "page {page}");
        }
    }
}
