//! Pagers and regions that end while they are in use: by SIGKILL, by being dropped, and many at once.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use libc::{c_int, c_void, siginfo_t};
use uzram::random::Random;
use uzram::units::PAGE_SIZE;
use uzram_pager::TrapKind;

use crate::common::{
    MIB, builder, each, each_in_child, expect_pages, fill_pages, pager, set_action, wait_until,
};

/// Says with which trap, and in which folder, a process is to evict until it is killed.
const SPILL: &str = "UZRAM_PAGER_TEST_SPILL";

/// Writes what does not compress to more memory than the limit, for as long as the process lives.
fn evict_for_ever(trap: TrapKind, dir: &str) -> ! {
    let pager = builder(trap, 8 * MIB).spill(dir, 128 << 20).build().unwrap();
    let mut region = pager.map(32 * MIB).unwrap();
    let mut random = Random::new(1);
    for round in 0.. {
        region.chunks_mut(PAGE_SIZE).for_each(|page| random.fill(page));
        if round == 0 {
            println!("\nready");
        }
    }
    unreachable!()
}

fn shared_files() -> Vec<String> {
    let Ok(files) = std::fs::read_dir("/dev/shm") else { return Vec::new() };
    let names = files.filter_map(|file| file.ok()?.file_name().into_string().ok());
    let mut names: Vec<_> = names.filter(|name| name.contains("uzram")).collect();
    names.sort();
    names
}

#[test]
fn a_killed_process_leaves_nothing() {
    if let Ok(case) = std::env::var(SPILL) {
        let (trap, dir) = case.split_once(' ').unwrap();
        let trap = TrapKind::ALL.into_iter().find(|kind| kind.name() == trap).unwrap();
        // SAFETY: has this process end with the one that started it.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        evict_for_ever(trap, dir);
    }
    each(&TrapKind::ALL, |trap| {
        let dir = tempfile::tempdir().unwrap();
        let files = shared_files();
        let mut random = Random::new(3);
        for _ in 0..3 {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "ends::a_killed_process_leaves_nothing", "--nocapture"])
                .env(SPILL, format!("{} {}", trap.name(), dir.path().display()))
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            assert!(lines.any(|line| line.unwrap() == "ready"), "{trap:?}: {:?}", child.wait());
            std::thread::sleep(Duration::from_micros(random.below_u64(100_000)));
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{trap:?}");
        }
        assert_eq!(shared_files(), files, "{trap:?}");
    });
}

/// Threads whose touch has failed.
static FAILED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_signal(_: c_int, _: *mut siginfo_t, _: *mut c_void) {
    FAILED.fetch_add(1, Ordering::SeqCst);
    // SAFETY: ends this thread, which nobody joins, and which holds nothing.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
}

fn touch_for_ever(start: usize, pages: usize, seed: u64) {
    let mut random = Random::new(seed);
    loop {
        let byte = (start + random.below(pages) * PAGE_SIZE + seed as usize) as *mut u8;
        // SAFETY: a byte of the region, or the thread ends.
        unsafe { byte.write_volatile(byte.read_volatile().wrapping_add(1)) };
    }
}

#[test]
fn touches_of_a_region_that_is_dropped_fail_and_the_pager_goes_on() {
    const THREADS: usize = 6;
    let body = |trap| {
        let action = on_signal as extern "C" fn(_, _, _) as usize;
        set_action(libc::SIGSEGV, action, libc::SA_SIGINFO | libc::SA_ONSTACK);
        let pager = pager(trap, 4 * MIB);
        for round in 1..=5 {
            let region = pager.map(16 * MIB).unwrap();
            let start = region.as_mut_ptr().addr();
            for seed in 0..THREADS as u64 {
                std::thread::spawn(move || touch_for_ever(start, 4096, seed));
            }
            std::thread::sleep(Duration::from_millis(30 * round as u64));
            drop(region);
            wait_until("all threads have ended", || FAILED.load(Ordering::SeqCst) == round * THREADS);
            assert_eq!(pager.stats().mapped_pages, 0);
            let mut other = pager.map(8 * MIB).unwrap();
            assert!(other.iter().all(|byte| *byte == 0));
            fill_pages(&mut other, 0, 1);
            expect_pages(&other, 0, 1);
        }
        assert_eq!(pager.stats().pages_lost, 0);
        drop(pager);
        println!("dropped");
    };
    each_in_child("dropped", &TrapKind::ALL, body, |_, ended| {
        ended.assert_success();
        assert!(ended.text.contains("dropped") && !ended.text.contains("panicked"), "{}", ended.text);
    });
}

#[test]
fn regions_come_and_go_in_many_threads() {
    const THREADS: usize = 8;
    each(&TrapKind::ALL, |trap| {
        let pager = pager(trap, 4 * MIB);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let pager = &pager;
                scope.spawn(move || {
                    let mut random = Random::new(thread as u64);
                    let mut regions = Vec::new();
                    for nth in 0..60 {
                        let pages = 1 + random.below(200);
                        let mut region = pager.map(pages * PAGE_SIZE).unwrap();
                        let at = random.below(pages);
                        assert!(region[at * PAGE_SIZE..].iter().all(|byte| *byte == 0), "not empty");
                        fill_pages(&mut region, thread << 16, nth);
                        regions.push((region, nth));
                        if random.below(3) == 0 || regions.len() > 5 {
                            let (region, nth) = regions.swap_remove(random.below(regions.len()));
                            match random.below(3) {
                                0 => region.pageout(..).unwrap(),
                                1 => region.prefetch(..).unwrap(),
                                _ => {}
                            }
                            expect_pages(&region, thread << 16, nth);
                        }
                    }
                    regions.iter().for_each(|(region, nth)| expect_pages(region, thread << 16, *nth));
                });
            }
        });
        let stats = pager.stats();
        assert_eq!((stats.mapped_pages, stats.resident_pages, stats.pages_lost), (0, 0, 0), "{stats:?}");
        assert!(stats.pages_out > 1000, "{stats:?}");
        assert!(pager.map(MIB).unwrap().iter().all(|byte| *byte == 0));
    });
}
