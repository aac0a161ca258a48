//! zstd frames without magic number, content size, checksum and dictionary id, which pages do not need.
//! The header is then two bytes, one of which is the window size.
//!
//! zstd sizes its tables when it codes the first page; the parameters never change after that, so the
//! context never grows. Decoding in one call needs no window buffer: whatever window a damaged header
//! claims, matches are looked up in the page itself, and nothing is allocated.

use std::ops::RangeInclusive;
use std::ptr;

use zstd_safe::zstd_sys::ZSTD_ErrorCode;
use zstd_safe::{CCtx, CDict, CParameter, DCtx, DDict, DParameter, ErrorCode, FrameFormat, get_error_name};

use super::Dictionary;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Arc;
use crate::base::units::{PAGE_SIZE, Page};

/// The default level. Higher levels find little more in a single page: on mixed pages level 3 was
/// measured to store 2.6 % less for about 20 % more time and a larger table, level 9 to store 6 % less for
/// eight times the time. Level -1 takes a quarter less time but stores 18 % more; for speed there is lz4.
pub(super) const DEFAULT_LEVEL: i32 = 1;

/// Returns the range of levels, including 0, which is zstd's alias of its own default.
pub(super) fn levels() -> RangeInclusive<i32> {
    zstd_safe::min_c_level()..=zstd_safe::max_c_level()
}

/// A dictionary digested for one level, for any number of coders. zstd only reads it, and refers to the
/// bytes in place.
pub(super) struct Digest {
    // Both are dropped before `source`, which they refer to.
    compress: CDict<'static>,
    decompress: DDict<'static>,
    pub(super) source: Arc<Dictionary>,
}

impl Digest {
    pub(super) fn new(level: i32, source: Arc<Dictionary>) -> Result<Digest> {
        let bytes = ptr::from_ref(source.bytes());
        // SAFETY: `source` keeps the bytes alive, unchanged and in place as long as the two dictionaries
        // exist: they are fields of the same struct, which are dropped before it.
        let bytes: &'static [u8] = unsafe { &*bytes };
        let unsound = || {
            Error::invalid(format!("dict={}: zstd cannot use it: a damaged zstd dictionary?", source.path()))
        };
        let compress = CDict::try_create_by_reference(bytes, level).ok_or_else(unsound)?;
        let decompress = DDict::try_create_by_reference(bytes).ok_or_else(unsound)?;
        Ok(Digest { compress, decompress, source })
    }

    pub(super) fn bytes(&self) -> usize {
        self.compress.sizeof() + self.decompress.sizeof() + self.source.bytes().len()
    }
}

pub(super) struct Encoder {
    context: CCtx<'static>,
    /// Referred to by the context; dropped after it.
    _digest: Option<Arc<Digest>>,
}

impl Encoder {
    /// Creates an encoder. `level` must be one of zstd's, and a dictionary must be digested for it.
    pub(super) fn new(level: i32, digest: Option<Arc<Digest>>) -> Result<Encoder> {
        let mut context = CCtx::try_create().ok_or_else(no_memory)?;
        for parameter in [
            CParameter::CompressionLevel(level),
            CParameter::Format(FrameFormat::Magicless),
            CParameter::ContentSizeFlag(false),
            CParameter::ChecksumFlag(false),
            CParameter::DictIdFlag(false),
        ] {
            context.set_parameter(parameter).map_err(unsupported)?;
        }
        if let Some(digest) = &digest {
            let dictionary = ptr::from_ref(&digest.compress);
            // SAFETY: the dictionary is behind an Arc that the encoder keeps until its context is dropped.
            context.ref_cdict(unsafe { &*dictionary }).map_err(unsupported)?;
        }
        // The first page makes zstd allocate its tables.
        let mut out = [0; 2 * PAGE_SIZE];
        context.compress2(&mut out[..], &super::warm_up_page()).map_err(|_| no_memory())?;
        Ok(Encoder { context, _digest: digest })
    }

    pub(super) fn encode(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        // A failed call leaves the context in mid-frame; compress2 first resets that.
        match self.context.compress2(out, page) {
            Ok(len_bytes) => Some(len_bytes),
            Err(code) => {
                // No page causes any other error. If one occurs, the page is just not compressed.
                debug_assert!(
                    is(code, ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall),
                    "{}",
                    get_error_name(code)
                );
                None
            }
        }
    }

    pub(super) fn state_bytes(&self) -> usize {
        self.context.sizeof()
    }
}

pub(super) struct Decoder {
    context: DCtx<'static>,
    /// Referred to by the context; dropped after it.
    _digest: Option<Arc<Digest>>,
}

impl Decoder {
    pub(super) fn new(digest: Option<Arc<Digest>>) -> Result<Decoder> {
        let mut context = DCtx::try_create().ok_or_else(no_memory)?;
        context.set_parameter(DParameter::Format(FrameFormat::Magicless)).map_err(unsupported)?;
        if let Some(digest) = &digest {
            let dictionary = ptr::from_ref(&digest.decompress);
            // SAFETY: the dictionary is behind an Arc that the decoder keeps until its context is dropped.
            context.ref_ddict(unsafe { &*dictionary }).map_err(unsupported)?;
        }
        let mut decoder = Decoder { context, _digest: digest };
        let (mut page, mut bytes) = (super::warm_up_page(), [0; PAGE_SIZE]);
        // A page coded without a dictionary decodes with any.
        let len_bytes = Encoder::new(DEFAULT_LEVEL, None)?.encode(&page, &mut bytes).unwrap_or(0);
        decoder.decode(&bytes[..len_bytes], &mut page)?;
        Ok(decoder)
    }

    pub(super) fn decode(&mut self, bytes: &[u8], page: &mut Page) -> Result<()> {
        match self.context.decompress(&mut page[..], bytes) {
            Ok(PAGE_SIZE) => Ok(()),
            Ok(_) => Err(Error::new(ErrorKind::Corrupt, "zstd: the bytes decode to less than a page")),
            Err(code) if is(code, ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall) => {
                Err(Error::new(ErrorKind::Corrupt, "zstd: the bytes decode to more than a page"))
            }
            Err(_) => Err(Error::new(ErrorKind::Corrupt, "zstd: the bytes do not decode")),
        }
    }

    pub(super) fn state_bytes(&self) -> usize {
        self.context.sizeof()
    }
}

fn no_memory() -> Error {
    Error::new(ErrorKind::NoMemory, "no memory for a zstd context")
}

fn unsupported(code: ErrorCode) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("this build of zstd cannot code pages: {}", get_error_name(code)),
    )
}

/// Returns whether zstd's return value `code` is `error`: zstd returns the error's number, negated.
fn is(code: ErrorCode, error: ZSTD_ErrorCode) -> bool {
    code == (error as usize).wrapping_neg()
}
