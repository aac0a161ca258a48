//! Compares seeded random operations with a naive model, a map.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use super::*;

for_every_design!(agrees_with_a_naive_model, threads_agree_with_naive_models);

fn store<D: PoolLocks>(pool: &RawPool<D>, bytes: &[u8], owner: u32, random: &mut Random) -> Option<u32> {
    let may_wait = || pool.store(bytes, owner, Gfp::MayWait);
    let first = if random.below(2) == 0 {
        pool.store(bytes, owner, Gfp::NoWait).or_else(|_| may_wait())
    } else {
        may_wait()
    };
    first.ok()
}

fn compact<D: PoolLocks>(pool: &RawPool<D>, random: &mut Random) {
    let effort = if random.below(2) == 0 { Effort::Zspages } else { Effort::Tight };
    let mut budget = if random.below(2) == 0 { Budget::unlimited() } else { Budget::bytes(20_000) };
    pool.compact(effort, &mut budget);
}

/// Evicts some of the coldest objects; their owners free most of them.
fn evict<D: PoolLocks>(
    pool: &RawPool<D>,
    live: &mut HashMap<u32, Live>,
    handles: &mut Vec<u32>,
    random: &mut Random,
) {
    let before = pool.pages_used();
    let by_owner: HashMap<u32, u32> = live.iter().map(|(handle, live)| (live.owner, *handle)).collect();
    let mut asked = HashSet::new();
    let freed = pool.reclaim(1 + random.below(60) as u64, |owner| {
        let handle = by_owner[&owner];
        assert!(asked.insert(handle), "asked twice");
        if random.below(20) > 0 {
            free(pool, handle);
            live.remove(&handle);
        }
    });
    assert_eq!(pool.pages_used(), before - freed.expect("it keeps the order"));
    handles.retain(|handle| live.contains_key(handle));
}

fn agrees_with_a_naive_model<D: PoolLocks>() {
    for seed in 0..4 {
        agree(&pool::<D>(4 + 4 * seed as usize), seed);
    }
}

/// Checks everything after each series of injected failures of the arena.
fn agree<D: PoolLocks>(pool: &RawPool<D>, seed: u64) {
    let mut random = Random::new(seed);
    let mut live: HashMap<u32, Live> = HashMap::new();
    let (mut handles, mut refused) = (Vec::new(), 0);
    for step in 0..6000u32 {
        if step % 1000 == 500 {
            pool.arena.inject_faults(seed, 3);
        } else if step % 1000 == 999 {
            pool.arena.inject_faults(0, 0);
            check(pool, &live);
        }
        match random.below(600) {
            0 | 1 => compact(pool, &mut random),
            2 => evict(pool, &mut live, &mut handles, &mut random),
            _ => {}
        }
        // Grow for 2000 steps, then shrink.
        if random.below(100) < if step / 2000 % 2 == 0 { 70 } else { 40 } {
            let bytes = contents(&mut random, u64::from(step));
            let Some(handle) = store(pool, &bytes, step, &mut random) else {
                refused += 1;
                continue;
            };
            let new = live.insert(handle, Live { owner: step, bytes });
            assert_eq!(new, None, "seed {seed}: a handle in use");
            handles.push(handle);
        } else if !handles.is_empty() {
            let handle = handles.swap_remove(random.below(handles.len()));
            let Live { owner, bytes } = live.remove(&handle).expect("live");
            assert_eq!(*read(pool, handle, owner, bytes.len()).expect("sound"), *bytes, "seed {seed}");
            free(pool, handle);
        }
    }
    check(pool, &live);
    live.into_keys().for_each(|handle| free(pool, handle));
    check(pool, &HashMap::new());
    assert_eq!(pool.corrupted(), 0);
    assert!((10..2000).contains(&refused), "seed {seed}: {refused} refused");
}

