//! Slab caches as text in the layout of the kernel's files, so that their parsers read this, too:
//! `/proc/slabinfo`, version 2.1, and the counters of `/sys/kernel/slab/CACHE/`.

use std::fmt::Write;

use uzram_serve::control::{CacheJson, CounterJson};

/// The two lines at the top of `/proc/slabinfo`.
const HEADER: &str = "\
slabinfo - version: 2.1
# name            <active_objs> <num_objs> <objsize> <objperslab> <pagesperslab> : tunables <limit> <batchcount> <sharedfactor> : slabdata <active_slabs> <num_slabs> <sharedavail>
";

/// Note for readers of the counters; parsers of the columns take it for a comment.
const TIMING_NOTE: &str =
    "# list_lock_hold_ns counts only in a daemon that was started with `uzram up --slab-timing`\n";

/// Formats a line for each cache and, `with_stats`, a line for each of its counters and for `corrupted`. Each
/// counter's line begins with the cache's name, so that grep's output shows which cache it belongs to.
pub fn text(caches: &[CacheJson], with_stats: bool) -> String {
    let mut text = HEADER.to_owned();
    if with_stats {
        text.push_str(TIMING_NOTE);
    }
    for cache in caches {
        text.push_str(&columns(cache));
        if with_stats {
            text.push_str(&counters(cache));
        }
    }
    text
}

/// Formats the line of a cache. Columns about caches shared between CPUs are 0, as in the kernel's own SLUB.
fn columns(cache: &CacheJson) -> String {
    format!(
        "{:<17} {:>6} {:>6} {:>6} {:>4} {:>4} : tunables {:>4} {:>4} {:>4} : slabdata {:>6} {:>6} {:>6}\n",
        cache.name,
        cache.active_objs,
        cache.num_objs,
        cache.objsize_bytes,
        cache.objperslab,
        cache.pagesperslab,
        cache.cpu_partial_objs,
        cache.sheaf_objs,
        0,
        cache.active_slabs,
        cache.num_slabs,
        0,
    )
}

/// Formats the lines of a cache's counters.
fn counters(cache: &CacheJson) -> String {
    let name = &cache.name;
    let mut text = String::new();
    for (counter, count) in &cache.stats {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name}/{counter} {}", sum_and_cpus(count));
    }
    let _ = writeln!(text, "{name}/corrupted {}", cache.corrupted);
    text
}

/// Formats a counter as the kernel's file does: the sum, then the CPUs with a nonzero count.
fn sum_and_cpus(count: &CounterJson) -> String {
    let mut text = count.total.to_string();
    for (cpu, count) in &count.cpus {
        let _ = write!(text, " C{cpu}={count}");
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn cache() -> CacheJson {
        let counter = CounterJson { total: 12, cpus: [(0, 5), (11, 7)].into() };
        CacheJson {
            name: "zram0/handle".to_owned(),
            policy: "sheaves".to_owned(),
            active_objs: 1,
            num_objs: 1_234_567,
            objsize_bytes: 8,
            objperslab: 512,
            pagesperslab: 1,
            cpu_partial_objs: 120,
            sheaf_objs: 64,
            active_slabs: 2,
            num_slabs: 3,
            corrupted: 2,
            stats: [
                ("alloc_fastpath".to_owned(), counter),
                ("alloc_slowpath".to_owned(), CounterJson::default()),
            ]
            .into(),
        }
    }

    #[test]
    fn a_cache_has_the_kernel_s_columns() {
        let text = text(&[cache()], false);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert_eq!(
            lines[2],
            "zram0/handle           1 1234567      8  512    1 : tunables  120   64    0 : \
             slabdata      2      3      0"
        );
    }

    /// Formatting what was parsed from the kernel's lines gives the same lines.
    #[test]
    fn the_layout_is_the_kernel_s() {
        let Ok(kernel) = std::fs::read_to_string("/proc/slabinfo") else {
            println!("skipped: /proc/slabinfo cannot be read");
            return;
        };
        let rows = kernel.strip_prefix(HEADER).expect("the kernel's header");
        let mut compared = 0;
        for row in rows.lines() {
            let (name, rest) = row.split_once(' ').unwrap();
            let n: Vec<u64> = rest.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            let [active_objs, num_objs, objsize, objperslab, pages, limit, batch, 0, active, num, 0] = n[..]
            else {
                // A name with a space in it, or nonzero shared columns.
                continue;
            };
            let cache = CacheJson {
                name: name.to_owned(),
                active_objs,
                num_objs,
                objsize_bytes: objsize as u32,
                objperslab: objperslab as u32,
                pagesperslab: pages as u32,
                cpu_partial_objs: limit as u32,
                sheaf_objs: batch as u32,
                active_slabs: active,
                num_slabs: num,
                ..cache()
            };
            assert_eq!(columns(&cache), format!("{row}\n"));
            compared += 1;
        }
        assert!(compared > 10, "{kernel}");
    }

    #[test]
    fn counters_say_whose_they_are() {
        let text = text(&[cache()], true);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[2].starts_with("# ") && lines[2].contains("--slab-timing"), "{text}");
        assert_eq!(
            lines[4..],
            [
                "zram0/handle/alloc_fastpath 12 C0=5 C11=7",
                "zram0/handle/alloc_slowpath 0",
                "zram0/handle/corrupted 2"
            ]
        );
    }
}
