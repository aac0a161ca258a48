//! A naive model beside seeded random events, deaths at every store, and damaged contents.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{SystemTime, UNIX_EPOCH};

use uzram::device::Device;
use uzram::random::Random;

use super::*;
use crate::Exports;
use crate::fuse::proto::{FUSE_UNIQUE_RESEND, bytes_of, fuse_in_header, fuse_open_in, opcode};
use crate::fuse::{Loopback, MountOptions};

thread_local! {
    /// Stores until the process dies, if it does.
    static STORES_LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// What a death unwinds with.
struct Death;

pub(super) fn before_store() {
    match STORES_LEFT.get() {
        Some(0) => {
            STORES_LEFT.set(None);
            // Without the report of a panic.
            resume_unwind(Box::new(Death));
        }
        Some(left) => STORES_LEFT.set(Some(left - 1)),
        None => {}
    }
}

/// Runs `f` with death after `stores` stores; returns `None` if it died.
fn mortal<R>(stores: usize, f: impl FnOnce() -> R) -> Option<R> {
    STORES_LEFT.set(Some(stores));
    let done = catch_unwind(AssertUnwindSafe(f));
    STORES_LEFT.set(None);
    done.map_err(|panic| assert!(panic.is::<Death>())).ok()
}

fn random() -> Random {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = std::env::var("UZRAM_TEST_SEED").map_or_else(|_| now(), |seed| seed.parse().unwrap());
    println!("UZRAM_TEST_SEED={seed}");
    Random::new(seed)
}

impl Ledger {
    fn has_answered(&self) -> bool {
        self.answered() != self.load(answered_at(self.life().life))
    }
}

fn reopened(ledger: &Ledger) -> Ledger {
    Ledger::from_fd(ledger.as_fd().try_clone_to_owned().unwrap()).unwrap()
}

/// What a ledger should say of lives.
#[derive(Default)]
struct Model {
    last: Strikes,
    before: BTreeSet<u64>,
    under_way: BTreeMap<u64, UnderWay>,
    has_answered: bool,
}

impl Model {
    fn next(&self) -> Strikes {
        let under_way: BTreeSet<_> = self.under_way.keys().copied().collect();
        let strikes = match self.last {
            Strikes { life: 0, .. } => 0,
            _ if self.has_answered => 1,
            last if !under_way.is_disjoint(&self.before) => last.strikes + 1,
            _ => 1,
        };
        Strikes { life: self.last.life + 1, strikes }
    }

    fn begin(&mut self) {
        self.last = self.next();
        self.before = std::mem::take(&mut self.under_way).into_keys().collect();
        self.has_answered = false;
    }
}

#[test]
fn lives_are_as_in_a_model_wherever_they_end() {
    let mut random = random();
    for _ in 0..40 {
        let (mut ledger, mut model) = (Ledger::new().unwrap(), Model::default());
        for _ in 0..400 {
            let unique = 2 * (1 + random.below_u64(4));
            let resend = if random.below(2) == 0 { FUSE_UNIQUE_RESEND } else { 0 };
            match random.below(8) {
                0..3 if model.last.life > 0 && !model.under_way.contains_key(&unique) => {
                    let request = ledger.begin_request(random.below(300), unique | resend);
                    model.under_way.insert(unique, request);
                }
                3..5 if model.under_way.contains_key(&unique) => {
                    let request = model.under_way.get_mut(&unique).map(std::mem::take).unwrap();
                    match mortal(random.below(12), || ledger.end_request(random.below(300), request)) {
                        Some(()) => {
                            model.under_way.remove(&unique);
                            model.has_answered = true;
                        }
                        // The count may have been stored, which decides.
                        None => {
                            model.has_answered |= ledger.has_answered();
                            ledger = reopened(&ledger);
                            model.under_way.values_mut().for_each(|request| *request = UnderWay::default());
                            assert_eq!(ledger.begin_life(), model.next());
                            model.begin();
                        }
                    }
                }
                5 => {
                    assert_eq!(ledger.begin_life(), model.next());
                    model.begin();
                }
                6 => {
                    let next = model.next();
                    let stores = [random.below(6), random.below(MAX_REQUESTS + 8)][random.below(2)];
                    let begun = mortal(stores, || ledger.begin_life());
                    assert!(begun.is_none_or(|begun| begun == next));
                    ledger = reopened(&ledger);
                    if ledger.life() != next {
                        // Nobody serves before a life has begun.
                        assert!(ledger.life() == model.last && ledger.begin_life() == next);
                    }
                    model.begin();
                }
                _ => {}
            }
        }
    }
}

#[test]
fn there_may_be_more_requests_than_entries() {
    let ledger = Ledger::new().unwrap();
    ledger.begin_life();
    let mut requests: Vec<_> = (1..=MAX_REQUESTS as u64).map(|at| ledger.begin_request(3, 2 * at)).collect();
    requests.push(ledger.begin_request(3, 1));
    assert_eq!(ledger.begin_request(9, 3).word, 0);
    for request in requests {
        ledger.end_request(3, request);
    }
    assert!(ledger.begin_request(9, 3).word > 0);
}

#[test]
fn a_file_is_entered_and_cleared_as_a_whole() {
    let ledger = Ledger::new().unwrap();
    let file = OpenFileRecord { ino: 9 << 16 | 1, mode: libc::O_RDWR, unique: 6 };
    for stores in 0.. {
        let done = mortal(stores, || ledger.enter_file(1023, 7, file));
        assert_eq!(ledger.opened_by(6 | FUSE_UNIQUE_RESEND), done.map(|()| (1023, 7)));
        if done.is_some() {
            assert_eq!(ledger.open_file(1023), (7, Some(file)));
            break;
        }
    }
    ledger.clear_file(1023, 8);
    assert_eq!((ledger.open_file(1023), ledger.opened_by(6)), ((8, None), None));
}

#[test]
fn numbers_are_entered_as_a_whole_and_never_again() {
    let ledger = Ledger::new().unwrap();
    let name = "n".repeat(64);
    for stores in 0.. {
        let done = mortal(stores, || ledger.enter_device(5, &name));
        assert!(stores == 0 || ledger.last_number() == 5);
        match done {
            Some(entered) => {
                assert!(entered && ledger.device_numbers() == [(5, name.into_bytes())]);
                break;
            }
            None => assert!(ledger.device_numbers().is_empty()),
        }
    }
    ledger.retain_devices(|number| number == 6);
    assert!(ledger.device_numbers().is_empty());
    for number in 6..6 + MAX_DEVICES as u64 {
        assert!(ledger.enter_device(number, "a"));
    }
    assert!(!ledger.enter_device(9999, "b") && ledger.last_number() == 9999);
}

#[test]
fn only_a_ledger_is_opened() {
    let ledger = Ledger::new().unwrap();
    drop(reopened(&ledger));
    ledger.store(MAGIC_AT, MAGIC + 1);
    assert!(Ledger::from_fd(ledger.as_fd().try_clone_to_owned().unwrap()).is_err());
    let other = MemoryFile::create("other", 4096).unwrap();
    assert!(Ledger::from_fd(other.as_fd().try_clone_to_owned().unwrap()).is_err());
    assert!(Ledger::from_fd(std::fs::File::open("/dev/null").unwrap().into()).is_err());
}

#[test]
fn damaged_contents_never_panic() {
    let mut random = random();
    let exports = Exports::new(["a", "b"].map(|name| Device::builder(name).build(1 << 20).unwrap()));
    let options = MountOptions { threads: 1, max_io_bytes: 1 << 16, ..MountOptions::default() };
    for round in 0..60 {
        let ledger = Arc::new(Ledger::new().unwrap());
        ledger.begin_life();
        drop(Loopback::new(exports.clone(), &options, &ledger));
        // Some damaged words, or all; small numbers are more likely to mean something.
        for _ in 0..if round % 2 == 0 { 3 * WORDS } else { 200 } {
            let word = match random.below(4) {
                0 => random.next(),
                1 => random.below_u64(8) << 32 | random.below_u64(8),
                2 => (1 + random.below_u64(3)) << 16 | random.below_u64(60),
                _ => u64::from_ne_bytes([b"a\0\0\0\0\0\0\0", b"b\0\0\0\0\0\0\0"][random.below(2)].to_owned()),
            };
            ledger.store(LIFE_AT + random.below(WORDS - 1), word);
        }
        let ledger = Arc::new(reopened(&ledger));
        ledger.begin_life();
        let request = ledger.begin_request(usize::MAX, 2);
        ledger.end_request(usize::MAX, request);
        let files = Loopback::new(exports.clone(), &options, &ledger);
        let open = |ino, unique| {
            let len = (size_of::<fuse_in_header>() + size_of::<fuse_open_in>()) as u32;
            let header =
                fuse_in_header { len, opcode: opcode::FUSE_OPEN, unique, nodeid: ino, ..Default::default() };
            let replies = files.carry_out(&[bytes_of(&header), bytes_of(&fuse_open_in::default())].concat());
            assert_eq!(replies.len(), 1);
        };
        for _ in 0..20 {
            open(
                (1 + random.below_u64(5)) << 16 | random.below_u64(4),
                (2 * random.below_u64(8)) | FUSE_UNIQUE_RESEND,
            );
        }
    }
}
