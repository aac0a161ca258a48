//! LZ4's block format through liblz4: the fast compressor, and the decoder, which lz4hc shares.
//!
//! The encoder resets its whole state for each page. liblz4 has a cheaper reset, but on 4 KiB pages it
//! was measured to gain nothing, to be slower on very compressible ones, and it makes the output depend
//! on earlier pages. Decoding needs no state.
//!
//! A dictionary is indexed once; encoders look it up in place, and liblz4 only reads it.

use std::ffi::{c_char, c_int, c_void};

// Linked for liblz4; its bindings lack the functions that work on a caller's state.
use lz4_sys as _;

use super::Dictionary;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Arc;
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
    fn LZ4_initStream(state: *mut c_void, state_bytes: usize) -> *mut c_void;
    fn LZ4_loadDictSlow(state: *mut c_void, dictionary: *const c_char, dictionary_bytes: c_int) -> c_int;
    fn LZ4_attach_dictionary(state: *mut c_void, dictionary_state: *const c_void);
    fn LZ4_compress_fast_continue(
        state: *mut c_void,
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
        acceleration: c_int,
    ) -> c_int;
    fn LZ4_decompress_safe_usingDict(
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
        dictionary: *const c_char,
        dictionary_bytes: c_int,
    ) -> c_int;
}

/// liblz4's default, which has the best ratio.
pub(super) const DEFAULT_ACCELERATION: i32 = 1;
/// `LZ4_ACCELERATION_MAX`: liblz4 clamps larger values to it.
pub(super) const MAX_ACCELERATION: i32 = 65537;

/// How far offsets reach back into a dictionary.
const WINDOW_BYTES: usize = 64 << 10;

/// Allocates a state of liblz4: words, because it needs 8-byte alignment.
pub(super) fn state(state_bytes: c_int) -> Result<Box<[u64]>> {
    let words = usize::try_from(state_bytes).unwrap_or(0).div_ceil(size_of::<u64>());
    let mut state = Vec::new();
    state
        .try_reserve_exact(words)
        .map_err(|_| Error::new(ErrorKind::NoMemory, "no memory for the state of an lz4 coder"))?;
    state.resize(words, 0);
    Ok(state.into_boxed_slice())
}

pub(super) fn reachable(dictionary: &Dictionary) -> &[u8] {
    let bytes = dictionary.bytes();
    &bytes[bytes.len().saturating_sub(WINDOW_BYTES)..]
}

/// Converts liblz4's result to a length: 0 means that the page does not fit.
pub(super) fn length(answer: c_int) -> Option<usize> {
    usize::try_from(answer).ok().filter(|&len_bytes| len_bytes > 0)
}

/// Returns a buffer's length as an int, clamped.
pub(super) fn room(out: &[u8]) -> c_int {
    c_int::try_from(out.len()).unwrap_or(c_int::MAX)
}

/// A dictionary with its match tables, for any number of encoders: lz4's, or lz4hc's of one level.
pub(super) struct Digest {
    tables: Box<[u64]>,
    /// Owns the bytes that `tables` points to.
    pub(super) source: Arc<Dictionary>,
}

/// `LZ4_loadDictSlow` or `LZ4_loadDictHC`.
pub(super) type LoadDictionary = unsafe extern "C" fn(*mut c_void, *const c_char, c_int) -> c_int;

impl Digest {
    pub(super) fn new(source: Arc<Dictionary>) -> Result<Digest> {
        // SAFETY: takes nothing and returns a constant. LZ4_loadDictSlow initialises a state of that size.
        Ok(unsafe { Digest::loaded(source, state(LZ4_sizeofState())?, LZ4_loadDictSlow) })
    }

