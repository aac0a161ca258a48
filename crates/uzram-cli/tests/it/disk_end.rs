//! The end of a disk, as a file (`uzram up --mount`) and as a block device (`uzram attach`): one table of
//! results for both, so that the kernel's block devices say what the file has to do.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::common::*;

/// Not a multiple of anything large.
const END: u64 = 5000 << 10;
/// Longer than several of the kernel's requests.
const TAIL: u64 = 4 << 20;

#[test]
fn a_file_and_a_block_device_on_it_end_alike() {
    let Some(place) = BlockPlace::if_able() else { return };
    let _daemon = place.up_mounted("5000K", "");
    let check = |path: &Path| {
        let mut disk = Disk::new(path);
        a_write_is_cut_at_the_end_and_then_there_is_no_space(&mut disk);
        a_read_is_cut_at_the_end_and_then_there_is_nothing(&disk);
        a_range_is_zeroed_up_to_the_end(&mut disk);
        asynchronous_requests_end_there_too(&mut disk);
    };
    check(&place.disk());
    let device = place.run("attach zram0").ok();
    check(Path::new(device.trim()));
    place.run("detach zram0").ok();
}

/// Returns a length or an error number.
fn errno(result: io::Result<usize>) -> Result<u64, Errno> {
    result.map(|len| len as u64).map_err(|error| Errno::from_io_error(&error).unwrap())
}

/// The same of a system call.
fn checked(returned: isize) -> Result<u64, Errno> {
    errno(usize::try_from(returned).map_err(|_| io::Error::last_os_error()))
}

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

    fn check(&self, len: u64, what: &str) {
        let mut read = vec![0; len as usize];
        self.open(0).read_exact_at(&mut read, END - len).unwrap();
        assert!(read == self.tail[(TAIL - len) as usize..], "{}: {what}", self.path.display());
    }

    /// Checks reads about the end, each of which ends there.
    fn check_reads(
        &self,
        cases: impl Iterator<Item = (u64, u64)>,
        read: impl Fn(&mut [u8], u64) -> Result<u64, Errno>,
    ) {
        for (offset, len) in cases {
            let (mut buffer, before_end) = (Buffer::new(len, 0), END.saturating_sub(offset).min(len));
            let what = format!("{}: {len} bytes at {offset}", self.path.display());
            assert_eq!(read(buffer.bytes(), offset), Ok(before_end), "{what}");
            let (start, len) = ((offset.min(END) - (END - TAIL)) as usize, before_end as usize);
            assert!(buffer.bytes()[..len] == self.tail[start..][..len], "{what}");
        }
    }

    /// Checks writes about the end, each of which ends there, and what is on the disk then; `may_be` says
    /// whether a write of which so many bytes lie before the end may have another result.
    fn check_writes(
        &mut self,
        cases: impl Iterator<Item = (u64, u64)>,
        write: impl Fn(&mut [u8], u64) -> Result<u64, Errno>,
        may_be: impl Fn(u64, u64, Errno) -> bool,
    ) {
        for (byte, (offset, len)) in (1..).zip(cases) {
            let before_end = END.saturating_sub(offset).min(len);
            let wanted = if before_end == 0 && len > 0 { Err(Errno::NOSPC) } else { Ok(before_end) };
            let what = format!("{len} bytes at {offset}");
            let written = write(Buffer::new(len, byte).bytes(), offset);
            let is_other = written.is_err_and(|error| may_be(len, before_end, error));
            assert!(written == wanted || is_other, "{}: {what}: {written:?}", self.path.display());
            self.filled(offset, before_end, byte);
            self.check(1 << 16, &what);
        }
        self.check(TAIL, "all");
    }
}

fn cases(is_aligned: bool) -> impl Iterator<Item = (u64, u64)> {
    let offsets = [END - (3 << 20), END - 8192, END - 4096, END, END + 4096, END + (1 << 40)];
    let offsets = offsets.into_iter().chain([END - 4097, END - 1, END + 1]);
    let lens = [0, 4096, 8192, 4 << 20, 1, 4097];
    let all = offsets.flat_map(move |offset| lens.map(|len| (offset, len)));
    all.filter(move |(offset, len)| !is_aligned || (offset | len) % 4096 == 0)
}

