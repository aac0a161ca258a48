//! liblz4's high compression: more searching, the same format as lz4's, and so the same decoder.
//!
//! The state takes 256 KiB. Clearing it for each page was measured to cost half the time of compression
//! again at level 2. liblz4's fast reset instead continues the numbering of positions, so that entries of
//! earlier pages are out of reach, and clears the tables after every gibibyte of positions and after a
//! page that did not fit. The output does not depend on earlier pages.

use std::ffi::{c_char, c_int, c_void};

use super::Dictionary;
use super::lz4::{self, Digest};
use crate::base::error::Result;
use crate::base::sync::Arc;
use crate::base::units::{PAGE_SIZE, Page};

unsafe extern "C" {
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

/// liblz4's default, and the kernel's.
pub(super) const DEFAULT_LEVEL: i32 = 9;
/// liblz4 treats level 1 as level 2.
pub(super) const MIN_LEVEL: i32 = 2;
/// liblz4's levels 10 to 12 allocate and free memory for each page. On pages of programs they were
/// measured to store 0.1 % less than level 9.
pub(super) const MAX_LEVEL: i32 = 9;

/// Allocates and initialises a state. liblz4 only refuses one that is too small, which it never is.
fn state(level: i32) -> Result<Box<[u64]>> {
    // SAFETY: takes nothing and returns a constant.
    let mut state = lz4::state(unsafe { LZ4_sizeofStateHC() })?;
    let state_bytes = size_of_val(&*state);
    // SAFETY: both write within the LZ4_sizeofStateHC bytes that `state` has at least.
    unsafe {
        LZ4_initStreamHC(state.as_mut_ptr().cast(), state_bytes);
        LZ4_resetStreamHC_fast(state.as_mut_ptr().cast(), level);
    }
    Ok(state)
}

/// Makes lz4hc's match tables of a dictionary, for any number of encoders of one level.
pub(super) fn digest(level: i32, source: Arc<Dictionary>) -> Result<Digest> {
    // SAFETY: an initialised state with its level set.
    Ok(unsafe { Digest::loaded(source, state(level)?, LZ4_loadDictHC) })
}

/// liblz4's match tables, set to a level.
pub(super) struct Encoder {
    /// `LZ4_sizeofStateHC` bytes, rounded up; initialised.
    state: Box<[u64]>,
    level: c_int,
    digest: Option<Arc<Digest>>,
}

impl Encoder {
    pub(super) fn new(level: i32, digest: Option<Arc<Digest>>) -> Result<Encoder> {
        let mut encoder = Encoder { state: state(level)?, level, digest };
        encoder.encode(&super::warm_up_page(), &mut [0; PAGE_SIZE]);
        Ok(encoder)
    }

    pub(super) fn encode(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        let state = self.state.as_mut_ptr().cast::<c_void>();
        let (source, dest, out_bytes) = (page.as_ptr().cast(), out.as_mut_ptr().cast(), lz4::room(out));
        let page_bytes = PAGE_SIZE as c_int;
        // SAFETY: `state` has at least LZ4_sizeofStateHC bytes, is initialised (`new` made it so), and
        // this encoder owns it. The reset forgets the last page's address, which is never followed.
        // liblz4 reads PAGE_SIZE bytes of `page` and writes at most `out_bytes` bytes, which `out` has.
        // The dictionary's tables were made by LZ4_loadDictHC, are only read (pages of up to 4 KiB look
        // them up in place), and `digest` keeps them alive.
        let len_bytes = unsafe {
            match &self.digest {
                None => LZ4_compress_HC_extStateHC_fastReset(
                    state, source, dest, page_bytes, out_bytes, self.level,
                ),
                Some(digest) => {
                    LZ4_resetStreamHC_fast(state, self.level);
                    LZ4_attach_HC_dictionary(state, digest.tables());
                    LZ4_compress_HC_continue(state, source, dest, page_bytes, out_bytes)
                }
            }
        };
        lz4::length(len_bytes)
    }

    pub(super) fn state_bytes(&self) -> usize {
        size_of_val(&*self.state)
    }
}
