//! Programs that run under `uzram run`: their figures, as their pagers publish them.
//!
//! A pager is a process of its own, a child of its program, and in the program's memory. It has the figures
//! in a memfd ([`Figures`]), found among its descriptors. Any process can take a pager's name, and have a
//! file that looks so: what is opened is known to be in the kernel's memory before it is, each length is
//! bounded, and figures are believed of the process alone whose memory the pager has ([`is_pager_of`]).

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, MemfdFlags, Mode, OFlags, StatxFlags};
use uzram_pager::Figures;

use crate::system::process_status::status_field;

/// How often figures are read until they are the same twice, so that they are all of one time.
const TRIES: usize = 10;
/// The most that is read of a process's status: the groups in it may be many.
const MOST_BYTES: u64 = 1 << 20;
/// The most descriptors of a pager that are looked at: a process may have a million.
const MOST_FILES: usize = 4096;
/// The name of a pager's process.
const PAGER: &str = "uzram-pager";
/// kcmp(2), `<linux/kcmp.h>`: whether two processes have one memory.
const KCMP_VM: libc::c_int = 1;
const OPEN_DIR: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::DIRECTORY);

/// A program that runs under `uzram run`.
pub struct Program {
    pub id: u32,
    /// The name of its command, printable.
    pub command: String,
    pub figures: Figures,
}

/// Returns all programs that this process may look at, in the order of their processes.
pub fn all() -> Vec<Program> {
    let memfd = rustix::fs::memfd_create("uzram-list", MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL);
    let Some(memfds) = memfd.ok().and_then(FileSystem::of) else { return Vec::new() };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut programs: Vec<Program> = ids.filter_map(|id| program_of_pager(id, memfds)).collect();
    programs.sort_unstable_by_key(|program| program.id);
    programs.dedup_by_key(|program| program.id);
    programs
}

/// Returns the program of a process, if it runs under `uzram run`, and this process may look at it.
pub fn of(id: u32) -> Option<Program> {
    all().into_iter().find(|program| program.id == id)
}

/// A file system, by the device numbers that its files have.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileSystem(u32, u32);

impl FileSystem {
    /// Returns that of a file. Asks nobody, such as a server of files that does not answer.
    fn of(file: impl AsFd) -> Option<FileSystem> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(file, c"", flags, StatxFlags::empty()).ok()?;
        Some(FileSystem(stat.stx_dev_major, stat.stx_dev_minor))
    }
}

/// A process, of which nothing is asked but by its directory: another one that gets its number is not taken
/// for it.
struct Process {
    id: u32,
    dir: OwnedFd,
}

impl Process {
    fn open(id: u32) -> Option<Process> {
        let dir = rustix::fs::open(format!("/proc/{id}"), OPEN_DIR, Mode::empty()).ok()?;
        Some(Process { id, dir })
    }

    /// Reads the beginning of one of its files.
    fn text(&self, name: &CStr) -> Option<String> {
        let file =
            rustix::fs::openat(&self.dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let mut bytes = Vec::new();
        File::from(file).take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn name(&self) -> Option<String> {
        Some(self.text(c"comm")?.trim_end_matches('\n').to_owned())
    }

    /// Returns a field of its status.
    fn field(&self, name: &str) -> Option<String> {
        status_field(&self.text(c"status")?, name).map(str::to_owned)
    }
}

/// Returns the program of a pager, if that process is one.
fn program_of_pager(id: u32, memfds: FileSystem) -> Option<Program> {
    let pager = Process::open(id)?;
    // Most are none: nothing else is read of them.
    if pager.name()? != PAGER {
        return None;
    }
    let program = Process::open(pager.field("PPid")?.parse().ok()?)?;
    // The number that the program has in the pager's namespace, which is its own.
    let own: u64 = program.field("NSpid")?.split_whitespace().next_back()?.parse().ok()?;
    let fds = rustix::fs::openat(&pager.dir, c"fd", OPEN_DIR, Mode::empty()).ok()?;
    let wanted = format!("/memfd:{} (deleted)", Figures::FILE_NAME);
    let figures = Dir::read_from(&fds).ok()?.flatten().take(MOST_FILES).find_map(|entry| {
        let link = rustix::fs::readlinkat(&fds, entry.file_name(), Vec::new()).ok()?;
        let is_wanted = link.as_bytes() == wanted.as_bytes();
        let figures = is_wanted.then(|| read(&fds, entry.file_name(), memfds))??;
        (figures.process == own).then_some(figures)
    })?;
    if !is_pager_of(&pager, &program) {
        return None;
    }
    Some(Program { id: program.id, command: printable(&program.name()?), figures })
}

/// Returns whether a process is the pager of its parent: the two have one memory. A process that only has a
/// pager's name must not show figures for its parent, which may be another user's: it becomes one by
/// execve(2) of a set-uid program, say, or init if the one before has ended. Where the kernel does not tell,
/// the two have the same users.
fn is_pager_of(pager: &Process, program: &Process) -> bool {
    // SAFETY: it takes numbers, and compares.
    let compared = unsafe { libc::syscall(libc::SYS_kcmp, pager.id, program.id, KCMP_VM, 0, 0) };
    let is_one_memory = match io::Error::last_os_error().raw_os_error() {
        // Not in this kernel; or a container forbids it.
        Some(libc::ENOSYS | libc::EPERM) if compared == -1 => pager.field("Uid") == program.field("Uid"),
        _ => compared == 0,
    };
    // If a number is another process's by now, the name of the one before cannot be read any more.
    is_one_memory && pager.name().is_some() && program.name().is_some()
}

/// Reads the figures in a file that a pager has open; `None` if there are none.
fn read(fds: &OwnedFd, name: &CStr, memfds: FileSystem) -> Option<Figures> {
    // This opens nothing really: it is no matter what it is, such as a device that does something when it is
    // opened.
    let path = rustix::fs::openat(fds, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    if FileSystem::of(&path)? != memfds {
        return None;
    }
    let stat = rustix::fs::fstat(&path).ok()?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !is_file || stat.st_size != Figures::TEXT_BYTES as i64 {
        return None;
    }
    // The same file: the number is this process's.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let link = format!("/proc/self/fd/{}", path.as_raw_fd());
    let file = rustix::fs::open(link, flags, Mode::empty()).ok()?;
    let mut last = None;
    for _ in 0..TRIES {
        let mut text = [0; Figures::TEXT_BYTES];
        let count = rustix::io::pread(&file, &mut text, 0).ok()?;
        let figures = Figures::parse(&text[..count]);
        if figures.is_some() && figures == last {
            return figures;
        }
        last = figures;
    }
    None
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
