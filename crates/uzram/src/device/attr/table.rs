//! The table of attributes: a row for each has its name, its help text, how it is shown, how a text is
//! parsed, and how the value is applied. Parsing needs no device, so that a value can be checked without one.

use crate::base::units::pages_to_bytes;
use crate::base::work::Unit;
use crate::codec::Algorithm;
use crate::store::{MAX_WRITEBACK_BATCH, ReclaimOrder};
#[cfg(feature = "designs")]
use crate::{
    lru::{LruDesign, MAX_PAGEVEC_PAGES},
    store::{MAX_BATCH_PAGES, WritebackLayout},
    stream::StreamDesign,
    zsmalloc::{CHAIN_SIZES, PoolDesign},
};

use super::super::Device;
use super::algorithms::*;
use super::backing::*;
use super::cold::*;
use super::pool::*;
use super::*;

/// An attribute set at any time, by `$parse`, `fn(&str) -> Result<T>`, and `$apply`, `fn(&Device, T) ->
/// Result<()>`.
macro_rules! at_any_time {
    ($parse:expr, $apply:expr) => {
        Set {
            is_task: false,
            check: |text| parsed(text, $parse, |_| Ok(())),
            apply: |_, device, text, _| parsed(text, $parse, |value| applied(device, value, $apply)),
        }
    };
}

/// An attribute set only before the device is initialised, by `$parse`, `fn(&str) -> Result<T>`, and `$put`,
/// `fn(&mut Params, T)`. `$check`, `fn(&str) -> Result<()>`, is for values whose parsing does more than read
/// the text.
macro_rules! before {
    ($parse:expr, $put:expr) => {
        before!($parse, $put, |text| parsed(text, $parse, |_| Ok(())))
    };
    ($parse:expr, $put:expr, $check:expr) => {
        Set {
            is_task: false,
            check: $check,
            apply: |name, device, text, _| parsed(text, $parse, |value| put(name, device, value, $put)),
        }
    };
}

/// An attribute that starts a task, by `$parse`, `fn(&str) -> Result<T>`, and `$run`, `fn(&Task, T) ->
/// Result<()>`.
macro_rules! task {
    ($unit:expr, $parse:expr, $run:expr) => {
        Set {
            is_task: true,
            check: |text| parsed(text, $parse, |_| Ok(())),
            apply: |name, device, text, is_wanted| {
                let task = device.begin(name, $unit, is_wanted)?;
                parsed(text, $parse, |value| applied(&task, value, $run))
            },
        }
    };
}

/// A switch, 0 or 1, of [`Params`], set only before the device is initialised.
macro_rules! switch_before {
    ($name:expr, $help:expr, $($field:tt)+) => {
        both(
            $name,
            $help,
            |device| u8::from(device.state.lock().params.$($field)+).into(),
            before!(|text| switch($name, text), |params, on| params.$($field)+ = on),
        )
    };
}

/// A field of [`Params`] with a named value, set only before the device is initialised.
macro_rules! name_before {
    ($name:expr, $help:expr, $type:ty, $($field:tt)+) => {
        both(
            $name,
            $help,
            |device| device.state.lock().params.$($field)+.to_string().into(),
            before!(str::parse::<$type>, |params, value| params.$($field)+ = value),
        )
    };
}

/// A field of the reclaim policy, set at any time.
macro_rules! of_policy {
    ($name:expr, $help:expr, $parse:expr, $field:ident) => {
        both(
            $name,
            $help,
            |device| device.state.lock().params.store.policy.$field.into(),
            at_any_time!($parse, |device, value| change_policy(device, |policy| {
                policy.$field = value;
                Ok(())
            })),
        )
    };
}

fn parsed<T>(
    text: &str,
    parse: impl FnOnce(&str) -> Result<T>,
    then: impl FnOnce(T) -> Result<()>,
) -> Result<()> {
    then(parse(text)?)
}

