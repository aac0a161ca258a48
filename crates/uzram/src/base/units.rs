//! Conversions between bytes, pages, durations and their texts: the only place for them.

use std::fmt;

use super::error::{Error, Result};

/// Bytes of a page, everywhere in uzram, whatever the host's page size.
pub const PAGE_SIZE: usize = 1 << PAGE_SHIFT;
/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

/// One page of contents.
pub type Page = [u8; PAGE_SIZE];

/// The number of a page of a store: a store has at most 2^32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageNo(pub u32);

impl PageNo {
    /// Returns the page that holds byte `offset` of a disk. The caller has checked that `offset` is within
    /// the disk.
    #[inline]
    pub const fn of_byte(offset: u64) -> Self {
        debug_assert!(page_of(offset) <= u32::MAX as u64, "a store has at most 2^32 pages");
        PageNo(page_of(offset) as u32)
    }

    /// Returns the page of this number.
    ///
    /// # Panics
    /// If the number is 2^32 or more.
    #[inline]
    pub const fn from_number(number: u64) -> Self {
        assert!(number <= u32::MAX as u64, "a store has at most 2^32 pages");
        PageNo(number as u32)
    }

    /// Returns its number as a u64, for ranges of pages: their end may be 2^32.
    #[inline]
    pub const fn number(self) -> u64 {
        self.0 as u64
    }

    /// Returns its index in a table of all pages.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for PageNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Returns the number of the page that holds byte `offset`.
#[inline]
pub const fn page_of(offset: u64) -> u64 {
    offset >> PAGE_SHIFT
}

/// Returns the offset of byte `offset` within its page.
#[inline]
pub const fn offset_in_page(offset: u64) -> usize {
    (offset & (PAGE_SIZE as u64 - 1)) as usize
}

/// Returns the bytes of `pages` pages.
#[inline]
pub const fn pages_to_bytes(pages: u64) -> u64 {
    pages << PAGE_SHIFT
}

/// Returns the number of pages needed for `bytes` bytes.
#[inline]
pub const fn bytes_to_pages(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_SIZE as u64)
}

/// Reads a size: decimal digits and an optional K, M, G or T (powers of 1024; an `iB` or `B` may follow).
/// Fails with `Invalid` when the text is anything else or the size does not fit 64 bits.
pub fn parse_size(text: &str) -> Result<u64> {
    parse_number(text, "too large", unit_bytes).map_err(|why| {
        let why = whole_size(text.trim())
            .map_or_else(|| why.to_owned(), |whole| format!("no fractions: write {whole}"));
        Error::invalid(format!("'{text}' is not a size: {why}; write digits and K, M, G or T, as in 512M"))
    })
}

/// Returns what to write in place of a size with a fraction, as 1536M for 1.5G: the same in the next smaller
/// unit, rounded down. `None` for any other text.
fn whole_size(text: &str) -> Option<String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(digits);
    let unit_bytes = unit_bytes(&unit.to_ascii_lowercase())?;
    let (smaller_bytes, smaller) = match unit_bytes >> 10 {
        bytes @ 0x4000_0000.. => (bytes, "G"),
        bytes @ 0x10_0000.. => (bytes, "M"),
        bytes @ 0x400.. => (bytes, "K"),
        _ => (1, "B"),
    };
    let whole =
        number.parse::<f64>().ok().filter(|_| number.contains('.'))? * (unit_bytes / smaller_bytes) as f64;
    Some(format!("{}{smaller}", whole as u64))
}

/// Returns the bytes of a unit, which is given in lower case.
pub fn unit_bytes(suffix: &str) -> Option<u64> {
    match suffix {
        "" | "b" => Some(1),
        "k" | "kb" | "kib" => Some(1 << 10),
        "m" | "mb" | "mib" => Some(1 << 20),
        "g" | "gb" | "gib" => Some(1 << 30),
        "t" | "tb" | "tib" => Some(1 << 40),
        _ => None,
    }
}

/// Parses decimal digits and a unit; `unit` returns the factor of a unit in lower case. On failure returns
/// the reason, `too_much` if the value does not fit 64 bits.
fn parse_number(
    text: &str,
    too_much: &'static str,
    unit: impl Fn(&str) -> Option<u64>,
) -> std::result::Result<u64, &'static str> {
    let trimmed = text.trim();
    let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
    let (number, suffix) = trimmed.split_at(digits);
    if number.is_empty() {
        return Err(if trimmed.starts_with("-") { "it is negative" } else { "no digits" });
    }
    let number: u64 = number.parse().map_err(|_| too_much)?;
    let unit = unit(&suffix.to_ascii_lowercase()).ok_or("unknown unit")?;
    number.checked_mul(unit).ok_or(too_much)
}

