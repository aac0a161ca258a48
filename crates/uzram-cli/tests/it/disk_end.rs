//! The end of a disk, as a file (`uzram up --mount`) and as a block device (`uzram attach`): one table of
//! results for both, so that the kernel's block devices say what the file has to do.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::common::Daemon;
use crate::common::block::BlockPlace;
use crate::common::clients::{arg, run};

/// Not a multiple of anything large.
const END: u64 = 5000 << 10;
/// Longer than several of the kernel's requests.
const TAIL: u64 = 4 << 20;

fn up(place: &BlockPlace) -> Daemon {
    place.up_sized("5000K", &["--mount", arg(&place.dir().join("mnt"))])
}

/// Calls `check` with the file, and then with a block device on it.
fn as_file_and_block_device(check: impl Fn(&mut Disk)) {
    let Some(place) = BlockPlace::if_able() else { return };
    let _daemon = up(&place);
    check(&mut Disk::new(&place.disk()));
    let device = place.run(&["attach", "zram0"]).ok();
    check(&mut Disk::new(Path::new(device.trim())));
    place.run(&["detach", "zram0"]).ok();
}

/// Returns a length or an error number.
fn checked(returned: isize) -> Result<u64, i32> {
    u64::try_from(returned).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap())
}

fn errno(result: io::Result<usize>) -> Result<u64, i32> {
    result.map(|len| len as u64).map_err(|error| error.raw_os_error().unwrap())
}

/// Memory for direct I/O.
struct Buffer(Vec<u8>);

impl Buffer {
    fn new(len: u64, byte: u8) -> Buffer {
        Buffer(vec![byte; len as usize + 4096])
    }

    fn bytes(&mut self) -> &mut [u8] {
        let (start, len) = (self.0.as_ptr().align_offset(4096), self.0.len() - 4096);
        &mut self.0[start..start + len]
    }
}

/// A disk, and what its last bytes are.
struct Disk {
    path: PathBuf,
    tail: Vec<u8>,
}

impl Disk {
    fn new(path: &Path) -> Disk {
        let tail: Vec<u8> = (0..TAIL).map(|at| (at / 5) as u8 | 1).collect();
        let disk = Disk { path: path.to_owned(), tail };
        disk.open(0).write_all_at(&disk.tail, END - TAIL).unwrap();
        disk
    }

    fn open(&self, flags: i32) -> File {
        OpenOptions::new().read(true).write(true).custom_flags(flags).open(&self.path).unwrap()
    }

    fn filled(&mut self, offset: u64, len: u64, byte: u8) {
        let at = |offset: u64| (offset.min(END) - (END - TAIL)) as usize;
        self.tail[at(offset)..at(offset + len)].fill(byte);
    }

    /// Checks the last `len` bytes.
    fn check(&self, len: u64, what: &str) {
        let mut read = vec![0; len as usize];
        self.open(0).read_exact_at(&mut read, END - len).unwrap();
        assert!(read == self.tail[(TAIL - len) as usize..], "{}: {what}", self.path.display());
    }
}

/// Returns offsets about the end, and lengths.
fn cases(is_aligned: bool) -> impl Iterator<Item = (u64, u64)> {
    let offsets = [END - (3 << 20), END - 8192, END - 4096, END, END + 4096, END + (1 << 40)];
    let offsets = offsets.into_iter().chain([END - 4097, END - 1, END + 1]);
    let lens = [0, 4096, 8192, 4 << 20, 1, 4097];
    let all = offsets.flat_map(move |offset| lens.map(|len| (offset, len)));
    all.filter(move |(offset, len)| !is_aligned || (offset | len) % 4096 == 0)
}

#[test]
fn a_write_is_cut_at_the_end_and_then_there_is_no_space() {
    as_file_and_block_device(|disk| {
        for flags in [0, libc::O_DIRECT] {
            let file = disk.open(flags);
            for (byte, (offset, len)) in (1..).zip(cases(flags != 0)) {
                let what = format!("{flags:#o}: {len} bytes at {offset}");
                let wanted = match END.saturating_sub(offset).min(len) {
                    0 if len > 0 => Err(libc::ENOSPC),
                    before_end => Ok(before_end),
                };
                let written = file.write_at(Buffer::new(len, byte).bytes(), offset);
                assert_eq!(errno(written), wanted, "{}: {what}", disk.path.display());
                disk.filled(offset, wanted.unwrap_or(0), byte);
                disk.check(1 << 16, &what);
            }
        }
        disk.check(TAIL, "all");
    });
}

#[test]
fn a_read_is_cut_at_the_end_and_then_there_is_nothing() {
    as_file_and_block_device(|disk| {
        for flags in [0, libc::O_DIRECT] {
            let file = disk.open(flags);
            for (offset, len) in cases(flags != 0) {
                let mut buffer = Buffer::new(len, 0);
                let before_end = END.saturating_sub(offset).min(len);
                let read = file.read_at(buffer.bytes(), offset);
                let what = format!("{}: {flags:#o}: {len} bytes at {offset}", disk.path.display());
                assert_eq!(errno(read), Ok(before_end), "{what}");
                let start = (offset.min(END) - (END - TAIL)) as usize;
                assert!(
                    buffer.bytes()[..before_end as usize] == disk.tail[start..][..before_end as usize],
                    "{what}"
                );
            }
        }
    });
}