/// Calls `apply` with a parsed value; this function lets the compiler infer the closure's argument types.
fn applied<C: ?Sized, T>(to: &C, value: T, apply: impl FnOnce(&C, T) -> Result<()>) -> Result<()> {
    apply(to, value)
}

const fn both(name: &'static str, help: &'static str, get: fn(&Device) -> Reading, set: Set) -> Attribute {
    Attribute { name, help, get: Some(get), set: Some(set) }
}

const fn shown(name: &'static str, help: &'static str, get: fn(&Device) -> Reading) -> Attribute {
    Attribute { name, help, get: Some(get), set: None }
}

const fn written(name: &'static str, help: &'static str, set: Set) -> Attribute {
    Attribute { name, help, get: None, set: Some(set) }
}

/// The table, in the order in which it is shown.
pub(in super::super) static TABLE: &[Attribute] = &[
    both(
        "disksize",
        "size of the disk in bytes, or with suffix K, M, G or T; setting it initialises the device",
        |device| device.size_bytes().into(),
        at_any_time!(parse_disksize, Device::initialise),
    ),
    shown("initstate", "1 once the device is initialised", |device| u8::from(device.size_bytes() > 0).into()),
    written(
        "reset",
        "any number but 0 frees everything and resets all parameters; refused while in use",
        at_any_time!(parse_reset, |device, ()| device.reset()),
    ),
    both(
        "comp_algorithm",
        "lz4[:ACCELERATION], lz4hc[:LEVEL], zstd[:LEVEL], deflate[:LEVEL] or memory, all but deflate \
         optionally followed by ,dict=PATH; shows the one in use in brackets; before initialisation",
        comp_algorithm,
        before!(
            str::parse::<Algorithm>,
            |params, algorithm| params.store.algorithm = algorithm,
            Algorithm::check
        ),
    ),
    written(
        "algorithm_params",
        "level=N dict=PATH set the parameters of the algorithm in use, omitted ones to their defaults; \
         priority=N or algo=NAME selects a recompression algorithm; before initialisation",
        at_any_time!(AlgorithmParams::parse, set_algorithm_params),
    ),
    both(
        "recomp_algorithm",
        "algo=ALGORITHM priority=1..3 (default 1) sets a recompression algorithm, in the syntax of \
         comp_algorithm, or none; before initialisation",
        recomp_algorithm,
        before!(
            |text| parse_recomp_algorithm(text, str::parse::<Algorithm>),
            |params, (algorithm, priority)| params.store.recompression[priority - 1] = algorithm,
            |text| parse_recomp_algorithm(text, Algorithm::check).map(drop)
        ),
    ),
    written(
        "recompress",
        "type=idle, huge or huge_idle, threshold=BYTES, max_pages=N, algo=NAME or priority=N, all optional: \
         recompresses pages, the largest first",
        task!(Unit::Pages, RecompressRequest::parse, recompress),
    ),
    written(
        "idle",
        "all, or seconds: marks pages not used for that long as idle, until they are used",
        task!(Unit::Pages, parse_idle_age, |task, age_s| task.mark_idle_interruptible(age_s, &task.work)),
    ),
    shown(
        BLOCK_STATE,
        "for each page that holds something, its number, the time of its last use in seconds of uptime, and \
         its flags: s same-filled, w written back, h huge, i idle, r recompressed, n incompressible; at most \
         1048576 lines",
        block_state,
    ),
    shown(
        "progress",
        "for each running recompress, writeback, idle and compact, its name, the number of pages done \
         (compact: objects moved), and their total, 0 if unknown; empty if none is running (uzram only)",
        progress,
    ),
    both(
        "backing_dev",
        "the backing device for cold pages: the absolute PATH of a block device or file, or PATH:SIZE to use \
         only that much of it and to create a missing file, or none; the text after the last ':' is a size if \
         it parses as one; or redis://HOST:PORT[:SIZE] or s3://BUCKET[/PREFIX][:SIZE], where the program was built \
         with stores on other machines; or several with spaces in between, which are used in this order; before \
         initialisation",
        backing_dev,
        at_any_time!(parse_backing_dev, set_backing_dev),
    ),
    switch_before!(
        "backing_force",
        "1 to use a backing_dev that holds other data, which is then lost; set it before backing_dev (uzram \
         only)",
        how_to_open.force
    ),
    both(
        "backing_copies",
        "how many copies of each object a cluster of servers keeps, on different masters: 1 or 2; set it before \
         backing_dev (uzram only)",
        |device| copies(device).into(),
        before!(|text| number_within("backing_copies", text, 1..=2), |params, copies| params
            .how_to_open
            .copies =
            copies as u8),
    ),
    both(
        "backing_encrypted",
        "1 to encrypt what goes to files and block devices, too, where the program was built with stores on other \
         machines, which always are; set it before backing_dev (uzram only)",
        |device| u8::from(is_encrypted(device)).into(),
        before!(parse_encrypted, |params, on| params.how_to_open.encrypted = on),
    ),
    shown(
        "backing_state",
        "ok, or degraded, full or failing, for how long and why; of a store on other machines also what it lost, \
         requests that it did not answer in time, and objects that could not be removed (uzram only)",
        backing_state,
    ),
    written(
        "writeback",
        "idle, huge, huge_idle, incompressible or all (uzram only), alone or after type=; or any number of \
         page_index=N and page_indexes=LO-HI: writes these pages to the backing device, in order, or if not all \
         may be written or have room, the largest first, and frees their memory",
        task!(Unit::Pages, parse_writeback, writeback),
    ),
    both(
        "writeback_limit",
        "how much may still be written to the backing device while writeback_limit_enable is 1, in units of \
         4 KiB; counts down; at any time",
        |device| writeback_limit(device).left.into(),
        at_any_time!(|text| number_within("writeback_limit", text, 0..=u64::MAX), |device, left| {
            change_writeback_limit(device, |limit| limit.left = left)
        }),
    ),
    both(
        "writeback_limit_enable",
        "1 to enforce writeback_limit; at any time",
        |device| u8::from(writeback_limit(device).enabled).into(),
        at_any_time!(|text| switch("writeback_limit_enable", text), |device, on| change_writeback_limit(
            device,
            |limit| limit.enabled = on
        )),
    ),
    both(
        "writeback_batch_size",
        "maximum number of writes in flight to the backing device, 1 to 128; default 4; at any time",
        |device| writeback_batch_size(device).into(),
        at_any_time!(
            |text| number_within("writeback_batch_size", text, 1..=MAX_WRITEBACK_BATCH),
            |device, value| live(
                device,
                |store| store.set_writeback_batch(value),
                |config| config.writeback_batch = Some(value)
            )
        ),
    ),
    #[cfg(feature = "designs")]
    switch_before!(
        "compressed_writeback",
        "1 to write pages compressed, 0 to write all 4 KiB, which needs writeback_layout=blocks; before \
         initialisation",
        compressed_writeback
    ),
    #[cfg(feature = "designs")]
    name_before!(
        "writeback_layout",
        "layout of the backing device: packed, compressed pages one after another, or blocks, each page in its \
         own 4 KiB; before initialisation (uzram only)",
        WritebackLayout,
        writeback_layout
    ),
    shown(
        "bd_stat",
        "bd_count bd_reads bd_writes: space that pages take on the backing device, reads from it and writes to \
         it, in units of 4 KiB",
        bd_stat,
    ),
    shown(
        "backing",
        "statistics of the backing device: its pages and the space they take, reads, writes, moves and \
         failures; all 0 without one (uzram only)",
        backing,
    ),
    both(
        "policy_high",
        "high watermark, in percent of mem_limit less reserve, 1 to 100: above it the coldest pages are \
         reclaimed, by recompression if that saves memory, else by writeback; lowers policy_low to it; at any \
         time (uzram only)",
        |device| device.state.lock().params.store.policy.high_percent.into(),
        at_any_time!(|text| number_within("policy_high", text, 1..=100), set_policy_high),
    ),
    both(
        "policy_low",
        "low watermark, in percent of mem_limit less reserve, 0 to policy_high: below it reclaim ends; at any \
         time (uzram only)",
        |device| device.state.lock().params.store.policy.low_percent.into(),
        at_any_time!(|text| number_within("policy_low", text, 0..=100), set_policy_low),
    ),
    of_policy!(
        "recompress_after",
        "age at which unused pages are recompressed, in seconds or with suffix s, m, h or d; 0 for never; at any time (uzram only)",
        |text| parse_age_s("recompress_after", text),
        recompress_after_s
    ),
    of_policy!(
        "recompress_cpu",
        "most CPU time that this recompression takes, in percent of one CPU, 1 to 100; 0 for no bound; \
         at any time (uzram only)",
        |text| number_within("recompress_cpu", text, 0..=100),
        recompress_cpu_percent
    ),
    of_policy!(
        "writeback_after",
        "age at which unused pages are written back, in seconds or with suffix s, m, h or d; 0 for never; at \
         any time (uzram only)",
        |text| parse_age_s("writeback_after", text),
        writeback_after_s
    ),
    of_policy!(
        "writeback_budget",
        "maximum bytes written to the backing device in a day, by request or policy, as SIZE or SIZE/day; 0 \
         for no budget; at any time (uzram only)",
        parse_writeback_budget,
        writeback_budget_bytes
    ),
    name_before!(
        "reclaim",
        "order of reclaim: pages, the coldest page first, or zspages, all pages of the coldest zspage at a \
         time; before initialisation (uzram only)",
        ReclaimOrder,
        store.policy.order
    ),
    shown("policy", "statistics of the reclaim policy (uzram only)", policy),
    both(
        "mem_limit",
        "limit of mem_charged, in bytes; 0 for no limit; at any time, but initialisation needs at least 24 KiB \
         for the first pages, or the reserve",
        |device| device.counts().mem_limit_bytes.into(),
        at_any_time!(parse_limit_pages, set_mem_limit),
    ),
    both(
        "reserve",
        "free memory kept ready, in bytes, so that no read, write or discard waits for memory from the system: \
         for a disk used as swap; rounded up to 2 MiB, at least 4 MiB; a write fails when none is left; 0 for \
         none; before initialisation (uzram only)",
        |device| pages_to_bytes(device.state.lock().params.store.reserve_pages).into(),
        before!(parse_reserve_pages, |params, pages| params.store.reserve_pages = pages),
    ),
    both(
        "mem_used_max",
        "maximum memory of the pool so far; writing 0 resets it",
        |device| device.counts().mem_used_max_bytes.into(),
        at_any_time!(parse_mem_used_max, reset_mem_used_max),
    ),
    shown(
        "mm_stat",
        "orig_data_size compr_data_size mem_used_total mem_limit mem_used_max same_pages \
         pages_compacted huge_pages huge_pages_since",
        |device| mm_stat(&device.counts()),
    ),
    shown("io_stat", "failed_reads failed_writes invalid_io notify_free", |device| io_stat(&device.counts())),
    shown("debug_stat", "version, then the kernel's two debug counts, which are always 0 here", debug_stat),
    shown(
        "mem_charged",
        "memory of pool, metadata slabs and free pages kept for reuse, which mem_limit bounds (uzram only)",
        |device| device.counts().mem_charged_bytes.into(),
    ),
    shown(
        "mem_fixed",
        "maximum memory of slot table, LRU, streams and dictionary; grows by a stream whenever all are in use \
         and a spare one is made, up to 4 per CPU (uzram only)",
        |device| device.counts().mem_fixed_bytes.into(),
    ),
    shown("classes", "size classes of the pool: zspages by fullness, objects, pages", classes),
    written(
        "compact",
        "any value packs the pool's objects together, while reads and writes go on, and frees memory",
        task!(Unit::Objects, |_| Ok(()), |task, ()| compact(task)),
    ),
    both(
        "compact_threshold",
        "percentage of the pool's memory that background compaction must be able to free before it begins, 0 \
         to 100; 0 for never; at any time (uzram only)",
        |device| device.state.lock().params.store.compact_threshold_percent.into(),
        at_any_time!(|text| number_within("compact_threshold", text, 0..=100), |device, value| live(
            device,
            |store| store.set_compact_threshold_percent(value),
            |config| config.compact_threshold_percent = value
        )),
    ),
    both(
        "compact_rate",
        "maximum bytes of objects that background compaction moves in a second, at least 1M; at any time \
         (uzram only)",
        |device| device.state.lock().params.store.compact_rate_bytes.into(),
        at_any_time!(parse_compact_rate, |device, value| live(
            device,
            |store| store.set_compact_rate_bytes(value),
            |config| config.compact_rate_bytes = value
        )),
    ),
    shown("mem_chunks", "memory of all 2 MiB chunks that hold any of mem_charged (uzram only)", |device| {
        device.counts().mem_chunk_bytes.into()
    }),
    #[cfg(feature = "designs")]
    name_before!(
        "pool_design",
        "lock design of the pool: pinned, class-indexed, consolidated or split; before initialisation (uzram \
         only)",
        PoolDesign,
        store.designs.pool
    ),
    shown(
        "lru",
        "statistics of the LRU: lengths of the lists, moves between them, pages scanned, lock acquisitions and \
         contention; all 0 without an LRU (uzram only)",
        lru,
    ),
    switch_before!(
        "lru_enable",
        "1 to keep pages in LRU order, which reclaim needs and which takes 12 bytes a page; before \
         initialisation (uzram only)",
        store.lru
    ),
    #[cfg(feature = "designs")]
    name_before!(
        "lru_design",
        "lock design of the LRU: batched or single-lock; before initialisation (uzram only)",
        LruDesign,
        store.designs.lru
    ),
    #[cfg(feature = "designs")]
    both(
        "lru_pagevec",
        "pages that each CPU collects before it adds them to the LRU's lists, 1 to 128; at any time (uzram \
         only)",
        |device| device.state.lock().params.store.lru_pagevec_pages.into(),
        at_any_time!(|text| number_within("lru_pagevec", text, 1..=MAX_PAGEVEC_PAGES), |device, value| live(
            device,
            |store| store.set_lru_pagevec_pages(value).expect("in range"),
            |config| config.lru_pagevec_pages = value
        )),
    ),
    #[cfg(feature = "designs")]
    both(
        "chain_size",
        "maximum number of pages of a zspage, 4 to 16; before initialisation (uzram only)",
        |device| device.state.lock().params.store.chain_size.into(),
        before!(|text| number_within("chain_size", text, CHAIN_SIZES), |params, pages| params
            .store
            .chain_size =
            pages),
    ),
    switch_before!(
        "checksum",
        "1 to keep a checksum of each page and verify it at each read; before initialisation (uzram only)",
        store.checksum
    ),
    #[cfg(feature = "designs")]
    name_before!(
        "streams",
        "compression streams: percpu, or the number of streams on a locked idle list, 1 to 1024; before \
         initialisation (uzram only)",
        StreamDesign,
        store.designs.streams
    ),
    #[cfg(feature = "designs")]
    both(
        "run_cache_batch",
        "pages that a CPU's cache of free runs moves at a time, up to 512; 0 for no caches; at any time (uzram \
         only)",
        |device| device.state.lock().params.store.run_cache_batch_pages.into(),
        at_any_time!(|text| number_within("run_cache_batch", text, 0..=MAX_BATCH_PAGES), |device, value| {
            live(
                device,
                |store| store.set_run_cache_batch_pages(value).expect("in range"),
                |config| config.run_cache_batch_pages = value,
            )
        }),
    ),
];
