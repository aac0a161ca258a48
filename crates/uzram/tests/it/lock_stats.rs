//! Lock statistics (feature `lock-stats`) against what threads know that they did. The statistics are the
//! process's, so these tests take turns.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use uzram::random::Random;
use uzram::sync::{
    Condvar, LockMode, LockRecording, LockStat, Mutex, RwLock, WaitTable, WideLock, classes, lock_stats,
    record_locks_on_demand, reset_lock_stats,
};

/// Waits for its turn, and begins with statistics of 0. The first one sees that locks are recorded from the
/// start. The recording ends before the turn.
fn turn() -> (LockRecording, MutexGuard<'static, ()>) {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    static FIRST: Once = Once::new();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    FIRST.call_once(|| {
        drop(Mutex::new(&classes::DEVICE, ()).lock());
        assert_eq!(exclusive("device").hold.count, 1);
        record_locks_on_demand();
    });
    reset_lock_stats();
    (LockRecording::start(), turn)
}

fn stat(class: &str, mode: LockMode) -> LockStat {
    lock_stats().into_iter().find(|stat| stat.class == class && stat.mode == mode).unwrap()
}

fn exclusive(class: &str) -> LockStat {
    stat(class, LockMode::Exclusive)
}

fn assert_sound(stat: &LockStat) {
    assert!(stat.acquisition_bounces <= stat.hold.count, "{stat:?}");
    assert!(stat.contention_bounces <= stat.wait.count && stat.wait.count <= stat.hold.count, "{stat:?}");
    for times in [stat.wait, stat.hold] {
        assert!(times.min_ns <= times.max_ns && times.max_ns <= times.total_ns, "{stat:?}");
        assert!(times.total_ns <= times.count * times.max_ns, "{stat:?}");
    }
}

fn two_cpus() -> Option<[usize; 2]> {
    let allowed = sched_getaffinity(None).unwrap();
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let two = cpus.next().zip(cpus.next()).map(|(one, two)| [one, two]);
    if two.is_none() {
        println!("skipped: bounces between CPUs: there is one CPU only");
    }
    two
}

fn move_to(cpu: usize) {
    let mut one = CpuSet::new();
    one.set(cpu);
    sched_setaffinity(None, &one).unwrap();
}

#[test]
fn acquisitions_of_several_threads_add_up() {
    let _turn = turn();
    const THREADS: u64 = 4;
    let locks = [(); 2].map(|()| Mutex::new(&classes::DEVICE, ()));
    let (pool, slot, table) = (RwLock::new(&classes::ZS_POOL), WideLock::default(), WaitTable::new(4));
    let taken: [AtomicU64; 4] = Default::default();
    let held_ns = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (locks, pool, slot, table, taken, held_ns) = (&locks, &pool, &slot, &table, &taken, &held_ns);
            scope.spawn(move || {
                let mut random = Random::new(thread);
                for _ in 0..3000 {
                    let kind = random.below(4);
                    match kind {
                        0 => {
                            let device = locks[random.below(2)].lock();
                            let since = Instant::now();
                            std::hint::black_box(&device);
                            held_ns.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
                            drop(device);
                        }
                        1 => drop(pool.read()),
                        2 => drop(pool.write()),
                        _ => drop(slot.lock(table, 7)),
                    }
                    taken[kind].fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let stats =
        [exclusive("device"), stat("zs_pool", LockMode::Shared), exclusive("zs_pool"), exclusive("slot")];
    for (stat, taken) in stats.iter().zip(&taken) {
        assert_eq!(stat.hold.count, taken.load(Ordering::Relaxed), "{stat:?}");
        assert!(stat.hold.min_ns > 0, "{stat:?}");
        assert_sound(stat);
    }
    assert!(stats[0].hold.total_ns >= held_ns.load(Ordering::Relaxed), "{:?}", stats[0]);
    lock_stats().iter().for_each(assert_sound);
}

#[test]
fn a_bounce_is_an_acquisition_after_another_cpus() {
    let _turn = turn();
    let Some(cpus) = two_cpus() else { return };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (lock, other) = (Mutex::new(&classes::DEVICE, ()), Mutex::new(&classes::DEVICE, ()));
            let (slot, table) = (WideLock::default(), WaitTable::new(1));
            for turn in 0..40 {
                // Twice on each CPU: 0, 0, 1, 1, 0, …
                move_to(cpus[turn / 2 % 2]);
                drop(lock.lock());
                drop(slot.lock(&table, 3));
                // Of the same class, but always on one CPU, as another slot is.
                if turn / 2 % 2 == 0 {
                    drop(other.lock());
                    drop(slot.lock(&table, 4));
                }
            }
        });
    });
    for class in ["device", "slot"] {
        let stat = exclusive(class);
        assert_eq!((stat.hold.count, stat.acquisition_bounces), (60, 19), "{stat:?}");
        assert_eq!((stat.wait.count, stat.contention_bounces), (0, 0), "{stat:?}");
    }
}

