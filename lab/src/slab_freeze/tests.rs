use super::*;
use crate::experiment::testing::{open_case, plan, value};

/// The change of the series takes effect here: slabs fill up and return through both partial lists, and each
/// takes one exchange less when it is frozen late. With a single thread this is deterministic.
#[test]
fn slabs_go_round_by_way_of_both_partial_lists() {
    let mut caches = open_case(&SERIES, RAWPKT);
    let mut counts = Vec::new();
    for (i, (design, _)) in DESIGNS.iter().enumerate() {
        let sample = caches.measure(&plan(i, 1, 100_000)).unwrap();
        let value = |name: &str| value(&sample, name);
        let passed = |names: &[&str]| {
            for name in names {
                assert!(value(&format!("{name}_per_object")) > 0.0, "{design}: {name}");
            }
        };
        if *design == Sheaves::NAME {
            passed(&["alloc_pcs", "free_pcs", "barn_get", "barn_put"]);
        } else {
            passed(&["cpu_partial_alloc", "cpu_partial_free", "cpu_partial_node", "cpu_partial_drain"]);
            passed(&["alloc_from_partial", "free_add_partial", "free_slowpath", "alloc_fastpath"]);
            passed(&["list_lock_acquired", "list_lock_hold_ns"]);
        }
        counts.push(value("cmpxchg_double_per_object"));
    }
    let [eager, on_partial, unfreeze_first, delayed, sheaves] = counts[..] else { unreachable!() };
    assert!(delayed < 0.9 * eager.min(on_partial).min(unfreeze_first), "{counts:?}");
    assert!(sheaves < 0.5 * delayed, "{counts:?}");
}

/// The arena is too small for the objects in flight: some threads fail, and the others, which wait for them,
/// must not wait for ever.
#[test]
fn memory_that_runs_out_is_an_error() {
    for (of, case) in CASES {
        for (name, measure) in DESIGNS {
            let arena = Arc::new(Arena::new(1 << 20).unwrap());
            arena.set_limit_pages(20);
            let error = measure(&arena, case, &plan(0, 4, 1 << 30)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{of}, {name}: {error}");
        }
    }
}

#[test]
fn more_threads_than_there_may_be_are_refused() {
    let error = open_case(&SERIES, MESSAGING).measure(&plan(0, 65, 1)).unwrap_err();
    assert!(error.to_string().contains("--jobs"), "{error}");
    let error = by_name(&DESIGNS, "frozen").unwrap_err().to_string();
    assert!(error.contains("only: eager, on-partial"), "{error}");
}

#[test]
fn an_object_that_holds_something_else_is_found_out() {
    let arena = Arc::new(Arena::new(1 << 20).unwrap());
    let objects = Objects::<DelayedFreeze>::new(&arena, "letters", 64, 8, 10).unwrap();
    let mut content = objects::Content::<32>::of(3);
    let object = objects.take(content.numbered(1)).unwrap();
    // SAFETY: the object was taken just now, by this thread.
    let error = unsafe { objects.give_back(object, content.numbered(2)) }.unwrap_err();
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("letters"), "{error}");
    // SAFETY: it is still in use.
    unsafe { objects.give_back(object, content.numbered(1)) }.unwrap();
    assert_eq!(objects.info().active_objs, 0);
}
