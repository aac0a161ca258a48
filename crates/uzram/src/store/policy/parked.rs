//! Recompression of pages that nobody has used for long, without anybody waiting for it: the policy's thread
//! copies a batch of pages, a thread of idle priority, which holds no lock, compresses the copies, and the
//! policy's thread publishes those whose pages did not change.
//!
//! The CPU time of both is kept below a share of one CPU: after a batch, the next one waits.

use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::base::clock::thread_cpu_time;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::ZeroedPages;
use crate::base::sync::Arc;
use crate::base::thread::{join, run_when_idle, spawn};
use crate::base::units::{PAGE_SIZE, Page, PageNo};
use crate::codec::{Encoder, ROOM_BYTES};
use crate::store::recompress::Recompressed;
use crate::store::slot::Peek;
use crate::store::stream::Codec;
use crate::store::{MAX_RECOMPRESSION, Recompression, Store};

type Encoders = [Option<Encoder>; MAX_RECOMPRESSION];

const BATCH: usize = 16;

pub(super) struct Compressor {
    to: Option<SyncSender<Batch>>,
    from: Receiver<Batch>,
    /// `None` while the thread has it.
    batch: Option<Batch>,
    not_before: Instant,
    thread: Option<JoinHandle<()>>,
}

struct Batch {
    pages: Vec<Copied>,
    what: Recompression,
    contents: ZeroedPages,
    objects: ZeroedPages,
    began: Instant,
    cpu_time: Duration,
}

struct Copied {
    page: PageNo,
    old: Peek,
    outcome: Recompressed,
}

impl Batch {
    fn new() -> Result<Batch> {
        let touched = |len| {
            let mut pages = ZeroedPages::new(len)?;
            pages.fill(0);
            Ok::<_, Error>(pages)
        };
        Ok(Batch {
            pages: Vec::with_capacity(BATCH),
            what: Recompression::default(),
            contents: touched(BATCH * PAGE_SIZE)?,
            objects: touched(BATCH * ROOM_BYTES)?,
            began: Instant::now(),
            cpu_time: Duration::ZERO,
        })
    }

    fn page_mut(&mut self, at: usize) -> &mut Page {
        &mut self.contents.as_chunks_mut().0[at]
    }

    fn compress(&mut self, store: &Store, encoders: &mut Encoders) {
        let began = thread_cpu_time();
        let (copies, rooms) = (self.contents.as_chunks().0, self.objects.chunks_exact_mut(ROOM_BYTES));
        for ((copied, page), room) in self.pages.iter_mut().zip(copies).zip(rooms) {
            copied.outcome = store.first_smaller(copied.old, &self.what, |priority| {
                let encoder = encoders.get_mut(usize::from(priority).checked_sub(1)?)?.as_mut()?;
                Some(encoder.encode(page, room))
            });
        }
        self.cpu_time += thread_cpu_time().saturating_sub(began);
    }

    fn object(&self, at: usize, len: usize) -> &[u8] {
        &self.objects[at * ROOM_BYTES..][..len]
    }
}

impl Compressor {
    pub(super) fn start(store: &Arc<Store>) -> Result<Self> {
        let encoders = encoders(store)?;
        let batch = Batch::new()?;
        let ((to, jobs), (done, from)) = (sync_channel::<Batch>(1), sync_channel(1));
        let (store, waker) = (Arc::clone(store), std::thread::current());
        let run = move || compress(&store, encoders, &jobs, &done, &waker);
        let thread = spawn("uzram-recompress", run)?;
        let (to, thread) = (Some(to), Some(thread));
        let (batch, not_before) = (Some(batch), Instant::now());
        Ok(Compressor { to, from, batch, not_before, thread })
    }

    /// Waits until there is a batch and it may begin; `None` if more urgent work came up.
    fn wait(&mut self, is_urgent: impl Fn() -> bool) -> Result<Option<&mut Batch>> {
        while !is_urgent() {
            match self.batch {
                None => match self.from.try_recv() {
                    Ok(batch) => self.batch = Some(batch),
                    Err(TryRecvError::Empty) => std::thread::park(),
                    Err(TryRecvError::Disconnected) => {
                        return Err(Error::new(ErrorKind::Io, "the thread that recompresses has died"));
                    }
                },
                // What was compressed is published at once.
                Some(ref batch) if batch.pages.is_empty() && self.not_before > Instant::now() => {
                    std::thread::park_timeout(self.not_before - Instant::now());
                }
                Some(_) => return Ok(self.batch.as_mut()),
            }
        }
        Ok(None)
    }

