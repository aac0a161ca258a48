//! Both designs under loom: two batch locks and batches of three pages. After each interleaving the lists
//! have the right pages, links agree both ways, and the invariants of batches hold.

use super::*;
use crate::base::sync::Arc;
use crate::base::sync::models::{beside, model};

const PAGES: u32 = 6;

const SMALL: Batching = Batching { locks: 2, max_pages: 3, two_passes: false, splice: true };

macro_rules! for_every_design {
    ($($model:ident),* $(,)?) => {
        $(mod $model {
            use super::*;

            #[test]
            fn every_design() {
                #[cfg(feature = "designs")]
                super::$model::<SingleLock>(SMALL);
                for batching in [
                    SMALL,
                    Batching { two_passes: true, ..SMALL },
                    // One tag for all, and open batches.
                    Batching { locks: 1, ..SMALL },
                    Batching { splice: false, ..SMALL },
                ] {
                    super::$model::<Batched>(batching);
                }
            }
        })*
    };
}

for_every_design!(
    loom_lru_neighbours_are_removed,
    loom_lru_removal_meets_a_promoted_sentinel,
    loom_lru_removal_meets_pages_that_come,
    loom_lru_front_is_removed_while_pages_come,
    loom_lru_page_is_removed_from_two_batches,
    loom_lru_edge_is_removed_from_two_batches,
    loom_lru_edges_of_two_batches_are_removed,
    loom_lru_scan_meets_removal,
    loom_lru_scan_meets_removal_in_a_batch,
    loom_lru_scan_meets_pages_that_come,
    loom_lru_pagevec_meets_removal,
    loom_lru_doomed_page_comes_back,
    loom_lru_activation_meets_removal,
    loom_lru_evicted_page_comes_anew,
    loom_lru_scans_meet,
);

struct Model<D: LruLocks>(Lru<D>);

impl<D: LruLocks> Model<D> {
    /// Makes an LRU with the first `pages` pages in one batch per three, and pagevecs of one page.
    fn new(batching: Batching, pages: u32) -> Arc<Self> {
        let options = LruConfig { pagevec_pages: 1, batching, ..LruConfig::new(u64::from(PAGES)) };
        let lru = Lru::new(&options).expect("memory");
        let _ = lru.set_pagevec_pages(3);
        (0..pages).for_each(|page| lru.add(page));
        lru.drain_all();
        let _ = lru.set_pagevec_pages(1);
        Arc::new(Model(lru))
    }

    fn end(&self, inactive: &[u32], active: &[u32]) {
        self.0.drain_all();
        for (list, wanted) in [(List::Inactive, inactive), (List::Active, active)] {
            let mut pages = self.0.lists.nodes.pages_of(list);
            assert_eq!(self.0.len(list), pages.len() as u64);
            pages.sort_unstable();
            assert_eq!(pages, wanted, "{list:?}");
            if D::NAME == Batched::NAME {
                self.0.lists.nodes.check_batches(list);
            }
        }
        let is_gone = |page: &u32| !inactive.contains(page) && !active.contains(page);
        for page in (0..PAGES).filter(is_gone) {
            let place = self.0.lists.nodes.state(page).place();
            assert!(matches!(place, Place::Out | Place::Evicted), "page {page} is {place:?}");
        }
    }
}

/// Runs `one` and `other` concurrently on what `make` made, and then `end`.
fn run<D: LruLocks>(
    make: impl Fn() -> Arc<Model<D>> + Send + Sync + 'static,
    one: impl Fn(&Lru<D>) + Send + Sync + Clone + 'static,
    other: impl Fn(&Lru<D>) + Send + Sync + 'static,
    end: impl Fn(&Model<D>) + Send + Sync + 'static,
) {
    model(3, move || {
        let (model, one) = (make(), one.clone());
        let thread = beside(&model, move |model| one(&model.0));
        other(&model.0);
        thread.join().expect("no panic");
        end(&model);
    });
}

