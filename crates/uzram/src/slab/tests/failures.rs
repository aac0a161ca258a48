//! Failing calls of the arena, one in turn, and full caches: only the allocation that needed the memory
//! fails.

use super::objects::Live;
use super::*;
use crate::base::error::ErrorKind;
use crate::base::random::Random;

for_every_policy!(
    each_call_of_the_arena_fails_in_turn,
    a_full_cache_names_its_setting,
    no_object_is_refused_because_others_are_kept_free,
);

/// Allocates, frees and shrinks by a seed, and retries what failed. Returns whether a call of the arena
/// has failed.
fn script<P: Policy>(arena: &Arc<Arena>, cache: Cache<P>, size: usize) -> bool {
    const SEED: u64 = 4;
    let mut random = Random::new(SEED);
    let (mut live, mut failures, mut stamp): (Vec<Live>, _, _) = (Vec::new(), 0, 0);
    for step in 0..150 {
        let most = if step % 50 < 25 { (64 << 10) / size.max(256) } else { 5 };
        let count = 1 + random.below(30);
        if live.len() < most {
            for _ in 0..count {
                let object = loop {
                    let error = match cache.alloc(Gfp::MayWait) {
                        Ok(object) => break object,
                        Err(error) => error,
                    };
                    failures += 1;
                    assert!(matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::NoMemory), "{error}");
                    assert_eq!(failures, 1, "{error}");
                    check_info(arena, &cache, live.len());
                };
                stamp += 1;
                live.push(Live::new(&cache, size, object, stamp));
            }
        } else {
            let freed = live.split_off(live.len().saturating_sub(count).max(most));
            freed.iter().for_each(|live| live.check(&cache, size));
            freed.into_iter().for_each(|live| cache.free(live.object).unwrap());
        }
        if step % 20 == 19 {
            cache.shrink().unwrap();
        }
        check_info(arena, &cache, live.len());
    }
    live.iter().for_each(|live| live.check(&cache, size));
    live.into_iter().for_each(|live| cache.free(live.object).unwrap());
    let failed = !arena.injects_faults();
    arena.inject_faults(0, 0);
    check_all_is_back(arena, vec![cache]);
    failed
}

fn each_call_of_the_arena_fails_in_turn<P: Policy>() {
    let cpus = allowed_cpus();
    // On one CPU, so that the calls are the same each time.
    sched_setaffinity(None, &cpus[0]).unwrap();
    for shape in [(64, 64), (704, 8), (4096, 8)] {
        for calls_before in 0.. {
            let _context = Context(format!("{shape:?}, {calls_before} calls before the one that fails"));
            let arena = arena();
            let cache = cache_of::<P>(&arena, shape, kinds()[0]);
            arena.inject_fault_after(calls_before);
            if !script(&arena, cache, shape.0) {
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
        let mut live = Vec::new();
        let error = loop {
            match cache.alloc(Gfp::MayWait) {
                Ok(object) => live.push(Live::new(&cache, 64, object, live.len() as u64)),
                Err(error) => break error,
            }
        };
        assert!(live.len() >= 1000, "{}", live.len());
        assert_eq!((error.kind(), error.setting()), (ErrorKind::NoSpace, Some("how_many")), "{error}");
        assert!(error.to_string().contains("full"), "{error}");
        check_info(&arena, &cache, live.len());
        for at in [0, 500, 900] {
            live[at].check(&cache, 64);
            cache.free(live[at].object).unwrap();
            live[at] = Live::new(&cache, 64, cache.alloc(Gfp::MayWait).unwrap(), 1 << 32);
        }
        live.iter().for_each(|live| live.check(&cache, 64));
        live.into_iter().for_each(|live| cache.free(live.object).unwrap());
        check_all_is_back(&arena, vec![cache]);
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
        let mut random = Random::new(5);
        let mut live: Vec<u32> = Vec::new();
        for _ in 0..30 {
            sched_setaffinity(None, &cpus[random.below(cpus.len())]).unwrap();
            while live.len() < MOST {
                live.push(cache.alloc(Gfp::MayWait).unwrap());
            }
            let keep = random.below(MOST) >> random.below(10);
            while live.len() > keep {
                if random.below(50) == 0 {
                    sched_setaffinity(None, &cpus[random.below(cpus.len())]).unwrap();
                }
                cache.free(live.swap_remove(random.below(live.len()))).unwrap();
            }
        }
        free_all(&cache, &live);
        check_all_is_back(&arena, vec![cache]);
    }
}
