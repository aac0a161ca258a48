//! The store's algorithms and their streams.
//!
//! Lock order: slot, stream, then the pool's.

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::ZeroedPages;
use crate::base::random::Random;
use crate::base::sync::{Arc, Counter};
use crate::base::units::{PAGE_SIZE, Page};
use crate::codec::{Algorithm, Decoder, Encoder, ROOM_BYTES, StatelessDecoder};
use crate::stream::Streams;

use super::Designs;
use super::designs::StoreStreams;

pub(super) struct Stream {
    pub(super) encoder: Encoder,
    pub(super) decoder: Decoder,
    /// The buffer, in pages of its own, which are left out of core files.
    pub(super) compressed: ZeroedPages,
}

impl Stream {
    pub(super) fn new(algorithm: &Algorithm) -> Result<Self> {
        Ok(Stream {
            encoder: Encoder::new(algorithm)?,
            decoder: Decoder::new(algorithm)?,
            compressed: ZeroedPages::new(ROOM_BYTES)?,
        })
    }

    /// Touches all memory of the stream, by encoding and decoding pages of several kinds.
    fn warm_up(&mut self) {
        let mut random = Random::new(0);
        let (mut page, mut decoded) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        for kind in 0..WARM_UP_PAGES {
            // The share of random bytes falls from all to few; the rest are repeated words.
            let words = 2 + kind * 37 % 400;
            let random_bytes = PAGE_SIZE * (WARM_UP_PAGES - kind) / WARM_UP_PAGES;
            for (at, byte) in page.iter_mut().enumerate() {
                let word = (at / 7 * (1 + kind)) % words;
                *byte = if at < random_bytes { random.next() as u8 } else { (word * 31 + at % 7) as u8 };
            }
            if let Some(len) = self.encoder.encode(&page, &mut self.compressed) {
                // It cannot fail: the page was encoded just now.
                let _ = self.decoder.decode(&self.compressed[..len], &mut decoded);
            }
        }
        self.compressed.fill(1);
    }

    pub(super) fn bytes(&self) -> usize {
        self.encoder.state_bytes() + self.decoder.state_bytes() + self.compressed.len()
    }
}

const WARM_UP_PAGES: usize = 32;

pub(super) struct Codec {
    pub(super) streams: StoreStreams<Stream>,
    algorithm: Algorithm,
    /// Set if the algorithm decodes without state; then reads take no stream.
    pub(super) stateless_decoder: Option<StatelessDecoder>,
}

impl Codec {
    /// Creates the codec of `algorithm`. Adds to `bytes` the memory of its streams and of what they share,
    /// now and whenever a spare stream is made. With `ready`, all spares are made now and all memory of the
    /// streams is touched.
    pub(super) fn new(
        algorithm: &Algorithm,
        designs: Designs,
        ready: bool,
        bytes: &Arc<Counter>,
    ) -> Result<Self> {
        bytes.add(algorithm.shared_bytes() as u64);
        let (of_streams, bytes) = (algorithm.clone(), Arc::clone(bytes));
        let make = move || {
            let mut stream = Stream::new(&of_streams)?;
            if ready {
                stream.warm_up();
            }
            bytes.add(stream.bytes() as u64);
            Ok::<_, Error>(stream)
        };
        let streams = designs.streams(make)?;
        if ready && !streams.make_spares() {
            return Err(
                Error::new(ErrorKind::NoMemory, "no memory for spare streams").with_setting("reserve")
            );
        }
        let (algorithm, stateless_decoder) = (algorithm.clone(), algorithm.stateless_decoder());
        Ok(Codec { streams, algorithm, stateless_decoder })
    }

    /// Makes an encoder for a thread that lends no stream.
    #[cfg(not(loom))]
    pub(super) fn encoder(&self) -> Result<Encoder> {
        Encoder::new(&self.algorithm)
    }

    #[inline]
    pub(super) fn decode(&self, bytes: &[u8], out: &mut Page) -> Result<()> {
        match &self.stateless_decoder {
            Some(decoder) => decoder.decode(bytes, out),
            None => self.streams.lend().decoder.decode(bytes, out),
        }
    }

    pub(super) fn sleeps(&self) -> u64 {
        self.streams.sleeps()
    }
}