fn a_write_is_cut_at_the_end_and_then_there_is_no_space(disk: &mut Disk) {
    for flags in [0, libc::O_DIRECT] {
        let file = disk.open(flags);
        let write = |bytes: &mut [u8], offset| errno(file.write_at(bytes, offset));
        disk.check_writes(cases(flags != 0), write, |_, _, _| false);
    }
}

fn a_read_is_cut_at_the_end_and_then_there_is_nothing(disk: &Disk) {
    for flags in [0, libc::O_DIRECT] {
        let file = disk.open(flags);
        disk.check_reads(cases(flags != 0), |bytes, offset| errno(file.read_at(bytes, offset)));
    }
}

fn a_range_is_zeroed_up_to_the_end(disk: &mut Disk) {
    const KEEP: FallocateFlags = FallocateFlags::KEEP_SIZE;
    let file = disk.open(0);
    let (hole, zero) = (FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE);
    for mode in [hole | KEEP, zero | KEEP, zero, KEEP, FallocateFlags::empty()] {
        let zeroes = mode.intersects(hole | zero);
        // The system itself refuses a length of 0.
        for (offset, len) in cases(true).filter(|(_, len)| *len > 0) {
            let before_end = END.saturating_sub(offset).min(len);
            let wanted = match before_end {
                _ if !zeroes => Err(Errno::OPNOTSUPP),
                0 => Err(Errno::INVAL),
                _ if !mode.contains(KEEP) && before_end < len => Err(Errno::INVAL),
                _ => Ok(()),
            };
            let what = format!("{mode:?}: {len} bytes at {offset}");
            file.write_all_at(&vec![5; before_end as usize], offset).unwrap();
            disk.filled(offset, before_end, 5);
            let done = rustix::fs::fallocate(&file, mode, offset, len);
            // A block device looks at the range first.
            let is_other = !zeroes && done == Err(Errno::INVAL) && before_end < len;
            let path = disk.path.display();
            assert!(done == wanted || is_other, "{path}: {what}: {done:?}, not {wanted:?}");
            if wanted.is_ok() {
                disk.filled(offset, len, 0);
            }
            disk.check(1 << 16, &what);
        }
    }
    disk.check(TAIL, "all");
}

/// `struct iocb` of `<linux/aio_abi.h>`.
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
fn asynchronously(file: &File, opcode: u16, bytes: &mut [u8], offset: u64) -> Result<u64, Errno> {
    let mut context = 0usize;
    // `struct io_event`: the third field is the result.
    let mut event = [0i64; 4];
    let (fd, buffer, len) = (file.as_raw_fd() as u32, bytes.as_mut_ptr() as u64, bytes.len() as u64);
    let mut request = Iocb { opcode, fd, buffer, len, offset, ..Iocb::default() };
    let mut list = [&raw mut request];
    // SAFETY: all pointers are to values of the right size, which live until the request has ended.
    let submitted = unsafe {
        assert_eq!(libc::syscall(libc::SYS_io_setup, 1, &raw mut context), 0);
        let submitted = checked(libc::syscall(libc::SYS_io_submit, context, 1, list.as_mut_ptr()) as isize);
        let none = std::ptr::null_mut::<libc::timespec>();
        if submitted.is_ok() {
            assert_eq!(libc::syscall(libc::SYS_io_getevents, context, 1, 1, event.as_mut_ptr(), none), 1);
        }
        libc::syscall(libc::SYS_io_destroy, context);
        submitted
    };
    submitted?;
    u64::try_from(event[2]).map_err(|_| Errno::from_raw_os_error(-event[2] as i32))
}

fn asynchronous_requests_end_there_too(disk: &mut Disk) {
    let file = disk.open(libc::O_DIRECT);
    let cases = || cases(true).filter(|(_, len)| *len > 0);
    disk.check_reads(cases(), |bytes, offset| asynchronously(&file, 0, bytes, offset));
    let is_file = disk.path.ends_with("disk");
    let write = |bytes: &mut [u8], offset| asynchronously(&file, 1, bytes, offset);
    // Of a file the kernel makes an error of a short write, and of several requests of which one fails.
    disk.check_writes(cases(), write, |len, before_end, error| {
        let wanted = if len > 1 << 20 { Errno::NOSPC } else { Errno::IO };
        is_file && (1..len).contains(&before_end) && error == wanted
    });
    disk.check_reads(cases(), |bytes, offset| asynchronously(&file, 0, bytes, offset));
}

