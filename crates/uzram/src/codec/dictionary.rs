//! A dictionary: bytes that every compressed page of a device may refer to; and how one is trained.
//!
//! It gives the codec matches that a single 4 KiB page lacks. It is read once, when the algorithm is set, and
//! shared by all coders of the device. Compressed pages do not name it, which would cost bytes: the
//! dictionary of their device cannot change while it holds pages.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::OFlags;

use crate::base::error::{Error, Result};
use crate::base::units::{PAGE_SIZE, Page};

/// The maximum size, 1 MiB: nine times the default of zstd's trainer. A longer dictionary would not stay
/// in a CPU's cache from page to page; the limit also guards against a wrong path.
pub const MAX_DICTIONARY_BYTES: usize = 1 << 20;
/// The minimum size: zstd and lz4 silently ignore shorter dictionaries.
pub const MIN_DICTIONARY_BYTES: usize = 8;
/// The magic number that zstd's dictionaries begin with, RFC 8878.
const MAGIC: [u8; 4] = 0xec30_a437_u32.to_le_bytes();
/// The maximum length of a path, as in Linux.
const MAX_PATH_BYTES: usize = 4096;

/// The bytes of a dictionary, and the path they were read from.
///
/// A file must begin with the magic number of zstd's dictionaries, as those of its trainer do, so that a
/// wrong path is not taken for one; bytes that a program gives need not. zstd parses what begins with it, and
/// refuses an invalid one. All else, and everything for lz4 and lz4hc, is raw contents. lz4's offsets reach
/// 64 KiB, so it uses only the last 64 KiB.
#[derive(PartialEq, Eq)]
pub struct Dictionary {
    path: String,
    bytes: Box<[u8]>,
}

impl Dictionary {
    /// Reads the file at `path`. Fails with `Invalid`, naming the file, if it is unreadable or no dictionary.
    pub fn read(path: &str) -> Result<Dictionary> {
        Dictionary::check_path(path)?;
        let refused = |why: &str| Error::invalid(format!("dict={path}: {why}"));
        let bytes = read_bounded(path).map_err(|error| refused(&error.to_string()))?;
        let Some(bytes) = bytes else {
            return Err(refused("a dictionary must be a regular file"));
        };
        let dictionary = Dictionary::new(path, bytes)?;
        if !dictionary.bytes.starts_with(&MAGIC) {
            return Err(refused(
                "it is not a dictionary: `uzram train` and `zstd --train` make them, for all algorithms",
            ));
        }
        Ok(dictionary)
    }

    /// Creates a dictionary from `bytes`; it is shown as `path`. Fails with `Invalid` unless it has
    /// [`MIN_DICTIONARY_BYTES`] to [`MAX_DICTIONARY_BYTES`] and the path is valid.
    pub fn new(path: &str, bytes: Vec<u8>) -> Result<Dictionary> {
        Dictionary::check_path(path)?;
        match bytes.len() {
            0 => Err(Error::invalid(format!("dict={path}: the file is empty"))),
            MIN_DICTIONARY_BYTES..=MAX_DICTIONARY_BYTES => {
                Ok(Dictionary { path: path.to_owned(), bytes: bytes.into_boxed_slice() })
            }
            1..MIN_DICTIONARY_BYTES => Err(Error::invalid(format!(
                "dict={path}: a dictionary has {MIN_DICTIONARY_BYTES} bytes at least, this one {}",
                bytes.len()
            ))),
            _ => Err(Error::invalid(format!(
                "dict={path}: a dictionary has {} KiB at most; `uzram train --size` makes smaller ones",
                MAX_DICTIONARY_BYTES >> 10
            ))),
        }
    }

    /// Checks that a path is absolute, because the process that opens it may have another working directory
    /// than the user who wrote it, and that it can be shown in a space-separated list with brackets.
    pub(crate) fn check_path(path: &str) -> Result<()> {
        let refused = |why: &str| Err(Error::invalid(format!("dict={path}: {why}")));
        if !path.starts_with('/') {
            return refused("write the whole path, beginning with '/'");
        }
        if path.len() > MAX_PATH_BYTES {
            return Err(Error::invalid(format!("dict=…: a path has {MAX_PATH_BYTES} bytes at most")));
        }
        if path.chars().any(|c| c.is_whitespace() || c.is_control() || matches!(c, '[' | ']')) {
            return refused("the path of a dictionary can have no spaces and no brackets");
        }
        Ok(())
    }

    /// Returns the path that it was read from.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the contents.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Reads a regular file up to one byte more than allowed. Returns `None` if it is not a regular file.
fn read_bounded(path: &str) -> io::Result<Option<Vec<u8>>> {
    // Opening a FIFO would wait for its writer.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if !file.metadata()?.is_file() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    file.take(MAX_DICTIONARY_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// The minimum bytes of samples per byte of the dictionary; with fewer the dictionary overfits.
pub const MIN_SAMPLE_FACTOR: usize = 8;

/// Returns a zstd dictionary of at most `len_bytes` for pages like `samples`. Its most useful contents come
/// last, so that it is also good for lz4. Fails with `Invalid` for a length out of range, for fewer than
/// [`MIN_SAMPLE_FACTOR`] times `len_bytes` of samples, or if the trainer fails.
pub fn train(samples: &[Page], len_bytes: usize) -> Result<Vec<u8>> {
    /// The minimum size, for the dictionary's header and tables.
    const LEAST_BYTES: usize = 1024;
    const { assert!(LEAST_BYTES >= MIN_DICTIONARY_BYTES) };
    if !(LEAST_BYTES..=MAX_DICTIONARY_BYTES).contains(&len_bytes) {
        let what = format!("a dictionary has {LEAST_BYTES} to {MAX_DICTIONARY_BYTES} bytes");
        return Err(Error::invalid(what).with_setting("--size"));
    }
    let wanted = (len_bytes * MIN_SAMPLE_FACTOR).div_ceil(PAGE_SIZE);
    if samples.len() < wanted {
        let what = format!("{} pages to train on are too few for that size: give {wanted}", samples.len());
        return Err(Error::invalid(what).with_setting("--size"));
    }
    let (mut dictionary, lengths) = (vec![0; len_bytes], vec![PAGE_SIZE; samples.len()]);
    let trained = zstd_safe::train_from_buffer(&mut dictionary[..], samples.as_flattened(), &lengths);
    dictionary.truncate(trained.map_err(|code| {
        let why = zstd_safe::get_error_name(code);
        Error::invalid(format!("no dictionary can be made of these pages: {why}"))
    })?);
    Ok(dictionary)
}
