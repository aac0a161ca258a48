//! Pages that are written back to several backings, which are used in order.

use super::objects_tests::{Shared, overwrite_and_remove, store_on};
use super::tests::config;
use super::writeback::sealed::tests::Plain;
use super::writeback_tests::{ALL, agree_with_a_model, check, expect, file, half_random, overwrite};
use super::*;
use crate::backing::{Backing, FaultyBacking, Health, MARK_BYTES, Seal, Tiers};
use crate::base::error::ErrorKind;
use crate::base::random::Random;
use crate::base::sync::Arc;
use crate::base::units::PageNo;

const TIER_BYTES: u64 = 8 << 20;

fn file_and(objects: &Shared, dir: &tempfile::TempDir) -> Arc<Tiers> {
    tiers(vec![in_file(dir), objects.tier()], objects.seal())
}

fn in_file(dir: &tempfile::TempDir) -> Backing {
    Backing::Blocks(Arc::new(file(dir.path(), TIER_BYTES)))
}

fn tiers(backings: Vec<Backing>, seal: Option<Arc<dyn Seal>>) -> Arc<Tiers> {
    Arc::new(Tiers::new(backings, seal).expect("sizes"))
}

fn write(store: &Store, pages: std::ops::Range<u64>) {
    writeback_tests::write(store, pages, half_random);
    store.write_back(&ALL).expect("room");
}

#[test]
fn the_first_tier_is_used_first_and_again() {
    for sealed in [false, true] {
        let objects = if sealed { Shared::sealed(32 << 20) } else { Shared::new(32 << 20) };
        let dir = tempfile::tempdir().expect("a directory");
        let store = store_on(file_and(&objects, &dir), config(20_000));
        write(&store, 0..3000);
        assert_eq!((objects.objects(), store.backing_stats().len_bytes), (0, TIER_BYTES + (32 << 20)));
        write(&store, 3000..6000);
        let beyond = objects.objects();
        assert!(beyond > 10, "{beyond}");
        // What is free in the first one is used before more of the second.
        store.discard_pages(0..2000);
        write(&store, 10_000..11_500);
        assert_eq!(objects.objects(), beyond);
        check(&store, (2000..6000).chain(10_000..11_500), half_random);
        let path = dir.path().join("backing");
        let in_file = std::fs::read(path).expect("the file").split_off(MARK_BYTES);
        let needle = &half_random(2500)[64..96];
        let is_readable = in_file.windows(needle.len()).any(|window| window == needle);
        assert_eq!(is_readable, !sealed, "what is in the file is sealed, too");
        store.erase_backing();
        assert_eq!(objects.objects(), 0);
    }
}

#[test]
fn pages_are_overwritten_in_two_tiers() {
    for objects in [Shared::new(TIER_BYTES), Shared::sealed(TIER_BYTES)] {
        let dir = tempfile::tempdir().expect("a directory");
        // A file that is encrypted, as well as before objects.
        let backing = match objects.seal() {
            None => tiers(vec![in_file(&dir)], Some(Arc::new(Plain::default()))),
            Some(_) => file_and(&objects, &dir),
        };
        let store = store_on(backing, config(4000));
        let (mut versions, mut random) = (vec![0; 2000], Random::new(9));
        write(&store, 0..2000);
        overwrite(&store, &mut versions, &mut random);
        (0..).zip(&versions).for_each(|(page, version)| expect(&store, page, &half_random(page + version)));
    }
    // Objects in two stores.
    let (one, other) = (Shared::new(TIER_BYTES), Shared::new(TIER_BYTES));
    overwrite_and_remove(tiers(vec![one.tier(), other.tier()], None), &|| one.objects() + other.objects());
}

#[test]
fn files_are_used_one_after_another() {
    for (layout, compressed) in [(WritebackLayout::Packed, true), (WritebackLayout::Blocks, false)] {
        let dirs = [0, 1].map(|_| tempfile::tempdir().expect("a directory"));
        let backing = tiers(dirs.iter().map(in_file).collect(), None);
        assert_eq!(backing.object_bytes(), None);
        let backing = BackingOptions { backing, layout, compressed };
        let store = Store::new(&StoreBuilder { backing: Some(backing), ..config(6000) }).expect("a store");
        let written = |dir: &tempfile::TempDir| {
            let bytes = std::fs::read(dir.path().join("backing")).expect("the file");
            bytes[MARK_BYTES..].iter().any(|byte| *byte != 0)
        };
        write(&store, 0..1500);
        assert_eq!(dirs.each_ref().map(written), [true, false]);
        write(&store, 1500..3700);
        assert_eq!(dirs.each_ref().map(written), [true, layout == WritebackLayout::Blocks]);
        let (mut versions, mut random) = (vec![0; 3700], Random::new(2));
        overwrite(&store, &mut versions, &mut random);
        (0..).zip(&versions).for_each(|(page, version)| expect(&store, page, &half_random(page + version)));
    }
}