/// Removes those of these pages at once that are not gone.
fn remove_some<D: LruLocks>(lru: &Lru<D>, pages: &[u32]) {
    let mut dead: Vec<u32> = pages.iter().copied().filter(|page| lru.mark_dead(*page)).collect();
    lru.remove_dead(&mut dead);
}

fn isolated<D: LruLocks>(lru: &Lru<D>, most: usize) -> Vec<u32> {
    let mut out = Vec::new();
    lru.isolate(most, &mut out);
    out
}

/// Pages 0, 1 and 2 are a batch, of which 1 is no sentinel; page 3 is another.
fn loom_lru_neighbours_are_removed<D: LruLocks>(batching: Batching) {
    let make = move || Model::<D>::new(batching, 4);
    run(make, |lru| lru.remove(1), |lru| lru.remove(2), |model| model.end(&[0, 3], &[]));
}

/// Removing the edges of a batch makes the middle page, which is being removed, a sentinel.
fn loom_lru_removal_meets_a_promoted_sentinel<D: LruLocks>(batching: Batching) {
    let make = move || Model::<D>::new(batching, 3);
    let one = |lru: &Lru<D>| {
        lru.remove(2);
        lru.remove(0);
    };
    run(make, one, |lru| lru.remove(1), |model| model.end(&[], &[]));
}

fn loom_lru_removal_meets_pages_that_come<D: LruLocks>(batching: Batching) {
    let make = move || Model::<D>::new(batching, 3);
    let one = |lru: &Lru<D>| {
        lru.add(3);
        lru.add(4);
        lru.remove(3);
    };
    run(make, one, |lru| remove_some(lru, &[1, 2]), |model| model.end(&[0, 4], &[]));
}

fn loom_lru_front_is_removed_while_pages_come<D: LruLocks>(batching: Batching) {
    let make = move || Model::<D>::new(batching, 3);
    let one = |lru: &Lru<D>| {
        lru.remove(2);
        lru.remove(1);
    };
    run(make, one, |lru| lru.add(3), |model| model.end(&[0, 3], &[]));
}

/// A thread reads the page's batch, but by the time it has the lock the page was removed and added again in
/// another batch.
fn removed_from_two_batches<D: LruLocks>(
    batching: Batching,
    page: u32,
    come: [u32; 3],
    stay: &'static [u32],
) {
    let make = move || {
        let model = Model::<D>::new(batching, 3);
        let _ = model.0.set_pagevec_pages(3);
        assert!(model.0.mark_dead(page));
        model
    };
    let again = move |lru: &Lru<D>| {
        lru.remove_dead(&mut [page]);
        come.into_iter().for_each(|page| lru.add(page));
        let mut dead: Vec<u32> = [page, 4].into_iter().filter(|page| lru.mark_dead(*page)).collect();
        lru.remove_dead(&mut [4]);
        lru.remove_dead(&mut dead);
    };
    run(make, move |lru| lru.remove_dead(&mut [page]), again, |model| model.end(stay, &[]));
}

fn loom_lru_page_is_removed_from_two_batches<D: LruLocks>(batching: Batching) {
    removed_from_two_batches::<D>(batching, 1, [4, 1, 5], &[0, 2, 5]);
}

/// The page is an edge of its new batch, next to a page whose removal needs only the batch lock.
fn loom_lru_edge_is_removed_from_two_batches<D: LruLocks>(batching: Batching) {
    removed_from_two_batches::<D>(batching, 0, [0, 4, 5], &[1, 2, 5]);
}

fn loom_lru_edges_of_two_batches_are_removed<D: LruLocks>(batching: Batching) {
    let make = move || Model::<D>::new(batching, 6);
    let edges = |lru: &Lru<D>| remove_some(lru, &[0, 3]);
    let within = |lru: &Lru<D>| {
        lru.remove(1);
        lru.remove(4);
    };
    run(make, edges, within, |model| model.end(&[2, 5], &[]));
}

