//! The attributes of a device: one table, which the command line and the control API show.
//!
//! Names, formats and life cycle are the kernel's where the kernel has the attribute; what only
//! uzram has is marked so. Some that the kernel can only write can be read here as well.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::named::hint;
use crate::base::units::{bytes_to_pages, page_of, pages_to_bytes, parse_size};
use crate::base::work::Unit;

mod algorithms;
mod backing;
mod cold;
mod policy;
mod pool;
mod text;

pub use text::AttributeText;

use super::task::{Task, TaskProgress};
use super::{Device, DeviceStats, Params};
use Set::Value;
use algorithms::{
    comp_algorithm, recomp_algorithm, set_algorithm_params, set_comp_algorithm, set_recomp_algorithm,
};
use backing::{
    backing, backing_dev, bd_stat, set_backing_dev, set_backing_force, set_compressed_writeback,
    set_writeback_batch_size, set_writeback_layout, set_writeback_limit, set_writeback_limit_enable,
    writeback, writeback_batch_size, writeback_limit,
};
use cold::{block_state, recompress, set_idle};
use policy::{
    policy, set_policy_high, set_policy_low, set_reclaim, set_recompress_after, set_writeback_after,
    set_writeback_budget,
};
use pool::{
    classes, compact, lru, set_chain_size, set_compact_rate, set_compact_threshold, set_lru_design,
    set_lru_pagevec, set_pool_design, set_reserve, set_run_cache_batch,
};

const BLOCK_STATE: &str = "block_state";

/// One row of the table.
#[derive(Clone, Copy)]
pub struct Attribute {
    /// Its name.
    pub name: &'static str,
    /// What it is, and when it may be written.
    pub help: &'static str,
    get: Option<fn(&Device) -> String>,
    set: Option<Set>,
}