/// Threads do all operations at once, on two tiers of which the second one has faults.
#[test]
fn everything_at_once_on_tiers_agrees_with_a_model() {
    const PAGES: u64 = 6000;
    let (objects, dir) = (Shared::sealed(TIER_BYTES), tempfile::tempdir().expect("a directory"));
    let faulty = FaultyBacking::new(objects.clone(), 5).expect("a thread");
    let faults = faulty.faults();
    let backing = tiers(vec![in_file(&dir), Backing::Objects(Arc::new(faulty))], objects.seal());
    let backing = BackingOptions::packed(backing);
    let config = StoreBuilder { backing: Some(backing), limit_pages: 128, ..config(PAGES) };
    let store = Arc::new(Store::new(&config).expect("a store"));
    let policy = PolicyThread::start("test", &store).expect("a thread");
    agree_with_a_model(&store, &faults, 7, 20_000, |_| ());
    drop(policy);
    let stats = store.backing_stats();
    assert!(stats.pages_written_back > 1000 && stats.pages_returned > 0, "{stats:?}");
    store.erase_backing();
    assert_eq!(objects.objects(), 0);
}

#[test]
fn tiers_that_do_not_fit_together_are_refused() {
    let of = |sizes: &[u64]| sizes.iter().map(|size| Shared::new(*size).tier()).collect();
    let refused = |backings: Vec<Backing>, hint: &str| {
        let error = Tiers::new(backings, None).map(drop).expect_err(hint);
        assert_eq!((error.kind(), error.setting()), (ErrorKind::Invalid, Some("backing_dev")));
        assert!(error.to_string().contains(hint), "{error}");
    };
    refused(of(&[]), "1 to 4");
    refused(of(&[TIER_BYTES; 5]), "1 to 4");
    refused(of(&[4 << 20, TIER_BYTES]), "tier 1 needs a size");
    assert!(Tiers::new(of(&[TIER_BYTES, 4 << 20]), None).is_ok());
}

/// The numbers of extents and generations begin anew in each store, and so would the nonces.
#[test]
fn objects_are_for_one_store() {
    let tiers = Shared::sealed(TIER_BYTES).alone();
    let builder = StoreBuilder { backing: Some(BackingOptions::packed(tiers.clone())), ..config(100) };
    let store = Store::new(&builder).expect("the first store");
    drop(store);
    let error = Store::new(&builder).map(drop).expect_err("a second store");
    assert_eq!((error.kind(), error.setting()), (ErrorKind::Busy, Some("backing_dev")));
    tiers.give_back();
    Store::new(&builder).expect("the first one has written nothing");
}

#[test]
fn tiers_are_stopped_once_all_are() {
    let dir = tempfile::tempdir().expect("a directory");
    let downs = [0; 2].map(|_| Shared::new(TIER_BYTES));
    let both = tiers(downs.iter().map(Shared::tier).collect(), None);
    let with_file = file_and(&downs[1], &dir);
    let state = |tiers: &Tiers| {
        let Health { expired, stopped, degraded, checked, .. } = tiers.health().expect("it is known");
        (expired, stopped.is_some(), degraded.is_some(), checked.is_some())
    };
    assert_eq!((state(&both), state(&with_file)), ((2, false, false, true), (1, false, false, false)));
    downs[1].set_down(true);
    assert_eq!((state(&both), state(&with_file)), ((2, false, true, true), (1, false, true, false)));
    downs[0].set_down(true);
    assert_eq!((state(&both), state(&with_file)), ((2, true, false, true), (1, false, true, false)));
}

#[test]
fn a_tier_that_is_down_keeps_no_other_from_being_cleaned() {
    // The pages of the second tier, of which each takes some 2 KiB, and those written before it is down,
    // which clean it.
    for (in_second, before) in [(0, 0..0), (3000, 0..0), (3500, 9000..10_500)] {
        let (objects, dir) = (Shared::new(TIER_BYTES), tempfile::tempdir().expect("a directory"));
        let store = store_on(file_and(&objects, &dir), config(12_000));
        let in_first = 3600;
        write(&store, 0..in_first + in_second);
        assert_eq!(objects.objects() > 40, in_second > 0);
        let half = |pages: std::ops::Range<u64>| {
            pages.step_by(2).for_each(|page| store.discard(PageNo(page as u32)))
        };
        half(in_first..in_first + in_second);
        write(&store, before.clone());
        objects.set_down(true);
        // The first tier is half dead now, and nothing else is written to.
        half(0..in_first);
        write(&store, 7900..9000);
        objects.set_down(false);
        let left = (0..in_first + in_second).skip(1).step_by(2).chain(7900..9000).chain(before);
        check(&store, left, half_random);
    }
}
