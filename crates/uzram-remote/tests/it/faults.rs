//! A backing on a store that fails in every way a store can: delays, drops, lost and changed objects, and one
//! that is full.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::pages::{contents, store_on, transfer};
use crate::common::wait_until;
use uzram::backing::{Direction, Filling, Objects};
use uzram::random::Random;
use uzram::store::{PageNo, PolicyThread, Store, Writeback};
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind};
use uzram_remote::{DeviceId, Failure, Identity, Key, Limits, Meaning, ObjectStore, RemoteBacking};

/// A store in memory that misbehaves, in one of so many requests.
#[derive(Default)]
struct Bad {
    objects: Mutex<HashMap<Key, Vec<u8>>>,
    one_in: AtomicU32,
    /// What every request meets.
    always: Mutex<Fault>,
    leased: Mutex<Option<DeviceId>>,
    random: Mutex<Option<Random>>,
}

#[derive(Clone)]
struct Handle(Arc<Bad>);

#[derive(Clone, Copy, Default, PartialEq)]
enum Fault {
    #[default]
    None,
    Refused,
    /// It is not carried out, and has no answer.
    Silent,
    /// It is carried out, and the answer is lost.
    NoAnswer,
    /// It takes longer than the deadline, and is carried out.
    Late,
    Flipped,
    /// Another object is returned.
    Swapped,
    Missing,
}

impl Handle {
    fn new(seed: u64) -> Handle {
        Handle(Arc::new(Bad { random: Mutex::new(Some(Random::new(seed))), ..Bad::default() }))
    }

    fn set(&self, one_in: u32) {
        self.0.one_in.store(one_in, Ordering::Relaxed);
    }

    fn always(&self, fault: Fault) {
        *self.0.always.lock().unwrap() = fault;
    }

    fn draw(&self, below: usize) -> usize {
        self.0.random.lock().unwrap().as_mut().unwrap().below(below)
    }

    fn fault(&self, reads: bool) -> Fault {
        let always = *self.0.always.lock().unwrap();
        if always != Fault::None {
            return always;
        }
        let one_in = self.0.one_in.load(Ordering::Relaxed) as usize;
        if one_in == 0 || self.draw(one_in) > 0 {
            return Fault::None;
        }
        let kinds: &[Fault] = match reads {
            true => &[Fault::Refused, Fault::Late, Fault::Flipped, Fault::Swapped, Fault::Missing],
            false => &[Fault::Refused, Fault::NoAnswer, Fault::Late],
        };
        kinds[self.draw(kinds.len())]
    }

    fn objects(&self) -> usize {
        self.0.objects.lock().unwrap().len()
    }
}

fn open(bad: &Handle, len_bytes: Option<u64>, limits: Limits) -> Arc<RemoteBacking<Handle>> {
    let connected = bad.clone();
    let connect = || async { Ok(connected) };
    Arc::new(RemoteBacking::open(&Identity::new().unwrap(), len_bytes, limits, connect).unwrap())
}

fn refused() -> Failure {
    Failure::new(Meaning::Again, Error::new(ErrorKind::Io, "the connection was closed"))
}

fn gone() -> Failure {
    Failure::new(Meaning::Lost, Error::new(ErrorKind::NotFound, "gone"))
}

async fn be_late() {
    tokio::time::sleep(Duration::from_millis(30)).await;
}

impl ObjectStore for Handle {
    const OBJECT_BYTES: usize = 64 << 10;

    async fn put(&self, key: Key, bytes: &[u8]) -> Result<(), Failure> {
        let fault = self.fault(false);
        match fault {
            Fault::Refused => return Err(refused()),
            Fault::Silent => std::future::pending().await,
            _ => {}
        }
        let old = self.0.objects.lock().unwrap().insert(key, bytes.to_vec());
        assert_eq!(old, None, "{key:?} is written twice");
        match fault {
            Fault::NoAnswer => return Err(refused()),
            Fault::Late => be_late().await,
            _ => {}
        }
        Ok(())
    }

    async fn get(&self, key: Key, at: usize, len_bytes: usize) -> Result<Vec<u8>, Failure> {
        let fault = self.fault(true);
        match fault {
            Fault::Refused => return Err(refused()),
            Fault::Missing => return Err(gone()),
            Fault::Silent => std::future::pending().await,
            Fault::Late => be_late().await,
            _ => {}
        }
        let (flip, other) = (self.draw(len_bytes * 8), self.draw(1000));
        let objects = self.0.objects.lock().unwrap();
        let key = match fault {
            Fault::Swapped => *objects.keys().nth(other % objects.len().max(1)).unwrap_or(&key),
            _ => key,
        };
        let whole = objects.get(&key).ok_or_else(gone)?;
        let mut read = whole.get(at..).unwrap_or_default().to_vec();
        read.resize(len_bytes, 0);
        if fault == Fault::Flipped {
            read[flip / 8] ^= 1 << (flip % 8);
        }
        Ok(read)
    }

    async fn remove(&self, keys: Vec<Key>) -> Vec<Key> {
        let mut failed = Vec::new();
        for key in keys {
            match self.fault(false) {
                Fault::None => drop(self.0.objects.lock().unwrap().remove(&key)),
                _ => failed.push(key),
            }
        }
        failed
    }

