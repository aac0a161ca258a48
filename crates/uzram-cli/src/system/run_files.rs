//! The two files of `uzram run`: the library that is loaded into programs, and the image of the pager's
//! process. `build.rs` has put them into this program; here they are laid out where programs find them.
//!
//! **Where.** In the first of [`candidates`] that will do. Both are named in the environment of programs,
//! which run them with the rights that they have: so only root and the user of this process may write to the
//! folder, and to all above it, and every user whose rights root's programs may take can read them.
//!
//! **Names** have the build's id: files of two builds are beside each other. A file is written under another
//! name, then renamed. One that is there is used if its owner, mode and length are right, else replaced.
//!
//! **Removing** those of other builds. A process that lays files out holds a shared lock on the folder until
//! it has become the program; who removes files has an exclusive one. A pager holds a shared lock on its
//! image. A program that is just being executed has no pager, but the image's name in its environment, before
//! and after; in between it has no environment at all, which is waited for ([`is_named`]).

use std::error::Error;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use object::read::elf::{FileHeader, SectionHeader};
use object::{Endianness, ReadCache, elf};
use rustix::fs::{
    AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, StatVfsMountFlags, fchmod, flock, fstat, fstatvfs,
    openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;
use uzram::check_file_size;
use uzram::trusted_path::only_we_may_write;
use uzram::units::format_size;

use crate::failure::{Failure, Result};

// Both files, one behind the other, in a section that no process maps: the daemon locks all that is mapped of
// this program in memory.
core::arch::global_asm!(
    ".pushsection .uzram.run,\"R\",%progbits",
    concat!(".incbin \"", env!("OUT_DIR"), "/libuzram-run.so\""),
    concat!(".incbin \"", env!("OUT_DIR"), "/uzram-pager\""),
    ".popsection",
    options(raw)
);
const SECTION: &[u8] = b".uzram.run";
/// The files in this program, if `tools/pager` had built them.
const BUILT: Option<Build> = include!(concat!(env!("OUT_DIR"), "/built.rs"));

/// Not in `/var/lib/uzram`, which root alone may enter.
const DIR_OF_ROOT: &str = "/var/lib/uzram-run";
/// What is before and behind the id in the names of files.
const LIBRARY: [&str; 2] = ["libuzram-run-", ".so"];
const IMAGE: [&str; 2] = ["uzram-pager-", ""];
/// The beginning of the names of files that are being written.
const NEW: &str = ".new-";
/// Writing by the owner; reading and executing, for all.
const MODE: Mode = Mode::from_raw_mode(0o755);
const USABLE: Mode = Mode::from_raw_mode(0o555);

/// How often, and how long, a process waits for another one that removes files.
const LOCK_TRIES: usize = 200;
const LOCK_WAIT: Duration = Duration::from_millis(5);
/// How often an environment is looked for, of a program that has arguments, and of one that has none.
const ENVIRONMENT_TRIES: usize = 20;
const EXEC_TRIES: usize = 1000;
const EXEC_WAIT: Duration = Duration::from_millis(1);
/// Linux allows so much for arguments and environment, execve(2).
const MOST_ENVIRONMENT_BYTES: usize = 6 << 20;

/// The files of a build.
#[derive(Clone, Copy)]
pub struct Build {
    id: &'static str,
    library_bytes: usize,
    image_bytes: usize,
}

/// The files, laid out. They stay for as long as this is not dropped, or a program uses them.
pub struct RunFiles {
    pub library: PathBuf,
    pub image: PathBuf,
    _lock: OwnedFd,
}

/// What fails in one folder, as the end of a sentence.
type Attempt<T> = std::result::Result<T, Box<dyn Error>>;

/// Returns the files in this program.
pub fn built() -> Result<Build> {
    BUILT.ok_or_else(|| {
        let how = "run `tools/pager`, then build uzram again; `make run` does both";
        Failure::line(format!(
            "this program was built without the library and the pager of `uzram run`: {how}"
        ))
    })
}

/// Returns whether the name of a file is that of a library of any build.
pub fn is_library(path: &OsStr) -> bool {
    Path::new(path).file_name().and_then(|name| id_in(name.as_bytes(), LIBRARY)).is_some()
}

/// Lays the files out, unless they are.
pub fn lay_out() -> Result<RunFiles> {
    let (build, mut reasons) = (built()?, Vec::new());
    for dir in candidates() {
        match lay_out_in(&dir, build, &own_section) {
            Ok(files) => return Ok(files),
            Err(why) => reasons.push(why.to_string()),
        }
    }
    Err(Failure::line(format!(
        "no folder for the library and the pager: {}; set XDG_CACHE_HOME to a folder of your own that allows execution",
        reasons.join("; ")
    )))
}

/// Returns the folders that come into question, the best one first. Not `/run`, which often forbids
/// execution.
fn candidates() -> Vec<PathBuf> {
    let uid = rustix::process::geteuid();
    // The XDG Base Directory Specification says to ignore relative paths.
    let named = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
    let of_root = uid.is_root().then(|| PathBuf::from(DIR_OF_ROOT));
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let own = format!("/var/tmp/uzram-{}", uid_outside(&map, uid.as_raw()));
    of_root.into_iter().chain(cache.map(|cache| cache.join("uzram"))).chain([own.into()]).collect()
}

/// Returns the number that a user of a user namespace has outside of it: two roots are two users there.
fn uid_outside(map: &str, uid: u32) -> u32 {
    let numbers: Vec<u32> = map.split_whitespace().flat_map(str::parse).collect();
    let nth = |range: &[u32]| uid.checked_sub(range[0]).filter(|nth| *nth < range[2]);
    let outside = |range: &[u32]| range[1].checked_add(nth(range)?);
    numbers.chunks_exact(3).find_map(outside).unwrap_or(uid)
}

/// Lays the files out in one folder; `read` returns both, one behind the other.
fn lay_out_in(dir: &Path, build: Build, read: &dyn Fn() -> Attempt<Vec<u8>>) -> Attempt<RunFiles> {
    let (path, dir) = open_folder(dir).map_err(|why| format!("{}: {why}", dir.display()))?;
    if flock(&dir, FlockOperation::NonBlockingLockExclusive).is_ok() {
        remove_others(&dir, build.id);
    }
    // Anyone may lock the folder: who does that for long keeps nobody waiting.
    for _ in 0..LOCK_TRIES {
        match flock(&dir, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) => thread::sleep(LOCK_WAIT),
            _ => break,
        }
    }
    let [library, image] = [LIBRARY, IMAGE].map(|[before, after]| format!("{before}{}{after}", build.id));
    let parts = [(&library, 0, build.library_bytes), (&image, build.library_bytes, build.image_bytes)];
    for (name, at, len) in parts {
        if is_right(&dir, name, len) {
            continue;
        }
        check_file_size(name, len as u64)?;
        let bytes = read().map_err(|error| format!("cannot read this program's file: {error}"))?;
        let bytes = bytes.get(at..at + len).ok_or("this program's file is not whole: install it again")?;
        write(&dir, name, bytes).map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                format!("{}: no room for {name}, {}: make room", path.display(), format_size(len as u64))
            }
            _ => format!("cannot write {}: {error}", path.join(name).display()),
        })?;
    }
    Ok(RunFiles { library: path.join(library), image: path.join(image), _lock: dir })
}