    /// Has the next batch wait so long that CPU time stays below `percent` percent of one CPU, if that is not
    /// 0. Returns the CPU time that was taken.
    fn rest(&mut self, percent: u64) -> Duration {
        let Some(batch) = &mut self.batch else { return Duration::ZERO };
        let cpu_time = std::mem::take(&mut batch.cpu_time);
        self.not_before = batch.began + cpu_time * 100u32.checked_div(percent as u32).unwrap_or(0);
        cpu_time
    }

    fn send(&mut self) {
        if let (Some(to), Some(batch)) = (&self.to, self.batch.take()) {
            // If the thread has died, nothing comes back.
            let _ = to.send(batch);
        }
    }
}

impl Drop for Compressor {
    fn drop(&mut self) {
        self.to = None;
        self.thread.take().into_iter().for_each(join);
    }
}

fn encoders(store: &Store) -> Result<Encoders> {
    let mut encoders = [const { None }; MAX_RECOMPRESSION];
    for (place, codec) in encoders.iter_mut().zip(&store.recompression) {
        *place = codec.as_ref().map(Codec::encoder).transpose()?;
    }
    Ok(encoders)
}

fn compress(
    store: &Store,
    mut encoders: Encoders,
    jobs: &Receiver<Batch>,
    done: &SyncSender<Batch>,
    waker: &Thread,
) {
    // Where the system refuses it, the share of CPU time still holds.
    run_when_idle(0);
    while let Ok(mut batch) = jobs.recv() {
        batch.compress(store, &mut encoders);
        if done.send(batch).is_err() {
            return;
        }
        waker.unpark();
    }
}

impl Store {
    /// Recompresses pages that were not used for `age_s` seconds, within `percent` percent of one CPU's time;
    /// 0 for no bound. Returns whether it finished before more urgent work came up.
    pub(super) fn recompress_parked(&self, age_s: u32, percent: u64, compressor: &mut Compressor) -> bool {
        let what = self.within_algorithms(&Recompression::default());
        let mut pages = self.old_pages(age_s).filter(|page| what.may_win(self.slots.peek(*page)));
        loop {
            let batch = match compressor.wait(|| self.watermarks.is_urgent(&self.arena)) {
                Ok(Some(batch)) => batch,
                Ok(None) => return false,
                Err(_) => {
                    self.watermarks.decisions.failures.add(1);
                    return true;
                }
            };
            let began = thread_cpu_time();
            let is_done = !batch.pages.is_empty();
            if is_done {
                self.publish_batch(batch, |page| self.is_unused(page, age_s));
            } else {
                batch.began = Instant::now();
                batch.what.clone_from(&what);
                self.copy_batch(&mut pages, batch);
            }
            batch.cpu_time += thread_cpu_time().saturating_sub(began);
            let is_empty = batch.pages.is_empty();
            if is_empty {
                let cpu_time = compressor.rest(percent);
                self.watermarks.decisions.recompress_cpu_us.add(cpu_time.as_micros() as u64);
            } else {
                compressor.send();
            }
            if is_empty && !is_done {
                return true;
            }
        }
    }

    fn copy_batch(&self, pages: &mut dyn Iterator<Item = PageNo>, batch: &mut Batch) {
        while batch.pages.len() < BATCH
            && let Some(page) = pages.next()
        {
            let slot = self.slots.try_lock(page).locked();
            let Some(slot) = slot.filter(|slot| batch.what.may_win(slot.peek())) else { continue };
            let old = slot.peek();
            match self.read_locked(&slot, page, batch.page_mut(batch.pages.len())) {
                Ok(()) => batch.pages.push(Copied { page, old, outcome: Recompressed::Untried }),
                Err(_) => drop(self.watermarks.decisions.failures.add(1)),
            }
        }
    }

    /// Publishes the objects of pages that did not change meanwhile and are still wanted. Empties the batch.
    fn publish_batch(&self, batch: &mut Batch, is_wanted: impl Fn(PageNo) -> bool) {
        let copies = std::mem::take(&mut batch.pages);
        for (at, Copied { page, old, outcome }) in copies.iter().enumerate() {
            if self.arena.lacks_reserve() {
                // A new object takes memory before the old one gives it back. Writers come first.
                break;
            }
            let is_same = |now: Peek| (now.len_bytes(), now.priority()) == (old.len_bytes(), old.priority());
            let slot = self.slots.try_lock(*page).locked();
            let slot = slot.filter(|slot| batch.what.may_win(slot.peek()) && is_same(slot.peek()));
            let Some(slot) = slot.filter(|_| is_wanted(*page)) else { continue };
            let mut contents = [0; PAGE_SIZE];
            if self.read_locked(&slot, *page, &mut contents).is_err() || contents != *batch.page_mut(at) {
                continue;
            }
            match self.finish_recompression(slot, *page, *outcome, |len| batch.object(at, len), &batch.what) {
                Ok(slot) => self.watermarks.decisions.old_recompressed.add(u64::from(slot.is_none())),
                Err(_) => self.watermarks.decisions.failures.add(1),
            };
        }
        batch.pages = copies;
        batch.pages.clear();
    }
}