    async fn renew_lease(&self, device: DeviceId) -> Result<(), Failure> {
        *self.0.leased.lock().unwrap() = Some(device);
        Ok(())
    }

    async fn end_lease(&self, device: DeviceId) {
        assert_eq!(self.0.leased.lock().unwrap().take(), Some(device));
    }

    async fn check(&self) -> Result<Option<String>, Failure> {
        if self.fault(false) == Fault::None { Ok(None) } else { Err(refused()) }
    }
}

/// Pages are written, written back and read at random. A read gives what was written, or an error; in the
/// end, without faults, what was written; and nothing stays in the store.
#[test]
fn whatever_the_store_does_no_read_is_wrong() {
    const PAGES: u32 = 1000;
    for seed in 0..4 {
        let bad = Handle::new(seed);
        let limits = Limits {
            read_deadline: Duration::from_millis(10),
            write_deadline: Duration::from_millis(10),
            ..Limits::default()
        };
        let backing = open(&bad, Some(8 << 20), limits);
        let store = store_on(&backing, PAGES);
        let (mut versions, mut random) = (vec![0; PAGES as usize], Random::new(100 + seed));
        (0..PAGES).for_each(|page| store.write(PageNo(page), &contents(page, 0)).unwrap());
        bad.set(20);
        let (mut out, mut failed) = ([0; PAGE_SIZE], 0);
        for event in 0..20_000 {
            let page = random.below(PAGES as usize);
            match random.below(100) {
                0 => _ = store.write_back(&Writeback::of(page as u64..page as u64 + 50)),
                1..30 => {
                    versions[page] += 1;
                    store.write(PageNo(page as u32), &contents(page as u32, versions[page])).unwrap();
                }
                _ => match store.read(PageNo(page as u32), &mut out) {
                    Ok(()) => assert!(
                        out == contents(page as u32, versions[page]),
                        "seed {seed}, event {event}: page {page}"
                    ),
                    Err(_) => failed += 1,
                },
            }
        }
        assert!(failed > 10, "seed {seed}: only {failed} reads failed");
        bad.set(0);
        for (page, version) in (0..).zip(&versions) {
            // On a busy machine a read may take longer than its deadline.
            let read = (0..100).any(|_| store.read(PageNo(page), &mut out).is_ok());
            assert!(read, "seed {seed}: page {page} cannot be read");
            assert!(out == contents(page, *version), "seed {seed}: page {page} in the end");
        }
        let stats = store.backing_stats();
        assert!(stats.pages_written_back > 1000 && stats.failed_writes > 0, "{stats:?}");
        assert!(stats.corrupted > 0, "{stats:?}");
        let health = backing.health();
        assert!(stats.lost_reads > 0, "{stats:?}");
        assert!(health.expired > 0 && health.left_behind == 0, "{health:?}");
        store.discard_pages(0..PAGES.into());
        store.erase_backing();
        drop(store);
        assert_eq!(*bad.0.leased.lock().unwrap(), None);
        // One that was given up may come late: it is removed, too.
        assert!(bad.objects() <= 1 + health.expired as usize);
    }
}

/// A backing that no store has begun to use leaves nothing behind.
#[test]
fn a_lease_ends_with_a_backing_that_was_never_used() {
    let bad = Handle::new(1);
    let backing = open(&bad, None, Limits::default());
    assert!(bad.0.leased.lock().unwrap().is_some());
    drop(backing);
    assert_eq!(*bad.0.leased.lock().unwrap(), None);
}

/// What is written by one process is read by the next one, though the store is away at first.
#[test]
fn another_process_goes_on_before_it_is_connected() {
    let (bad, identity) = (Handle::new(1), Identity::new().unwrap());
    let limits = Limits { read_deadline: Duration::from_millis(300), ..Limits::default() };
    let connected = bad.clone();
    let first = RemoteBacking::open(&identity, Some(1 << 20), limits, || async { Ok(connected) }).unwrap();
    assert_eq!(transfer(&first, Direction::Write, 7), Ok(7));
    assert!(bad.0.leased.lock().unwrap().is_some());
    drop(first);
    assert_eq!(bad.objects(), 1);
    let is_there = Arc::new(AtomicU32::new(0));
    let (connected, flag) = (bad.clone(), Arc::clone(&is_there));
    let connect = move || {
        let (connected, flag) = (connected.clone(), Arc::clone(&flag));
        async move { if flag.load(Ordering::Relaxed) > 0 { Ok(connected) } else { Err(refused().into()) } }
    };
    let second = RemoteBacking::resume(&identity, 1 << 20, limits, connect).unwrap();
    assert!(transfer(&second, Direction::Read, 7).is_err());
    assert!(second.health().stopped.is_some());
    is_there.store(1, Ordering::Relaxed);
    wait_until("it is connected", || transfer(&second, Direction::Read, 7) == Ok(7));
    assert_eq!(second.health().stopped, None);
    second.delete(7, Filling { generation: 1, home: 0 });
    second.end();
    assert_eq!(bad.objects(), 0);
    assert!(transfer(&second, Direction::Write, 1).is_err(), "it has ended");
}

