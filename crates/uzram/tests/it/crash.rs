//! Death of the process that has a store's memory: at every store to it, and by SIGKILL at any moment; and
//! damage to that memory.
//!
//! A short form runs among the tests. `UZRAM_CRASH_ROUNDS` multiplies it: `make crash`.

pub mod memory;
mod stepping;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::alone::alone;
use crate::wait_until;
use memory::{Journal, Survivor, in_child, kill_after, resume, start_child, wait_for_stop};
use uzram::codec::{Algorithm, Kind};
use uzram::random::Random;
use uzram::store::{Attached, PageNo, Recompression, Store, StoreBuilder, Wait, Writeback};
use uzram::units::PAGE_SIZE;

type Page = [u8; PAGE_SIZE];
/// What each page holds: a [`contents`] by its number. Others are holes.
type Model = BTreeMap<u32, u64>;

const PAGES: u32 = 1024;
/// Where the slots are in a store's memory; superblock and settings are before them.
const SLOTS_AT: u64 = 16 << 20;
/// Of these bytes a part is written.
const PART: std::ops::Range<usize> = 100..300;
/// Contents of which a part was written afterwards.
const PATCHED: u64 = 1 << 40;
/// Of which all was made zeros.
const ZEROS: u64 = 1 << 41;
/// As many stores of an operation are tried in a short run, of those that have more, at random.
const TRIED_STORES: u64 = 60;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

fn rounds() -> u64 {
    variable("UZRAM_CRASH_ROUNDS").unwrap_or(1)
}

/// A seed, printed, so that a failure can be repeated with `UZRAM_TEST_SEED`.
fn seeded() -> Random {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = variable("UZRAM_TEST_SEED").unwrap_or_else(now);
    println!("UZRAM_TEST_SEED={seed}");
    Random::new(seed)
}

/// One word, or noise of some length and then zeros; of a hole, which has the number 0, zeros.
fn contents(number: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    if number == 0 || number & ZEROS != 0 {
        return page;
    }
    let seed = number & !PATCHED;
    let mut random = Random::new(seed);
    match seed % 8 {
        0 => page.fill(seed as u8 | 1),
        1 => random.fill(&mut page),
        // Few different bytes and no repeats: zstd makes them smaller, and lz4 does not.
        2 => {
            random.fill(&mut page[..2500]);
            page.iter_mut().for_each(|byte| *byte &= 15);
        }
        _ => {
            let noise = 16 + random.below(2500);
            random.fill(&mut page[..noise]);
        }
    }
    if number & PATCHED != 0 {
        page[PART].fill(7);
    }
    page
}

fn holds(model: &Model, page: u32, found: &Page) -> bool {
    *found == contents(model.get(&page).copied().unwrap_or(0))
}

fn write(store: &Store, model: &mut Model, page: u32, number: u64) {
    model.insert(page, number);
    store.write(PageNo(page), &contents(number)).unwrap();
}

fn discard(store: &Store, model: &mut Model, pages: std::ops::Range<u32>) {
    pages.clone().for_each(|page| _ = model.remove(&page));
    store.discard_pages(pages.start.into()..pages.end.into());
}

fn read(store: &Store, page: u32) -> uzram::Result<Box<Page>> {
    let mut out = Box::new([0; PAGE_SIZE]);
    store.read(PageNo(page), &mut out).map(|()| out)
}

fn attach(survivor: &Survivor) -> (Store, Attached) {
    // SAFETY: the process that had the memory has ended, or its store was dropped, or it is a copy.
    let attached = unsafe { Store::attach(survivor.memory(), survivor.backing(), |_| ()) };
    attached.unwrap_or_else(|error| panic!("{error}"))
}

/// Checks what is left of a store: each page is as in one of two models, a second attach finds the same, and
/// everything can be freed.
fn check(survivor: &Survivor, before: &Model, after: &Model, what: &str) {
    let copy = survivor.copy();
    let (store, attached) = attach(&copy);
    assert_eq!(attached.pages_lost, 0, "{what}");
    let first = store.stats();
    // Pages that are read may come back from the backing device: by another attach, as they were found.
    drop(store);
    let (store, _) = attach(&copy);
    let second = store.stats();
    // Slabs of descriptors are made anew, on one CPU or on several.
    let of = |stats: &uzram::store::StoreStats| {
        let charged_pages = stats.charged_pages - stats.slab_pages;
        let counts = [stats.pages_stored, stats.compr_data_bytes, stats.same_pages, stats.huge_pages];
        (counts, stats.pool_pages, charged_pages)
    };
    assert_eq!(of(&first), of(&second), "{what}: a second attach finds something else");
    assert!(first.charged_pages >= first.pool_pages + first.slab_pages, "{what}: {first:?}");
    assert_eq!(second.charged_pages, copy.arena_pages(), "{what}: {second:?}");
    for page in 0..PAGES {
        let found = read(&store, page).unwrap_or_else(|error| panic!("{what}: page {page}: {error}"));
        let is_one = holds(before, page, &found) || holds(after, page, &found);
        assert!(is_one, "{what}: page {page} has neither its old contents nor its new ones");
    }
    store.discard_pages(0..PAGES.into());
    check_empty(&store, what);
    assert_eq!(store.backing_stats().pages, 0, "{what}");
    // A thread of the store gives free memory back.
    let is_given_back = || store.stats().charged_pages == copy.arena_pages();
    assert!(wait_until(is_given_back), "{what}: {:?}, {} pages", store.stats(), copy.arena_pages());
}

