use super::*;
use crate::experiment::clock::Done;
use crate::experiment::testing::{corpus, open_case, plan, value};

/// The locks that a free takes are deterministic.
#[test]
fn each_step_takes_its_locks_away() {
    for case in SERIES.case_names() {
        let mut pools = open_case(&SERIES, case);
        for (i, (design, _)) in DESIGNS.iter().enumerate() {
            for jobs in [1, 3] {
                let sample = pools.measure(&plan(i, jobs, 3000)).unwrap();
                let value = |name: &str| value(&sample, name);
                let (pool, arena) = match *design {
                    "split" | "class-in-word" => (1.0, 1.0),
                    "no-pool-lock" => (0.0, 1.0),
                    "pages-after-lock" => (1.0, 0.0),
                    _ => (0.0, 0.0),
                };
                let name = format!("{case}, {design}, {jobs} jobs");
                assert_eq!(value("pool_locks_per_object"), pool, "{name}");
                assert_eq!(value("locked_frees_per_zspage"), arena, "{name}");
                assert_eq!(value("class_locks_per_object"), 1.0, "{name}");
                assert!(value("lists_hold_ns_per_object") > 0.0, "{name}");
                // The mixed corpus has objects of many classes.
                assert!(value("equal_classes") > 5.0, "{name}");
                let emptied = value("zspages_emptied_per_object");
                assert!(emptied > 0.05 && emptied < 1.0, "{name}: {emptied}");
            }
        }
    }
}

/// Work beyond what threads store at a time is done in passes, all of it.
#[test]
fn much_work_is_done_in_passes() {
    let pages = Packed::new(&Algorithm::default(), 2000, &corpus().load().unwrap()).unwrap();
    let jobs = 256;
    let most = passes::most_objects(jobs);
    assert!(
        (1..passes::FULL_SIZE_PAGES).contains(&most) && passes::most_objects(1) == passes::FULL_SIZE_PAGES
    );
    let objects = 2 * passes::FULL_SIZE_PAGES;
    let memory = Memory::new(DEFAULT_RUN_CACHE_BATCH_PAGES, objects, pages.mean_bytes()).unwrap();
    let plan = plan(0, 2, objects + 2);
    let free = || passes::run::<Pinned>(&memory, &pages, &plan, true, None).unwrap();
    let freed = free();
    let half = objects / 4 + 1;
    let units = |pass: &Vec<Done>| pass.iter().map(|done| done.units).collect();
    assert_eq!(freed.ended.iter().map(units).collect::<Vec<Vec<_>>>(), [[half; 2]; 2]);
    assert_eq!((freed.counts.frees, freed.counts.allocs), (4 * half, 0));
    // The memory that was in use stays in the arena.
    let charged_pages = memory.arena.charged_pages();
    free();
    let kept = memory.arena.charged_pages() as f64 / charged_pages as f64;
    assert!((kept - 1.0).abs() < 0.01, "{kept}");
    let pool_bytes = pages.mean_bytes() * objects as f64 / 2.0;
    let untouched_pages = memory.arena.used_pages(uzram::mem::Account::Slab);
    let kept_bytes = (charged_pages - untouched_pages) as f64 * 4096.0;
    assert!(kept_bytes > pool_bytes, "{kept_bytes} of {pool_bytes}");
}

#[test]
fn what_is_no_case_is_refused() {
    assert!(open_case(&SERIES, "run-cache").begin("frozen").unwrap_err().to_string().contains("frozen"));
}
