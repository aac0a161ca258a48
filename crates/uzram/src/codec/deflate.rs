//! Raw deflate streams through libdeflate: no header, no checksum.
//!
//! libdeflate allocates all memory of a coder when it creates it, and each call codes a whole buffer. It
//! does not support dictionaries.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::NonNull;

use libdeflate_sys::{
    libdeflate_alloc_compressor_ex, libdeflate_alloc_decompressor_ex, libdeflate_compressor,
    libdeflate_decompressor, libdeflate_deflate_compress, libdeflate_deflate_decompress_ex,
    libdeflate_free_compressor, libdeflate_free_decompressor, libdeflate_options,
    libdeflate_result_LIBDEFLATE_INSUFFICIENT_SPACE as INSUFFICIENT_SPACE,
    libdeflate_result_LIBDEFLATE_SUCCESS as SUCCESS,
};

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::units::{PAGE_SIZE, Page};

/// libdeflate's default, and zlib's, which the kernel uses.
pub(super) const DEFAULT_LEVEL: i32 = 6;
/// Level 0 does not compress.
pub(super) const MIN_LEVEL: i32 = 1;
/// Levels from 10 on take several MiB for each encoder.
pub(super) const MAX_LEVEL: i32 = 12;

thread_local! {
    /// The bytes that [`counting_malloc`] gave this thread; libdeflate does not report a coder's size.
    static TAKEN_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// `malloc`, counted; it has no preconditions.
unsafe extern "C" fn counting_malloc(len_bytes: usize) -> *mut c_void {
    TAKEN_BYTES.set(TAKEN_BYTES.get() + len_bytes);
    // SAFETY: malloc takes any length.
    unsafe { libc::malloc(len_bytes) }
}

/// A compressor or decompressor, which this owns.
struct Coder<T> {
    coder: NonNull<T>,
    free: unsafe extern "C" fn(*mut T),
    state_bytes: usize,
}

// SAFETY: libdeflate's coders are plain memory, not tied to a thread, and only used through `&mut`.
unsafe impl<T> Send for Coder<T> {}

impl<T> Coder<T> {
    fn new(
        alloc: impl FnOnce(&libdeflate_options) -> *mut T,
        free: unsafe extern "C" fn(*mut T),
    ) -> Result<Self> {
        let options = libdeflate_options {
            sizeof_options: size_of::<libdeflate_options>(),
            malloc_func: Some(counting_malloc),
            free_func: Some(libc::free),
        };
        let before = TAKEN_BYTES.get();
        let coder = NonNull::new(alloc(&options))
            .ok_or_else(|| Error::new(ErrorKind::NoMemory, "no memory for a deflate coder"))?;
        Ok(Coder { coder, free, state_bytes: TAKEN_BYTES.get() - before })
    }
}

impl<T> Drop for Coder<T> {
    fn drop(&mut self) {
        // SAFETY: this owns the coder, which is freed by its own function and not used again.
        unsafe { (self.free)(self.coder.as_ptr()) }
    }
}

pub(super) struct Encoder(Coder<libdeflate_compressor>);

impl Encoder {
    /// Creates an encoder. `level` must be one of deflate's.
    pub(super) fn new(level: i32) -> Result<Encoder> {
        // SAFETY: the options live during the call.
        let alloc = |options: &_| unsafe { libdeflate_alloc_compressor_ex(level, options) };
        let mut encoder = Encoder(Coder::new(alloc, libdeflate_free_compressor)?);
        encoder.encode(&super::warm_up_page(), &mut [0; PAGE_SIZE]);
        Ok(encoder)
    }

    pub(super) fn encode(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        // SAFETY: this encoder owns the compressor. libdeflate reads PAGE_SIZE bytes of `page` and writes
        // within the length of `out`.
        let len_bytes = unsafe {
            libdeflate_deflate_compress(
                self.0.coder.as_ptr(),
                page.as_ptr().cast(),
                PAGE_SIZE,
                out.as_mut_ptr().cast(),
                out.len(),
            )
        };
        // 0 means that it does not fit.
        (len_bytes > 0).then_some(len_bytes)
    }

    pub(super) fn state_bytes(&self) -> usize {
        self.0.state_bytes
    }
}

pub(super) struct Decoder(Coder<libdeflate_decompressor>);

impl Decoder {
    pub(super) fn new() -> Result<Decoder> {
        // SAFETY: the options live during the call.
        let alloc = |options: &_| unsafe { libdeflate_alloc_decompressor_ex(options) };
        let mut decoder = Decoder(Coder::new(alloc, libdeflate_free_decompressor)?);
        let (mut page, mut bytes) = (super::warm_up_page(), [0; PAGE_SIZE]);
        let len_bytes = Encoder::new(MIN_LEVEL)?.encode(&page, &mut bytes).unwrap_or(0);
        decoder.decode(&bytes[..len_bytes], &mut page)?;
        Ok(decoder)
    }

    pub(super) fn decode(&mut self, bytes: &[u8], page: &mut Page) -> Result<()> {
        let (mut read_bytes, mut written_bytes) = (0, 0);
        // SAFETY: this decoder owns the decompressor. libdeflate checks its input: it reads within the
        // length of `bytes`, and writes at most PAGE_SIZE bytes of `page`.
        let answer = unsafe {
            libdeflate_deflate_decompress_ex(
                self.0.coder.as_ptr(),
                bytes.as_ptr().cast(),
                bytes.len(),
                page.as_mut_ptr().cast(),
                PAGE_SIZE,
                &mut read_bytes,
                &mut written_bytes,
            )
        };
        let corrupt = |what: &'static str| Err(Error::new(ErrorKind::Corrupt, what));
        match answer {
            SUCCESS if written_bytes != PAGE_SIZE => corrupt("deflate: the bytes decode to less than a page"),
            SUCCESS if read_bytes != bytes.len() => corrupt("deflate: bytes are left over after a page"),
            SUCCESS => Ok(()),
            INSUFFICIENT_SPACE => corrupt("deflate: the bytes decode to more than a page"),
            _ => corrupt("deflate: the bytes do not decode"),
        }
    }

    pub(super) fn state_bytes(&self) -> usize {
        self.0.state_bytes
    }
}