fn threads_agree_with_naive_models<D: PoolLocks>() {
    for seed in 0..2 {
        let pool = pool::<D>(if seed == 0 { 16 } else { 5 });
        if seed == 1 {
            pool.arena.set_run_cache_batch_pages(0).expect("in range");
        }
        threads_agree(&pool, seed);
    }
}

/// Eight threads and one that compacts, while allocations fail.
fn threads_agree<D: PoolLocks>(pool: &RawPool<D>, seed: u64) {
    const THREADS: u64 = 8;
    // ThreadSanitizer makes a step many times slower.
    const STEPS: u64 = if cfg!(tsan) { 200 } else { 2000 };
    type Shared = Mutex<Option<(u32, Live)>>;
    let shared: Vec<Shared> = (0..64).map(|_| Mutex::new(&classes::SLOT, None)).collect();
    let done = AtomicBool::new(false);
    let own: Vec<HashMap<u32, Live>> = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random::new(seed);
            while !done.load(Ordering::Relaxed) {
                compact(pool, &mut random);
                std::thread::yield_now();
            }
        });
        let worker = |thread: u64| {
            let shared = &shared;
            scope.spawn(move || {
                let mut random = Random::new(seed << 32 | thread);
                let mut live: HashMap<u32, Live> = HashMap::new();
                for step in 0..STEPS {
                    if thread == 0 && step % 500 == 250 {
                        pool.arena.inject_faults(seed, 5);
                    } else if thread == 0 && step % 500 == 499 {
                        pool.arena.inject_faults(0, 0);
                    }
                    let number = thread << 32 | step;
                    step_of_a_thread(pool, shared, &mut live, &mut random, number);
                }
                live
            })
        };
        let workers: Vec<_> = (0..THREADS).map(worker).collect();
        let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        done.store(true, Ordering::Relaxed);
        ended.into_iter().map(|live| live.expect("no panic")).collect()
    });
    pool.arena.inject_faults(0, 0);
    let shared = shared.into_iter().filter_map(|slot| slot.lock().take());
    let live: HashMap<u32, Live> = shared.chain(own.into_iter().flatten()).collect();
    check(pool, &live);
    pool.compact(Effort::Tight, &mut Budget::unlimited());
    check(pool, &live);
    live.into_keys().for_each(|handle| free(pool, handle));
    check(pool, &HashMap::new());
    assert_eq!(pool.corrupted(), 0);
}

fn step_of_a_thread<D: PoolLocks>(
    pool: &RawPool<D>,
    shared: &[Mutex<Option<(u32, Live)>>],
    live: &mut HashMap<u32, Live>,
    random: &mut Random,
    number: u64,
) {
    let owner = number as u32;
    let any = live.keys().next().copied();
    match (random.below(8), any) {
        (0..=2, _) if live.len() < 200 => {
            let bytes = contents(random, number);
            if let Some(handle) = store(pool, &bytes, owner, random) {
                live.insert(handle, Live { owner, bytes });
            }
        }
        (3, Some(handle)) => {
            let Live { owner, bytes } = &live[&handle];
            assert_eq!(*read(pool, handle, *owner, bytes.len()).expect("sound"), **bytes, "{number:#x}");
            free(pool, handle);
            live.remove(&handle);
        }
        // Shared objects, like the store's slots: exchanged and read under a lock.
        _ => {
            let mut slot = shared[random.below(shared.len())].lock();
            let bytes = contents(random, number);
            let Some(handle) = store(pool, &bytes, owner, random) else { return };
            let Some((old, Live { owner, bytes })) = slot.replace((handle, Live { owner, bytes })) else {
                return;
            };
            let reading = read(pool, old, owner, bytes.len());
            drop(slot);
            // Go on reading after the object is freed, where the design allows it.
            if D::READS_OUTLIVE_FREES {
                free(pool, old);
            }
            assert_eq!(*reading.expect("sound"), *bytes, "{number:#x}");
            if !D::READS_OUTLIVE_FREES {
                free(pool, old);
            }
        }
    }
}