/// How an attribute is set.
#[derive(Clone, Copy)]
enum Set {
    /// At once.
    Value(fn(&Device, &str) -> Result<()>),
    /// By going through all pages.
    Task(Unit, fn(&Task<'_>, &str) -> Result<()>),
}

/// The table, in the order in which it is shown.
pub(super) static TABLE: &[Attribute] = &[
    Attribute {
        name: "disksize",
        help: "size of the disk in bytes; K, M, G, T are understood; setting it initialises the device",
        get: Some(|device| device.size_bytes().to_string()),
        set: Some(Value(set_disksize)),
    },
    Attribute {
        name: "initstate",
        help: "1 once the device is initialised",
        get: Some(|device| u8::from(device.size_bytes() > 0).to_string()),
        set: None,
    },
    Attribute {
        name: "reset",
        help: "any number but 0 frees everything and forgets all parameters; refused while in use",
        get: None,
        set: Some(Value(set_reset)),
    },
    Attribute {
        name: "comp_algorithm",
        help: "lz4[:ACCELERATION], lz4hc[:LEVEL], zstd[:LEVEL] or deflate[:LEVEL], and but for deflate \
               ,dict=PATH; the one in use in brackets; before initialisation",
        get: Some(comp_algorithm),
        set: Some(Value(set_comp_algorithm)),
    },
    Attribute {
        name: "algorithm_params",
        help: "level=N dict=PATH of the algorithm in use; what is left out \
               becomes the default; priority=N or algo=NAME name one of recompression; before initialisation",
        get: None,
        set: Some(Value(set_algorithm_params)),
    },
    Attribute {
        name: "recomp_algorithm",
        help: "algo=ALGORITHM priority=1..3 (1 if left out): by which pages can be compressed again, written as \
               comp_algorithm's; before initialisation",
        get: Some(recomp_algorithm),
        set: Some(Value(set_recomp_algorithm)),
    },
    Attribute {
        name: "recompress",
        help: "type=idle, huge or huge_idle, threshold=BYTES, max_pages=N, algo=NAME or priority=N, all of which \
               may be left out: compresses pages again, the largest first",
        get: None,
        set: Some(Set::Task(Unit::Pages, recompress)),
    },
    Attribute {
        name: "idle",
        help: "all, or seconds: marks pages as idle that were not used for as long, until they are",
        get: None,
        set: Some(Set::Task(Unit::Pages, set_idle)),
    },
    Attribute {
        name: BLOCK_STATE,
        help: "of each page that holds something its number, when it was used last in seconds of uptime, and s \
               same-filled, w written back, h huge, i idle, r recompressed, n incompressible; the first 1048576 of them",
        get: Some(block_state),
        set: None,
    },
    Attribute {
        name: "progress",
        help: "of each of recompress, writeback, idle and compact that is at work its name, the pages that are done (compact: \
               the objects that were moved), and how many there are, 0 if that is not known; empty if there is none \
               (uzram only)",
        get: Some(progress),
        set: None,
    },
    Attribute {
        name: "backing_dev",
        help: "where cold pages go: the whole PATH of a block device or file, or PATH:SIZE to use so much of it and \
               to make the file if there is none, or none; what follows the last ':' is a size if it reads as one; \
               before initialisation",
        get: Some(backing_dev),
        set: Some(Value(set_backing_dev)),
    },
    Attribute {
        name: "backing_force",
        help: "1 to take a backing_dev that holds something else than a backing of uzram, which is then lost; to be set \
               before backing_dev (uzram only)",
        get: Some(|device| u8::from(device.state.lock().params.backing_force).to_string()),
        set: Some(Value(set_backing_force)),
    },
    Attribute {
        name: "writeback",
        help: "idle, huge, huge_idle, incompressible or all (uzram only), as a word or after type=; or any number of \
               page_index=N and page_indexes=LO-HI: writes these pages to the backing device, the largest first, \
               and frees their memory",
        get: None,
        set: Some(Set::Task(Unit::Pages, writeback)),
    },
    Attribute {
        name: "writeback_limit",
        help: "what may still be written to the backing device while writeback_limit_enable is 1, in units of 4 KiB; \
               counts down; at any time",
        get: Some(|device| writeback_limit(device).left.to_string()),
        set: Some(Value(set_writeback_limit)),
    },
    Attribute {
        name: "writeback_limit_enable",
        help: "1 to write no more to the backing device than writeback_limit; at any time",
        get: Some(|device| u8::from(writeback_limit(device).enabled).to_string()),
        set: Some(Value(set_writeback_limit_enable)),
    },
    Attribute {
        name: "writeback_batch_size",
        help: "writes to the backing device that are in flight at a time, 1 to 128; 4 if it was not set, or 32 with \
               writeback_layout=blocks; at any time",
        get: Some(|device| writeback_batch_size(device).to_string()),
        set: Some(Value(set_writeback_batch_size)),
    },
    Attribute {
        name: "compressed_writeback",
        help: "1 to write pages as they are compressed, 0 to write all of their 4 KiB, which takes \
               writeback_layout=blocks; before initialisation",
        get: Some(|device| u8::from(device.state.lock().params.compressed_writeback).to_string()),
        set: Some(Value(set_compressed_writeback)),
    },
    Attribute {
        name: "writeback_layout",
        help: "how pages lie on the backing device: packed, compressed and many to an extent, or blocks, each in 4 KiB of \
               its own; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.writeback_layout.to_string()),
        set: Some(Value(set_writeback_layout)),
    },
    Attribute {
        name: "bd_stat",
        help: "bd_count bd_reads bd_writes: what pages take on the backing device, what was read from it and written to it, \
               in units of 4 KiB",
        get: Some(bd_stat),
        set: None,
    },
    Attribute {
        name: "backing",
        help: "the backing device: pages there and what they take, what was read, written, moved and \
               failed; all 0 without one (uzram only)",
        get: Some(backing),
        set: None,
    },
    Attribute {
        name: "policy_high",
        help: "percent of mem_limit less reserve above which the coldest pages leave by themselves, 1 to 100, recompressed if that wins \
               memory, else written back; lowers policy_low to it; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.config.policy.high_percent.to_string()),
        set: Some(Value(set_policy_high)),
    },
    Attribute {
        name: "policy_low",
        help: "percent of mem_limit less reserve below which that ends, 0 to policy_high; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.config.policy.low_percent.to_string()),
        set: Some(Value(set_policy_low)),
    },
    Attribute {
        name: "recompress_after",
        help: "seconds, or a number and s, m, h or d, after which pages that nobody used are compressed again; 0 for \
               never; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.config.policy.recompress_after_s.to_string()),
        set: Some(Value(set_recompress_after)),
    },
    Attribute {
        name: "writeback_after",
        help: "the same for writing them to the backing device (uzram only)",
        get: Some(|device| device.state.lock().params.config.policy.writeback_after_s.to_string()),
        set: Some(Value(set_writeback_after)),
    },
    Attribute {
        name: "writeback_budget",
        help: "the most bytes that are written to the backing device in a day, on request or not, also written as SIZE/day; \
               0 for any number; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.config.policy.writeback_budget_bytes.to_string()),
        set: Some(Value(set_writeback_budget)),
    },
    Attribute {
        name: "reclaim",
        help: "in what order pages leave by themselves: pages, the coldest first, or zspages, all of the coldest zspage at a \
               time; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.config.policy.order.to_string()),
        set: Some(Value(set_reclaim)),
    },
    Attribute {
        name: "policy",
        help: "what left by itself, when and why, in counts (uzram only)",
        get: Some(policy),
        set: None,
    },
    Attribute {
        name: "mem_limit",
        help: "the most memory that mem_charged may reach, in bytes; 0 for no limit; at any time, but a device is not \
               initialised with less than its first pages take, 24 KiB or the reserve",
        get: Some(|device| device.counts().mem_limit_bytes.to_string()),
        set: Some(Value(set_mem_limit)),
    },
    Attribute {
        name: "reserve",
        help: "free memory that is kept ready, in bytes, so that no read, write or discard waits for the system's: for a \
               disk that is swapped to; rounded up to 2 MiB, at least 4 MiB; a write fails when none is left; 0 for none; \
               before initialisation (uzram only)",
        get: Some(|device| pages_to_bytes(device.state.lock().params.config.reserve_pages).to_string()),
        set: Some(Value(set_reserve)),
    },
    Attribute {
        name: "mem_used_max",
        help: "the most memory the pool ever had; writing 0 starts anew",
        get: Some(|device| device.counts().mem_used_max_bytes.to_string()),
        set: Some(Value(set_mem_used_max)),
    },
    Attribute {
        name: "mm_stat",
        help: "orig_data_size compr_data_size mem_used_total mem_limit mem_used_max same_pages \
               pages_compacted huge_pages huge_pages_since",
        get: Some(|device| mm_stat(&device.counts())),
        set: None,
    },
    Attribute {
        name: "io_stat",
        help: "failed_reads failed_writes invalid_io notify_free",
        get: Some(|device| io_stat(&device.counts())),
        set: None,
    },
    Attribute {
        name: "debug_stat",
        help: "version, then writestall, the writes that stream_alloc=released made wait, and miss_free, always 0",
        get: Some(|device| format!("version: 1\n{:8} {:8}", device.counts().writestall, 0)),
        set: None,
    },
    Attribute {
        name: "mem_charged",
        help: "memory of pool, metadata slabs and kept free pages, which mem_limit bounds (uzram only)",
        get: Some(|device| device.counts().mem_charged_bytes.to_string()),
        set: None,
    },
    Attribute {
        name: "mem_fixed",
        help: "the most memory that slot table, LRU, streams and dictionary can take; more by a stream whenever all were lent and a spare one was made, up to 4 a CPU (uzram only)",
        get: Some(|device| device.counts().mem_fixed_bytes.to_string()),
        set: None,
    },
    Attribute {
        name: "classes",
        help: "size classes of the pool: zspages by fullness, objects, pages",
        get: Some(classes),
        set: None,
    },
    Attribute {
        name: "compact",
        help: "anything packs the pool's objects together, while reads and writes go on, and gives back what that frees",
        get: None,
        set: Some(Set::Task(Unit::Objects, compact)),
    },
    Attribute {
        name: "compact_threshold",
        help: "percent of the pool's memory that compaction must free to begin by itself, 0 to 100; 0 for never; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.config.compact_threshold_percent.to_string()),
        set: Some(Value(set_compact_threshold)),
    },
    Attribute {
        name: "compact_rate",
        help: "bytes of objects that it then moves in a second at most, from 1M; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.config.compact_rate_bytes.to_string()),
        set: Some(Value(set_compact_rate)),
    },
    Attribute {
        name: "mem_chunks",
        help: "memory of all chunks of 2 MiB in which any of mem_charged lies (uzram only)",
        get: Some(|device| device.counts().mem_chunk_bytes.to_string()),
        set: None,
    },
    Attribute {
        name: "pool_design",
        help: "how the pool is locked: pinned, class-indexed, consolidated or split; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.config.pool_design.to_string()),
        set: Some(Value(set_pool_design)),
    },
    Attribute {
        name: "lru",
        help: "pages by their use: lengths of the lists, flows between them, pages looked at, locks taken and found taken; all 0 without lists (uzram only)",
        get: Some(lru),
        set: None,
    },
    Attribute {
        name: "lru_design",
        help: "how the lists of pages by their use are locked: batched or single-lock, or none for no lists; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.config.lru_design.to_string()),
        set: Some(Value(set_lru_design)),
    },
    Attribute {
        name: "lru_pagevec",
        help: "pages that each CPU collects before they are put into the lists, 1 to 128; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.config.lru_pagevec_pages.to_string()),
        set: Some(Value(set_lru_pagevec)),
    },
    Attribute {
        name: "chain_size",
        help: "the most pages of a zspage, 4 to 16; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.config.chain_size.to_string()),
        set: Some(Value(set_chain_size)),
    },
    Attribute {
        name: "checksum",
        help: "1 to keep a checksum of each page and verify it at each read; before initialisation (uzram only)",
        get: Some(|device| u8::from(device.state.lock().params.config.checksum).to_string()),
        set: Some(Value(set_checksum)),
    },
    Attribute {
        name: "streams",
        help: "who may compress at once: percpu, or the number of streams on a locked list of idle ones, 1 to 1024; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.config.streams.to_string()),
        set: Some(Value(set_streams)),
    },
    Attribute {
        name: "stream_alloc",
        help: "held, or released to give the stream to others while the pool grows or is cut back, and compress the page again; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.config.stream_alloc.to_string()),
        set: Some(Value(set_stream_alloc)),
    },
    Attribute {
        name: "run_cache_batch",
        help: "pages that the CPUs' caches of free runs move at a time, up to 512; 0 for none; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.config.run_cache_batch_pages.to_string()),
        set: Some(Value(set_run_cache_batch)),
    },
];

/// The row of a name.
pub(super) fn find(name: &str) -> Result<&'static Attribute> {
    TABLE.iter().find(|row| row.name == name).ok_or_else(|| {
        let names: Vec<_> = TABLE.iter().map(|row| row.name).collect();
        Error::new(ErrorKind::NotFound, format!("no attribute '{name}'; {}", hint(name, &names)))
    })
}

impl Attribute {
    /// In what turn to set the attribute of that name, of several of a new device, lowest first: `disksize` comes
    /// last, because it makes the disk from the others, and before it what may make a file.
    pub fn turn(name: &str) -> u8 {
        match name {
            "disksize" => 2,
            "backing_dev" => 1,
            _ => 0,
        }
    }

