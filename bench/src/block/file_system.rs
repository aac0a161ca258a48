//! A file system, ext4: many small files by `fs_mark`, and a large one written and read in order.
//!
//! Every measurement uses a new file system; making it also discards the disk's contents. `fs_mark` is run as
//! the kernel's developers ran it on zram, and fills four fifths of it: 8 threads, a folder each, 500 files
//! each of 100,000 bytes, which are synced one by one and kept. It writes zeroes, which neither device
//! compresses: this measures the way to the device.
//!
//! The large file is the corpus, repeated, written by this program in pieces of 1 MiB and synced at the end,
//! which counts; then the file system is remounted, so that nothing is cached, and the file is read in such
//! pieces. fio cannot do this: its buffers contain noise, or data generated during the measured time; these
//! are real pages of programs. The data read is compared afterwards.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use uzram::{Error, ErrorKind, Result};

use super::disk::{Attached, Mounted};
use super::{ALGORITHM, PATIENCE, check_kernel};
use crate::engine::{KernelZram, ROUNDS};
use crate::harness::process::{command, require, run, run_to_end, runtime_dir};
use crate::harness::report::each;
use crate::harness::rounds::in_turn;
use crate::harness::{Options, Report, io_error, read_back, unsupported};

const THREADS: u32 = 8;
/// The size of `fs_mark`'s files.
pub const SMALL_FILE_BYTES: u32 = 100_000;
const PIECE_BYTES: usize = 1 << 20;
const EXT4: &str = "ext4";

const FIGURES: [&str; 3] = ["fs_mark, files/s", "large file written, MB/s", "large file read, MB/s"];

/// `Unsupported` names a missing program.
pub fn check(file_system: &str) -> Result<()> {
    require(&["fs_mark", &format!("mkfs.{file_system}")])
}

pub(super) fn measure(options: &Options, pages: &Path) -> Result<Report> {
    check(EXT4)?;
    check_kernel()?;
    let contents = fs::read(pages).map_err(|error| io_error(pages, error))?;
    let size_bytes = options.amount(560, 64) << 20;
    let kernel = KernelZram::add(ALGORITHM, size_bytes)?;
    let dir = runtime_dir()?;
    make(EXT4, &kernel.path())?;
    let tried = Mounted::new(&kernel.path(), EXT4, dir.path()).and_then(Mounted::unmount);
    tried.map_err(|error| unsupported(format!("{EXT4} cannot be mounted: {error}")))?;
    let uzram = Attached::new(options.uzram()?, ALGORITHM, size_bytes, &[])?;
    let devices = [uzram.path(), &kernel.path()];
    let figures: [Vec<[f64; 3]>; 2] =
        in_turn(options.rounds(ROUNDS), &options.stop, |_, which| round(options, devices[which], &contents))?;
    let mut report = Report::default();
    for (at, figure) in FIGURES.into_iter().enumerate() {
        let [uzram, kernel] = figures.each_ref().map(|rounds| each(rounds, |of| of[at]));
        let row = format!("{EXT4}, {figure}");
        report.compared("block devices", &row, ["uzram", "kernel"], [&uzram, &kernel]);
    }
    report.note(
        "fs_mark writes zeroes and syncs each file; the large file is the corpus, written in pieces of 1 MiB and synced, \
         read after mounting anew",
    );
    Ok(report)
}

/// Returns [`FIGURES`].
fn round(options: &Options, device: &Path, contents: &[u8]) -> Result<[f64; 3]> {
    let dir = runtime_dir()?;
    let mount_point = dir.path().join("mnt");
    fs::create_dir(&mount_point).map_err(|error| io_error(&mount_point, error))?;

    make(EXT4, device)?;
    let mounted = Mounted::new(device, EXT4, &mount_point)?;
    let files = options.amount(500, 4);
    let files_per_s = fs_mark(&mount_point, dir.path(), THREADS, THREADS, files, &options.stop)?;
    mounted.unmount()?;
    options.go_on()?;

    make(EXT4, device)?;
    let (file, file_bytes) = (mount_point.join("pages"), options.amount(256, 8) << 20);
    let mounted = Mounted::new(device, EXT4, &mount_point)?;
    let write_mb_per_s = write(&file, contents, file_bytes)?;
    mounted.unmount()?;
    options.go_on()?;
    let mounted = Mounted::new(device, EXT4, &mount_point)?;
    let read_mb_per_s = read(&file)?;
    compare(&file, contents, file_bytes)?;
    mounted.unmount()?;
    Ok([files_per_s, write_mb_per_s, read_mb_per_s])
}

/// Makes a file system of that name; what the device held is lost.
pub fn make(name: &str, device: &Path) -> Result<()> {
    let mut command = command(&format!("mkfs.{name}"));
    // mkfs.btrfs asks before it overwrites another file system.
    command.args(if name == "btrfs" { &["-q", "-f"][..] } else { &["-q"] });
    run_to_end(command.arg(device), PATIENCE).map(drop)
}

