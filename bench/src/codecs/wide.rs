//! Codecs for pages larger than the engine's, by the libraries that the engine uses, with the parameters that it sets.
//!
//! The engine codes pages of 4 KiB only. What larger pages would gain is measured here as if it coded them at once; a test
//! compares the coders with the engine's at 4 KiB. Those that are the engine's own code exist for 4 KiB only.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;

use libdeflate_sys::{
    libdeflate_alloc_compressor, libdeflate_alloc_decompressor, libdeflate_compressor,
    libdeflate_decompressor, libdeflate_deflate_compress, libdeflate_deflate_decompress,
    libdeflate_free_compressor, libdeflate_free_decompressor,
    libdeflate_result_LIBDEFLATE_SUCCESS as SUCCESS,
};
use lz4_sys::LZ4_decompress_safe;
use uzram::codec::Algorithm;
use uzram::{Error, ErrorKind, Result};
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, FrameFormat};

unsafe extern "C" {
    fn LZ4_sizeofState() -> c_int;
    fn LZ4_compress_fast_extState(
        state: *mut c_void,
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
        acceleration: c_int,
    ) -> c_int;
    fn LZ4_sizeofStateHC() -> c_int;
    fn LZ4_initStreamHC(state: *mut c_void, state_bytes: usize) -> *mut c_void;
    fn LZ4_compress_HC_extStateHC_fastReset(
        state: *mut c_void,
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
        level: c_int,
    ) -> c_int;
}

/// A compressor and a decompressor of whole buffers.
pub(super) enum Coder {
    Lz4 { state: Box<[u64]>, acceleration: c_int },
    Lz4hc { state: Box<[u64]>, level: c_int },
    Zstd { compress: CCtx<'static>, decompress: DCtx<'static> },
    Deflate(Deflate),
}

impl Coder {
    /// Returns the coder of an algorithm without a dictionary; `None` for one that no library codes.
    ///
    /// # Errors
    /// `NoMemory`, or a library that lacks what is set.
    pub(super) fn new(algorithm: &Algorithm) -> Result<Option<Coder>> {
        let level = algorithm.level();
        // By name, so that the engine may have kinds that are unknown here.
        Ok(Some(match algorithm.kind().name() {
            // SAFETY: it takes nothing and returns a constant.
            "lz4" => Coder::Lz4 { state: state(unsafe { LZ4_sizeofState() }), acceleration: level },
            "lz4hc" => {
                // SAFETY: as above.
                let mut state = state(unsafe { LZ4_sizeofStateHC() });
                let state_bytes = size_of_val(&*state);
                // SAFETY: the state has LZ4_sizeofStateHC bytes, aligned to 8, and is this function's.
                unsafe { LZ4_initStreamHC(state.as_mut_ptr().cast(), state_bytes) };
                Coder::Lz4hc { state, level }
            }
            "zstd" => zstd(level)?,
            "deflate" => Coder::Deflate(Deflate::new(level)?),
            _ => return Ok(None),
        }))
    }

    /// Compresses a page into the start of `out`, which has room for any result; returns the length in bytes, or `None`
    /// if the library does not compress the page.
    pub(super) fn encode(&mut self, page: &[u8], out: &mut [u8]) -> Option<usize> {
        let (source, source_bytes) = (page.as_ptr().cast(), page.len() as c_int);
        match self {
            Coder::Lz4 { state, acceleration } => {
                let (dest, dest_bytes) = (out.as_mut_ptr().cast(), out.len() as c_int);
                // SAFETY: the state has LZ4_sizeofState bytes, aligned to 8, and the call initialises it. It reads the
                // bytes of `page` and writes within `out`.
                let len = unsafe {
                    let state = state.as_mut_ptr().cast();
                    LZ4_compress_fast_extState(state, source, dest, source_bytes, dest_bytes, *acceleration)
                };
                usize::try_from(len).ok().filter(|len| *len > 0)
            }
            Coder::Lz4hc { state, level } => {
                let (dest, dest_bytes) = (out.as_mut_ptr().cast(), out.len() as c_int);
                // SAFETY: the state is initialised, and this coder's. The call reads the bytes of `page` and writes within
                // `out`; it forgets the page before.
                let len = unsafe {
                    let state = state.as_mut_ptr().cast();
                    LZ4_compress_HC_extStateHC_fastReset(
                        state,
                        source,
                        dest,
                        source_bytes,
                        dest_bytes,
                        *level,
                    )
                };
                usize::try_from(len).ok().filter(|len| *len > 0)
            }
            Coder::Zstd { compress, .. } => compress.compress2(out, page).ok(),
            Coder::Deflate(deflate) => deflate.encode(page, out),
        }
    }

