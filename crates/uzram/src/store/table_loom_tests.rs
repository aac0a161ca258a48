//! Loom tests of pages of the slot table that leave while their slots are used. A page has two slots under
//! loom.

use super::loom_tests::spawn;
use super::slot::{Contents, Slots};
use super::*;
use crate::base::sync::{AtomicU32, Ordering};
use crate::base::units::PageNo;

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.max_branches = 5000;
    builder.log = std::env::var_os("LOOM_LOG").is_some();
    builder.check(f);
}

/// Returns the slots of one page of the table; the second holds something.
fn slots() -> Arc<Slots> {
    let slots = Slots::new(2).expect("memory");
    slots.lock(PageNo(1)).replace(Contents::Same(9));
    Arc::new(slots)
}

fn discard(slots: &Slots, page: u64) {
    slots.discard(page..page + 1, |page| _ = slots.lock(page).replace(Contents::Empty));
}

#[test]
fn loom_table_page_leaves_against_a_writer() {
    model(|| {
        let slots = slots();
        let writer = spawn(&slots, |slots: &Slots| {
            slots.lock(PageNo(0)).replace(Contents::Same(1));
            assert_eq!(slots.state(PageNo(0)), PageState::Same);
        });
        discard(&slots, 1);
        writer.join().expect("no panic");
        assert_eq!(slots.lock(PageNo(0)).contents(), Contents::Same(1));
        assert!(slots.is_empty(PageNo(1)));
        assert_eq!(slots.table_pages(), 1);
        discard(&slots, 0);
        assert_eq!((slots.table_pages(), slots.state(PageNo(0))), (0, PageState::Hole));
    });
}

/// A thread that knows that a slot was written sees the contents without its lock.
#[test]
fn loom_table_page_leaves_against_a_reader() {
    model(|| {
        let slots = slots();
        let is_written = Arc::new(AtomicU32::new(0));
        let told = Arc::clone(&is_written);
        let writer = spawn(&slots, move |slots: &Slots| {
            slots.lock(PageNo(0)).replace(Contents::Same(1));
            told.store(1, Ordering::Release);
        });
        let reader = spawn(&slots, move |slots: &Slots| {
            if is_written.load(Ordering::Acquire) == 1 {
                assert_eq!(slots.state(PageNo(0)), PageState::Same);
                assert_eq!(slots.run(0..1, |state| state == PageState::Same), 1);
                assert!(!slots.is_empty(PageNo(0)));
            }
        });
        discard(&slots, 1);
        writer.join().expect("no panic");
        reader.join().expect("no panic");
    });
}

#[test]
fn loom_table_page_is_emptied_by_two() {
    model(|| {
        let slots = slots();
        slots.lock(PageNo(0)).replace(Contents::Same(1));
        let other = spawn(&slots, |slots: &Slots| discard(slots, 0));
        discard(&slots, 1);
        other.join().expect("no panic");
        assert!(slots.is_empty(PageNo(0)) && slots.is_empty(PageNo(1)));
        assert_eq!(slots.table_pages(), 0);
    });
}

/// A thread that waits for a closed slot is woken, although the page left with the bit that says that threads
/// wait.
#[test]
fn loom_table_page_leaves_against_those_who_wait() {
    model(|| {
        let slots = slots();
        let add = |slots: &Slots| {
            let mut slot = slots.lock(PageNo(0));
            let before = match slot.contents() {
                Contents::Same(word) => word,
                _ => 0,
            };
            slot.replace(Contents::Same(before + 1));
        };
        let others = [spawn(&slots, add), spawn(&slots, add)];
        discard(&slots, 1);
        others.into_iter().for_each(|other| other.join().expect("no panic"));
        assert_eq!(slots.lock(PageNo(0)).contents(), Contents::Same(2));
    });
}

#[test]
fn loom_table_page_that_is_refused_stays() {
    model(|| {
        let slots = Arc::new(Slots::new(2).expect("memory"));
        drop(slots.lock(PageNo(1)));
        let other = spawn(&slots, |slots: &Slots| _ = slots.lock(PageNo(0)).replace(Contents::Same(1)));
        slots.release_if_empty_by(1, |_| false);
        other.join().expect("no panic");
        assert_eq!(slots.lock(PageNo(0)).contents(), Contents::Same(1));
        assert_eq!((slots.table_pages(), slots.state(PageNo(1))), (1, PageState::Hole));
        discard(&slots, 0);
        assert_eq!(slots.table_pages(), 0);
    });
}