/// Makes a folder if necessary, and opens it. Returns its path without links; an error says why it will not
/// do.
fn open_folder(path: &Path) -> Attempt<(PathBuf, OwnedFd)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err("it is no folder".into());
    };
    make_dir(parent, Mode::RWXU)?;
    let parent = fs::canonicalize(parent)?;
    let path = parent.join(name);
    // ld.so splits the list of libraries there.
    if path.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b':' | b' ')) {
        return Err("the loader finds no library in a folder with a colon or a space".into());
    }
    let is_root = rustix::process::geteuid().is_root();
    check_way(&parent, is_root)?;
    let is_new = make_dir(&path, MODE)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = match rustix::fs::open(&path, flags, Mode::empty()) {
        Err(Errno::NOTDIR | Errno::LOOP) => return Err("it is no folder".into()),
        opened => opened?,
    };
    let stat = fstat(&dir)?;
    if !only_we_may_write(&stat) {
        let mode = stat.st_mode & 0o7777;
        let what = format!("it is user {}'s, mode {mode:04o}: other users can change it", stat.st_uid);
        return Err(what.into());
    }
    if is_new || (is_root && !Mode::from_raw_mode(stat.st_mode).contains(USABLE)) {
        // Whatever the umask is.
        fchmod(&dir, MODE)?;
    }
    if fstatvfs(&dir)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Err("its file system allows no execution (noexec)".into());
    }
    Ok((path, dir))
}

/// Makes a folder whose parent exists; returns false if there is something of that name already.
fn make_dir(path: &Path, mode: Mode) -> Attempt<bool> {
    match fs::DirBuilder::new().mode(mode.bits()).create(path) {
        Ok(()) => Ok(true),
        // Another error than that it is there comes first in a file system that is read-only.
        Err(_) if fs::symlink_metadata(path).is_ok() => Ok(false),
        Err(error) => Err(format!("cannot make {}: {error}", path.display()).into()),
    }
}