    /// # Safety
    /// `tables` is a state for `load`.
    pub(super) unsafe fn loaded(
        source: Arc<Dictionary>,
        mut tables: Box<[u64]>,
        load: LoadDictionary,
    ) -> Digest {
        let reachable = reachable(&source);
        // SAFETY: the caller's promise. The state keeps pointers to `reachable`, at most 64 KiB: they live as
        // long as `source`, which is never changed.
        unsafe { load(tables.as_mut_ptr().cast(), reachable.as_ptr().cast(), reachable.len() as c_int) };
        Digest { tables, source }
    }

    /// Returns the address of the tables, which encoders only read.
    pub(super) fn tables(&self) -> *const c_void {
        self.tables.as_ptr().cast()
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.tables) + self.source.bytes().len()
    }
}

/// liblz4's match table for one page at a time.
pub(super) struct Encoder {
    /// `LZ4_sizeofState` bytes, rounded up.
    state: Box<[u64]>,
    acceleration: c_int,
    digest: Option<Arc<Digest>>,
}

impl Encoder {
    pub(super) fn new(acceleration: i32, digest: Option<Arc<Digest>>) -> Result<Encoder> {
        // SAFETY: takes nothing and returns a constant.
        let state = state(unsafe { LZ4_sizeofState() })?;
        let mut encoder = Encoder { state, acceleration, digest };
        encoder.encode(&super::warm_up_page(), &mut [0; PAGE_SIZE]);
        Ok(encoder)
    }

    pub(super) fn encode(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        let (state_bytes, state) = (self.state_bytes(), self.state.as_mut_ptr().cast::<c_void>());
        let (source, dest, out_bytes) = (page.as_ptr().cast(), out.as_mut_ptr().cast(), room(out));
        let page_bytes = PAGE_SIZE as c_int;
        // SAFETY: `state` has at least LZ4_sizeofState bytes aligned to 8 (`new` made it so), and this
        // encoder owns it. Both branches first initialise it, so that its pointers to the last page are
        // never followed. liblz4 reads PAGE_SIZE bytes of `page` and writes at most `out_bytes` bytes,
        // which `out` has. The dictionary's table was made by LZ4_loadDictSlow, is only read (pages of
        // up to 4 KiB look it up in place), and `digest` keeps it alive.
        let len_bytes = unsafe {
            match &self.digest {
                None => {
                    LZ4_compress_fast_extState(state, source, dest, page_bytes, out_bytes, self.acceleration)
                }
                Some(digest) => {
                    LZ4_initStream(state, state_bytes);
                    LZ4_attach_dictionary(state, digest.tables());
                    LZ4_compress_fast_continue(state, source, dest, page_bytes, out_bytes, self.acceleration)
                }
            }
        };
        length(len_bytes)
    }

    pub(super) fn state_bytes(&self) -> usize {
        size_of_val(&*self.state)
    }
}

pub(super) fn decode(bytes: &[u8], page: &mut Page, dictionary: Option<&Dictionary>) -> Result<()> {
    let source_bytes = c_int::try_from(bytes.len())
        .map_err(|_| Error::new(ErrorKind::Corrupt, "lz4: the compressed page is longer than 2 GiB"))?;
    let dictionary = dictionary.map_or(&[][..], reachable);
    // SAFETY: the call checks its input: it reads at most `source_bytes` bytes of `bytes` and at most
    // the bytes of `dictionary`, and writes at most PAGE_SIZE bytes of `page`, which overlaps neither
    // (it is borrowed mutably).
    let len_bytes = unsafe {
        LZ4_decompress_safe_usingDict(
            bytes.as_ptr().cast(),
            page.as_mut_ptr().cast(),
            source_bytes,
            PAGE_SIZE as c_int,
            dictionary.as_ptr().cast(),
            dictionary.len() as c_int,
        )
    };
    match len_bytes {
        _ if len_bytes == PAGE_SIZE as c_int => Ok(()),
        0.. => Err(Error::new(ErrorKind::Corrupt, "lz4: the bytes decode to less than a page")),
        _ => Err(Error::new(ErrorKind::Corrupt, "lz4: the bytes do not decode")),
    }
}