fn loom_lru_scan_meets_removal<D: LruLocks>(batching: Batching) {
    let make = move || Model::<D>::new(batching, 3);
    let scan = |lru: &Lru<D>| {
        let out = isolated(lru, 1);
        assert!(out.len() == 1 && out[0] < 2, "{out:?}");
        lru.put_back(&out);
    };
    run(make, scan, |lru| lru.remove(0), |model| model.end(&[1, 2], &[]));
}

fn loom_lru_scan_meets_removal_in_a_batch<D: LruLocks>(batching: Batching) {
    let make = move || Model::<D>::new(batching, 3);
    let scan = |lru: &Lru<D>| {
        assert_eq!(isolated(lru, 1), [0]);
        lru.evicted(0);
    };
    run(make, scan, |lru| lru.remove(1), |model| model.end(&[2], &[]));
}

fn loom_lru_scan_meets_pages_that_come<D: LruLocks>(batching: Batching) {
    let make = move || Model::<D>::new(batching, 1);
    let scan = |lru: &Lru<D>| isolated(lru, 2).into_iter().for_each(|page| lru.evicted(page));
    let come = |lru: &Lru<D>| {
        lru.add(1);
        lru.mark(1);
    };
    run(make, scan, come, |model| {
        let lru = &model.0;
        let stats = lru.stats();
        assert_eq!(stats.added, 2);
        lru.drain_all();
        assert_eq!(lru.len(List::Inactive) + lru.len(List::Active) + stats.evicted, 2, "{stats:?}");
    });
}

fn loom_lru_pagevec_meets_removal<D: LruLocks>(batching: Batching) {
    let make = move || {
        let model = Model::<D>::new(batching, 1);
        let _ = model.0.set_pagevec_pages(8);
        model.0.add(1);
        model.0.add(2);
        model
    };
    run(make, |lru| lru.drain_all(), |lru| lru.remove(1), |model| model.end(&[0, 2], &[]));
}

fn loom_lru_doomed_page_comes_back<D: LruLocks>(batching: Batching) {
    let make = move || {
        let model = Model::<D>::new(batching, 3);
        assert!(model.0.mark_dead(1));
        model
    };
    let one = |lru: &Lru<D>| lru.remove_dead(&mut [0, 1]);
    run(make, one, |lru| lru.add(1), |model| model.end(&[0, 1, 2], &[]));
}

fn loom_lru_activation_meets_removal<D: LruLocks>(batching: Batching) {
    let make = move || {
        let model = Model::<D>::new(batching, 3);
        model.0.mark(1);
        model
    };
    run(make, |lru| lru.mark(1), |lru| lru.remove(0), |model| model.end(&[2], &[1]));
    run(make, |lru| lru.mark(1), |lru| lru.remove(1), |model| model.end(&[0, 2], &[]));
}

/// An isolated page is removed and added again while another thread, without a lock on it, marks it evicted.
fn loom_lru_evicted_page_comes_anew<D: LruLocks>(batching: Batching) {
    let make = move || {
        let model = Model::<D>::new(batching, 2);
        assert_eq!(isolated(&model.0, 1), [0]);
        model
    };
    let anew = |lru: &Lru<D>| {
        lru.remove(0);
        lru.add(0);
    };
    run(make, |lru| lru.evicted(0), anew, |model| model.end(&[0, 1], &[]));
}

fn loom_lru_scans_meet<D: LruLocks>(batching: Batching) {
    let make = move || Model::<D>::new(batching, 2);
    let scan = |lru: &Lru<D>| {
        let out = isolated(lru, 1);
        assert_eq!(out.len(), 1);
        lru.evicted(out[0]);
    };
    run(make, scan, scan, |model| {
        model.end(&[], &[]);
        assert_eq!(model.0.stats().evicted, 2);
    });
}
