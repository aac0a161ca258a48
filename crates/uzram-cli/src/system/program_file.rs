//! Whether a library can be loaded into the program in a file that manages its memory.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use object::read::elf::{FileHeader, ProgramHeader, SectionHeader};
use object::{Endianness, ReadCache, ReadRef, elf};

/// How many scripts may name each other as their interpreters; the kernel's limit.
const MOST_SCRIPTS: usize = 5;
/// What runs a script that names no interpreter.
const SHELL: &str = "/bin/sh";
/// What starts the address sanitizer.
const SANITIZER: &[u8] = b"__asan_init";
/// What the kernel reads of a script's first line.
const LINE_BYTES: u64 = 256;

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = elf::EM_X86_64;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = elf::EM_AARCH64;

const NO_PROGRAM: &str = "is no ELF program";
const OTHER_MACHINE: &str = "is for another kind of machine";

/// Why the memory of a program cannot be managed, as the end of a sentence that its name begins; `None` if it
/// can.
type Obstacle = Option<&'static str>;

/// Looks at a program; if it is a script, at its interpreter. Errors: those of opening the file; and
/// `NotFound` with the name of an interpreter that is missing.
pub fn obstacle(path: &Path) -> io::Result<Obstacle> {
    let mut file = path.to_owned();
    for _ in 0..MOST_SCRIPTS {
        let found = match interpreter(&file) {
            Ok(Some(interpreter)) => {
                file = interpreter;
                continue;
            }
            Ok(None) => obstacle_in_file(&file),
            Err(error) => Err(error),
        };
        return match found {
            Err(error) if error.kind() == io::ErrorKind::NotFound && file != path => {
                let what = format!("its interpreter {} is missing", file.display());
                Err(io::Error::new(error.kind(), what))
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(Some("may not be read")),
            found => found,
        };
    }
    Ok(Some(NO_PROGRAM))
}

/// Returns the interpreter of a script: a shell, if none is named, as execvp(3) has it.
fn interpreter(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut line = Vec::new();
    File::open(path)?.take(LINE_BYTES).read_to_end(&mut line)?;
    let Some(line) = line.strip_prefix(b"#!") else {
        let is_text = !line.starts_with(&elf::ELFMAG) && !line.contains(&0);
        return Ok(is_text.then(|| PathBuf::from(SHELL)));
    };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii_start();
    let name = line.split(|byte| matches!(byte, b' ' | b'\t')).next().unwrap_or_default();
    Ok(Some(PathBuf::from(OsStr::from_bytes(name))))
}

fn obstacle_in_file(path: &Path) -> io::Result<Obstacle> {
    let mut capabilities = [0; 64];
    let has_capabilities = rustix::fs::getxattr(path, "security.capability", &mut capabilities).is_ok();
    if fs::metadata(path)?.mode() & 0o6000 != 0 || (has_capabilities && !rustix::process::geteuid().is_root())
    {
        return Ok(Some("has other rights than its user (set-uid, set-gid or capabilities)"));
    }
    let file = ReadCache::new(File::open(path)?);
    Ok(obstacle_in_elf(&file).unwrap_or(Some(NO_PROGRAM)))
}

fn obstacle_in_elf(file: &ReadCache<File>) -> object::Result<Obstacle> {
    // Its first bytes are the same for every machine; then comes the size of addresses.
    let ident = file.read_bytes_at(0, elf::ELFMAG.len() as u64 + 1).unwrap_or_default();
    if ident.strip_prefix(&elf::ELFMAG).is_some_and(|class| class[0] != elf::ELFCLASS64) {
        return Ok(Some(OTHER_MACHINE));
    }
    let header = elf::FileHeader64::<Endianness>::parse(file)?;
    let endian = header.endian()?;
    if header.e_machine(endian) != MACHINE {
        return Ok(Some(OTHER_MACHINE));
    }
    let mut loader = None;
    for segment in header.program_headers(endian, file)? {
        loader = loader.or(segment.interpreter(endian, file)?);
    }
    let Some(loader) = loader else { return Ok(Some("is linked statically")) };
    let sections = header.sections(endian, file)?;
    if sections.section_by_name(endian, b".go.buildinfo").is_some_and(|(_, go)| go.sh_size(endian) > 0) {
        return Ok(Some("is a Go program, which makes its system calls itself"));
    }
    let symbols = sections.symbols(endian, file, elf::SHT_DYNSYM)?;
    if symbols.iter().any(|symbol| symbols.symbol_name(endian, symbol) == Ok(SANITIZER)) {
        return Ok(Some(
            "is built with the address sanitizer, which ends programs that have a library before it",
        ));
    }
    let name = loader.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    Ok((!name.starts_with(b"ld-linux")).then_some("is not for glibc"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        let loop_line = format!("#!{}\n", path.display());
        let other_machine = [&own[..18], b"\xff\xff", &own[20..64]].concat();
        for (contents, why) in [
            (&b"#! /bin/sh -e\necho"[..], None),
            (b"echo", None),
            (b"echo\0", Some(NO_PROGRAM)),
            (b"\x7fELF\x02\x01\x01", Some(NO_PROGRAM)),
            (loop_line.as_bytes(), Some(NO_PROGRAM)),
            (&other_machine, Some(OTHER_MACHINE)),
            (b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0", Some(OTHER_MACHINE)),
        ] {
            fs::write(&path, contents).unwrap();
            assert_eq!(obstacle(&path).unwrap(), why, "{:?}", &contents[..contents.len().min(40)]);
        }
        fs::write(&path, b"#!/no/such/program\n").unwrap();
        let lost = obstacle(&path).unwrap_err();
        assert!(lost.kind() == io::ErrorKind::NotFound && lost.to_string().contains("/no/such/program"));
    }
}