/// Runs `fs_mark` on a new file system, in so many folders with as many of the threads each: its command
/// line has room for few. It makes files, syncs each and keeps them; its log goes to another folder. Returns
/// files a second.
pub fn fs_mark(
    mount_point: &Path,
    log_dir: &Path,
    folders: u32,
    threads: u32,
    files_per_thread: u32,
    stop: &AtomicBool,
) -> Result<f64> {
    let mut command = command("fs_mark");
    command.current_dir(log_dir).arg("-l").arg(log_dir.join("fs_mark.log"));
    command.args(["-k", "-s", &SMALL_FILE_BYTES.to_string(), "-n", &files_per_thread.to_string()]);
    command.args(["-t", &threads.to_string()]);
    for folder in 0..folders {
        let dir = mount_point.join(format!("d{folder}"));
        fs::create_dir(&dir).map_err(|error| io_error(&dir, error))?;
        command.arg("-d").arg(dir);
    }
    let printed = run(&mut command, PATIENCE, || stop.load(Ordering::Relaxed))?;
    files_per_s(&printed, u64::from(threads) * u64::from(files_per_thread)).ok_or_else(|| {
        Error::new(ErrorKind::Io, format!("fs_mark's table has an unknown form: {}", printed.trim()))
    })
}

/// Returns the rate in the row of `fs_mark`'s table, if the row says that so many files were made.
fn files_per_s(printed: &str, files: u64) -> Option<f64> {
    let mut lines = printed.lines().skip_while(|line| !line.starts_with("FSUse%"));
    let heading: Vec<_> = lines.next()?.split_ascii_whitespace().collect();
    let row: Vec<_> = lines.next()?.split_ascii_whitespace().collect();
    if row.get(1)?.parse::<u64>().ok()? != files || *heading.get(3)? != "Files/sec" {
        return None;
    }
    row.get(3)?.parse().ok()
}

/// Returns the contents in pieces, repeated up to so many bytes.
fn pieces(contents: &[u8], size_bytes: u64) -> impl Iterator<Item = &[u8]> {
    let mut left = size_bytes;
    contents.chunks(PIECE_BYTES).cycle().map_while(move |piece| {
        let len = left.min(piece.len() as u64);
        left -= len;
        (len > 0).then(|| &piece[..len as usize])
    })
}

/// Writes a file and syncs it; returns 10^6 bytes a second.
fn write(path: &Path, contents: &[u8], size_bytes: u64) -> Result<f64> {
    let failed = |error| io_error(path, error);
    let start = Instant::now();
    let mut file = File::create(path).map_err(failed)?;
    for piece in pieces(contents, size_bytes) {
        file.write_all(piece).map_err(failed)?;
    }
    file.sync_all().map_err(failed)?;
    Ok(size_bytes as f64 / start.elapsed().as_secs_f64() / 1e6)
}

/// Reads a file; returns 10^6 bytes a second.
fn read(path: &Path) -> Result<f64> {
    let failed = |error| io_error(path, error);
    let mut buffer = vec![0; PIECE_BYTES];
    let mut read_bytes = 0;
    let start = Instant::now();
    let mut file = File::open(path).map_err(failed)?;
    loop {
        match file.read(&mut buffer).map_err(failed)? {
            0 => return Ok(read_bytes as f64 / start.elapsed().as_secs_f64() / 1e6),
            len => read_bytes += len,
        }
    }
}

/// Fails unless a file contains what was written to it.
fn compare(path: &Path, contents: &[u8], size_bytes: u64) -> Result<()> {
    let failed = |error| io_error(path, error);
    let mut file = File::open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.len() != size_bytes {
        return Err(Error::new(ErrorKind::Corrupt, format!("{} has another length", path.display())));
    }
    let mut buffer = vec![0; PIECE_BYTES];
    for piece in pieces(contents, size_bytes) {
        file.read_exact(&mut buffer[..piece.len()]).map_err(failed)?;
        read_back(&buffer[..piece.len()], piece, || path.display().to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fs_marks_table_is_understood_or_refused() {
        let table = "#  fs_mark  -k\n#\tVersion 3.3\n\nFSUse%        Count         Size    Files/sec     App Overhead\n    \
                     80         4000       100000       5403.7            28854\n";
        assert_eq!(files_per_s(table, 4000), Some(5403.7));
        assert_eq!(files_per_s(table, 4001), None, "some are missing");
        assert_eq!(files_per_s(&table[..table.find("    80").unwrap()], 4000), None);
        assert_eq!(files_per_s("", 4000), None);
    }

    #[test]
    fn a_file_is_the_contents_again_and_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pages");
        let contents: Vec<u8> = (0..PIECE_BYTES + 5000).map(|at| (at / 7) as u8).collect();
        let size_bytes = 2 * contents.len() as u64 + 123;
        assert!(write(&path, &contents, size_bytes).unwrap() > 0.0);
        let written = fs::read(&path).unwrap();
        assert_eq!(written.len() as u64, size_bytes);
        assert!(written[contents.len()..2 * contents.len()] == contents[..]);
        assert!(read(&path).unwrap() > 0.0);
        compare(&path, &contents, size_bytes).unwrap();
        assert!(compare(&path, &contents, size_bytes - 1).is_err());
        assert!(compare(&path, &contents[1..], size_bytes).is_err());
    }
}
