//! The table of attributes: a row for each says its name, what shows it, how its text becomes a typed value, and where
//! that value goes. Parsing needs no device, so that a value can be checked without one.

use crate::base::units::pages_to_bytes;
use crate::base::work::Unit;
use crate::codec::Algorithm;
use crate::lru::{LruDesign, MAX_PAGEVEC_PAGES};
use crate::store::{MAX_BATCH_PAGES, MAX_WRITEBACK_BATCH, ReclaimOrder, WritebackLayout};
use crate::stream::StreamDesign;
use crate::zsmalloc::{CHAIN_SIZES, PoolDesign};

use super::super::Device;
use super::algorithms::*;
use super::backing::*;
use super::cold::*;
use super::policy::*;
use super::pool::*;
use super::*;

/// Set by `$parse`, `fn(&str) -> Result<T>`, and `$apply`, `fn(&Device, T) -> Result<()>`.
macro_rules! at_any_time {
    ($parse:expr, $apply:expr) => {
        Set::Value {
            check: |text| parsed(text, $parse, |_| Ok(())),
            apply: |_, device, text| parsed(text, $parse, |value| applied(device, value, $apply)),
        }
    };
}

/// Set only before the device is initialised, by `$parse`, `fn(&str) -> Result<T>`, and `$put`, `fn(&mut Params, T)`.
/// `$check`, `fn(&str) -> Result<()>`, is for values that are more than their text.
macro_rules! before {
    ($parse:expr, $put:expr) => {
        before!($parse, $put, |text| parsed(text, $parse, |_| Ok(())))
    };
    ($parse:expr, $put:expr, $check:expr) => {
        Set::Value {
            check: $check,
            apply: |name, device, text| parsed(text, $parse, |value| put(name, device, value, $put)),
        }
    };
}

/// Worked on by `$parse`, `fn(&str) -> Result<T>`, and `$run`, `fn(&Task, T) -> Result<()>`.
macro_rules! task {
    ($unit:expr, $parse:expr, $run:expr) => {
        Set::Task {
            unit: $unit,
            check: |text| parsed(text, $parse, |_| Ok(())),
            run: |task, text| parsed(text, $parse, |value| applied(task, value, $run)),
        }
    };
}

fn parsed<T>(
    text: &str,
    parse: impl FnOnce(&str) -> Result<T>,
    then: impl FnOnce(T) -> Result<()>,
) -> Result<()> {
    then(parse(text)?)
}

/// Calls `apply` with a value parsed for it: here its closure learns the types of its arguments.
fn applied<C: ?Sized, T>(to: &C, value: T, apply: impl FnOnce(&C, T) -> Result<()>) -> Result<()> {
    apply(to, value)
}

