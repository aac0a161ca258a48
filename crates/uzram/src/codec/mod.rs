//! Compresses single 4 KiB pages, and decompresses them, in the caller's buffers.
//!
//! An [`Encoder`] and a [`Decoder`] own everything their algorithm needs but the dictionary, which all
//! coders of an [`Algorithm`] share. Each allocates its memory and codes a page when it is created, and
//! never allocates again. Neither depends on the pages it coded before: any decoder of the algorithm
//! reads the output of any encoder, at any level, with the same dictionary.
//!
//! Invariants, kept by every algorithm: the encoder writes only into `out`; the decoder writes only
//! into the page, reads only `bytes` and the dictionary, and succeeds only if they decode to exactly
//! one page. The bytes carry no magic number, no length, no checksum and no dictionary id: the caller
//! keeps their length, and damage that still decodes to a whole page, or the wrong dictionary, may go
//! unnoticed here (the store can verify a checksum).

mod algorithm;
mod deflate;
mod dictionary;
mod lz4;
mod memory;
#[cfg(test)]
mod tests;
mod w64;
mod zstd;

pub use algorithm::{Algorithm, Kind};
pub use dictionary::{Dictionary, MAX_DICTIONARY_BYTES, MIN_DICTIONARY_BYTES, MIN_SAMPLE_FACTOR, train};

use crate::base::error::Result;
use crate::base::sync::Arc;
use crate::base::units::{PAGE_SIZE, Page};

/// The size of an output buffer that lets encoders skip bounds checks at each step: at least
/// `LZ4_compressBound(4096)`, 4128, and `ZSTD_compressBound(4096)`, 4174; deflate adds a few bytes to a
/// page that it cannot compress.
pub const ROOM_BYTES: usize = PAGE_SIZE + PAGE_SIZE / 8;

/// Compresses pages.
pub struct Encoder(EncoderState);

enum EncoderState {
    Lz4(lz4::Encoder),
    Zstd(zstd::Encoder),
    Deflate(deflate::Encoder),
    Memory(memory::Encoder),
}

impl Encoder {
    /// Creates an encoder, and allocates all of its memory. Fails with `NoMemory` when the system gives none.
    pub fn new(algorithm: &Algorithm) -> Result<Encoder> {
        let level = algorithm.level();
        let by_lz4 =
            |compressor| lz4::Encoder::new(compressor, algorithm.lz4_digest()).map(EncoderState::Lz4);
        Ok(Encoder(match algorithm.kind() {
            Kind::Lz4 => by_lz4(lz4::Compressor::Fast(level))?,
            Kind::Lz4hc => by_lz4(lz4::Compressor::High(level))?,
            Kind::Zstd => EncoderState::Zstd(zstd::Encoder::new(level, algorithm.zstd_digest())?),
            Kind::Deflate => EncoderState::Deflate(deflate::Encoder::new(level)?),
            Kind::Memory => EncoderState::Memory(memory::Encoder::new(algorithm.lz4_digest())?),
        }))
    }

    /// Compresses `page` into the start of `out`. Returns the compressed length in bytes, or `None` if
    /// it does not fit: `out` may then be partly overwritten. zstd and deflate write whole words, and may
    /// return `None` already if fewer than 16 bytes would be left. `memory` returns `None` for a page that
    /// looks random, whatever the room.
    #[inline]
    pub fn encode(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        match &mut self.0 {
            EncoderState::Lz4(encoder) => encoder.encode(page, out),
            EncoderState::Zstd(encoder) => encoder.encode(page, out),
            EncoderState::Deflate(encoder) => encoder.encode(page, out),
            EncoderState::Memory(encoder) => encoder.encode(page, out),
        }
    }

    /// Returns the bytes of memory that it owns, not counting what the algorithm shares; constant.
    pub fn state_bytes(&self) -> usize {
        match &self.0 {
            EncoderState::Lz4(encoder) => encoder.state_bytes(),
            EncoderState::Zstd(encoder) => encoder.state_bytes(),
            EncoderState::Deflate(encoder) => encoder.state_bytes(),
            EncoderState::Memory(encoder) => encoder.state_bytes(),
        }
    }
}

impl Algorithm {
    /// Returns a decoder without state, if the algorithm has one: reads then need no stream.
    pub fn stateless_decoder(&self) -> Option<StatelessDecoder> {
        let kernel = match self.kind() {
            Kind::Lz4 | Kind::Lz4hc => None,
            Kind::Memory => Some(w64::Kernel::fastest()),
            Kind::Zstd | Kind::Deflate => return None,
        };
        Some(StatelessDecoder { kernel, dictionary: self.source().cloned() })
    }
}

/// A decoder that threads can share.
#[derive(Clone)]
pub struct StatelessDecoder {
    /// What decodes w64, if the algorithm is `memory`; lz4 and lz4hc have none.
    kernel: Option<w64::Kernel>,
    dictionary: Option<Arc<Dictionary>>,
}

impl StatelessDecoder {
    /// As [`Decoder::decode`].
    #[inline]
    pub fn decode(&self, bytes: &[u8], page: &mut Page) -> Result<()> {
        let dictionary = self.dictionary.as_deref();
        match self.kernel {
            None => lz4::decode(bytes, page, dictionary),
            Some(kernel) => memory::decode(kernel, bytes, page, dictionary),
        }
    }
}

/// Decompresses pages.
pub struct Decoder(DecoderState);

enum DecoderState {
    Stateless(StatelessDecoder),
    Zstd(zstd::Decoder),
    Deflate(deflate::Decoder),
}

impl Decoder {
    /// Creates a decoder, and allocates all of its memory. It reads every level of its algorithm. Fails with
    /// `NoMemory` when the system gives none.
    pub fn new(algorithm: &Algorithm) -> Result<Decoder> {
        if let Some(stateless) = algorithm.stateless_decoder() {
            return Ok(Decoder(DecoderState::Stateless(stateless)));
        }
        Ok(Decoder(match algorithm.kind() {
            Kind::Zstd => DecoderState::Zstd(zstd::Decoder::new(algorithm.zstd_digest())?),
            _ => DecoderState::Deflate(deflate::Decoder::new()?),
        }))
    }

    /// Decompresses `bytes`, exactly one compressed page, into `page`. Fails with `Corrupt` if the bytes do
    /// not decode to exactly one page; `page` may then be partly overwritten. The decoder stays usable.
    #[inline]
    pub fn decode(&mut self, bytes: &[u8], page: &mut Page) -> Result<()> {
        match &mut self.0 {
            DecoderState::Stateless(decoder) => decoder.decode(bytes, page),
            DecoderState::Zstd(decoder) => decoder.decode(bytes, page),
            DecoderState::Deflate(decoder) => decoder.decode(bytes, page),
        }
    }

    /// Returns the bytes of memory that it owns, not counting what the algorithm shares; constant.
    pub fn state_bytes(&self) -> usize {
        match &self.0 {
            DecoderState::Stateless(_) => 0,
            DecoderState::Zstd(decoder) => decoder.state_bytes(),
            DecoderState::Deflate(decoder) => decoder.state_bytes(),
        }
    }
}

// Streams move both between threads.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Encoder>();
    is_send::<Decoder>();
};

/// Returns a page that takes a coder through all of its paths (literals, near and far matches, entropy
/// coding), so that coding it once faults in the memory of its state.
fn warm_up_page() -> Page {
    let mut state = 1u32;
    std::array::from_fn(|i| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Runs of a counter, and between them letters with geometrically distributed frequencies.
        if i / 64 % 3 == 0 { i as u8 } else { b'a' + (state >> 24).leading_zeros() as u8 - 24 }
    })
}
