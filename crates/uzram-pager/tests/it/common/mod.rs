//! Pagers in tests, pages that tell which they are, and processes of this program for tests that end or
//! change theirs.

use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal, set_parent_process_death_signal, setrlimit};
use uzram::random::Random;
use uzram::units::PAGE_SIZE;
use uzram_pager::{Pager, PagerBuilder, Region, Trap};

pub const MIB: usize = 1 << 20;
/// Says which case a process of this program is to run.
const CASE: &str = "UZRAM_PAGER_TEST_CASE";
/// How long such a process may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a test with each of some traps that works here.
pub fn each(traps: &[Trap], test: impl Fn(Trap)) {
    for trap in traps {
        match trap.check() {
            Ok(()) => test(*trap),
            Err(error) => println!("skipped: {}: {error}", trap.name()),
        }
    }
}

pub fn builder(trap: Trap, limit: usize) -> PagerBuilder {
    Pager::builder().limit(limit as u64).capacity(1 << 30).trap(trap)
}

pub fn pager(trap: Trap, limit: usize) -> Pager {
    builder(trap, limit).build().unwrap()
}

/// Returns a pager and a region of it, filled with numbers from 0 on.
pub fn filled(trap: Trap, limit: usize, pages: usize) -> (Pager, Region) {
    let pager = pager(trap, limit);
    let mut region = pager.map(pages * PAGE_SIZE).unwrap();
    fill_pages(&mut region, 0, 1);
    (pager, region)
}

/// Fills a page with words that compress well, and that tell which page and version it is. The version 0 is
/// of zeros.
pub fn fill(page: &mut [u8], number: usize, version: u64) {
    let mut random = Random::new(number as u64 ^ version << 32);
    for (at, word) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let value = if at % 16 == 0 { random.next() } else { (number as u64) << 20 | version };
        *word = if version == 0 { [0; 8] } else { value.to_le_bytes() };
    }
}

/// Fills pages with numbers from `first` on.
pub fn fill_pages(pages: &mut [u8], first: usize, version: u64) {
    for (number, page) in (first..).zip(pages.chunks_mut(PAGE_SIZE)) {
        fill(page, number, version);
    }
}

/// Checks what [`fill_pages`] filled.
#[track_caller]
pub fn expect_pages(pages: &[u8], first: usize, version: u64) {
    for (number, page) in (first..).zip(pages.chunks(PAGE_SIZE)) {
        let mut wanted = [0; PAGE_SIZE];
        fill(&mut wanted[..page.len()], number, version);
        let found = u64::from_le_bytes(page[8..16].try_into().unwrap());
        let (at, of) = (found >> 20, found & 0xfffff);
        assert!(*page == wanted[..page.len()], "page {number} has not version {version}, but {at}'s {of}");
    }
}

/// Returns a slice of a region that may be used by system calls and other threads.
///
/// # Safety
/// The range is inside the region that begins at `start`, which lives longer than the result; nothing else
/// uses it.
pub unsafe fn part<'a>(start: usize, first_page: usize, pages: usize) -> &'a mut [u8] {
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts_mut((start + first_page * PAGE_SIZE) as *mut u8, pages * PAGE_SIZE) }
}

/// Waits until something holds, but not for ever.
#[track_caller]
pub fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + TIMEOUT / 2;
    while !holds() {
        assert!(Instant::now() < end, "not within {:?}: {what}", TIMEOUT / 2);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs `body` in a process of its own, which runs the test that calls this and ends after `body`; hands how
/// it ended and both of its outputs to `check`. A test may have any number of cases, each with a name of its
/// own.
#[track_caller]
pub fn in_child(case: &str, body: impl FnOnce(), check: impl FnOnce(ExitStatus, &str)) {
    if let Ok(wanted) = std::env::var(CASE) {
        if wanted != case {
            return;
        }
        // It ends with the one that started it, without a core file, and in time.
        set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
        setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).unwrap();
        std::thread::spawn(|| {
            std::thread::sleep(TIMEOUT);
            println!("takes more than {TIMEOUT:?}");
            std::process::abort();
        });
        body();
        std::process::exit(0);
    }
    let thread = std::thread::current();
    let test = thread.name().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test, "--nocapture"]).env(CASE, case).output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    assert!(!text.contains("running 0 tests"), "there is no test '{test}'");
    check(output.status, &text);
}

