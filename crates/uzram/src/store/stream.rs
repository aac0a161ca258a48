//! What a stream of the store is, and what becomes of it while its writer waits for memory.

use std::fmt;
use std::str::FromStr;

use crate::base::error::{Error, Result};
use crate::codec::{Algorithm, Decoder, Encoder, ROOM_BYTES};

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