#[test]
fn a_range_is_zeroed_up_to_the_end() {
    as_file_and_block_device(|disk| {
        const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
        let file = disk.open(0);
        for mode in [
            libc::FALLOC_FL_PUNCH_HOLE | KEEP,
            libc::FALLOC_FL_ZERO_RANGE | KEEP,
            libc::FALLOC_FL_ZERO_RANGE,
            KEEP,
            0,
        ] {
            let zeroes = mode & !KEEP != 0;
            // The system itself refuses a length of 0.
            for (offset, len) in cases(true).filter(|(_, len)| *len > 0) {
                let before_end = END.saturating_sub(offset).min(len);
                let wanted = match before_end {
                    _ if !zeroes => Err(libc::EOPNOTSUPP),
                    0 => Err(libc::EINVAL),
                    _ if mode & KEEP == 0 && before_end < len => Err(libc::EINVAL),
                    _ => Ok(0),
                };
                let what = format!("mode {mode:#x}: {len} bytes at {offset}");
                file.write_all_at(&vec![5; before_end as usize], offset).unwrap();
                disk.filled(offset, before_end, 5);
                // SAFETY: the descriptor is open.
                let done = unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, len as i64) };
                let done = checked(done as isize);
                // A block device looks at the range first.
                let is_other = !zeroes && done == Err(libc::EINVAL) && before_end < len;
                assert!(
                    done == wanted || is_other,
                    "{}: {what}: {done:?}, not {wanted:?}",
                    disk.path.display()
                );
                if wanted == Ok(0) {
                    disk.filled(offset, len, 0);
                }
                disk.check(1 << 16, &what);
            }
        }
        disk.check(TAIL, "all");
    });
}

/// `struct iocb` and `struct io_event` of `<linux/aio_abi.h>`.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    len: u64,
    offset: u64,
    reserved: u64,
    flags: u32,
    event_fd: u32,
}

/// Reads (0) or writes (1) by the system's asynchronous I/O.
fn asynchronously(file: &File, opcode: u16, bytes: &mut [u8], offset: u64) -> Result<u64, i32> {
    let mut context = 0usize;
    let mut event = [0u64; 4];
    let fd = file.as_raw_fd() as u32;
    let mut request = Iocb {
        opcode,
        fd,
        buffer: bytes.as_mut_ptr() as u64,
        len: bytes.len() as u64,
        offset,
        ..Iocb::default()
    };
    let mut list = [&raw mut request];
    // SAFETY: all pointers are to values of the right size, which live until the request has ended.
    let done = unsafe {
        assert_eq!(libc::syscall(libc::SYS_io_setup, 1, &raw mut context), 0);
        let submitted = checked(libc::syscall(libc::SYS_io_submit, context, 1, list.as_mut_ptr()) as isize);
        let none = std::ptr::null_mut::<libc::timespec>();
        if submitted.is_ok() {
            assert_eq!(libc::syscall(libc::SYS_io_getevents, context, 1, 1, event.as_mut_ptr(), none), 1);
        }
        libc::syscall(libc::SYS_io_destroy, context);
        submitted
    };
    done.and_then(|_| u64::try_from(event[2] as i64).map_err(|_| -(event[2] as i64) as i32))
}

#[test]
fn asynchronous_requests_end_there_too() {
    as_file_and_block_device(|disk| {
        let file = disk.open(libc::O_DIRECT);
        for (offset, len) in cases(true).filter(|(_, len)| *len > 0) {
            let (before_end, what) =
                (END.saturating_sub(offset).min(len), format!("{len} bytes at {offset}"));
            let mut buffer = Buffer::new(len, 0);
            assert_eq!(asynchronously(&file, 0, buffer.bytes(), offset), Ok(before_end), "{what}");
            let start = (offset.min(END) - (END - TAIL)) as usize;
            assert!(
                buffer.bytes()[..before_end as usize] == disk.tail[start..][..before_end as usize],
                "{what}"
            );
            let wanted = if before_end == 0 { Err(libc::ENOSPC) } else { Ok(before_end) };
            let mut buffer = Buffer::new(len, len as u8 ^ 0x55);
            let written = asynchronously(&file, 1, buffer.bytes(), offset);
            // Of a file the kernel makes an error of a short write, and of several requests of which one
            // fails.
            let is_cut = disk.path.ends_with("disk") && (1..len).contains(&before_end);
            let wanted_too = if len > 1 << 20 { libc::ENOSPC } else { libc::EIO };
            let is_wanted = written == wanted || is_cut && written == Err(wanted_too);
            assert!(is_wanted, "{}: {what}: {written:?}", disk.path.display());
            disk.filled(offset, before_end, len as u8 ^ 0x55);
            disk.check(1 << 16, &what);
        }
        disk.check(TAIL, "all");
    });
}

