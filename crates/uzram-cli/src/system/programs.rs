//! Programs that run under `uzram run`: their figures, as their processes publish them.
//!
//! Each has them in a memfd ([`Figures`]), found among its descriptors. Any process can have a file that
//! looks so: what is opened is known to be in the kernel's memory before it is, and each length is bounded.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, MemfdFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use uzram_pager::{Figures, descriptors};

use crate::system::process_status::status_field;

/// How often figures are read until they are the same twice, so that they are all of one time.
const TRIES: usize = 10;
/// The most of `/proc/PID/status` that is read: the groups in it may be many.
const MOST_STATUS_BYTES: u64 = 1 << 20;
/// The most of `/proc/PID/comm`.
const MOST_COMMAND_BYTES: u64 = 64;

/// A program that runs under `uzram run`.
pub struct Program {
    pub id: u32,
    /// The name of its command, printable.
    pub command: String,
    pub figures: Figures,
}

/// The file system of memfds, by the device numbers that its files have.
#[derive(Clone, Copy, PartialEq, Eq)]
struct MemoryFiles {
    major: u32,
    minor: u32,
}

/// Returns all programs that this process may look at, in the order of their processes; without this process.
pub fn all() -> Vec<Program> {
    let Some(memory_files) = MemoryFiles::find() else { return Vec::new() };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut ids: Vec<u32> = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    ids.sort_unstable();
    let ids = ids.into_iter().filter(|id| *id != std::process::id());
    ids.filter_map(|id| program(id, memory_files).ok().flatten()).collect()
}

/// Returns the program of a process, if it runs under `uzram run`, and this process may look at it.
pub fn of(id: u32) -> Option<Program> {
    program(id, MemoryFiles::find()?).ok().flatten()
}

impl MemoryFiles {
    fn find() -> Option<MemoryFiles> {
        let flags = MemfdFlags::CLOEXEC;
        // The second is not known before Linux 6.3, and the first may be forbidden since then.
        let file = rustix::fs::memfd_create("uzram-list", flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|_| rustix::fs::memfd_create("uzram-list", flags));
        MemoryFiles::of(&file.ok()?).ok()
    }

    /// Returns that of a file. Asks nobody, such as a server of files that does not answer.
    fn of(file: impl AsFd) -> Result<MemoryFiles, Errno> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(file, c"", flags, StatxFlags::empty())?;
        Ok(MemoryFiles { major: stat.stx_dev_major, minor: stat.stx_dev_minor })
    }
}

fn program(id: u32, memory_files: MemoryFiles) -> Result<Option<Program>, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    // As it is open, another process that gets its number is not taken for it.
    let dir = rustix::fs::open(format!("/proc/{id}"), flags | OFlags::DIRECTORY, Mode::empty())?;
    let fds = rustix::fs::openat(&dir, c"fd", flags | OFlags::DIRECTORY, Mode::empty())?;
    let wanted = format!("/memfd:{} (deleted)", Figures::FILE_NAME);
    let (mut candidates, mut entries) = (Vec::new(), Dir::read_from(&fds)?);
    while let Some(Ok(entry)) = entries.read() {
        let name = entry.file_name().to_owned();
        let Some(number) = name.to_str().ok().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // In ascending order: a process may have a million.
        if number >= descriptors::ABOVE_ALL {
            break;
        }
        let link = rustix::fs::readlinkat(&fds, &*name, Vec::new());
        if link.is_ok_and(|link| link.as_bytes() == wanted.as_bytes()) {
            candidates.extend(read(&fds, &name, memory_files).ok().flatten());
        }
    }
    if candidates.is_empty() {
        return Ok(None);
    }
    // A child of vfork(2), and one that has not gone on yet after a fork, has its parent's.
    let status = text(&dir, c"status", MOST_STATUS_BYTES)?;
    let own = status_field(&status, "NSpid").and_then(|ids| ids.split_whitespace().next_back()?.parse().ok());
    let Some(figures) = candidates.into_iter().find(|figures| Some(figures.process) == own) else {
        return Ok(None);
    };
    let command = printable(text(&dir, c"comm", MOST_COMMAND_BYTES)?.trim_end_matches('\n'));
    Ok(Some(Program { id, command, figures }))
}

/// Reads the figures in a file that a process has open; `None` if there are none.
fn read(fds: &OwnedFd, name: &std::ffi::CStr, memory_files: MemoryFiles) -> Result<Option<Figures>, Errno> {
    // This opens nothing really: it is no matter what it is, such as a device that does something when it is
    // opened.
    let path = rustix::fs::openat(fds, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    if MemoryFiles::of(&path)? != memory_files {
        return Ok(None);
    }
    let stat = rustix::fs::fstat(&path)?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !is_file || stat.st_size != Figures::TEXT_BYTES as i64 {
        return Ok(None);
    }
    // The same file: the number is this process's.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::open(format!("/proc/self/fd/{}", path.as_raw_fd()), flags, Mode::empty())?;
    let mut last = None;
    for _ in 0..TRIES {
        let mut text = [0; Figures::TEXT_BYTES];
        let count = rustix::io::pread(&file, &mut text, 0)?;
        let figures = Figures::parse(&text[..count]);
        if figures.is_some() && figures == last {
            return Ok(figures);
        }
        last = figures;
    }
    Ok(None)
}

/// Reads the beginning of a file of `/proc/PID`.
fn text(dir: &OwnedFd, name: &std::ffi::CStr, most_bytes: u64) -> Result<String, Errno> {
    let file = rustix::fs::openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = Vec::new();
    let read = File::from(file).take(most_bytes).read_to_end(&mut bytes);
    read.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns a name that a process has given itself so that it can be shown.
fn printable(name: &str) -> String {
    let shown = |c: char| if ['\'', '"'].contains(&c) { c.to_string() } else { c.escape_debug().to_string() };
    name.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_commands_are_printable() {
        for (name, shown) in [
            ("python3", "python3"),
            ("it's \"it\"", "it's \"it\""),
            ("a\x1b[2Jb\n\tc\0", "a\\u{1b}[2Jb\\n\\tc\\0"),
            ("\u{202e}drow\u{7f}", "\\u{202e}drow\\u{7f}"),
            ("größe \\", "größe \\\\"),
        ] {
            assert_eq!(printable(name), shown);
        }
    }
}