    /// Whether it can be read.
    pub fn readable(&self) -> bool {
        self.get.is_some()
    }

    /// Whether it can be written.
    pub fn writable(&self) -> bool {
        self.set.is_some()
    }

    /// Whether its text grows with the disk: it is no part of a summary, and to be read piece by piece ([`Device::text`]).
    pub fn is_long(&self) -> bool {
        self.name == BLOCK_STATE
    }

    pub(super) fn get(&self, device: &Device) -> Result<String> {
        let denied =
            || Error::new(ErrorKind::Permission, format!("attribute '{}' can only be written", self.name));
        self.get.map(|get| get(device)).ok_or_else(denied)
    }

    /// Whether setting it may take long, goes through all pages, and can be interrupted ([`Device::set_interruptible`]).
    pub fn works(&self) -> bool {
        matches!(self.set, Some(Set::Task(..)))
    }

    pub(super) fn set(&self, device: &Device, value: &str, is_wanted: &dyn Fn() -> bool) -> Result<()> {
        let denied =
            || Error::new(ErrorKind::Permission, format!("attribute '{}' can only be read", self.name));
        match self.set.ok_or_else(denied)? {
            Value(set) => set(device, value),
            Set::Task(unit, run) => run(&device.begin(self.name, unit, is_wanted)?, value),
        }
    }
}

fn set_disksize(device: &Device, value: &str) -> Result<()> {
    device.initialise(parse_disksize(value)?)
}

/// In bytes.
pub(super) fn parse_disksize(value: &str) -> Result<u64> {
    match parse_size(value)? {
        0 => Err(Error::invalid("a disk of 0 bytes is none").with_setting("disksize")),
        bytes => Ok(bytes),
    }
}

fn set_reset(device: &Device, value: &str) -> Result<()> {
    match value.parse::<u16>() {
        Ok(number) if number != 0 => device.reset(),
        _ => Err(Error::invalid(format!("'{value}' does not reset: write 1"))),
    }
}

fn set_mem_limit(device: &Device, value: &str) -> Result<()> {
    // The largest that can be told in bytes again is as good as none.
    let pages = bytes_to_pages(parse_size(value)?).min(page_of(u64::MAX));
    let mut state = device.state.lock();
    state.params.config.limit_pages = pages;
    if let Some(store) = &state.store {
        store.set_limit_pages(pages);
    }
    Ok(())
}

fn set_mem_used_max(device: &Device, value: &str) -> Result<()> {
    if value != "0" {
        return Err(Error::invalid(format!("'{value}' cannot be mem_used_max: write 0 to start anew")));
    }
    if let Some(store) = &device.state.lock().store {
        store.reset_pool_max();
    }
    Ok(())
}

fn mm_stat(stats: &DeviceStats) -> String {
    format!(
        "{:8} {:8} {:8} {:8} {:8} {:8} {:8} {:8} {:8}",
        stats.orig_data_bytes,
        stats.compr_data_bytes,
        stats.mem_used_bytes,
        stats.mem_limit_bytes,
        stats.mem_used_max_bytes,
        stats.same_pages,
        stats.pages_compacted,
        stats.huge_pages,
        stats.huge_pages_since
    )
}

fn io_stat(stats: &DeviceStats) -> String {
    format!("{:8} {:8} {} {:8}", stats.failed_reads, stats.failed_writes, 0, stats.notify_free)
}

fn progress(device: &Device) -> String {
    let line = |task: TaskProgress| format!("{} {} {}", task.name, task.progress.done(), task.progress.all());
    device.tasks().into_iter().map(line).collect::<Vec<_>>().join("\n")
}

/// The words of a value, each `name=value`.
fn words(value: &str) -> impl Iterator<Item = (&str, &str)> {
    value.split_whitespace().map(|word| word.split_once('=').unwrap_or((word, "")))
}

fn before_initialisation<T>(
    device: &Device,
    name: &str,
    value: T,
    set: impl FnOnce(&mut Params, T),
) -> Result<()> {
    let mut state = device.state.lock();
    state.uninitialised(name)?;
    set(&mut state.params, value);
    Ok(())
}

/// An attribute's value that is a number in a range.
fn number_within<T>(name: &str, value: &str, range: RangeInclusive<T>) -> Result<T>
where
    T: FromStr + PartialOrd + Display,
{
    let wanted =
        || Error::invalid(format!("'{value}' is no {name}: write {} to {}", range.start(), range.end()));
    value.parse().ok().filter(|number| range.contains(number)).ok_or_else(wanted)
}

/// An attribute's value that says whether something is on.
fn switch(name: &str, value: &str) -> Result<bool> {
    match value {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(Error::invalid(format!("'{value}' is no {name}: write 0 or 1"))),
    }
}

/// A line for each count.
fn lines(counts: &[(&str, u64)]) -> String {
    let width = counts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let lines: Vec<_> = counts.iter().map(|(name, count)| format!("{name:width$} {count}")).collect();
    lines.join("\n")
}

fn set_checksum(device: &Device, value: &str) -> Result<()> {
    let on = switch("checksum", value)?;
    before_initialisation(device, "checksum", on, |params, on| params.config.checksum = on)
}

/// An attribute whose values are read and told apart by their type.
fn set_parsed<T: FromStr<Err = Error>>(
    device: &Device,
    name: &str,
    value: &str,
    set: impl FnOnce(&mut Params, T),
) -> Result<()> {
    before_initialisation(device, name, value.parse()?, set)
}

fn set_streams(device: &Device, value: &str) -> Result<()> {
    set_parsed(device, "streams", value, |params, design| params.config.streams = design)
}

fn set_stream_alloc(device: &Device, value: &str) -> Result<()> {
    set_parsed(device, "stream_alloc", value, |params, alloc| params.config.stream_alloc = alloc)
}
