//! Making a dictionary from sample pages, with the trainer that comes with zstd.

use crate::base::error::{Error, Result};
use crate::base::units::{PAGE_SIZE, Page};

use super::{MAX_DICTIONARY_BYTES, MIN_DICTIONARY_BYTES};

/// With fewer bytes of samples for each byte of the dictionary, the trainer learns them by heart.
pub const MIN_SAMPLE_FACTOR: usize = 8;

/// The bytes of a zstd dictionary for pages like `samples`, `len_bytes` of them at most. Its most
/// useful contents stand last, so that it serves lz4 as well.
///
/// # Errors
/// `Invalid` for a length that no dictionary has, or for fewer than [`MIN_SAMPLE_FACTOR`] times
/// `len_bytes` of samples; what the trainer says.
pub fn train(samples: &[Page], len_bytes: usize) -> Result<Vec<u8>> {
    /// What the trainer needs for its header and tables.
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
