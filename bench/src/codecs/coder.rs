//! One codec for pages of one size: the engine's own for 4 KiB, and its libraries for larger ones.

use uzram::codec::{Algorithm, Decoder, Encoder};
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

use super::wide;

pub(super) enum Coder {
    Engine(Encoder, Decoder),
    Wide(wide::Coder),
}

impl Coder {
    /// Returns the coder; `None` if the codec does not code pages of this size.
    ///
    /// # Errors
    /// `NoMemory`.
    pub(super) fn new(algorithm: &Algorithm, page_bytes: usize) -> Result<Option<Coder>> {
        match page_bytes {
            PAGE_SIZE => Ok(Some(Coder::Engine(Encoder::new(algorithm)?, Decoder::new(algorithm)?))),
            _ => Ok(wide::Coder::new(algorithm)?.map(Coder::Wide)),
        }
    }

    /// Returns the memory that an encoder and a decoder own; `None` for larger pages, which the engine does not code.
    pub(super) fn state_bytes(&self) -> Option<usize> {
        match self {
            Coder::Engine(encoder, decoder) => Some(encoder.state_bytes() + decoder.state_bytes()),
            Coder::Wide(_) => None,
        }
    }

    /// Compresses a page of its size into the start of `out`, which has room for any result; returns the length in bytes,
    /// or `None` if the page does not get smaller.
    #[inline]
    pub(super) fn encode(&mut self, page: &[u8], out: &mut [u8]) -> Option<usize> {
        let len = match self {
            Coder::Engine(encoder, _) => encoder.encode(page.try_into().ok()?, out),
            Coder::Wide(coder) => coder.encode(page, out),
        };
        len.filter(|len| *len < page.len())
    }

    /// Decompresses `bytes` into a page of its size.
    ///
    /// # Errors
    /// `Corrupt`.
    #[inline]
    pub(super) fn decode(&mut self, bytes: &[u8], page: &mut [u8]) -> Result<()> {
        match self {
            Coder::Engine(_, decoder) => {
                let page =
                    page.try_into().map_err(|_| Error::new(ErrorKind::Invalid, "no page of 4096 bytes"))?;
                decoder.decode(bytes, page)
            }
            Coder::Wide(coder) => coder.decode(bytes, page),
        }
    }
}
