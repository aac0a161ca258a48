//! zstd frames without what a page does not need: no magic number, no content size, no checksum. The
//! header is then two bytes, one of which says that matches reach back 4 KiB at most.
//!
//! zstd sizes its tables for the page when it codes the first one; the parameters never change after,
//! and so the context never grows. Decoding in one call needs no window buffer: whatever window a
//! damaged header claims, matches are looked up in the page itself, and nothing is allocated.

use zstd_safe::zstd_sys::ZSTD_ErrorCode;
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, ErrorCode, FrameFormat};

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::units::{PAGE_SIZE, Page};

/// The level of plain `zstd`. A single page leaves higher levels little to find: on mixed pages level 3
/// was measured to store 2.6 % less for about 20 % more time and a larger table, level 9 to store 6 %
/// less for eight times the time. Level -1 takes a quarter less time but stores 18 % more, and who
/// wants speed most has lz4.
pub(super) const DEFAULT_LEVEL: i32 = 1;

/// Refuses a level that zstd would silently turn into another one.
pub(super) fn check_level(level: i32) -> Result<()> {
    if level == 0 {
        return Err(Error::invalid("zstd level 0 only means zstd's own default; write zstd:3 for it"));
    }
    if !(zstd_safe::min_c_level()..=zstd_safe::max_c_level()).contains(&level) {
        return Err(not_a_level(&level.to_string()));
    }
    Ok(())
}

/// The error for a `level` that is not one.
pub(super) fn not_a_level(level: &str) -> Error {
    Error::invalid(format!(
        "'{level}' is not a zstd level; write 1 to {}, or {} to -1 for more speed, as in zstd:3",
        zstd_safe::max_c_level(),
        zstd_safe::min_c_level(),
    ))
}

/// A compression context, its parameters set.
pub(super) struct Encoder {
    context: CCtx<'static>,
}

impl Encoder {
    pub(super) fn new(level: i32) -> Result<Encoder> {
        check_level(level)?;
        let mut context = CCtx::try_create().ok_or_else(no_memory)?;
        for parameter in [
            CParameter::CompressionLevel(level),
            CParameter::Format(FrameFormat::Magicless),
            CParameter::ContentSizeFlag(false),
            CParameter::ChecksumFlag(false),
        ] {
            context.set_parameter(parameter).map_err(unsupported)?;
        }
        // The first page makes zstd allocate its tables.
        let mut out = [0; 2 * PAGE_SIZE];
        context.compress2(&mut out[..], &super::warm_up_page()).map_err(|_| no_memory())?;
        Ok(Encoder { context })
    }

    pub(super) fn encode(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        // A failed call leaves the context in mid-frame; compress2 begins by forgetting that.
        match self.context.compress2(out, page) {
            Ok(len_bytes) => Some(len_bytes),
            Err(code) => {
                // No page causes another error. If zstd had one, the page is merely not compressed.
                debug_assert!(is(code, ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall), "{}", name(code));
                None
            }
        }
    }

    pub(super) fn state_bytes(&self) -> usize {
        self.context.sizeof()
    }
}

/// A decompression context, its parameters set.
pub(super) struct Decoder {
    context: DCtx<'static>,
}

impl Decoder {
    pub(super) fn new() -> Result<Decoder> {
        let mut context = DCtx::try_create().ok_or_else(no_memory)?;
        context.set_parameter(DParameter::Format(FrameFormat::Magicless)).map_err(unsupported)?;
        let mut decoder = Decoder { context };
        let (mut page, mut bytes) = (super::warm_up_page(), [0; PAGE_SIZE]);
        let len_bytes = Encoder::new(DEFAULT_LEVEL)?.encode(&page, &mut bytes).unwrap_or(0);
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
    Error::new(ErrorKind::Unsupported, format!("this build of zstd cannot code pages: {}", name(code)))
}

fn name(code: ErrorCode) -> &'static str {
    zstd_safe::get_error_name(code)
}

/// Whether zstd's return value `code` is `error`: it returns the error's number, negated.
fn is(code: ErrorCode, error: ZSTD_ErrorCode) -> bool {
    code == (error as usize).wrapping_neg()
}