/// Reads a duration in seconds: decimal digits and an optional unit s, m, h or d; seconds without one. Fails
/// with `Invalid` when the text is anything else or the duration does not fit 64 bits.
pub fn parse_duration_s(text: &str) -> Result<u64> {
    let bad = |why: &str| {
        Error::invalid(format!(
            "'{text}' is not a duration: {why}; write digits and s, m, h or d, as in 90s or 1h"
        ))
    };
    let unit_s = |suffix: &str| match suffix {
        "" | "s" => Some(1),
        "m" => Some(60),
        "h" => Some(60 * 60),
        "d" => Some(24 * 60 * 60),
        _ => None,
    };
    parse_number(text, "too long", unit_s).map_err(bad)
}

/// Formats a size for people, in the largest unit in which the number is at least one.
pub fn format_size(bytes: u64) -> String {
    const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    for (shift, unit) in UNITS {
        if bytes >> shift > 0 {
            let whole = bytes >> shift;
            return if whole << shift == bytes {
                format!("{whole} {unit}")
            } else {
                format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64)
            };
        }
    }
    format!("{bytes} B")
}

/// Fills a page with a word.
#[inline]
pub fn fill_with_word(page: &mut Page, word: u64) {
    let (words, _) = page.as_chunks_mut::<8>();
    words.fill(word.to_ne_bytes());
}

/// Returns the word that fills the page, if the page is same-filled.
#[inline]
pub fn same_word(page: &Page) -> Option<u64> {
    let (words, _) = page.as_chunks::<8>();
    let (first, last) = (words[0], words[words.len() - 1]);
    // Few pages start and end with the same word: scan only those.
    (first == last && words.iter().all(|word| *word == first)).then(|| u64::from_ne_bytes(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_binary_units() {
        assert_eq!(parse_size("4096").unwrap(), 4096);
        assert_eq!(parse_size(" 1g\n").unwrap(), 1 << 30);
        assert_eq!(parse_size("3KiB").unwrap(), 3072);
        assert_eq!(parse_size("16T").unwrap(), 16 << 40);
    }

    #[test]
    fn a_bad_size_says_why() {
        for (text, why) in [
            ("", "no digits"),
            ("G", "no digits"),
            ("-1", "it is negative"),
            ("-G", "it is negative"),
            ("1.5G", "no fractions: write 1536M; "),
            ("1.1 GiB", "unknown unit"),
            ("0.30tib", "no fractions: write 307G; "),
            ("2.5m", "no fractions: write 2560K; "),
            ("1.5kb", "no fractions: write 1536B; "),
            ("8191.9B", "no fractions: write 8191B; "),
            ("1..5G", "unknown unit"),
            ("1.5", "unknown unit"),
            ("1X", "unknown unit"),
            ("99999999999T", "too large"),
            ("99999999999999999999", "too large"),
        ] {
            let error = parse_size(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn durations_are_seconds_unless_they_say_otherwise() {
        for (text, seconds) in
            [("0", 0), ("90", 90), (" 90s\n", 90), ("10m", 600), ("2H", 7200), ("30d", 30 * 86400)]
        {
            assert_eq!(parse_duration_s(text), Ok(seconds), "{text}");
        }
        for (text, why) in [
            ("", "no digits"),
            ("h", "no digits"),
            ("-1", "it is negative"),
            ("1.5h", "unknown unit"),
            ("1 h", "unknown unit"),
            ("1w", "unknown unit"),
            ("99999999999999999999", "too long"),
            ("18446744073709551615m", "too long"),
        ] {
            let error = parse_duration_s(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_print_in_the_largest_unit() {
        assert_eq!(format_size(0), "0 B");
        assert_eq!(format_size(1 << 30), "1 GiB");
        assert_eq!(format_size((1 << 30) + (1 << 29)), "1.5 GiB");
    }

    #[test]
    #[should_panic(expected = "2^32")]
    fn no_store_has_more_pages_than_numbers() {
        assert_eq!(PageNo::from_number((1 << 32) - 1).number(), (1 << 32) - 1);
        PageNo::from_number(1 << 32);
    }
}
