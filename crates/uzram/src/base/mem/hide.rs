//! Hiding chunks for evacuation: chooses them, and keeps them from filling up again meanwhile.
//!
//! A caller that can relocate runs asks for the emptiest chunks. These are *hidden* from then on: none of
//! their runs is taken, and a freed one does not enter the run caches, so that relocated runs end up in other
//! chunks. A chunk is hidden under the arena's lock. Its bit, which `free_run` checks under the run cache's
//! lock, is set before the run caches are flushed, so that no cache keeps a run of a hidden chunk.

use super::runs::{CHUNK_PAGES, Survey};
use super::{Account, Arena};
use crate::base::sync::Ordering;

/// A chunk of which more than this many eighths are taken is not worth evacuating: more than seven
/// pages would move for each one freed.
const MOST_EIGHTHS_TAKEN: u64 = 7;
/// One in this many of the pages to move may find no room, though the survey counted some.
const SLACK: u64 = 16;
/// Chunks that are surveyed per acquisition of the arena's lock.
const CHUNKS_PER_HOLD: usize = 64;

/// Chunks that are being evacuated: no run of them is taken until this is dropped. Dropping it gives the
/// memory of their free pages back to the system, that of an empty chunk in one call; with a reserve, only
/// that of empty chunks beyond it.
///
/// Meanwhile `Gfp::NoWait` takes runs only from chunks in use, so that relocated runs start no new chunk.
/// Only one `HiddenChunks` at a time is not empty. (If the reservation is used up, an allocation that finds
/// no other run shows all chunks early: the evacuation may then free fewer.)
pub struct HiddenChunks<'a> {
    arena: &'a Arena,
    /// In ascending order.
    chunks: Vec<u32>,
}

impl HiddenChunks<'_> {
    /// Returns whether a page lies in one of the chunks, so that its run should be moved.
    pub fn contains(&self, page: u32) -> bool {
        self.chunks.binary_search(&(page / CHUNK_PAGES)).is_ok()
    }

    /// Returns the chunks, in ascending order.
    pub fn chunks(&self) -> &[u32] {
        &self.chunks
    }

    /// Returns whether there is no chunk to evacuate.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }
}

impl Drop for HiddenChunks<'_> {
    fn drop(&mut self) {
        if !self.chunks.is_empty() {
            self.chunks.iter().for_each(|chunk| self.arena.show(*chunk as usize));
            self.arena.hiding.set(0);
        }
    }
}

impl Arena {
    /// Hides the emptiest chunks of `account`, as many as its other chunks have room for, but at most `most`
    /// and none of `kept`. Hides none if evacuation would free nothing, or while another thread hides chunks.
    /// The room is an estimate: runs of the right length may be missing. A caller that emptied no chunk may
    /// succeed with others.
    pub fn hide_sparse_chunks(&self, account: Account, most: usize, kept: &[u32]) -> HiddenChunks<'_> {
        let mut hidden = HiddenChunks { arena: self, chunks: Vec::new() };
        {
            let _inner = self.inner.lock();
            if self.hiding.get() != 0 {
                return hidden;
            }
            self.hiding.set(1);
        }
        self.flush_caches();
        hidden.chunks = choose(self.survey(account), most, kept);
        {
            let mut inner = self.inner.lock();
            hidden.chunks.retain(|chunk| inner.runs.hide(*chunk as usize, account));
            for chunk in &hidden.chunks {
                let (word, bit) = self.hidden_bit(chunk * CHUNK_PAGES);
                self.hidden[word].fetch_or(bit, Ordering::Relaxed);
            }
        }
        if hidden.is_empty() {
            self.hiding.set(0);
        } else {
            self.flush_caches();
        }
        hidden
    }

    /// Returns the number of chunks of which at least one page is in memory.
    pub fn chunks_held(&self) -> u64 {
        let chunks = self.inner.lock().runs.chunks();
        (0..chunks).filter(|chunk| self.chunk_is_resident(*chunk)).count() as u64
    }

    /// Returns the number of those that are not free chunks of a reserve.
    pub fn chunks_in_use(&self) -> u64 {
        self.chunks_held().saturating_sub(self.reserve_free_pages() / u64::from(CHUNK_PAGES))
    }

    /// Returns whether a page lies in a hidden chunk. Exact if the caller holds a run cache's lock.
    #[inline]
    pub(super) fn is_hidden(&self, page: u32) -> bool {
        self.hiding.get() != 0 && {
            let (word, bit) = self.hidden_bit(page);
            self.hidden[word].load(Ordering::Relaxed) & bit != 0
        }
    }

    fn hidden_bit(&self, page: u32) -> (usize, u64) {
        let chunk = page / CHUNK_PAGES;
        ((chunk / u64::BITS) as usize, 1 << (chunk % u64::BITS))
    }

    /// Surveys the chunks of `account`. An estimate, as other threads allocate and free meanwhile.
    fn survey(&self, account: Account) -> Vec<Survey> {
        let mut surveys = Vec::new();
        let mut chunk = 0;
        loop {
            // Collected on the stack: nothing is allocated under the lock.
            let mut lot = [const { None }; CHUNKS_PER_HOLD];
            let inner = self.inner.lock();
            let chunks = inner.runs.chunks();
            let some = chunk..chunks.min(chunk + CHUNKS_PER_HOLD);
            lot.iter_mut().zip(some).for_each(|(survey, chunk)| *survey = inner.runs.survey(account, chunk));
            drop(inner);
            if chunk >= chunks || surveys.try_reserve(CHUNKS_PER_HOLD).is_err() {
                return surveys;
            }
            surveys.extend(lot.into_iter().flatten());
            chunk += CHUNKS_PER_HOLD;
        }
    }

    fn show(&self, chunk: usize) {
        if !self.has_reserve() {
            self.release_chunk(&self.reclaim.lock(), chunk);
        }
        let mut inner = self.inner.lock();
        inner.runs.show(chunk);
        let (word, bit) = self.hidden_bit(chunk as u32 * CHUNK_PAGES);
        self.hidden[word].fetch_and(!bit, Ordering::Relaxed);
        if self.has_reserve() {
            drop(inner);
            self.release_chunk_if_surplus(chunk);
        }
    }
}

