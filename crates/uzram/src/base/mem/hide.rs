//! Emptying chunks: which ones are worth it, and keeping them from filling up again meanwhile.
//!
//! Who can move the contents of runs asks for the emptiest chunks, which are *hidden* from then on:
//! no run of them is handed out, and one that is freed stays out of the run caches. What is moved
//! so ends up in the other chunks. A chunk is hidden under the arena's lock; its bit, which
//! `free_run` looks at, is set before the run caches are flushed and read under a run cache's lock,
//! so that no run of a hidden chunk is left in one.

use super::runs::{CHUNK_PAGES, Survey};
use super::{Account, Arena};
use crate::base::sync::Ordering;

/// A chunk that is taken to more than so many eighths is not worth emptying: eight must move then
/// for one that is won.
const MOST_EIGHTHS_TAKEN: u64 = 7;
/// Of the pages to be moved one in so many may find no place that the survey promised it.
const SLACK: u64 = 16;
/// Chunks that are looked at under one hold of the arena's lock.
const CHUNKS_PER_HOLD: usize = 64;

/// Chunks that are being emptied: no run of them is taken until this is dropped. The memory of
/// their free pages goes back to the system then, that of an empty chunk all at once; with a reserve, that of empty
/// chunks beyond it.
///
/// Meanwhile a run that is taken without waiting is one of a chunk that is in use anyway: no free chunk
/// is begun for what is moved. There is one of these at a time that is not empty. (Where the reservation
/// is used up, an allocation that finds no other run ends the hiding early, which costs nothing but its
/// purpose.)
pub struct HiddenChunks<'a> {
    arena: &'a Arena,
    /// In ascending order.
    chunks: Vec<u32>,
}

impl HiddenChunks<'_> {
    /// Whether a page lies in one of the chunks, so that its run is to be moved.
    pub fn contains(&self, page: u32) -> bool {
        self.chunks.binary_search(&(page / CHUNK_PAGES)).is_ok()
    }

    /// The chunks, in ascending order.
    pub fn chunks(&self) -> &[u32] {
        &self.chunks
    }

    /// Whether there is nothing to empty.
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
    /// Hides the emptiest chunks of `account`, as many as there is room for in its others, but at most
    /// `most` and none of `kept`. None are hidden if that would gain nothing, or while another's are. There
    /// being room is an estimate: runs of the right length may lack. Who emptied none may with others.
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

    /// Chunks of which at least one page is in memory.
    pub fn chunks_held(&self) -> u64 {
        let chunks = self.inner.lock().runs.chunks();
        (0..chunks).filter(|chunk| self.chunk_is_resident(*chunk)).count() as u64
    }

    /// Those of them that are not free chunks of a reserve.
    pub fn chunks_in_use(&self) -> u64 {
        self.chunks_held().saturating_sub(self.reserve_free_pages() / u64::from(CHUNK_PAGES))
    }

    /// Whether a page lies in a hidden chunk. Exact for those who hold a run cache's lock.
    #[inline]
    pub(super) fn is_hidden(&self, page: u32) -> bool {
        self.hiding.get() != 0 && {
            let (word, bit) = self.hidden_bit(page);
            self.hidden[word].load(Ordering::Relaxed) & bit != 0
        }
    }

    /// The word of `hidden` and the bit for the chunk of a page.
    fn hidden_bit(&self, page: u32) -> (usize, u64) {
        let chunk = page / CHUNK_PAGES;
        ((chunk / u64::BITS) as usize, 1 << (chunk % u64::BITS))
    }

    /// What there is to choose from. Others go on in between, so that it is an estimate.
    fn survey(&self, account: Account) -> Vec<Survey> {
        let mut surveys = Vec::new();
        let mut chunk = 0;
        loop {
            // Collected apart: nothing is allocated under the lock.
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

    /// Ends the hiding of a chunk, and gives the memory of its free pages back.
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

/// Of all chunks of an account those to empty, at most `most` and none of `kept`, in ascending order: the
/// emptiest, whose taken pages together fit into the others.
fn choose(mut surveys: Vec<Survey>, most: usize, kept: &[u32]) -> Vec<u32> {
    // Of equals the last, as runs are taken from the first.
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
