//! What kind of program a file is: whether a library can be loaded into it that manages its memory.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use object::read::elf::{FileHeader, ProgramHeader, SectionHeader};
use object::{Endianness, ReadCache, elf};

/// How many scripts may name each other as their interpreters; the kernel's limit.
const MOST_SCRIPTS: usize = 5;
/// What the kernel reads of a script's first line.
const LINE_BYTES: usize = 256;

/// What kind of program a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Its memory can be managed.
    Dynamic,
    /// No library is loaded into it.
    Static,
    /// It is for another C library than the library is.
    OtherLoader,
    /// The loader loads no libraries of ours into it, as it has more rights than its user.
    SetUser,
    /// It makes its system calls itself.
    Go,
    /// It is not a program of this machine.
    Unknown,
}

impl Kind {
    /// Returns why its memory cannot be managed, as the end of a sentence that its name begins.
    pub const fn why(self) -> &'static str {
        match self {
            Kind::Dynamic => "is linked dynamically",
            Kind::Static => "is linked statically",
            Kind::OtherLoader => "is not for glibc",
            Kind::SetUser => "has other rights than its user (set-uid, set-gid or capabilities)",
            Kind::Go => "is a Go program, which makes its system calls itself",
            Kind::Unknown => "is no ELF program",
        }
    }
}

/// Returns the kind of a program; of a script, that of its interpreter.
pub fn kind(path: &Path) -> io::Result<Kind> {
    let mut path = path.to_owned();
    for _ in 0..MOST_SCRIPTS {
        match interpreter(&path)? {
            Some(interpreter) => path = interpreter,
            None => return kind_of_elf(&path),
        }
    }
    Ok(Kind::Unknown)
}

/// Returns the interpreter of a script.
fn interpreter(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut line = Vec::new();
    File::open(path)?.take(LINE_BYTES as u64).read_to_end(&mut line)?;
    let Some(line) = line.strip_prefix(b"#!") else { return Ok(None) };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii_start();
    let name = line.split(|byte| matches!(byte, b' ' | b'\t')).next().unwrap_or_default();
    Ok(Some(PathBuf::from(std::ffi::OsStr::from_bytes(name))))
}

fn kind_of_elf(path: &Path) -> io::Result<Kind> {
    let meta = fs::metadata(path)?;
    let mut capabilities = [0; 64];
    let has_capabilities = rustix::fs::getxattr(path, "security.capability", &mut capabilities).is_ok();
    if meta.mode() & 0o6000 != 0 || (has_capabilities && !rustix::process::geteuid().is_root()) {
        return Ok(Kind::SetUser);
    }
    let file = ReadCache::new(File::open(path)?);
    Ok(kind_of_header(&file).unwrap_or(Kind::Unknown))
}

fn kind_of_header<'a>(file: &'a ReadCache<File>) -> object::Result<Kind> {
    let data: &'a ReadCache<File> = file;
    let header = elf::FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let mut loader = None;
    for segment in header.program_headers(endian, data)? {
        loader = loader.or(segment.interpreter(endian, data)?);
    }
    let Some(loader) = loader else { return Ok(Kind::Static) };
    let sections = header.sections(endian, data)?;
    if sections.iter().any(|section| {
        sections.section_name(endian, section).is_ok_and(|name| name == b".go.buildinfo")
            && section.sh_size(endian) > 0
    }) {
        return Ok(Kind::Go);
    }
    let name = loader.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    Ok(if name.starts_with(b"ld-linux") { Kind::Dynamic } else { Kind::OtherLoader })
}

/// Returns why the loader cannot load a library, as the end of a sentence that its name begins; `None` if it
/// can. A file that was not copied whole would kill each program by SIGBUS.
pub fn flaw(path: &Path) -> io::Result<Option<String>> {
    let (file, len_bytes) = (File::open(path)?, fs::metadata(path)?.len());
    Ok(match end_of_parts(&ReadCache::new(file)) {
        Ok(end_bytes) if end_bytes > len_bytes => {
            Some(format!("is not whole: it has {len_bytes} bytes of at least {end_bytes}"))
        }
        Ok(_) => None,
        Err(_) => {
            Some(format!("is no library: it has {len_bytes} bytes, and no ELF header that can be read"))
        }
    })
}

/// Returns where the last of a library's segments and the table of its sections end.
fn end_of_parts(file: &ReadCache<File>) -> object::Result<u64> {
    let header = elf::FileHeader64::<Endianness>::parse(file)?;
    let endian = header.endian()?;
    let end = |offset: u64, len: u64| offset.saturating_add(len);
    let sections_bytes = u64::from(header.e_shnum(endian)) * u64::from(header.e_shentsize(endian));
    let sections_end = end(header.e_shoff(endian), sections_bytes);
    let segments = header.program_headers(endian, file)?.iter();
    let ends = segments.map(|segment| end(segment.p_offset(endian), segment.p_filesz(endian)));
    Ok(ends.chain([sections_end]).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_whole_has_a_flaw() {
        let own = std::env::current_exe().unwrap();
        assert_eq!(flaw(&own).unwrap(), None);
        let (dir, len_bytes) = (tempfile::tempdir().unwrap(), fs::metadata(&own).unwrap().len());
        let cut = dir.path().join("cut");
        fs::copy(&own, &cut).unwrap();
        for (len_bytes, said) in [
            (len_bytes - 1, "is not whole: it has "),
            (len_bytes / 2, "is not whole: it has "),
            (4096, "is not whole: it has 4096 bytes of at least "),
            (60, "is no library: it has 60 bytes"),
            (0, "is no library: it has 0 bytes"),
        ] {
            fs::OpenOptions::new().write(true).open(&cut).unwrap().set_len(len_bytes).unwrap();
            let flaw = flaw(&cut).unwrap().unwrap();
            assert!(flaw.starts_with(said), "{len_bytes}: {flaw}");
        }
        assert!(flaw(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn programs_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, contents: &[u8]| {
            let path = dir.path().join(name);
            fs::write(&path, contents).unwrap();
            path
        };
        assert_eq!(kind(&std::env::current_exe().unwrap()).unwrap(), Kind::Dynamic);
        assert_eq!(kind(&file("script", b"#! /bin/sh -e\necho")).unwrap(), Kind::Dynamic);
        assert_eq!(kind(&file("text", b"echo")).unwrap(), Kind::Unknown);
        assert_eq!(kind(&file("cut", b"\x7fELF\x02\x01\x01")).unwrap(), Kind::Unknown);
        let own = dir.path().join("own");
        let line = format!("#!{}\n", own.display());
        assert_eq!(kind(&file("own", line.as_bytes())).unwrap(), Kind::Unknown);
        assert!(kind(&file("lost", b"#!/no/such/program\n")).is_err());
    }
}