/// Returns the chunks of an account to evacuate, at most `most` and none of `kept`, in ascending order: the
/// emptiest, whose taken pages together fit into the other chunks.
fn choose(mut surveys: Vec<Survey>, most: usize, kept: &[u32]) -> Vec<u32> {
    // On a tie the last chunk, as runs are taken from the first.
    surveys.sort_unstable_by_key(|survey| (survey.taken_pages, std::cmp::Reverse(survey.chunk)));
    let mut room: u64 = surveys.iter().map(|survey| u64::from(survey.room_pages)).sum();
    let mut moved = 0;
    let fits = |survey: &&Survey| {
        let taken = u64::from(survey.taken_pages);
        room -= u64::from(survey.room_pages);
        moved += taken;
        taken * 8 <= MOST_EIGHTHS_TAKEN * u64::from(CHUNK_PAGES) && moved + moved / SLACK <= room
    };
    surveys.retain(|survey| !kept.contains(&survey.chunk));
    let chosen = surveys.iter().take(most).take_while(fits).count();
    let mut chunks: Vec<u32> = surveys.into_iter().take(chosen).map(|survey| survey.chunk).collect();
    chunks.sort_unstable();
    chunks
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn chooses_the_emptiest_that_fit_into_the_others() {
        let chunks_but = |most, kept: &[u32], taken: &[u16]| {
            let survey = |(chunk, taken_pages): (usize, &u16)| Survey {
                chunk: chunk as u32,
                taken_pages: *taken_pages,
                room_pages: CHUNK_PAGES as u16 - taken_pages,
            };
            choose(taken.iter().enumerate().map(survey).collect(), most, kept)
        };
        let chunks_of = |taken: &[u16]| chunks_but(100, &[], taken);
        assert_eq!(chunks_of(&[]), []);
        assert_eq!(chunks_of(&[1]), [], "there is no other");
        assert_eq!(chunks_of(&[30, 20, 30]), [1, 2]);
        assert_eq!(chunks_but(1, &[], &[30, 20, 30]), [1]);
        assert_eq!(chunks_but(100, &[1], &[30, 20, 30]), [0, 2], "what is kept has room");
        assert_eq!(chunks_but(1, &[1, 2], &[30, 20, 30]), [0]);
        assert_eq!(chunks_of(&[257, 257]), []);
        assert_eq!(chunks_of(&[500, 500, 500, 24]), [3]);
        assert_eq!(chunks_of(&[500, 500, 500, 36]), [], "some would find no place");
        assert_eq!(chunks_of(&[449; 100]), [], "too much moves for what is won");
        assert_eq!(chunks_of(&[384; 5]), [4]);
    }
}