/// Copies, compresses and publishes one batch of `pages`, however recently they were used; calls `between`
/// before it is published. Returns the number of pages copied.
#[cfg(test)]
pub(in crate::store) fn one_batch(
    store: &Store,
    pages: &mut impl Iterator<Item = PageNo>,
    between: impl FnOnce(),
) -> usize {
    let mut batch = Batch::new().expect("memory");
    batch.what = store.within_algorithms(&Recompression::default());
    store.copy_batch(pages, &mut batch);
    let copied = batch.pages.len();
    batch.compress(store, &mut encoders(store).expect("memory"));
    between();
    store.publish_batch(&mut batch, |_| true);
    copied
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::Random;
    use crate::store::StoreBuilder;
    use crate::store::tests::{config, get, letters as contents, on_threads, put, recompression};

    const PAGES: u64 = 200;

    fn store() -> Arc<Store> {
        let builder = StoreBuilder { recompression: recompression(["zstd:3", "", ""]), ..config(PAGES) };
        Arc::new(Store::new(&builder).expect("memory"))
    }

    fn all() -> impl Iterator<Item = PageNo> {
        (0..PAGES).map(PageNo::from_number)
    }

    #[test]
    fn what_changed_meanwhile_keeps_its_contents() {
        let store = store();
        (0..PAGES).for_each(|page| put(&store, page, &contents(page)));
        let before = store.stats().compr_data_bytes;
        let copied = one_batch(&store, &mut all(), || {
            put(&store, 1, &contents(1001));
            store.discard(PageNo(2));
            // The same contents again: whoever wrote them, they are what was compressed.
            put(&store, 3, &contents(3));
        });
        assert_eq!(copied, BATCH);
        assert!(store.stats().compr_data_bytes < before);
        assert_eq!(store.watermarks.decisions.old_recompressed.get(), BATCH as u64 - 2);
        assert!([(1, 1001), (3, 3), (0, 0), (15, 15)].iter().all(|of| get(&store, of.0) == contents(of.1)));
        // They are not tried again.
        assert_eq!(one_batch(&store, &mut (3..16).map(PageNo), || ()), 0);
    }

    #[test]
    fn pages_are_what_was_written_last() {
        let (store, writers) = (store(), 2);
        on_threads(writers + 1, |thread, running| {
            while thread == writers && running.get() > 1 {
                let mut pages = all();
                while one_batch(&store, &mut pages, || ()) > 0 {}
            }
            let (mut random, mut written) = (Random::new(thread), [None; PAGES as usize]);
            for _ in 0..if thread < writers { 20_000 } else { 0 } {
                let page = writers * random.below_u64(PAGES / writers) + thread;
                let last = &mut written[page as usize];
                match random.below(20) {
                    0 => {
                        store.discard(PageNo::from_number(page));
                        *last = None;
                    }
                    // Few different contents, so that the same ones come again.
                    1..8 => {
                        let seed = random.below_u64(3);
                        put(&store, page, &contents(seed));
                        *last = Some(seed);
                    }
                    _ => assert!(last.is_none_or(|seed| get(&store, page) == contents(seed)), "page {page}"),
                }
            }
        });
        assert!(store.watermarks.decisions.old_recompressed.get() > 0);
    }

    #[test]
    fn a_batch_waits_for_its_share_of_time() {
        let mut compressor = Compressor::start(&store()).expect("a thread");
        for (percent, wanted_ms) in [(0, 0), (1, 1000), (2, 500), (100, 10)] {
            let batch = compressor.batch.as_mut().expect("it is here");
            batch.cpu_time = Duration::from_millis(10);
            let began = batch.began;
            assert_eq!(compressor.rest(percent), Duration::from_millis(10));
            assert_eq!(compressor.not_before - began, Duration::from_millis(wanted_ms));
        }
        // What is more urgent does not wait.
        compressor.not_before = Instant::now() + Duration::from_secs(3600);
        assert!(matches!(compressor.wait(|| true), Ok(None)));
    }
}
