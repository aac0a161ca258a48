//! The bare codec: the least work of any store of compressed pages.
//!
//! * Write: compress the page into a private buffer that the next write uses again. The buffer
//!   has room for every result, so the codec never stops early.
//! * Read: decompress the page from an array that has the compressed pages in the corpus's order, into a
//!   private page. A page whose compressed size reaches the huge threshold is raw there and is copied: the
//!   engine does not decompress those either.
//!
//! Writes do not change the array: reads of a mixed pattern take the page of the filled device.

use std::hint::black_box;

use uzram::Result;
use uzram::codec::{Algorithm, Decoder, Encoder};
use uzram::device::DEFAULT_CHAIN_SIZE;
use uzram::units::{PAGE_SIZE, Page};
use uzram::zsmalloc::huge_threshold;

use super::packed::{ENCODED_MAX_BYTES, Packed};
use super::target::{Target, Worker};
use crate::harness::corpus::{AlignedPage, Corpus};

pub(super) struct CodecLoop {
    algorithm: Algorithm,
    packed: Packed,
}

impl CodecLoop {
    pub(super) fn new(algorithm: Algorithm, corpus: &Corpus) -> Result<CodecLoop> {
        let packed = Packed::new(&algorithm, huge_threshold(DEFAULT_CHAIN_SIZE), corpus)?;
        Ok(CodecLoop { algorithm, packed })
    }
}

impl Target for CodecLoop {
    fn name(&self) -> &'static str {
        "codec"
    }

    fn fill(&self, _: &Corpus) -> Result<()> {
        Ok(())
    }

    fn worker(&self) -> Result<Box<dyn Worker + '_>> {
        Ok(Box::new(CodecWorker {
            encoder: Encoder::new(&self.algorithm)?,
            decoder: Decoder::new(&self.algorithm)?,
            encoded: vec![0; ENCODED_MAX_BYTES],
            page: Box::new(AlignedPage([0; _])),
            source: self,
        }))
    }
}

struct CodecWorker<'a> {
    encoder: Encoder,
    decoder: Decoder,
    encoded: Vec<u8>,
    page: Box<AlignedPage>,
    source: &'a CodecLoop,
}

impl Worker for CodecWorker<'_> {
    fn read(&mut self, page: usize) -> Result<&Page> {
        let bytes = self.source.packed.page(page);
        if bytes.len() == PAGE_SIZE {
            self.page.0.copy_from_slice(bytes);
        } else {
            self.decoder.decode(bytes, &mut self.page.0)?;
        }
        Ok(&self.page.0)
    }

    fn write(&mut self, _: usize, contents: &Page) -> Result<()> {
        black_box(self.encoder.encode(contents, &mut self.encoded));
        black_box(&self.encoded);
        Ok(())
    }
}
