//! Training a dictionary from sample pages, with zstd's trainer.

use crate::base::error::{Error, Result};
use crate::base::units::{PAGE_SIZE, Page};

use super::{MAX_DICTIONARY_BYTES, MIN_DICTIONARY_BYTES};

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
