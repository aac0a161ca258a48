#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use uzram::random::Random;

use super::*;
use crate::{Pager, TrapKind};

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Returns memory with a limit of 8 MiB, whose pager starts at once; `None` if there can be none here.
fn memory(spill: Option<(PathBuf, u64)>) -> Option<Memory> {
    if let Err(error) = TrapKind::Uffd.check() {
        println!("skipped: {error}");
        return None;
    }
    let mut pager = Pager::builder().limit(8 << 20).capacity(2 << 30);
    if let Some((dir, bytes)) = spill {
        pager = pager.spill(dir, bytes);
    }
    let settings = Settings { pager, plain_bytes: 0, hard: false, on_excess: || {}, on_figures: |_| {} };
    let memory = Memory::new(settings).unwrap();
    memory.commit(memory.heap().0.addr(), 1);
    assert!(memory.stats().runs, "{:?}", memory.failure());
    Some(memory)
}

/// What a page is expected to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Unmapped,
    /// Mapped for reading and writing, or for reading alone: the version of its contents, 0 for zeros.
    Mapped {
        version: u64,
        is_writable: bool,
    },
}

fn word(page: usize, version: u64, nth: usize) -> u64 {
    match (version, nth % 3) {
        (0, _) => 0,
        (_, 0) => Random::new(page as u64 ^ version << 20 ^ (nth as u64) << 40).next(),
        _ => version << 32 | page as u64,
    }
}

struct Model {
    memory: Memory,
    base: usize,
    pages: Vec<Page>,
    version: u64,
    at: String,
}

impl Model {
    fn words(&self, page: usize) -> *mut u64 {
        std::ptr::with_exposed_provenance_mut(self.base + page * PAGE_SIZE)
    }

    fn check(&self, page: usize) {
        let Page::Mapped { version, .. } = self.pages[page] else { return };
        for nth in [0, 1, 2, 255, 510, 511] {
            // SAFETY: the page is mapped and readable.
            let found = unsafe { self.words(page).add(nth).read_volatile() };
            assert_eq!(found, word(page, version, nth), "{}: page {page}, word {nth}", self.at);
        }
    }

    fn fill(&mut self, page: usize) {
        let Page::Mapped { is_writable: true, .. } = self.pages[page] else { return };
        self.version += 1;
        for nth in 0..512 {
            // SAFETY: the page is mapped and writable.
            unsafe { self.words(page).add(nth).write_volatile(word(page, self.version, nth)) };
        }
        self.pages[page] = Page::Mapped { version: self.version, is_writable: true };
    }

    fn address(&self, page: usize) -> usize {
        self.base + page * PAGE_SIZE
    }
}

/// Carries out random calls on 24 MiB, three times the limit, and compares each page with what it must hold.
fn random_calls(seed: u64, steps: usize, spill: Option<(PathBuf, u64)>) {
    const PAGES: usize = 6144;
    let Some(memory) = memory(spill) else { return };
    let mut random = Random::new(seed);
    let base = memory.map(PAGES * PAGE_SIZE, 1 << 20, READ_WRITE).unwrap().expose_provenance();
    assert!(base.is_multiple_of(1 << 20));
    let new = Page::Mapped { version: 0, is_writable: true };
    let mut model = Model { memory, base, pages: vec![new; PAGES], version: 0, at: String::new() };
    for step in 0..steps {
        model.at = format!("seed {seed}, step {step}");
        let first = random.next() as usize % PAGES;
        let pages = (random.next() as usize % 300 + 1).min(PAGES - first);
        let (address, len, part) = (model.address(first), pages * PAGE_SIZE, first..first + pages);
        let is_mapped = |page: &Page| *page != Page::Unmapped;
        let all_mapped = model.pages[part.clone()].iter().all(is_mapped);
        match random.next() % 16 {
            0 => {
                model.memory.unmap(address, len, |_, _| panic!("all of it is inside")).unwrap();
                model.pages[part].fill(Page::Unmapped);
            }
            1 => {
                model.memory.map_at(address, len, READ_WRITE).unwrap().unwrap();
                model.pages[part].fill(new);
            }
            2 | 3 => {
                let is_writable = random.next().is_multiple_of(2);
                let protection = if is_writable { READ_WRITE } else { libc::PROT_READ };
                let changed = model.memory.protect(address, len, protection).unwrap();
                assert_eq!(changed, if all_mapped { Ok(()) } else { Err(libc::ENOMEM) }, "{}", model.at);
                // As the kernel does, up to the first page that is not mapped.
                for page in part.clone().take_while(|page| is_mapped(&model.pages[*page])).collect::<Vec<_>>()
                {
                    if let Page::Mapped { version, .. } = model.pages[page] {
                        model.pages[page] = Page::Mapped { version, is_writable };
                    }
                }
            }
            4 | 5 => {
                let advice = [libc::MADV_DONTNEED, libc::MADV_FREE][random.next() as usize % 2];
                let advised = model.memory.advise(address, len, advice).unwrap();
                assert_eq!(advised, if all_mapped { Ok(()) } else { Err(libc::ENOMEM) }, "{}", model.at);
                for page in &mut model.pages[part] {
                    if let Page::Mapped { version, .. } = page {
                        *version = 0;
                    }
                }
            }
            6 => {
                let advice = [libc::MADV_PAGEOUT, libc::MADV_WILLNEED, libc::MADV_RANDOM, libc::MADV_NORMAL];
                let _ = model.memory.advise(address, len, advice[random.next() as usize % 4]).unwrap();
            }
            7..=11 => part.for_each(|page| model.fill(page)),
            _ => part.for_each(|page| model.check(page)),
        }
    }
    (0..PAGES).for_each(|page| model.check(page));
    let stats = model.memory.stats();
    assert!(stats.runs && stats.pager.pages_out > 0, "{stats:?}");
    model.memory.unmap(model.base, PAGES * PAGE_SIZE, |_, _| ()).unwrap();
    assert_eq!(model.memory.stats().pager.resident_pages, 0, "{:?}", model.memory.stats());
}