#[test]
fn a_wait_is_recorded_and_bounces_between_cpus() {
    let _turn = turn();
    const HELD: Duration = Duration::from_millis(20);
    const PATIENCE: Duration = Duration::from_secs(20);
    let cpus = two_cpus();
    let (lock, taken) = (Mutex::new(&classes::DEVICE, ()), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if let Some([one, _]) = cpus {
                move_to(one);
            }
            let held = lock.lock();
            taken.wait();
            let start = Instant::now();
            while !held.is_contended() && start.elapsed() < PATIENCE {
                std::thread::yield_now();
            }
            std::thread::sleep(HELD);
            drop(held);
        });
        scope.spawn(|| {
            if let Some([_, two]) = cpus {
                move_to(two);
            }
            taken.wait();
            drop(lock.lock());
        });
    });
    let stat = exclusive("device");
    assert_eq!((stat.hold.count, stat.wait.count), (2, 1), "{stat:?}");
    assert!(stat.hold.max_ns >= HELD.as_nanos() as u64, "{stat:?}");
    assert!(stat.wait.total_ns > 0 && stat.wait.min_ns == stat.wait.max_ns, "{stat:?}");
    if cpus.is_some() {
        assert_eq!((stat.contention_bounces, stat.acquisition_bounces), (1, 1), "{stat:?}");
    }
    assert_sound(&stat);
}

#[test]
fn waiting_for_a_condition_is_not_holding() {
    let _turn = turn();
    const SLEPT: Duration = Duration::from_millis(50);
    let (lock, never) = (Mutex::new(&classes::DEVICE, ()), Condvar::new());
    let holds_meanwhile = || {
        reset_lock_stats();
        let start = Instant::now();
        // It may wake early.
        while start.elapsed() < SLEPT {
            drop(lock.lock().wait_for(&never, SLEPT.saturating_sub(start.elapsed())));
        }
        let stat = exclusive("device");
        assert!(stat.hold.count >= 2, "before the wait and after it: {stat:?}");
        stat.hold.total_ns >= (SLEPT / 2).as_nanos() as u64
    };
    // On a busy machine a thread may lose its CPU while it holds a lock, but not each time.
    assert!((0..20).any(|_| !holds_meanwhile()));
}

#[test]
fn on_demand_only_what_happens_meanwhile_is_recorded() {
    let (recording, _turn) = turn();
    drop(recording);
    let lock = Mutex::new(&classes::DEVICE, ());
    let take = |times| (0..times).for_each(|_| drop(lock.lock()));
    take(10);
    let recordings = (LockRecording::start(), LockRecording::start());
    take(100);
    drop(recordings.0);
    take(1000);
    drop(recordings.1);
    take(10_000);
    assert_eq!(exclusive("device").hold.count, 1100);
    reset_lock_stats();
    assert_eq!(exclusive("device").hold, exclusive("writeback").hold);
}