/// The table, in the order in which it is shown.
pub(in super::super) static TABLE: &[Attribute] = &[
    Attribute {
        name: "disksize",
        help: "size of the disk in bytes; K, M, G, T are understood; setting it initialises the device",
        get: Some(|device| device.size_bytes().to_string()),
        set: at_any_time!(parse_disksize, Device::initialise),
    },
    Attribute {
        name: "initstate",
        help: "1 once the device is initialised",
        get: Some(|device| u8::from(device.size_bytes() > 0).to_string()),
        set: Set::Never,
    },
    Attribute {
        name: "reset",
        help: "any number but 0 frees everything and forgets all parameters; refused while in use",
        get: None,
        set: at_any_time!(parse_reset, |device, ()| device.reset()),
    },
    Attribute {
        name: "comp_algorithm",
        help: "lz4[:ACCELERATION], lz4hc[:LEVEL], zstd[:LEVEL] or deflate[:LEVEL], and but for deflate \
               ,dict=PATH; the one in use in brackets; before initialisation",
        get: Some(comp_algorithm),
        set: before!(
            str::parse::<Algorithm>,
            |params, algorithm| params.store.algorithm = algorithm,
            Algorithm::check
        ),
    },
    Attribute {
        name: "algorithm_params",
        help: "level=N dict=PATH of the algorithm in use; what is left out \
               becomes the default; priority=N or algo=NAME name one of recompression; before initialisation",
        get: None,
        set: at_any_time!(AlgorithmParams::parse, set_algorithm_params),
    },
    Attribute {
        name: "recomp_algorithm",
        help: "algo=ALGORITHM priority=1..3 (1 if left out): by which pages can be compressed again, written as \
               comp_algorithm's; before initialisation",
        get: Some(recomp_algorithm),
        set: before!(
            |text| parse_recomp_algorithm(text, str::parse::<Algorithm>),
            |params, (algorithm, priority)| params.store.recompression[priority - 1] = Some(algorithm),
            |text| parse_recomp_algorithm(text, Algorithm::check).map(drop)
        ),
    },
    Attribute {
        name: "recompress",
        help: "type=idle, huge or huge_idle, threshold=BYTES, max_pages=N, algo=NAME or priority=N, all of which \
               may be left out: compresses pages again, the largest first",
        get: None,
        set: task!(Unit::Pages, RecompressRequest::parse, recompress),
    },
    Attribute {
        name: "idle",
        help: "all, or seconds: marks pages as idle that were not used for as long, until they are",
        get: None,
        set: task!(Unit::Pages, parse_idle_age, |task, age_s| task
            .mark_idle_interruptible(age_s, &task.work)),
    },
    Attribute {
        name: BLOCK_STATE,
        help: "of each page that holds something its number, when it was used last in seconds of uptime, and s \
               same-filled, w written back, h huge, i idle, r recompressed, n incompressible; the first 1048576 of them",
        get: Some(block_state),
        set: Set::Never,
    },
    Attribute {
        name: "progress",
        help: "of each of recompress, writeback, idle and compact that is at work its name, the pages that are done (compact: \
               the objects that were moved), and how many there are, 0 if that is not known; empty if there is none \
               (uzram only)",
        get: Some(progress),
        set: Set::Never,
    },
    Attribute {
        name: "backing_dev",
        help: "where cold pages go: the whole PATH of a block device or file, or PATH:SIZE to use so much of it and \
               to make the file if there is none, or none; what follows the last ':' is a size if it reads as one; \
               before initialisation",
        get: Some(backing_dev),
        set: at_any_time!(parse_backing_dev, set_backing_dev),
    },
    Attribute {
        name: "backing_force",
        help: "1 to take a backing_dev that holds something else than a backing of uzram, which is then lost; to be set \
               before backing_dev (uzram only)",
        get: Some(|device| u8::from(device.state.lock().params.backing_force).to_string()),
        set: before!(|text| switch("backing_force", text), |params, on| params.backing_force = on),
    },
    Attribute {
        name: "writeback",
        help: "idle, huge, huge_idle, incompressible or all (uzram only), as a word or after type=; or any number of \
               page_index=N and page_indexes=LO-HI: writes these pages to the backing device, the largest first, \
               and frees their memory",
        get: None,
        set: task!(Unit::Pages, parse_writeback, writeback),
    },
    Attribute {
        name: "writeback_limit",
        help: "what may still be written to the backing device while writeback_limit_enable is 1, in units of 4 KiB; \
               counts down; at any time",
        get: Some(|device| writeback_limit(device).left.to_string()),
        set: at_any_time!(|text| number_within("writeback_limit", text, 0..=u64::MAX), |device, left| {
            change_writeback_limit(device, |limit| limit.left = left)
        }),
    },
    Attribute {
        name: "writeback_limit_enable",
        help: "1 to write no more to the backing device than writeback_limit; at any time",
        get: Some(|device| u8::from(writeback_limit(device).enabled).to_string()),
        set: at_any_time!(
            |text| switch("writeback_limit_enable", text),
            |device, on| change_writeback_limit(device, |limit| limit.enabled = on)
        ),
    },
    Attribute {
        name: "writeback_batch_size",
        help: "writes to the backing device that are in flight at a time, 1 to 128; 4 if it was not set, or 32 with \
               writeback_layout=blocks; at any time",
        get: Some(|device| writeback_batch_size(device).to_string()),
        set: at_any_time!(
            |text| number_within("writeback_batch_size", text, 1..=MAX_WRITEBACK_BATCH),
            set_writeback_batch_size
        ),
    },
    Attribute {
        name: "compressed_writeback",
        help: "1 to write pages as they are compressed, 0 to write all of their 4 KiB, which takes \
               writeback_layout=blocks; before initialisation",
        get: Some(|device| u8::from(device.state.lock().params.compressed_writeback).to_string()),
        set: before!(|text| switch("compressed_writeback", text), |params, on| params.compressed_writeback =
            on),
    },
    Attribute {
        name: "writeback_layout",
        help: "how pages lie on the backing device: packed, compressed and many to an extent, or blocks, each in 4 KiB of \
               its own; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.writeback_layout.to_string()),
        set: before!(str::parse::<WritebackLayout>, |params, layout| params.writeback_layout = layout),
    },
    Attribute {
        name: "bd_stat",
        help: "bd_count bd_reads bd_writes: what pages take on the backing device, what was read from it and written to it, \
               in units of 4 KiB",
        get: Some(bd_stat),
        set: Set::Never,
    },
    Attribute {
        name: "backing",
        help: "the backing device: pages there and what they take, what was read, written, moved and \
               failed; all 0 without one (uzram only)",
        get: Some(backing),
        set: Set::Never,
    },
    Attribute {
        name: "policy_high",
        help: "percent of mem_limit less reserve above which the coldest pages leave by themselves, 1 to 100, recompressed if that wins \
               memory, else written back; lowers policy_low to it; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.store.policy.high_percent.to_string()),
        set: at_any_time!(|text| number_within("policy_high", text, 1..=100), set_policy_high),
    },
    Attribute {
        name: "policy_low",
        help: "percent of mem_limit less reserve below which that ends, 0 to policy_high; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.store.policy.low_percent.to_string()),
        set: at_any_time!(|text| number_within("policy_low", text, 0..=100), set_policy_low),
    },
    Attribute {
        name: "recompress_after",
        help: "seconds, or a number and s, m, h or d, after which pages that nobody used are compressed again; 0 for \
               never; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.store.policy.recompress_after_s.to_string()),
        set: at_any_time!(|text| parse_age_s("recompress_after", text), |device, after_s| change_policy(
            device,
            |policy| policy.recompress_after_s = after_s
        )),
    },
    Attribute {
        name: "writeback_after",
        help: "the same for writing them to the backing device (uzram only)",
        get: Some(|device| device.state.lock().params.store.policy.writeback_after_s.to_string()),
        set: at_any_time!(|text| parse_age_s("writeback_after", text), |device, after_s| change_policy(
            device,
            |policy| policy.writeback_after_s = after_s
        )),
    },
    Attribute {
        name: "writeback_budget",
        help: "the most bytes that are written to the backing device in a day, on request or not, also written as SIZE/day; \
               0 for any number; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.store.policy.writeback_budget_bytes.to_string()),
        set: at_any_time!(parse_writeback_budget, |device, bytes| change_policy(device, |policy| policy
            .writeback_budget_bytes =
            bytes)),
    },
    Attribute {
        name: "reclaim",
        help: "in what order pages leave by themselves: pages, the coldest first, or zspages, all of the coldest zspage at a \
               time; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.store.policy.order.to_string()),
        set: before!(str::parse::<ReclaimOrder>, |params, order| params.store.policy.order = order),
    },
    Attribute {
        name: "policy",
        help: "what left by itself, when and why, in counts (uzram only)",
        get: Some(policy),
        set: Set::Never,
    },
    Attribute {
        name: "mem_limit",
        help: "the most memory that mem_charged may reach, in bytes; 0 for no limit; at any time, but a device is not \
               initialised with less than its first pages take, 24 KiB or the reserve",
        get: Some(|device| device.counts().mem_limit_bytes.to_string()),
        set: at_any_time!(parse_limit_pages, set_mem_limit),
    },
    Attribute {
        name: "reserve",
        help: "free memory that is kept ready, in bytes, so that no read, write or discard waits for the system's: for a \
               disk that is swapped to; rounded up to 2 MiB, at least 4 MiB; a write fails when none is left; 0 for none; \
               before initialisation (uzram only)",
        get: Some(|device| pages_to_bytes(device.state.lock().params.store.reserve_pages).to_string()),
        set: before!(parse_reserve_pages, |params, pages| params.store.reserve_pages = pages),
    },
    Attribute {
        name: "mem_used_max",
        help: "the most memory the pool ever had; writing 0 starts anew",
        get: Some(|device| device.counts().mem_used_max_bytes.to_string()),
        set: at_any_time!(parse_mem_used_max, reset_mem_used_max),
    },
    Attribute {
        name: "mm_stat",
        help: "orig_data_size compr_data_size mem_used_total mem_limit mem_used_max same_pages \
               pages_compacted huge_pages huge_pages_since",
        get: Some(|device| mm_stat(&device.counts())),
        set: Set::Never,
    },
    Attribute {
        name: "io_stat",
        help: "failed_reads failed_writes invalid_io notify_free",
        get: Some(|device| io_stat(&device.counts())),
        set: Set::Never,
    },
    Attribute {
        name: "debug_stat",
        help: "version, then two counts that are always 0, as nothing here stalls or misses",
        get: Some(|_| format!("version: 1\n{:8} {:8}", 0, 0)),
        set: Set::Never,
    },
    Attribute {
        name: "mem_charged",
        help: "memory of pool, metadata slabs and kept free pages, which mem_limit bounds (uzram only)",
        get: Some(|device| device.counts().mem_charged_bytes.to_string()),
        set: Set::Never,
    },
    Attribute {
        name: "mem_fixed",
        help: "the most memory that slot table, LRU, streams and dictionary can take; more by a stream whenever all were lent and a spare one was made, up to 4 a CPU (uzram only)",
        get: Some(|device| device.counts().mem_fixed_bytes.to_string()),
        set: Set::Never,
    },
    Attribute {
        name: "classes",
        help: "size classes of the pool: zspages by fullness, objects, pages",
        get: Some(classes),
        set: Set::Never,
    },
    Attribute {
        name: "compact",
        help: "anything packs the pool's objects together, while reads and writes go on, and gives back what that frees",
        get: None,
        set: task!(Unit::Objects, |_| Ok(()), |task, ()| compact(task)),
    },
    Attribute {
        name: "compact_threshold",
        help: "percent of the pool's memory that compaction must free to begin by itself, 0 to 100; 0 for never; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.store.compact_threshold_percent.to_string()),
        set: at_any_time!(|text| number_within("compact_threshold", text, 0..=100), set_compact_threshold),
    },
    Attribute {
        name: "compact_rate",
        help: "bytes of objects that it then moves in a second at most, from 1M; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.store.compact_rate_bytes.to_string()),
        set: at_any_time!(parse_compact_rate, set_compact_rate),
    },
    Attribute {
        name: "mem_chunks",
        help: "memory of all chunks of 2 MiB in which any of mem_charged lies (uzram only)",
        get: Some(|device| device.counts().mem_chunk_bytes.to_string()),
        set: Set::Never,
    },
    Attribute {
        name: "pool_design",
        help: "how the pool is locked: pinned, class-indexed, consolidated or split; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.store.pool_design.to_string()),
        set: before!(str::parse::<PoolDesign>, |params, design| params.store.pool_design = design),
    },
    Attribute {
        name: "lru",
        help: "pages by their use: lengths of the lists, flows between them, pages looked at, locks taken and found taken; all 0 without lists (uzram only)",
        get: Some(lru),
        set: Set::Never,
    },
    Attribute {
        name: "lru_design",
        help: "how the lists of pages by their use are locked: batched or single-lock, or none for no lists; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.store.lru_design.to_string()),
        set: before!(str::parse::<LruDesign>, |params, design| params.store.lru_design = design),
    },
    Attribute {
        name: "lru_pagevec",
        help: "pages that each CPU collects before they are put into the lists, 1 to 128; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.store.lru_pagevec_pages.to_string()),
        set: at_any_time!(|text| number_within("lru_pagevec", text, 1..=MAX_PAGEVEC_PAGES), set_lru_pagevec),
    },
    Attribute {
        name: "chain_size",
        help: "the most pages of a zspage, 4 to 16; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.store.chain_size.to_string()),
        set: before!(|text| number_within("chain_size", text, CHAIN_SIZES), |params, pages| params
            .store
            .chain_size =
            pages),
    },
    Attribute {
        name: "checksum",
        help: "1 to keep a checksum of each page and verify it at each read; before initialisation (uzram only)",
        get: Some(|device| u8::from(device.state.lock().params.store.checksum).to_string()),
        set: before!(|text| switch("checksum", text), |params, on| params.store.checksum = on),
    },
    Attribute {
        name: "streams",
        help: "who may compress at once: percpu, or the number of streams on a locked list of idle ones, 1 to 1024; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.store.streams.to_string()),
        set: before!(str::parse::<StreamDesign>, |params, design| params.store.streams = design),
    },
    Attribute {
        name: "run_cache_batch",
        help: "pages that the CPUs' caches of free runs move at a time, up to 512; 0 for none; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.store.run_cache_batch_pages.to_string()),
        set: at_any_time!(
            |text| number_within("run_cache_batch", text, 0..=MAX_BATCH_PAGES),
            set_run_cache_batch
        ),
    },
];
