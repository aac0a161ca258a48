//! One 4 KiB page to bytes and back, into the caller's buffers.
//!
//! An [`Encoder`] and a [`Decoder`] own everything their algorithm needs: each allocates and codes
//! a page when it is made and never takes memory from the system again. Neither depends on the
//! pages it saw before: any decoder of the algorithm reads what any encoder wrote, at any level.
//!
//! Invariants, kept by every algorithm: the encoder writes only into `out`; the decoder writes only
//! into the page, reads only `bytes`, and succeeds only when they decode to exactly one page. The
//! bytes carry no magic number, no length and no checksum: their length is the caller's to keep, and
//! damage that still decodes to a whole page goes unnoticed here (the store can check a checksum).
//!
//! The algorithms are an enum, not a trait object: a match costs nothing beside a page.

mod lz4;
#[cfg(test)]
mod tests;
mod zstd;

use std::fmt;
use std::str::FromStr;

use crate::base::error::{Error, Result};
use crate::base::units::{PAGE_SIZE, Page};

/// A compression algorithm with its parameters; reads and prints as `lz4`, `zstd` or `zstd:3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// LZ4 block format.
    Lz4,
    /// zstd at a level.
    Zstd {
        /// zstd's compression level: 1..=22, or negative for speed; plain `zstd` is level 1.
        level: i32,
    },
}

impl Algorithm {
    /// The names of the algorithms offered, without parameters, the default first.
    pub const NAMES: &'static [&'static str] = &["lz4", "zstd"];

    /// Its name, without parameters.
    pub const fn name(&self) -> &'static str {
        match self {
            Algorithm::Lz4 => "lz4",
            Algorithm::Zstd { .. } => "zstd",
        }
    }

    /// A decoder that needs no state, where the algorithm has one: a reader then needs no stream.
    /// It keeps the contract of [`Decoder::decode`].
    pub const fn stateless_decode(&self) -> Option<Decode> {
        match self {
            Algorithm::Lz4 => Some(lz4::decode),
            Algorithm::Zstd { .. } => None,
        }
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, level) = match text.trim().split_once(':') {
            Some((name, level)) => (name, Some(level)),
            None => (text.trim(), None),
        };
        match (name, level) {
            ("lz4", None) => Ok(Algorithm::Lz4),
            ("lz4", Some(level)) => {
                Err(Error::invalid(format!("lz4 takes no level, but '{level}' was given; write lz4")))
            }
            ("zstd", None) => Ok(Algorithm::Zstd { level: zstd::DEFAULT_LEVEL }),
            ("zstd", Some(level)) => {
                let level = level.parse().map_err(|_| zstd::not_a_level(level))?;
                zstd::check_level(level)?;
                Ok(Algorithm::Zstd { level })
            }
            _ => Err(Error::invalid(format!(
                "no compression algorithm '{name}'; there are: {}",
                Self::NAMES.join(", ")
            ))),
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Algorithm::Zstd { level } if *level != zstd::DEFAULT_LEVEL => write!(f, "zstd:{level}"),
            _ => f.write_str(self.name()),
        }
    }
}

/// A decoder without state: the bytes of one compressed page, and the page to fill.
pub type Decode = fn(&[u8], &mut Page) -> Result<()>;

/// With this much room for a compressed page, encoders need not check for the end of it at each
/// step: at least `LZ4_compressBound(4096)`, 4128, and `ZSTD_compressBound(4096)`, 4174.
pub const ROOM_BYTES: usize = PAGE_SIZE + PAGE_SIZE / 8;

/// Compresses pages.
pub struct Encoder(EncoderState);

enum EncoderState {
    Lz4(lz4::Encoder),
    Zstd(zstd::Encoder),
}

impl Encoder {
    /// An encoder with all its memory.
    ///
    /// # Errors
    /// `Invalid` for a level that zstd does not have, `NoMemory` when the system gives none.
    pub fn new(algorithm: &Algorithm) -> Result<Encoder> {
        Ok(Encoder(match *algorithm {
            Algorithm::Lz4 => EncoderState::Lz4(lz4::Encoder::new()?),
            Algorithm::Zstd { level } => EncoderState::Zstd(zstd::Encoder::new(level)?),
        }))
    }

    /// Compresses `page` into the start of `out`. Returns the compressed length in bytes, or `None`
    /// when it does not fit: `out` may then be partly overwritten. zstd writes whole words and may say
    /// so already when fewer than 16 bytes would be left over; lz4 uses the room to the last byte.
    #[inline]
    pub fn encode(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        match &mut self.0 {
            EncoderState::Lz4(encoder) => encoder.encode(page, out),
            EncoderState::Zstd(encoder) => encoder.encode(page, out),
        }
    }

    /// Bytes of memory it holds beside itself; they never change.
    pub fn state_bytes(&self) -> usize {
        match &self.0 {
            EncoderState::Lz4(encoder) => encoder.state_bytes(),
            EncoderState::Zstd(encoder) => encoder.state_bytes(),
        }
    }
}

/// Decompresses pages.
pub struct Decoder(DecoderState);

enum DecoderState {
    Lz4,
    Zstd(zstd::Decoder),
}

impl Decoder {
    /// A decoder with all its memory. It reads every level of its algorithm.
    ///
    /// # Errors
    /// `NoMemory` when the system gives none.
    pub fn new(algorithm: &Algorithm) -> Result<Decoder> {
        Ok(Decoder(match algorithm {
            Algorithm::Lz4 => DecoderState::Lz4,
            Algorithm::Zstd { .. } => DecoderState::Zstd(zstd::Decoder::new()?),
        }))
    }

    /// Decompresses `bytes`, all of which must be one compressed page, into `page`.
    ///
    /// # Errors
    /// `Corrupt` when the bytes do not decode to exactly one page; `page` may then be partly
    /// overwritten. The decoder stays usable.
    #[inline]
    pub fn decode(&mut self, bytes: &[u8], page: &mut Page) -> Result<()> {
        match &mut self.0 {
            DecoderState::Lz4 => lz4::decode(bytes, page),
            DecoderState::Zstd(decoder) => decoder.decode(bytes, page),
        }
    }

    /// Bytes of memory it holds beside itself; they never change.
    pub fn state_bytes(&self) -> usize {
        match &self.0 {
            DecoderState::Lz4 => 0,
            DecoderState::Zstd(decoder) => decoder.state_bytes(),
        }
    }
}

// Streams hand both from thread to thread.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Encoder>();
    is_send::<Decoder>();
};

/// A page that takes a coder through all its paths (literals, near and far matches, entropy coding),
/// so that coding it once brings in the memory behind its state.
fn warm_up_page() -> Page {
    let mut state = 1u32;
    std::array::from_fn(|i| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Stretches of a counter, and between them letters of which each is half as likely as the next.
        if i / 64 % 3 == 0 { i as u8 } else { b'a' + (state >> 24).leading_zeros() as u8 - 24 }
    })
}