    /// Decompresses `bytes` into `page`, which they must fill.
    ///
    /// # Errors
    /// `Corrupt`: they do not decode to a page.
    pub(super) fn decode(&mut self, bytes: &[u8], page: &mut [u8]) -> Result<()> {
        let len = match self {
            Coder::Lz4 { .. } | Coder::Lz4hc { .. } => {
                // SAFETY: the call checks its input: it reads within `bytes` and writes within `page`.
                let len = unsafe {
                    let (source, dest) = (bytes.as_ptr().cast(), page.as_mut_ptr().cast());
                    LZ4_decompress_safe(source, dest, bytes.len() as c_int, page.len() as c_int)
                };
                usize::try_from(len).ok()
            }
            Coder::Zstd { decompress, .. } => decompress.decompress(page, bytes).ok(),
            Coder::Deflate(deflate) => deflate.decode(bytes, page),
        };
        match len {
            Some(len) if len == page.len() => Ok(()),
            _ => Err(Error::new(ErrorKind::Corrupt, "the bytes do not decode to a page")),
        }
    }
}

/// Returns zeroed memory of at least so many bytes, aligned to 8.
fn state(state_bytes: c_int) -> Box<[u64]> {
    vec![0; usize::try_from(state_bytes).unwrap_or(0).div_ceil(size_of::<u64>())].into()
}

fn no_memory() -> Error {
    Error::new(ErrorKind::NoMemory, "no memory for a codec")
}

/// Frames without what pages do not need, as the engine's.
fn zstd(level: c_int) -> Result<Coder> {
    let refused = |code| Error::new(ErrorKind::Unsupported, zstd_safe::get_error_name(code));
    let mut compress = CCtx::try_create().ok_or_else(no_memory)?;
    for parameter in [
        CParameter::CompressionLevel(level),
        CParameter::Format(FrameFormat::Magicless),
        CParameter::ContentSizeFlag(false),
        CParameter::ChecksumFlag(false),
        CParameter::DictIdFlag(false),
    ] {
        compress.set_parameter(parameter).map_err(refused)?;
    }
    let mut decompress = DCtx::try_create().ok_or_else(no_memory)?;
    decompress.set_parameter(DParameter::Format(FrameFormat::Magicless)).map_err(refused)?;
    Ok(Coder::Zstd { compress, decompress })
}

/// libdeflate's two coders, which this owns.
pub(super) struct Deflate {
    compressor: NonNull<libdeflate_compressor>,
    decompressor: NonNull<libdeflate_decompressor>,
}

impl Deflate {
    fn new(level: c_int) -> Result<Deflate> {
        // SAFETY: it takes a number, and returns null for one that is no level.
        let compressor = NonNull::new(unsafe { libdeflate_alloc_compressor(level) }).ok_or_else(no_memory)?;
        // SAFETY: there are no preconditions.
        match NonNull::new(unsafe { libdeflate_alloc_decompressor() }) {
            Some(decompressor) => Ok(Deflate { compressor, decompressor }),
            None => {
                // SAFETY: the compressor was allocated above, and nothing else has it.
                unsafe { libdeflate_free_compressor(compressor.as_ptr()) };
                Err(no_memory())
            }
        }
    }

    fn encode(&mut self, page: &[u8], out: &mut [u8]) -> Option<usize> {
        // SAFETY: the compressor is this one's. The call reads the bytes of `page` and writes within `out`.
        let len = unsafe {
            let (source, dest) = (page.as_ptr().cast(), out.as_mut_ptr().cast());
            libdeflate_deflate_compress(self.compressor.as_ptr(), source, page.len(), dest, out.len())
        };
        (len > 0).then_some(len)
    }

    /// Returns the number of bytes that it wrote to `page`.
    fn decode(&mut self, bytes: &[u8], page: &mut [u8]) -> Option<usize> {
        let mut written = 0;
        // SAFETY: the decompressor is this one's. The call checks its input: it reads within `bytes` and writes within
        // `page`.
        let result = unsafe {
            let (source, dest) = (bytes.as_ptr().cast(), page.as_mut_ptr().cast());
            let decompressor = self.decompressor.as_ptr();
            libdeflate_deflate_decompress(decompressor, source, bytes.len(), dest, page.len(), &mut written)
        };
        (result == SUCCESS).then_some(written)
    }
}

impl Drop for Deflate {
    fn drop(&mut self) {
        // SAFETY: both are this one's, and it does not use them again.
        unsafe {
            libdeflate_free_compressor(self.compressor.as_ptr());
            libdeflate_free_decompressor(self.decompressor.as_ptr());
        }
    }
}
