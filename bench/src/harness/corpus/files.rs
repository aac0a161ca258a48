//! Text and binary pages: the contents of files, one after another; on machines that have none, seeded
//! sentences of words with a natural skew.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The most bytes taken of one file, so that no large file dominates the corpus.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Folders deeper than this are not entered.
const MAX_DEPTH: usize = 12;

const TEXT_ROOTS: [&str; 4] = ["/usr/include", "/usr/share/doc", "/usr/lib/python3", "/usr/share"];
const TEXT_SUFFIXES: [&str; 13] =
    ["c", "h", "hpp", "rs", "py", "js", "json", "md", "txt", "html", "xml", "toml", "yaml"];
const BINARY_ROOTS: [&str; 4] =
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/bin", "/usr/lib"];

/// Returns `len_bytes` of text. The sources of Rust crates come in first where a registry is present.
pub(super) fn text(len_bytes: usize) -> Vec<u8> {
    let registry = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cargo")))
        .map(|cargo| cargo.join("registry/src"));
    // A third from each folder; otherwise a corpus shorter than the first folder would be of one language.
    let mut out = Vec::with_capacity(len_bytes);
    if let Some(registry) = registry {
        fill(&mut out, &registry, is_text, len_bytes / 3);
    }
    fill(&mut out, Path::new(TEXT_ROOTS[0]), is_text, len_bytes / 3 * 2);
    finish(out, &TEXT_ROOTS[1..], is_text, len_bytes)
}

/// Returns `len_bytes` of shared objects and programs.
pub(super) fn binary(len_bytes: usize) -> Vec<u8> {
    finish(Vec::with_capacity(len_bytes), &BINARY_ROOTS, is_elf, len_bytes)
}

/// Fills `out` from `roots`, then by repeating it, or with generated text if it is empty.
fn finish(mut out: Vec<u8>, roots: &[&str], wanted: fn(&Path) -> bool, len_bytes: usize) -> Vec<u8> {
    for root in roots {
        fill(&mut out, Path::new(root), wanted, len_bytes);
    }
    if out.is_empty() {
        return generated(len_bytes);
    }
    while out.len() < len_bytes {
        out.extend_from_within(..out.len().min(len_bytes - out.len()));
    }
    out
}

/// Appends the wanted files below `root`, in the order of their paths, until `out` has `len_bytes`.
/// Unreadable files are skipped.
fn fill(out: &mut Vec<u8>, root: &Path, wanted: fn(&Path) -> bool, len_bytes: usize) {
    // Folders still to visit; the last is next, so that children come before their siblings.
    let mut pending = vec![(root.to_path_buf(), 0)];
    while let Some((path, depth)) = pending.pop() {
        if out.len() >= len_bytes {
            return;
        }
        // The root itself may be a link; links below it are skipped, because they could form cycles.
        let metadata = if depth == 0 { fs::metadata(&path) } else { fs::symlink_metadata(&path) };
        match metadata {
            Ok(metadata) if metadata.is_dir() && depth < MAX_DEPTH => {
                let entries = fs::read_dir(&path).into_iter().flatten().flatten();
                let mut children: Vec<_> = entries.map(|entry| (entry.path(), depth + 1)).collect();
                children.sort_unstable_by(|a, b| b.cmp(a));
                pending.append(&mut children);
            }
            Ok(metadata) if metadata.is_file() && wanted(&path) => append(out, &path, len_bytes),
            _ => {}
        }
    }
}

fn append(out: &mut Vec<u8>, path: &Path, len_bytes: usize) {
    let room_bytes = (len_bytes - out.len()) as u64;
    if let Ok(file) = File::open(path) {
        // Of a file that fails half way, the bytes read so far are kept.
        let _ = file.take(room_bytes.min(MAX_FILE_BYTES)).read_to_end(out);
    }
}

fn is_text(path: &Path) -> bool {
    path.extension().and_then(|suffix| suffix.to_str()).is_some_and(|suffix| TEXT_SUFFIXES.contains(&suffix))
}

/// Returns whether the file begins like an ELF file: folders of programs also have scripts and configuration.
fn is_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"\x7fELF"
}

/// Returns `len_bytes` of generated text, always the same.
pub(super) fn generated(len_bytes: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(3);
    let words = words(&mut rng, 5000);
    let mut out = Vec::with_capacity(len_bytes + 64);
    while out.len() < len_bytes {
        // The product of two uniform numbers favours the first words, as languages do.
        let pick = (rng.f64() * rng.f64() * words.len() as f64) as usize;
        out.extend_from_slice(words[pick].as_bytes());
        out.extend_from_slice(if rng.u8(..12) == 0 { b".\n" } else { b" " });
    }
    out.truncate(len_bytes);
    out
}

/// Makes up `count` words of 2 to 9 of English's commonest letters.
pub(super) fn words(rng: &mut fastrand::Rng, count: usize) -> Vec<String> {
    const LETTERS: &[u8; 12] = b"etaoinshrdlu";
    (0..count)
        .map(|_| (0..rng.usize(2..10)).map(|_| char::from(LETTERS[rng.usize(..12)])).collect())
        .collect()
}