#[test]
fn random_calls_agree_with_a_model_of_single_pages() {
    for seed in 0..3 {
        random_calls(seed, 600, None);
    }
}

#[test]
fn random_calls_agree_with_a_model_if_pages_are_spilled() {
    let dir = tempfile::tempdir().unwrap();
    random_calls(7, 600, Some((dir.path().to_owned(), 64 << 20)));
}

#[test]
fn what_is_elsewhere_is_not_touched() {
    let Some(memory) = memory(None) else { return };
    let (start, len) = memory.addresses();
    for address in [PAGE_SIZE, start - PAGE_SIZE, start + len] {
        assert!(memory.map_at(address, PAGE_SIZE, READ_WRITE).is_none());
        assert!(memory.protect(address, PAGE_SIZE, READ_WRITE).is_none());
        assert!(memory.advise(address, PAGE_SIZE, libc::MADV_DONTNEED).is_none());
        assert!(memory.unmap(address, PAGE_SIZE, |_, _| ()).is_none());
        assert!(memory.replace(address, PAGE_SIZE, || ()).is_none());
        assert!(memory.protection(address).is_none());
    }
    for len in [usize::MAX, usize::MAX - PAGE_SIZE, usize::MAX / 2] {
        assert!(memory.map(len, PAGE_SIZE, READ_WRITE).is_none());
        assert!(memory.advise(start + PAGE_SIZE, len, libc::MADV_DONTNEED).is_none_or(|done| done.is_err()));
    }
}

#[test]
fn memory_from_before_the_pager_is_taken_over() {
    let Some(other) = memory(None) else { return };
    drop(other);
    let settings = Settings {
        pager: Pager::builder().limit(8 << 20).capacity(2 << 30),
        plain_bytes: 16 << 20,
        hard: false,
        on_excess: || {},
        on_figures: |_| {},
    };
    let memory = Memory::new(settings).unwrap();
    let plain = memory.map(12 << 20, PAGE_SIZE, READ_WRITE).unwrap().cast::<u64>();
    let words = (12 << 20) / 8;
    // SAFETY: the memory has these words, and nobody else has it.
    let write = |at: usize| unsafe { plain.add(at).write_volatile(at as u64 | 1 << 40) };
    (0..words).step_by(64).for_each(write);
    assert!(!memory.stats().runs);
    let more = memory.map(8 << 20, PAGE_SIZE, READ_WRITE).unwrap();
    let stats = memory.stats();
    assert!(stats.runs && stats.pager.resident_pages > 0, "{stats:?} {:?}", memory.failure());
    // SAFETY: the memory has these bytes.
    unsafe { more.write_bytes(7, 8 << 20) };
    // SAFETY: as above.
    let read = |at: usize| unsafe { plain.add(at).read_volatile() };
    assert!((0..words).step_by(64).all(|at| read(at) == at as u64 | 1 << 40));
    let stats = memory.stats();
    assert!(stats.pager.pages_out > 2048, "{stats:?}");
}
