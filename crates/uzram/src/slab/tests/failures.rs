//! Failing calls of the arena, one in turn, and full caches: only the allocation that needed the memory
//! fails.

use super::objects::Objects;
use super::*;
use crate::base::error::ErrorKind;
use crate::base::random::Random;

for_every_policy!(
    each_call_of_the_arena_fails_in_turn,
    a_full_cache_names_its_setting,
    no_object_is_refused_because_others_are_kept_free,
);

/// Runs a seeded script that retries what failed; returns whether a call of the arena has failed.
fn script<P: Policy>(mut objects: Objects<P>) -> bool {
    const SEED: u64 = 4;
    let mut random = Random::new(SEED);
    let mut failures = 0;
    for step in 0..150 {
        let most = if step % 50 < 25 { (64 << 10) / objects.size.max(256) } else { 5 };
        let count = 1 + random.below(30);
        let all = objects.live.len();
        if all < most {
            for _ in 0..count {
                while let Err(error) = objects.alloc(Gfp::MayWait) {
                    failures += 1;
                    assert!(matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::NoMemory), "{error}");
                    assert_eq!(failures, 1, "{error}");
                    objects.check_info();
                }
            }
        } else {
            (all.saturating_sub(count).max(most)..all).rev().for_each(|at| objects.free(at));
        }
        if step % 20 == 19 {
            objects.cache.shrink().unwrap();
        }
        objects.check_info();
    }
    (0..objects.live.len()).rev().for_each(|at| objects.free(at));
    let failed = !objects.arena.injects_faults();
    objects.arena.inject_faults(0, 0);
    objects.finish();
    failed
}

fn each_call_of_the_arena_fails_in_turn<P: Policy>() {
    let cpus = allowed_cpus();
    // On one CPU, so that the calls are the same each time.
    sched_setaffinity(None, &cpus[0]).unwrap();
    for shape in [(64, 64), (704, 8), (4096, 8)] {
        for calls_before in 0.. {
            println!("{shape:?}, {calls_before} calls before the one that fails");
            let objects = Objects::<P>::new(shape, kinds()[0]);
            objects.arena.inject_fault_after(calls_before);
            if !script(objects) {
                // The script makes fewer calls: all have failed once.
                assert!(calls_before > 10, "{calls_before} calls");
                break;
            }
        }
    }
}

fn a_full_cache_names_its_setting<P: Policy>() {
    let cpus = allowed_cpus();
    // On one CPU: a full cache does not use objects that are free on another.
    sched_setaffinity(None, &cpus[0]).unwrap();
    for restartable in kinds() {
        let arena = arena();
        let options = CacheConfig {
            max_objects_setting: "how_many",
            restartable,
            ..CacheConfig::new("full", 64, 8, 1000)
        };
        let cache = Cache::<P>::new(arena.clone(), options).unwrap();
        let mut objects = Objects::of(arena, cache, (64, 8));
        let error = (0..).find_map(|_| objects.alloc(Gfp::MayWait).err()).unwrap();
        assert!(objects.live.len() >= 1000, "{}", objects.live.len());
        assert_eq!((error.kind(), error.setting()), (ErrorKind::NoSpace, Some("how_many")), "{error}");
        assert!(error.to_string().contains("full"), "{error}");
        objects.check_info();
        for at in [0, 500, 900] {
            objects.free(at);
            objects.alloc(Gfp::MayWait).unwrap();
        }
        objects.finish();
    }
}

/// Objects are freed on other CPUs than those that allocate next: `max_objects` can still be in use.
fn no_object_is_refused_because_others_are_kept_free<P: Policy>() {
    const MOST: usize = 1000;
    let cpus = allowed_cpus();
    for restartable in kinds() {
        let arena = arena();
        let config = CacheConfig { restartable, ..CacheConfig::new("full", 64, 8, MOST as u64) };
        let cache = Cache::<P>::new(arena.clone(), config).unwrap();
        let (mut random, mut objects) = (Random::new(5), Objects::of(arena, cache, (64, 8)));
        for _ in 0..30 {
            sched_setaffinity(None, &cpus[random.below(cpus.len())]).unwrap();
            (objects.live.len()..MOST).for_each(|_| objects.alloc(Gfp::MayWait).unwrap());
            let keep = random.below(MOST) >> random.below(10);
            while objects.live.len() > keep {
                if random.below(50) == 0 {
                    sched_setaffinity(None, &cpus[random.below(cpus.len())]).unwrap();
                }
                objects.free(random.below(objects.live.len()));
            }
        }
        objects.finish();
    }
}