fn check_empty(store: &Store, what: &str) {
    let empty = store.stats();
    assert_eq!(
        (empty.pages_stored, empty.compr_data_bytes, empty.pool_pages),
        (0, 0, 0),
        "{what}: {empty:?}"
    );
}

/// A store of which nobody has anything but the memory: pages of all kinds, with gaps, some on the backing
/// device.
fn base(builder: StoreBuilder, pages: u32, has_backing: bool) -> (Survivor, Model) {
    let (survivor, store) = Survivor::create(builder, has_backing);
    let mut model = Model::new();
    (0..pages).for_each(|page| write(&store, &mut model, page, 8 + u64::from(page)));
    (0..pages).filter(|page| page % 5 == 3).for_each(|page| discard(&store, &mut model, page..page + 1));
    if has_backing {
        let last = u64::from(pages) / 100 * 100;
        assert!(store.write_back(&Writeback::of(last - 100..last - 50)).unwrap() > 30);
    }
    (survivor, model)
}

/// An operation, by the name that it has in messages: what it does to a store, and to the model.
type Operation = (&'static str, fn(&Store, &mut Model));

const OPERATIONS: &[Operation] = &[
    ("write a page", |store, model| write(store, model, 700, 1002)),
    ("overwrite a page", |store, model| write(store, model, 10, 1003)),
    ("overwrite a page by one word", |store, model| write(store, model, 11, 1000)),
    ("overwrite a page by one that does not compress", |store, model| write(store, model, 12, 1001)),
    ("overwrite a page of one word", |store, model| write(store, model, 16, 1006)),
    ("overwrite a page that does not compress", |store, model| write(store, model, 17, 1007)),
    ("overwrite a page of the backing device", |store, model| write(store, model, 402, 1004)),
    ("write a part of a page", |store, model| {
        *model.get_mut(&20).unwrap() |= PATCHED;
        store.write_part(PageNo(20), PART.start, &[7; PART.end - PART.start], Wait::Yes).unwrap();
    }),
    ("discard a page", |store, model| discard(store, model, 14..15)),
    ("discard a page that does not compress", |store, model| discard(store, model, 9..10)),
    ("discard a page of the backing device", |store, model| discard(store, model, 404..405)),
    ("discard many pages", |store, model| discard(store, model, 0..400)),
    ("make a page zeros", |store, model| {
        model.insert(15, ZEROS);
        store.zero(PageNo(15));
    }),
    ("compact", |store, _| _ = store.compact()),
    ("write pages back", |store, _| _ = store.write_back(&Writeback::of(100..140)).unwrap()),
    ("read pages of the backing device, which return", |store, model| {
        for page in (400..420).flat_map(|page| [page; 3]) {
            assert!(holds(model, page, &read(store, page).unwrap()));
        }
    }),
    ("compress pages again", |store, _| {
        assert!(store.recompress(&Recompression { max_pages: 100, ..Recompression::default() }).unwrap() > 0);
    }),
    ("set the limit", |store, _| store.set_limit_pages(5000)),
];

fn recompressing(name: &str, pages: u32) -> StoreBuilder {
    let zstd = Algorithm::from(Kind::Zstd);
    StoreBuilder::new(name, pages.into()).recompression([Some(zstd), None, None])
}

#[test]
fn death_at_every_store_leaves_old_contents_or_new_ones() {
    if !alone("crash::death_at_every_store_leaves_old_contents_or_new_ones") {
        return;
    }
    let mut random = seeded();
    let (started, mut checked) = (Instant::now(), 0);
    // One design whole, and the others in turn.
    #[cfg(not(feature = "designs"))]
    let designs = [("pinned", recompressing("steps", PAGES))];
    #[cfg(feature = "designs")]
    let designs = uzram::designs::PoolDesign::ALL
        .map(|design| (design.name(), recompressing("steps", PAGES).pool_design(design)));
    let others = designs.len() - 1;
    for (number, (design, builder)) in designs.into_iter().enumerate() {
        let (survivor, before) = base(builder, 512, true);
        let is_wanted = |at: usize| number == 0 || rounds() > 1 || at % others == number - 1;
        let operations = OPERATIONS.iter().enumerate().filter(|(at, _)| is_wanted(*at));
        for (_, (name, operation)) in operations {
            let what = format!("{design}, {name}");
            // Whole, in a process of its own, as all are.
            let whole = survivor.copy();
            let (status, stores) = in_child(|| {
                let (store, _) = attach(&whole);
                stepping::watch();
                operation(&store, &mut before.clone());
                memory::report(stepping::stores());
            });
            assert_eq!(status, 0, "{what}");
            let mut after = before.clone();
            operation(&attach(&survivor.copy()).0, &mut after);
            check(&whole, &after, &after, &format!("{what}, whole"));
            let stops: Box<stepping::Stops> = if rounds() > 1 || stores <= TRIED_STORES {
                Box::new(|_| true)
            } else {
                let tried = (0..TRIED_STORES).map(|_| 1 + random.below(stores as usize) as u64);
                let tried = tried.collect::<BTreeSet<_>>();
                Box::new(move |number| tried.contains(&number))
            };
            let stopped = check_before_stores(&survivor, operation, stops, &before, &after, &what);
            println!("{what}: {stores} stores, death before {stopped}");
            checked += stopped;
        }
    }
    println!("{checked} deaths, in {:.1} s", started.elapsed().as_secs_f64());
}

/// Runs an operation once, in a process that stops before stores, and checks each time what a death there
/// would leave, and in the end what the whole operation left. Returns how often it stopped.
fn check_before_stores(
    survivor: &Survivor,
    operation: &fn(&Store, &mut Model),
    stops: Box<stepping::Stops>,
    before: &Model,
    after: &Model,
    what: &str,
) -> u64 {
    let stepped = survivor.copy();
    let child = start_child(|| {
        let (store, _) = attach(&stepped);
        stepping::stop_before(stops);
        operation(&store, &mut before.clone());
    });
    let mut stopped = 0;
    loop {
        let (ended, store) = wait_for_stop(child);
        if let Some(status) = ended {
            assert_eq!(status, 0, "{what}");
            check(&stepped, after, after, &format!("{what}, after its last store"));
            return stopped;
        }
        stopped += 1;
        check(&stepped, before, after, &format!("{what}, store {store}"));
        resume(child);
    }
}

/// One operation at random on pages of a thread: those of which the number is `which` modulo `threads`. The
/// journal has what the page held, and what it is to hold, while it is under way.
fn step(store: &Store, journal: &Journal, random: &mut Random, which: u32, threads: u32, has_backing: bool) {
    let page = random.below((PAGES / threads) as usize) as u32 * threads + which;
    match random.below(24) {
        0..=13 => {
            let number = 1 + random.below(1 << 30) as u64;
            journal.change(page, number, || store.write(PageNo(page), &contents(number)).unwrap());
        }
        14..=17 => journal.change(page, 0, || store.discard(PageNo(page))),
        18 | 19 => journal.change(page, ZEROS, || store.zero(PageNo(page))),
        20 if has_backing => {
            let first = random.below(PAGES as usize - 50) as u64;
            store.write_back(&Writeback::of(first..first + 50)).unwrap();
        }
        21 => _ = store.recompress(&Recompression { max_pages: 10, ..Recompression::default() }).unwrap(),
        22 if random.below(10) == 0 => _ = store.compact(),
        _ => {
            let number = journal.held(page);
            let found = read(store, page).unwrap();
            assert!(*found == contents(number), "page {page}");
        }
    }
}

fn step_for_ever(store: &Store, journal: &Journal, seed: u64, has_backing: bool) {
    std::thread::scope(|scope| {
        for which in 0..2 {
            scope.spawn(move || {
                let mut random = Random::new(seed + u64::from(which));
                loop {
                    step(store, journal, &mut random, which, 2, has_backing);
                }
            });
        }
    });
}

/// Two threads; one stops for ever at a store chosen at random, the other goes on for some more.
#[test]
fn death_of_one_thread_and_then_of_the_other_leaves_old_contents_or_new_ones() {
    if !alone("crash::death_of_one_thread_and_then_of_the_other_leaves_old_contents_or_new_ones") {
        return;
    }
    let mut random = seeded();
    let (survivor, model) = base(recompressing("threads", PAGES), 512, true);
    for round in 0..30 * rounds() {
        let (dead, journal) = (survivor.copy(), Journal::new(PAGES));
        model.iter().for_each(|(page, number)| journal.set(*page, *number));
        let (number, others) = (1 + random.below(6000) as u64, random.below(500) as u64);
        let seed = random.next();
        let (status, _) = in_child(|| {
            let (store, _) = attach(&dead);
            memory::exit_after(Duration::from_millis(200));
            stepping::die_at_store(number, others);
            step_for_ever(&store, &journal, seed, true);
        });
        assert!([stepping::DIED, memory::LATE].contains(&status), "round {round}: status {status}");
        let (before, after) = journal.models();
        check(&dead, &before, &after, &format!("round {round}, store {number} and {others} more"));
    }
}

/// A process that is killed at any moment, also while it attaches, and another that goes on.
#[test]
fn processes_that_are_killed_lose_nothing() {
    if !alone("crash::processes_that_are_killed_lose_nothing") {
        return;
    }
    let mut random = seeded();
    let mut longest = Duration::ZERO;
    for has_backing in [false, true] {
        let (survivor, model) = base(recompressing("killed", PAGES), 512, has_backing);
        let journal = Journal::new(PAGES);
        model.iter().for_each(|(page, number)| journal.set(*page, *number));
        for kill in 0..100 * rounds() {
            let seed = random.next();
            let child = start_child(|| {
                let (store, _) = attach(&survivor);
                step_for_ever(&store, &journal, seed, has_backing);
            });
            let status = kill_after(child, Duration::from_micros(random.below(30_000) as u64));
            assert_eq!(status, -libc::SIGKILL, "kill {kill}: the process had ended");
            let started = Instant::now();
            let (before, after) = journal.models();
            check(&survivor, &before, &after, &format!("kill {kill}"));
            longest = longest.max(started.elapsed());
            if kill % 1000 == 999 {
                println!("{} kills of {} so far", kill + 1, 100 * rounds());
            }
            let (store, _) = attach(&survivor.copy());
            journal.settle(|page, number| *read(&store, page).unwrap() == contents(number));
        }
    }
    println!("the longest check took {longest:?}");
}

/// Bits flipped anywhere in memory. What is found may be refused, and is else what was written; of a page of
/// one word, whose word was hit, it is one word.
#[test]
fn damage_is_refused_or_does_no_harm() {
    const PAGES: u32 = 200;
    if !alone("crash::damage_is_refused_or_does_no_harm") {
        return;
    }
    let mut random = seeded();
    let (mut refused, mut lost, mut failed) = (0, 0, 0);
    for has_backing in [false, true] {
        let (survivor, model) = base(recompressing("damaged", PAGES).checksum(true), PAGES, has_backing);
        let data = survivor.data();
        let head: Vec<_> = data.iter().filter(|range| range.start < SLOTS_AT).cloned().collect();
        let slots = SLOTS_AT..SLOTS_AT + 16 * u64::from(PAGES);
        for round in 0..1000 * rounds() {
            let copy = survivor.copy();
            // Superblock and settings, slots, and anywhere.
            let part = match round % 4 {
                0 => &head[..],
                1 => std::slice::from_ref(&slots),
                _ => &data,
            };
            for _ in 0..1 + random.below(3) {
                // Bytes that say something are hit more often.
                let mut at = 0;
                for _ in 0..10 {
                    let range = &part[random.below(part.len())];
                    at = range.start + random.below((range.end - range.start) as usize) as u64;
                    if copy.byte(at) != 0 {
                        break;
                    }
                }
                copy.flip(at, 1 << random.below(8));
            }
            // SAFETY: the copy is used here only.
            let Ok((store, attached)) = (unsafe { Store::attach(copy.memory(), copy.backing(), |_| ()) })
            else {
                refused += 1;
                continue;
            };
            lost += attached.pages_lost;
            for page in 0..PAGES {
                let Ok(found) = read(&store, page) else {
                    failed += 1;
                    continue;
                };
                let is_word = found.chunks_exact(8).all(|word| word == &found[..8]);
                assert!(holds(&model, page, &found) || is_word, "round {round}: page {page} has other bytes");
            }
            let mut model = Model::new();
            (0..PAGES).for_each(|page| write(&store, &mut model, page, 1000 + u64::from(page)));
            store.compact();
            for page in 0..PAGES {
                assert!(holds(&model, page, &read(&store, page).unwrap()), "round {round}: page {page}");
            }
            store.discard_pages(0..PAGES.into());
            check_empty(&store, &format!("round {round}"));
        }
    }
    println!("{refused} stores refused, {lost} pages lost, {failed} reads failed");
    assert!(refused > 0 && lost > 0 && failed > lost, "the damage was found");
}
