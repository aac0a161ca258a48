//! The end of a disk, as a file (`uzram up --mount`) and as a block device (`uzram attach`): one table of
//! results for both, so that the kernel's block devices say what the file has to do.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::common::Daemon;
use crate::common::block::BlockPlace;
use crate::common::clients::arg;

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