/// Copies within the kernel, mappings, appending and seeking, of the file.
#[test]
fn every_other_way_to_the_end_of_the_file_ends_there() {
    let Some(place) = BlockPlace::needing(&["dd"]) else { return };
    let _daemon = up(&place);
    let mut disk = Disk::new(&place.disk());
    let file = disk.open(0);
    let fd = file.as_raw_fd();
    let from = place.root().join("from");
    fs::write(&from, [7; 8192]).unwrap();
    let from = File::open(from).unwrap();
    // SAFETY: it accesses no memory.
    let seek = |offset: u64, whence| checked(unsafe { libc::lseek(fd, offset as i64, whence) } as isize);
    let send = |offset: u64| {
        seek(offset, libc::SEEK_SET).unwrap();
        // SAFETY: the offset is a variable.
        checked(unsafe { libc::sendfile(fd, from.as_raw_fd(), &mut 0, 8192) })
    };
    assert_eq!(send(END - 4096), Ok(4096));
    disk.filled(END - 4096, 4096, 7);
    disk.check(1 << 16, "sendfile");
    assert_eq!(send(END), Err(libc::ENOSPC));
    let copy = |mut from: i64, mut to: i64, len| {
        // SAFETY: the offsets are variables.
        checked(unsafe { libc::copy_file_range(fd, &raw mut from, fd, &raw mut to, len, 0) })
    };
    file.write_all_at(&[8; 8192], 0).unwrap();
    let end = END as i64;
    assert_eq!(copy(0, end - 4096, 8192), Ok(4096));
    disk.filled(END - 4096, 4096, 8);
    disk.check(1 << 16, "copy_file_range");
    assert_eq!((copy(0, end, 8192), copy(end - 4096, 0, 8192)), (Err(libc::ENOSPC), Ok(4096)));
    assert_eq!(copy(end, 0, 8192), Ok(0));

    let append = OpenOptions::new().append(true).open(&disk.path).unwrap();
    assert_eq!(errno(io::Write::write(&mut &append, &[9; 4096])), Err(libc::ENOSPC));
    assert_eq!(append.metadata().unwrap().len(), END);

    assert_eq!((seek(0, libc::SEEK_END), seek(END - 1, libc::SEEK_DATA)), (Ok(END), Ok(END - 1)));
    assert_eq!((seek(END - 1, libc::SEEK_HOLE), seek(END, libc::SEEK_HOLE)), (Ok(END), Err(libc::ENXIO)));
    assert_eq!(
        (seek(END, libc::SEEK_DATA), seek(END + 1, libc::SEEK_DATA)),
        (Err(libc::ENXIO), Err(libc::ENXIO))
    );

    // Parts of pages.
    let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: it accesses no memory.
    assert_eq!(unsafe { libc::fallocate(fd, hole, end - 100, 4096) }, 0);
    disk.filled(END - 100, 100, 0);
    disk.check(1 << 16, "a hole in the last page");
    for len in [END - 1, END + 1, END + 4096] {
        assert_eq!(file.set_len(len).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
    disk.check(TAIL, "all");

    // A wipe that leaves nothing.
    let wiped =
        run(&place, "dd", &["if=/dev/zero", &format!("of={}", arg(&disk.path)), "bs=1M", "conv=notrunc"]);
    let said = crate::common::clients::text(&wiped.stderr);
    assert!(wiped.status.code() == Some(1) && said.contains("No space left on device"), "{said}");
    assert!(said.contains(&format!("{END} bytes")), "{said}");
    assert!(fs::read(&disk.path).unwrap().iter().all(|byte| *byte == 0));
    end_of_a_mapping(&file);
}

/// The last page of a mapping is the last of the disk; what lies behind cannot be touched.
fn end_of_a_mapping(file: &File) {
    let len = END as usize + 8192;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if start == libc::MAP_FAILED {
        println!("skipped: files without page cache can be mapped shared since Linux 6.6");
        return;
    }
    let null = OpenOptions::new().read(true).write(true).open("/dev/zero").unwrap();
    let (_reader, writer) = std::io::pipe().unwrap();
    for (at, wanted) in [(len - 8193, Ok(1)), (len - 8192, Err(libc::EFAULT)), (len - 1, Err(libc::EFAULT))] {
        // SAFETY: the system copies from and to the mapping, and fails where there is nothing.
        let written = checked(unsafe { libc::write(writer.as_raw_fd(), start.byte_add(at), 1) });
        // SAFETY: as above.
        let read = checked(unsafe { libc::read(null.as_raw_fd(), start.byte_add(at), 1) });
        assert_eq!((written, read), (wanted, wanted), "{at}");
    }
    // SAFETY: byte `END - 1` lies in the mapping, which is this function's own, and is unmapped once.
    unsafe {
        start.cast::<u8>().add(END as usize - 1).write(0x77);
        assert_eq!(libc::msync(start, len, libc::MS_SYNC), 0);
        libc::munmap(start, len);
    }
    let mut last = [0];
    file.read_exact_at(&mut last, END - 1).unwrap();
    assert_eq!(last, [0x77]);
}