/// Checks that only root and this user can put something else in the place of a folder, and for root's
/// programs that all users can enter it. The path has no links.
fn check_way(path: &Path, for_all: bool) -> Attempt<()> {
    // In a user namespace root has another number. Who has the root directory can change everything anyway.
    let ours = [0, rustix::process::geteuid().as_raw(), fs::symlink_metadata("/")?.uid()];
    let way: Vec<&Path> = path.ancestors().collect();
    for dir in way.into_iter().rev() {
        let meta = fs::symlink_metadata(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        let is_open = meta.mode() & 0o022 != 0 && meta.mode() & 0o1000 == 0;
        if !ours.contains(&meta.uid()) || is_open {
            return Err(format!("other users can change {}", dir.display()).into());
        }
        if for_all && meta.mode() & 0o001 == 0 {
            return Err(format!("programs that give up root cannot enter {}", dir.display()).into());
        }
    }
    Ok(())
}

/// Returns whether a file can be used as it is.
fn is_right(dir: &OwnedFd, name: &str, len: usize) -> bool {
    statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| {
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && Mode::from_raw_mode(stat.st_mode).contains(USABLE)
            && only_we_may_write(&stat)
            && usize::try_from(stat.st_size) == Ok(len)
    })
}

/// Writes a file, in the place of whatever has its name.
fn write(dir: &OwnedFd, name: &str, bytes: &[u8]) -> io::Result<()> {
    // Nobody else has the name.
    let new = format!("{NEW}{:016x}", RandomState::new().hash_one(name));
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(openat(dir, &new, flags, Mode::RWXU)?);
    let written = file.write_all(bytes).and_then(|()| Ok(fchmod(&file, MODE)?));
    let renamed = written.and_then(|()| Ok(renameat(dir, &new, dir, name)?));
    if renamed.is_err() {
        let _ = unlinkat(dir, &new, AtFlags::empty());
    }
    renamed
}

/// Reads both files from the file of this program.
fn own_section() -> Attempt<Vec<u8>> {
    // Also if it was replaced meanwhile.
    let file = ReadCache::new(File::open("/proc/self/exe")?);
    let header = elf::FileHeader64::<Endianness>::parse(&file)?;
    let endian = header.endian()?;
    let section = header.sections(endian, &file)?.section_by_name(endian, SECTION);
    let bytes = section.map(|(_, section)| section.data(endian, &file)).transpose()?;
    Ok(bytes.unwrap_or_default().to_vec())
}

/// Returns the id in the name of a file.
fn id_in<'a>(name: &'a [u8], [before, after]: [&str; 2]) -> Option<&'a str> {
    str::from_utf8(name).ok()?.strip_prefix(before)?.strip_suffix(after)
}

/// Removes the files of other builds that nobody uses, and those that were not written to their end. The
/// caller has the exclusive lock.
fn remove_others(dir: &OwnedFd, own_id: &str) {
    let Ok(entries) = Dir::read_from(dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_bytes().starts_with(NEW.as_bytes()) {
            let _ = unlinkat(dir, name, AtFlags::empty());
        }
        // The library is the first to be written, and the last to go.
        let Some(id) = id_in(name.to_bytes(), LIBRARY).filter(|id| *id != own_id) else { continue };
        let image = format!("{}{id}", IMAGE[0]);
        // The lock once more: a program in another namespace that has it at last is found nowhere else.
        if !is_locked(dir, &image) && !is_named(&image) && !is_locked(dir, &image) {
            let _ = unlinkat(dir, &image, AtFlags::empty());
            let _ = unlinkat(dir, name, AtFlags::empty());
        }
    }
}

/// Returns whether a pager has an image, or somebody who may not be disturbed.
fn is_locked(dir: &OwnedFd, image: &str) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    openat(dir, image, flags, Mode::empty())
        .is_ok_and(|image| flock(image, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK))
}

/// Returns whether the environment of a process names an image, as far as this process may look at it; also
/// if that cannot be found out.
fn is_named(image: &str) -> bool {
    let Ok(processes) = fs::read_dir("/proc") else { return true };
    let mut buffer = vec![0; MOST_ENVIRONMENT_BYTES];
    fs::read("/proc/self/environ").is_err()
        || processes.flatten().any(|process| has_named(&process.path(), image.as_bytes(), &mut buffer))
}

fn has_named(process: &Path, image: &[u8], buffer: &mut [u8]) -> bool {
    for nth in 0..EXEC_TRIES {
        // By one call: another one would find nothing more of a program that is executed meanwhile.
        let read = File::open(process.join("environ")).and_then(|mut file| file.read(buffer));
        let Ok(len) = read else { return false };
        // The kernel's threads and dead processes have no program.
        if len > 0 || fs::read_link(process.join("exe")).is_err() {
            return buffer[..len].windows(image.len()).any(|part| part == image);
        }
        // A program that is just being executed has no arguments either, but for a moment.
        let has_arguments = || fs::read(process.join("cmdline")).is_ok_and(|line| !line.is_empty());
        if nth >= ENVIRONMENT_TRIES && has_arguments() {
            return false;
        }
        thread::sleep(EXEC_WAIT);
    }
    true
}

#[cfg(test)]
mod tests;
