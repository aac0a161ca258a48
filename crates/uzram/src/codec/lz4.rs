//! LZ4's block format through liblz4: the fast compressor, lz4hc, which searches more, and their decoder.
//!
//! The fast one resets its whole state for each page. liblz4's cheaper reset gained nothing on 4 KiB pages,
//! was slower on very compressible ones, and makes the output depend on earlier pages.
//!
//! lz4hc's state takes 256 KiB, and clearing it for each page cost half the time of compression again at
//! level 2. liblz4's fast reset continues the numbering of positions instead, so that entries of earlier
//! pages are out of reach, and clears the tables after each gibibyte of positions and after a page that did
//! not fit.
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

    fn LZ4_sizeofStateHC() -> c_int;
    fn LZ4_initStreamHC(state: *mut c_void, state_bytes: usize) -> *mut c_void;
    fn LZ4_resetStreamHC_fast(state: *mut c_void, level: c_int);
    fn LZ4_compress_HC_extStateHC_fastReset(
        state: *mut c_void,
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
        level: c_int,
    ) -> c_int;
    fn LZ4_loadDictHC(state: *mut c_void, dictionary: *const c_char, dictionary_bytes: c_int) -> c_int;
    fn LZ4_attach_HC_dictionary(state: *mut c_void, dictionary_state: *const c_void);
    fn LZ4_compress_HC_continue(
        state: *mut c_void,
        source: *const c_char,
        dest: *mut c_char,
        source_bytes: c_int,
        dest_bytes: c_int,
    ) -> c_int;
}

/// liblz4's default, which has the best ratio.
pub(super) const DEFAULT_ACCELERATION: i32 = 1;
/// `LZ4_ACCELERATION_MAX`: liblz4 clamps larger values to it.
pub(super) const MAX_ACCELERATION: i32 = 65537;
/// liblz4's default of lz4hc, and the kernel's.
pub(super) const DEFAULT_LEVEL: i32 = 9;
/// liblz4 treats level 1 as level 2.
pub(super) const MIN_LEVEL: i32 = 2;
/// liblz4's levels 10 to 12 allocate and free memory for each page. On pages of programs they were
/// measured to store 0.1 % less than level 9.
pub(super) const MAX_LEVEL: i32 = 9;

/// How far offsets reach back into a dictionary.
const WINDOW_BYTES: usize = 64 << 10;

/// The compressor, with its parameter.
#[derive(Clone, Copy)]
pub(super) enum Compressor {
    /// With an acceleration.
    Fast(c_int),
    /// lz4hc, with a level.
    High(c_int),
}

/// Allocates a state of liblz4: words, because it needs 8-byte alignment. lz4hc's is initialised.
fn state(compressor: Compressor) -> Result<Box<[u64]>> {
    // SAFETY: both take nothing and return a constant.
    let state_bytes = unsafe {
        match compressor {
            Compressor::Fast(_) => LZ4_sizeofState(),
            Compressor::High(_) => LZ4_sizeofStateHC(),
        }
    };
    let words = usize::try_from(state_bytes).unwrap_or(0).div_ceil(size_of::<u64>());
    let mut state = Vec::new();
    state
        .try_reserve_exact(words)
        .map_err(|_| Error::new(ErrorKind::NoMemory, "no memory for the state of an lz4 coder"))?;
    state.resize(words, 0);
    if let Compressor::High(level) = compressor {
        // SAFETY: both write within the LZ4_sizeofStateHC bytes that `state` has at least. liblz4 only
        // refuses a state that is too small.
        unsafe {
            LZ4_initStreamHC(state.as_mut_ptr().cast(), size_of_val(&*state));
            LZ4_resetStreamHC_fast(state.as_mut_ptr().cast(), level);
        }
    }
    Ok(state.into_boxed_slice())
}

pub(super) fn reachable(dictionary: &Dictionary) -> &[u8] {
    let bytes = dictionary.bytes();
    &bytes[bytes.len().saturating_sub(WINDOW_BYTES)..]
}

/// A dictionary with its match tables, for any number of encoders: lz4's, or lz4hc's of one level.
pub(super) struct Digest {
    tables: Box<[u64]>,
    /// Owns the bytes that `tables` points to.
    pub(super) source: Arc<Dictionary>,
}

impl Digest {
    pub(super) fn new(compressor: Compressor, source: Arc<Dictionary>) -> Result<Digest> {
        let mut tables = state(compressor)?;
        let load = match compressor {
            Compressor::Fast(_) => LZ4_loadDictSlow,
            Compressor::High(_) => LZ4_loadDictHC,
        };
        let reachable = reachable(&source);
        // SAFETY: a state of this compressor. It keeps pointers to `reachable`, at most 64 KiB: they live as
        // long as `source`, which is never changed.
        unsafe { load(tables.as_mut_ptr().cast(), reachable.as_ptr().cast(), reachable.len() as c_int) };
        Ok(Digest { tables, source })
    }

    fn tables(&self) -> *const c_void {
        self.tables.as_ptr().cast()
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.tables) + self.source.bytes().len()
    }
}

/// liblz4's match tables for one page at a time.
pub(super) struct Encoder {
    state: Box<[u64]>,
    compressor: Compressor,
    digest: Option<Arc<Digest>>,
}

impl Encoder {
    /// Creates an encoder. A dictionary must be digested for its compressor.
    pub(super) fn new(compressor: Compressor, digest: Option<Arc<Digest>>) -> Result<Encoder> {
        let mut encoder = Encoder { state: state(compressor)?, compressor, digest };
        encoder.encode(&super::warm_up_page(), &mut [0; PAGE_SIZE]);
        Ok(encoder)
    }

    pub(super) fn encode(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        let (state_bytes, state) = (self.state_bytes(), self.state.as_mut_ptr().cast::<c_void>());
        let (source, dest, page_bytes) = (page.as_ptr().cast(), out.as_mut_ptr().cast(), PAGE_SIZE as c_int);
        let out_bytes = c_int::try_from(out.len()).unwrap_or(c_int::MAX);
        // SAFETY: `state` is one of this compressor, aligned to 8, and this encoder owns it. Each branch
        // first initialises or resets it, so that its pointers to the last page are never followed. liblz4
        // reads PAGE_SIZE bytes of `page` and writes at most `out_bytes` bytes, which `out` has. The
        // dictionary's tables are of this compressor, are only read (pages of up to 4 KiB look them up in
        // place), and `digest` keeps them alive.
        let len_bytes = unsafe {
            match (self.compressor, &self.digest) {
                (Compressor::Fast(acceleration), None) => {
                    LZ4_compress_fast_extState(state, source, dest, page_bytes, out_bytes, acceleration)
                }
                (Compressor::Fast(acceleration), Some(digest)) => {
                    LZ4_initStream(state, state_bytes);
                    LZ4_attach_dictionary(state, digest.tables());
                    LZ4_compress_fast_continue(state, source, dest, page_bytes, out_bytes, acceleration)
                }
                (Compressor::High(level), None) => {
                    LZ4_compress_HC_extStateHC_fastReset(state, source, dest, page_bytes, out_bytes, level)
                }
                (Compressor::High(level), Some(digest)) => {
                    LZ4_resetStreamHC_fast(state, level);
                    LZ4_attach_HC_dictionary(state, digest.tables());
                    LZ4_compress_HC_continue(state, source, dest, page_bytes, out_bytes)
                }
            }
        };
        // 0 means that the page does not fit.
        usize::try_from(len_bytes).ok().filter(|len_bytes| *len_bytes > 0)
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
