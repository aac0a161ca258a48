//! LZ4's block format through liblz4, and the only unsafe code of the codecs.
//!
//! The encoder resets its whole state for each page. liblz4 has a cheaper reset, but on 4 KiB pages
//! it was measured to gain nothing, to lose on very compressible ones, and to make the output depend
//! on the pages before. Decoding needs no state.

use std::ffi::{c_char, c_int, c_void};

// Linked for liblz4; its bindings leave out the calls on a caller's state.
use lz4_sys as _;

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::units::{PAGE_SIZE, Page};

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
    fn LZ4_decompress_safe(
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
    ) -> c_int;
}

/// liblz4's default, which trades the least ratio for speed.
const ACCELERATION: c_int = 1;

/// liblz4's match table for one page at a time.
pub(super) struct Encoder {
    /// `LZ4_sizeofState` bytes, rounded up; words, because liblz4 wants it 8-byte aligned.
    state: Box<[u64]>,
}

impl Encoder {
    pub(super) fn new() -> Result<Encoder> {
        // SAFETY: takes nothing and returns a constant.
        let state_bytes = unsafe { LZ4_sizeofState() } as usize;
        let words = state_bytes.div_ceil(size_of::<u64>());
        let mut state = Vec::new();
        state
            .try_reserve_exact(words)
            .map_err(|_| Error::new(ErrorKind::NoMemory, "no memory for an lz4 encoder"))?;
        state.resize(words, 0);
        let mut encoder = Encoder { state: state.into_boxed_slice() };
        encoder.encode(&super::warm_up_page(), &mut [0; PAGE_SIZE]);
        Ok(encoder)
    }

    pub(super) fn encode(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        let out_bytes = c_int::try_from(out.len()).unwrap_or(c_int::MAX);
        // SAFETY: `state` is at least LZ4_sizeofState bytes, aligned to 8 (`new` made it so) and ours
        // alone; liblz4 initialises it itself. It reads PAGE_SIZE bytes of `page` and writes at most
        // `out_bytes` bytes, which `out` has.
        let len_bytes = unsafe {
            LZ4_compress_fast_extState(
                self.state.as_mut_ptr().cast(),
                page.as_ptr().cast(),
                out.as_mut_ptr().cast(),
                PAGE_SIZE as c_int,
                out_bytes,
                ACCELERATION,
            )
        };
        // 0 says that it does not fit; lengths are positive.
        usize::try_from(len_bytes).ok().filter(|&len_bytes| len_bytes > 0)
    }

    pub(super) fn state_bytes(&self) -> usize {
        size_of_val(&*self.state)
    }
}

/// See [`super::Decoder::decode`].
pub(super) fn decode(bytes: &[u8], page: &mut Page) -> Result<()> {
    let source_bytes = c_int::try_from(bytes.len())
        .map_err(|_| Error::new(ErrorKind::Corrupt, "lz4: the compressed page is longer than 2 GiB"))?;
    // SAFETY: LZ4_decompress_safe checks its input: it reads at most `source_bytes` bytes of `bytes`
    // and writes at most PAGE_SIZE bytes of `page`, which do not overlap (one is borrowed mutably).
    let len_bytes = unsafe {
        LZ4_decompress_safe(bytes.as_ptr().cast(), page.as_mut_ptr().cast(), source_bytes, PAGE_SIZE as c_int)
    };
    match len_bytes {
        _ if len_bytes == PAGE_SIZE as c_int => Ok(()),
        0.. => Err(Error::new(ErrorKind::Corrupt, "lz4: the bytes decode to less than a page")),
        _ => Err(Error::new(ErrorKind::Corrupt, "lz4: the bytes do not decode")),
    }
}
