//! Pagers in tests, pages that tell which they are, and processes of this program for tests that end or
//! change theirs.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use uzram::random::Random;
use uzram::units::PAGE_SIZE;
use uzram_pager::{Pager, PagerBuilder, Region, TrapKind};

pub const MIB: usize = 1 << 20;
/// The trap that uses SIGSEGV.
pub const OF_SIGNALS: [TrapKind; 1] = [TrapKind::Guard];
/// The user and group without rights.
pub const NOBODY: u32 = 65534;
/// Says which case a process of this program is to run.
const CASE: &str = "UZRAM_PAGER_TEST_CASE";
/// How long such a process may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a test with each of some traps that works here.
pub fn each(traps: &[TrapKind], test: impl Fn(TrapKind)) {
    for trap in traps {
        match trap.check() {
            Ok(()) => test(*trap),
            Err(error) => println!("skipped: {}: {error}", trap.name()),
        }
    }
}

pub fn builder(trap: TrapKind, limit: usize) -> PagerBuilder {
    Pager::builder().limit(limit as u64).capacity(1 << 30).trap(trap)
}

pub fn pager(trap: TrapKind, limit: usize) -> Pager {
    builder(trap, limit).build().unwrap()
}

/// Returns a pager and a region of it, filled with numbers from 0 on.
pub fn filled(trap: TrapKind, limit: usize, pages: usize) -> (Pager, Region) {
    let pager = pager(trap, limit);
    let mut region = pager.map(pages * PAGE_SIZE).unwrap();
    fill_pages(&mut region, 0, 1);
    (pager, region)
}

/// Fills a page with words that compress well, and that tell which page and version it is.
pub fn fill(page: &mut [u8], number: usize, version: u64) {
    let mut random = Random::new(number as u64 ^ version << 32);
    for (at, word) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let value = if at % 16 == 0 { random.next() } else { (number as u64) << 20 | version };
        *word = value.to_le_bytes();
    }
}

/// Returns whether a page is as [`fill`] made it.
pub fn is_filled(page: &[u8], number: usize, version: u64) -> bool {
    let mut wanted = [0; PAGE_SIZE];
    fill(&mut wanted[..page.len()], number, version);
    *page == wanted[..page.len()]
}

/// Fills pages with numbers from `first` on.
pub fn fill_pages(pages: &mut [u8], first: usize, version: u64) {
    for (nth, page) in pages.chunks_mut(PAGE_SIZE).enumerate() {
        fill(page, first + nth, version);
    }
}

/// Checks what [`fill_pages`] filled.
#[track_caller]
pub fn expect_pages(pages: &[u8], first: usize, version: u64) {
    for (nth, page) in pages.chunks(PAGE_SIZE).enumerate() {
        let number = first + nth;
        let found = u64::from_le_bytes(page[8..16].try_into().unwrap());
        let (at, of) = (found >> 20, found & 0xfffff);
        assert!(is_filled(page, number, version), "page {number} has not version {version}, but {at}'s {of}");
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
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT / 2;
    while !holds() {
        assert!(Instant::now() < end, "not within {:?}: {what}", TIMEOUT / 2);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How a process of this program ended.
pub struct Ended {
    pub status: ExitStatus,
    /// Both outputs.
    pub text: String,
}

impl Ended {
    #[track_caller]
    pub fn assert_success(&self) {
        print!("{}", self.text);
        assert!(self.status.success(), "{}: {}", self.status, self.text);
    }

    #[track_caller]
    pub fn assert_signal(&self, signal: i32) {
        assert_eq!(self.status.signal(), Some(signal), "{}: {}", self.status, self.text);
    }
}

/// Runs `body`, a closure of a test, in a process of its own, which runs that test; `None` in that process if
/// it is for another case. A test may have any number of cases, each with a name of its own. The process ends
/// after `body`.
#[track_caller]
pub fn in_child<F: FnOnce()>(case: &str, body: F) -> Option<Ended> {
    in_child_of(test_of::<F>(), case, body)
}

/// Returns the name of the test that a closure is of: `ends::a_test` of `it::ends::a_test::{{closure}}`.
fn test_of<F>() -> &'static str {
    let path = std::any::type_name::<F>().split_once("::").unwrap().1;
    path.split("::{{closure}}").next().unwrap()
}

#[track_caller]
fn in_child_of(test: &str, case: &str, body: impl FnOnce()) -> Option<Ended> {
    if let Ok(wanted) = std::env::var(CASE) {
        if wanted == case {
            prepare_child();
            body();
            std::process::exit(0);
        }
        return None;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CASE, case)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut out, mut errors) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        out.read_to_string(&mut text).unwrap();
        errors.read_to_string(&mut text).unwrap();
        text
    });
    let end = Instant::now() + TIMEOUT;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if Instant::now() > end => {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("{test}, {case}: takes more than {TIMEOUT:?}: {}", reader.join().unwrap());
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let text = reader.join().unwrap();
    assert!(!text.contains("running 0 tests"), "there is no test '{test}'");
    Some(Ended { status, text })
}