#[track_caller]
pub fn expect_success(status: ExitStatus, text: &str) {
    print!("{text}");
    assert!(status.success(), "{status}: {text}");
}

/// Runs `body` as [`in_child`] does, with each of some traps that works here; it succeeds.
#[track_caller]
pub fn each_succeeds(traps: &[Trap], body: impl Fn(Trap)) {
    each(traps, |trap| in_child(trap.name(), || body(trap), expect_success));
}

/// Sets the action of a signal, a function that is safe to run anywhere; returns the one of before.
pub fn set_action(signal: i32, action: usize, flags: i32) -> libc::sigaction {
    // SAFETY: all fields are integers, or an optional function. The caller's `action` takes what `flags` say.
    unsafe {
        let (mut new, mut old): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
        (new.sa_sigaction, new.sa_flags) = (action, flags);
        assert_eq!(libc::sigaction(signal, &raw const new, &raw mut old), 0);
        old
    }
}

/// Threads write, read, evict, prefetch and pin pages of their own in one region, and one that all have; and
/// map others. They know what each page holds.
pub fn stress(pager: &Pager, threads: usize, seed: u64, duration: Duration) {
    const PAGES: usize = 1024;
    let region = pager.map(threads * PAGES * PAGE_SIZE).unwrap();
    let mut shared = pager.map(PAGE_SIZE).unwrap();
    fill(&mut shared, 0, 1);
    let (start, end) = (region.as_mut_ptr().addr(), Instant::now() + duration);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (region, shared) = (&region, &shared);
            scope.spawn(move || {
                let mut random = Random::new(seed + thread as u64);
                let (mut versions, mut version) = ([0; PAGES], 0);
                let (mut other, mut other_version) = (pager.map(PAGE_SIZE).unwrap(), 0);
                while Instant::now() < end {
                    let first = random.below(PAGES);
                    let pages = 1 + random.below(40).min(PAGES - first - 1);
                    let number = thread * PAGES + first;
                    let range = number * PAGE_SIZE..(number + pages) * PAGE_SIZE;
                    // SAFETY: the pages are this thread's, and the region outlives the scope.
                    let mine = unsafe { part(start, number, pages) };
                    let versions = &mut versions[first..first + pages];
                    match random.below(20) {
                        0 => region.pageout(range).unwrap(),
                        1 => region.prefetch(range).unwrap(),
                        2 => drop(region.pin(range).unwrap()),
                        3 => shared.pageout(..).unwrap(),
                        4 => drop(shared.pin(..).unwrap()),
                        5 => {
                            expect_pages(&other, 0, other_version);
                            other = pager.map(pages * PAGE_SIZE).unwrap();
                            expect_pages(&other[random.below(pages) * PAGE_SIZE..], 0, 0);
                            fill_pages(&mut other, 0, version);
                            other_version = version;
                        }
                        6..11 => {
                            version += 1;
                            fill_pages(mine, number, version);
                            versions.fill(version);
                        }
                        _ => {
                            expect_pages(shared, 0, 1);
                            for (nth, contents) in mine.chunks(PAGE_SIZE).enumerate() {
                                expect_pages(contents, number + nth, versions[nth]);
                            }
                        }
                    }
                }
            });
        }
    });
    drop((region, shared));
    wait_until("all is given back", || pager.stats().mapped_pages + pager.stats().resident_pages == 0);
    let stats = pager.stats();
    assert!(stats.pages_out > 100 && stats.pages_lost == 0, "{:?} {stats:?}", pager.trap());
}