/// Copies within the kernel, mappings, appending and seeking, of the file.
#[test]
fn every_other_way_to_the_end_of_the_file_ends_there() {
    let Some(place) = BlockPlace::needing("dd") else { return };
    let _daemon = place.up_mounted("5000K", "");
    let mut disk = Disk::new(&place.disk());
    let file = disk.open(0);
    let from = File::open(place.write("from", [7; 8192])).unwrap();
    let seek = |to| rustix::fs::seek(&file, to);
    let send = |offset: u64| {
        seek(SeekFrom::Start(offset)).unwrap();
        rustix::fs::sendfile(&file, &from, Some(&mut 0), 8192)
    };
    assert_eq!(send(END - 4096), Ok(4096));
    disk.filled(END - 4096, 4096, 7);
    disk.check(1 << 16, "sendfile");
    assert_eq!(send(END), Err(Errno::NOSPC));
    let copy =
        |mut from, mut to| rustix::fs::copy_file_range(&file, Some(&mut from), &file, Some(&mut to), 8192);
    file.write_all_at(&[8; 8192], 0).unwrap();
    assert_eq!(copy(0, END - 4096), Ok(4096));
    disk.filled(END - 4096, 4096, 8);
    disk.check(1 << 16, "copy_file_range");
    assert_eq!([copy(0, END), copy(END - 4096, 0), copy(END, 0)], [Err(Errno::NOSPC), Ok(4096), Ok(0)]);

    let append = OpenOptions::new().append(true).open(&disk.path).unwrap();
    assert_eq!(errno((&append).write(&[9; 4096])), Err(Errno::NOSPC));
    assert_eq!(append.metadata().unwrap().len(), END);

    for (to, wanted) in [
        (SeekFrom::End(0), Ok(END)),
        (SeekFrom::Data(END - 1), Ok(END - 1)),
        (SeekFrom::Hole(END - 1), Ok(END)),
        (SeekFrom::Hole(END), Err(Errno::NXIO)),
        (SeekFrom::Data(END), Err(Errno::NXIO)),
        (SeekFrom::Data(END + 1), Err(Errno::NXIO)),
    ] {
        assert_eq!(seek(to), wanted, "{to:?}");
    }

    // Parts of pages.
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, hole, END - 100, 4096).unwrap();
    disk.filled(END - 100, 100, 0);
    disk.check(1 << 16, "a hole in the last page");
    for len in [END - 1, END + 1, END + 4096] {
        assert_eq!(errno(file.set_len(len).map(|()| 0)), Err(Errno::INVAL));
    }
    disk.check(TAIL, "all");

    // A wipe that leaves nothing.
    let wiped = run(&place, "dd", &format!("if=/dev/zero of={} bs=1M conv=notrunc", arg(&disk.path)));
    let says = |words: &str| wiped.stderr.contains(words);
    assert!(wiped.status.code() == Some(1) && says("No space left on device"), "{wiped}");
    assert!(says(&format!("{END} bytes")), "{wiped}");
    assert!(is_zero(&fs::read(&disk.path).unwrap()));
    end_of_a_mapping(&file);
}

/// The last page of a mapping is the last of the disk; what lies behind cannot be touched.
fn end_of_a_mapping(file: &File) {
    let len = END as usize + 8192;
    let Some(map) = Map::if_able(file, len) else { return };
    let null = open("/dev/zero");
    let (_reader, writer) = io::pipe().unwrap();
    for (at, wanted) in [(len - 8193, Ok(1)), (len - 8192, Err(Errno::FAULT)), (len - 1, Err(Errno::FAULT))] {
        // SAFETY: the system copies from and to the mapping, and fails where there is nothing.
        let done = unsafe {
            let written = checked(libc::write(writer.as_raw_fd(), map.at(at).cast(), 1));
            [written, checked(libc::read(null.as_raw_fd(), map.at(at).cast(), 1))]
        };
        assert_eq!(done, [wanted; 2], "{at}");
    }
    map.write(END as usize - 1, &[0x77]);
    map.sync();
    let mut last = [0];
    file.read_exact_at(&mut last, END - 1).unwrap();
    assert_eq!(last, [0x77]);
}
