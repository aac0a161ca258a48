//! The store's algorithms and their streams, and what becomes of one while its writer waits for memory.

use std::fmt;
use std::str::FromStr;

use crate::base::error::{Error, Result};
use crate::base::sync::{Arc, Counter};
use crate::base::units::Page;
use crate::codec::{Algorithm, Decoder, Encoder, ROOM_BYTES, StatelessDecoder};
use crate::stream::{AnyStreams, Design, Streams};

/// A codec's states and a buffer for one compressed page.
pub(super) struct Stream {
    pub(super) encoder: Encoder,
    pub(super) decoder: Decoder,
    pub(super) compressed: Box<[u8]>,
}

impl Stream {
    pub(super) fn new(algorithm: &Algorithm) -> Result<Self> {
        Ok(Stream {
            encoder: Encoder::new(algorithm)?,
            decoder: Decoder::new(algorithm)?,
            compressed: vec![0; ROOM_BYTES].into_boxed_slice(),
        })
    }

    pub(super) fn bytes(&self) -> usize {
        self.encoder.state_bytes() + self.decoder.state_bytes() + self.compressed.len()
    }
}

/// An algorithm and its streams.
pub(super) struct Codec {
    streams: AnyStreams<Stream>,
    /// Where the algorithm decodes without state, reading takes no stream.
    stateless_decoder: Option<StatelessDecoder>,
}

impl Codec {
    /// The codec of `algorithm`. What its streams take, and what they share, is added to `bytes`, now and
    /// whenever a spare stream is made.
    pub(super) fn new(algorithm: &Algorithm, design: Design, bytes: &Arc<Counter>) -> Result<Self> {
        bytes.add(algorithm.shared_bytes() as u64);
        let (of_streams, bytes) = (algorithm.clone(), Arc::clone(bytes));
        let make = move || {
            let stream = Stream::new(&of_streams)?;
            bytes.add(stream.bytes() as u64);
            Ok::<_, Error>(stream)
        };
        let streams = AnyStreams::new(design, make)?;
        Ok(Codec { streams, stateless_decoder: algorithm.stateless_decoder() })
    }

    /// Lends a stream to `f`.
    #[inline]
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Stream) -> R) -> R {
        self.streams.with(f)
    }

    /// As [`Decoder::decode`].
    #[inline]
    pub(super) fn decode(&self, bytes: &[u8], out: &mut Page) -> Result<()> {
        match &self.stateless_decoder {
            Some(decoder) => decoder.decode(bytes, out),
            None => self.streams.with(|stream| stream.decoder.decode(bytes, out)),
        }
    }

    /// Times a thread found all streams lent and waited.
    pub(super) fn sleeps(&self) -> u64 {
        self.streams.sleeps()
    }

    /// Whether reading takes no stream.
    #[cfg(all(test, not(feature = "loom")))]
    pub(super) fn decodes_without_state(&self) -> bool {
        self.stateless_decoder.is_some()
    }
}

/// What becomes of a writer's stream when memory for its page takes waiting: the pool must grow by
/// a system call, or free memory must go back first because of the limit. (A page that is touched
/// the first time is faulted in by the kernel in either case, and counts as no waiting.) Reads and
/// prints as `held` or `released`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamAlloc {
    /// The writer holds it: others find one stream less meanwhile.
    #[default]
    Held,
    /// The writer lets it go, waits, takes a stream again and compresses the page anew, and counts
    /// a `writestall`: so did the kernel from 4.7 on, where nobody may sleep who holds the stream
    /// of a CPU, until streams could be slept with in 6.15.
    Released,
}

impl FromStr for StreamAlloc {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.trim() {
            "held" => Ok(StreamAlloc::Held),
            "released" => Ok(StreamAlloc::Released),
            other => {
                let what = format!("'{other}' is no stream_alloc: write held or released");
                Err(Error::invalid(what).with_setting("stream_alloc"))
            }
        }
    }
}

impl fmt::Display for StreamAlloc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StreamAlloc::Held => "held",
            StreamAlloc::Released => "released",
        })
    }
}