/// Returns a store at its limit, whose backing is `bad`; its pages leave as room is needed.
fn store_at_limit(bad: &Handle, limits: Limits) -> (Arc<Store>, PolicyThread) {
    let store = store_on(&open(bad, Some(64 << 20), limits), 8192);
    store.set_limit_pages(512);
    let store = Arc::new(store);
    let policy = PolicyThread::start("away", &store).unwrap();
    (0..2000).for_each(|page| store.write(PageNo(page), &contents(page, 0)).unwrap());
    assert!(store.backing_stats().pages > 500);
    (store, policy)
}

/// A store that is away for a few seconds fails no write, and no read; both go on soon when it is back. It
/// has to be away for longer than a disk may fail.
#[test]
fn writers_and_readers_wait_for_a_store_that_is_away() {
    const AWAY_FOR: Duration = Duration::from_secs(3);
    let bad = Handle::new(1);
    let limits = Limits { read_deadline: Duration::from_secs(60), ..Limits::default() };
    let (store, _policy) = store_at_limit(&bad, limits);
    bad.always(Fault::Refused);
    std::thread::scope(|scope| {
        let writer =
            scope.spawn(|| (2000..4000).try_for_each(|page| store.write(PageNo(page), &contents(page, 0))));
        let reader = scope.spawn(|| {
            let mut out = [0; PAGE_SIZE];
            (0..500).try_for_each(|page| {
                store.read(PageNo(page), &mut out)?;
                assert!(out == contents(page, 0), "page {page}");
                Ok::<(), Error>(())
            })
        });
        std::thread::sleep(AWAY_FOR);
        assert!(!writer.is_finished() && !reader.is_finished(), "they need the store");
        bad.always(Fault::None);
        writer.join().unwrap().expect("writers wait");
        reader.join().unwrap().expect("readers wait");
    });
}

/// A store that stays away: after the time that is set for it, writers get ENOSPC, and no longer wait;
/// readers get EIO.
#[test]
fn a_store_that_stays_away_is_waited_for_no_longer() {
    let bad = Handle::new(1);
    let limits = Limits {
        read_deadline: Duration::from_millis(300),
        gone_after: Duration::from_millis(300),
        ..Limits::default()
    };
    let (store, _policy) = store_at_limit(&bad, limits);
    bad.always(Fault::Refused);
    let began = Instant::now();
    let write = |page| store.write(PageNo(page), &contents(page, 0));
    let refusal = (2000..4000).find_map(|page| write(page).err()).expect("there is no room for all of them");
    assert_eq!(refusal.errno(), 28, "{refusal}");
    assert!(began.elapsed() >= limits.gone_after);
    let refused: Vec<_> = (4000..4100).map(|page| write(page).is_err()).collect();
    assert!(refused.iter().all(|is_refused| *is_refused));
    assert!(began.elapsed() < Duration::from_secs(15), "each write waits: {:?}", began.elapsed());
    let failure = (0..2000).find_map(|page| store.read(PageNo(page), &mut [0; PAGE_SIZE]).err());
    assert_eq!(failure.expect("some left").errno(), 5);
    bad.always(Fault::None);
    wait_until("it is used again when it is back", || write(4000).is_ok());
}

/// While a store gives no answer, nothing can be cleaned. The extents that only cleaning takes stay free: it
/// goes on when the store answers again, and as much fits as before.
#[test]
fn cleaning_goes_on_when_a_silent_store_answers_again() {
    const PAGES: u32 = 2500;
    let bad = Handle::new(1);
    let within = Duration::from_millis(500);
    let limits = Limits { read_deadline: within, write_deadline: within, ..Limits::default() };
    let store = store_on(&open(&bad, Some(4 << 20), limits), 2 * PAGES);
    let write_back = || store.write_back(&Writeback::default()).map_err(|error| error.kind());
    let fill = |pages: std::ops::Range<u32>| {
        pages.for_each(|page| store.write(PageNo(page), &contents(page, 0)).unwrap());
        assert_eq!(write_back(), Err(ErrorKind::NoSpace));
        store.backing_stats().pages
    };
    let fitting = fill(0..PAGES);
    (0..PAGES).step_by(2).for_each(|page| store.discard(PageNo(page)));
    bad.always(Fault::Silent);
    let before = store.backing_stats();
    for _ in 0..3 {
        assert!(write_back().is_err());
    }
    let stats = store.backing_stats();
    assert!(stats.failed_reads > before.failed_reads, "{stats:?}");
    assert_eq!((stats.written_bytes, stats.pages), (before.written_bytes, before.pages));
    bad.always(Fault::None);
    wait_until("it goes on", || write_back().is_ok());
    let fit = fill(PAGES..2 * PAGES);
    assert!(fit * 100 >= fitting * 97, "{fit} of {fitting}");
    let mut out = [0; PAGE_SIZE];
    for page in (0..PAGES).skip(1).step_by(2).chain(PAGES..2 * PAGES) {
        store.read(PageNo(page), &mut out).unwrap();
        assert!(out == contents(page, 0), "page {page}");
    }
}