/// Runs `body` with each of some traps that works here, each in a process of its own, and hands how that
/// ended to `check`.
#[track_caller]
pub fn each_in_child<F: Fn(TrapKind)>(
    case: &str,
    traps: &[TrapKind],
    body: F,
    check: impl Fn(TrapKind, Ended),
) {
    each(traps, |trap| {
        let case = format!("{case} {}", trap.name());
        if let Some(ended) = in_child_of(test_of::<F>(), &case, || body(trap)) {
            check(trap, ended);
        }
    });
}

/// Runs `body` as [`each_in_child`] does; it succeeds.
#[track_caller]
pub fn each_succeeds<F: Fn(TrapKind)>(case: &str, traps: &[TrapKind], body: F) {
    each_in_child(case, traps, body, |_, ended| ended.assert_success());
}

/// Sets the action of a signal, a function that is safe to run anywhere; returns the one of before.
pub fn set_action(signal: i32, action: usize, flags: i32) -> libc::sigaction {
    // SAFETY: all fields are integers, or an optional function. The caller's: `action` is the address of a
    // function that takes what `flags` say, and is safe to run anywhere.
    unsafe {
        let mut new: libc::sigaction = std::mem::zeroed();
        let mut old: libc::sigaction = std::mem::zeroed();
        new.sa_sigaction = action;
        new.sa_flags = flags;
        assert_eq!(libc::sigaction(signal, &raw const new, &raw mut old), 0);
        old
    }
}

/// Has this process end with the one that started it, and without a core file.
fn prepare_child() {
    // SAFETY: sets attributes of this process.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        assert_eq!(libc::setrlimit(libc::RLIMIT_CORE, &raw const none), 0);
    }
}

/// Threads, each with pages of its own in one region, write, read, evict, prefetch and pin, and know what
/// each page holds.
pub fn stress(pager: &Pager, threads: usize, seed: u64, duration: Duration) {
    const PAGES: usize = 1024;
    let region = pager.map(threads * PAGES * PAGE_SIZE).unwrap();
    let start = region.as_mut_ptr().addr();
    let end = Instant::now() + duration;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let region = &region;
            scope.spawn(move || {
                let mut random = Random::new(seed + thread as u64);
                let (mut versions, mut version) = ([0u64; PAGES], 0);
                while Instant::now() < end {
                    let page = random.below(PAGES);
                    let pages = 1 + random.below(40).min(PAGES - page - 1);
                    let number = thread * PAGES + page;
                    let range = number * PAGE_SIZE..(number + pages) * PAGE_SIZE;
                    // SAFETY: the pages are this thread's, and the region outlives the scope.
                    let mine = unsafe { part(start, number, pages) };
                    match random.below(16) {
                        0 => region.pageout(range).unwrap(),
                        1 => region.prefetch(range).unwrap(),
                        2 => drop(region.pin(range).unwrap()),
                        3..8 => {
                            version += 1;
                            fill_pages(mine, number, version);
                            versions[page..page + pages].fill(version);
                        }
                        _ => {
                            for (nth, contents) in mine.chunks(PAGE_SIZE).enumerate() {
                                match versions[page + nth] {
                                    0 => assert!(contents.iter().all(|byte| *byte == 0), "seed {seed}"),
                                    version => expect_pages(contents, number + nth, version),
                                }
                            }
                        }
                    }
                }
            });
        }
    });
    let stats = pager.stats();
    assert!(stats.pages_out > 100 && stats.pages_lost == 0, "{:?} {stats:?}", pager.trap());
}

/// Gives up root's rights, if this process has them.
pub fn drop_privileges() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    // SAFETY: changes the users of this process, in all threads.
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
        assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
    }
}
