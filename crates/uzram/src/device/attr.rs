//! The attributes of a device: one table, which the command line and the control API show.
//!
//! Names, formats and life cycle are the kernel's where the kernel has the attribute; what only
//! uzram has is marked so. Some that the kernel can only write can be read here as well.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::units::{bytes_to_pages, page_of, parse_size};
use crate::lru::MAX_PAGEVEC_PAGES;
use crate::store::MAX_BATCH_PAGES;
use crate::zsmalloc::CHAIN_SIZES;

mod algorithms;
mod cold;

use super::{Device, Params, Stats};
use algorithms::{
    comp_algorithm, recomp_algorithm, set_algorithm_params, set_comp_algorithm, set_recomp_algorithm,
};
use cold::{block_state, recompress, set_idle};

/// Less would move less than an object at a time.
const LEAST_COMPACT_RATE_BYTES: u64 = 1 << 20;

const BLOCK_STATE: &str = "block_state";

/// One row of the table.
#[derive(Clone, Copy)]
pub struct Attribute {
    /// Its name.
    pub name: &'static str,
    /// What it is, and when it may be written.
    pub help: &'static str,
    get: Option<fn(&Device) -> String>,
    set: Option<fn(&Device, &str) -> Result<()>>,
}

/// The table, in the order in which it is shown.
pub(super) static TABLE: &[Attribute] = &[
    Attribute {
        name: "disksize",
        help: "size of the disk in bytes; K, M, G, T are understood; setting it initialises the device",
        get: Some(|device| device.size_bytes().to_string()),
        set: Some(set_disksize),
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
        set: Some(set_reset),
    },
    Attribute {
        name: "comp_algorithm",
        help: "lz4[:ACCELERATION], lz4hc[:LEVEL], zstd[:LEVEL] or deflate[:LEVEL], and but for deflate \
               ,dict=PATH; the one in use in brackets; before initialisation",
        get: Some(comp_algorithm),
        set: Some(set_comp_algorithm),
    },
    Attribute {
        name: "algorithm_params",
        help: "level=N dict=PATH of the algorithm in use; what is left out \
               becomes the default; priority=N or algo=NAME name one of recompression; before initialisation",
        get: None,
        set: Some(set_algorithm_params),
    },
    Attribute {
        name: "recomp_algorithm",
        help: "algo=ALGORITHM priority=1..3 (1 if left out): by which pages can be compressed again, written as \
               comp_algorithm's; before initialisation",
        get: Some(recomp_algorithm),
        set: Some(set_recomp_algorithm),
    },
    Attribute {
        name: "recompress",
        help: "type=idle, huge or huge_idle, threshold=BYTES, max_pages=N, algo=NAME or priority=N, all of which \
               may be left out: compresses pages again, the largest first",
        get: None,
        set: Some(recompress),
    },
    Attribute {
        name: "idle",
        help: "all, or seconds: marks pages as idle that were not used for as long, until they are",
        get: None,
        set: Some(set_idle),
    },
    Attribute {
        name: BLOCK_STATE,
        help: "of each page that holds something its number, when it was used last in seconds of uptime, and s \
               same-filled, h huge, i idle, r recompressed, n incompressible; the first 1048576 of them",
        get: Some(block_state),
        set: None,
    },
    Attribute {
        name: "mem_limit",
        help: "the most memory that mem_charged may reach, in bytes; 0 for no limit; at any time",
        get: Some(|device| device.counts().mem_limit_bytes.to_string()),
        set: Some(set_mem_limit),
    },
    Attribute {
        name: "mem_used_max",
        help: "the most memory the pool ever had; writing 0 starts anew",
        get: Some(|device| device.counts().mem_used_max_bytes.to_string()),
        set: Some(set_mem_used_max),
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
        set: Some(compact),
    },
    Attribute {
        name: "compact_threshold",
        help: "percent of the pool's memory that compaction must free to begin by itself, 0 to 100; 0 for never; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.compact_threshold_percent.to_string()),
        set: Some(set_compact_threshold),
    },
    Attribute {
        name: "compact_rate",
        help: "bytes of objects that it then moves in a second at most, from 1M; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.compact_rate_bytes.to_string()),
        set: Some(set_compact_rate),
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
        get: Some(|device| device.state.lock().params.pool_design.to_string()),
        set: Some(set_pool_design),
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
        get: Some(|device| device.state.lock().params.lru_design.to_string()),
        set: Some(set_lru_design),
    },
    Attribute {
        name: "lru_pagevec",
        help: "pages that each CPU collects before they are put into the lists, 1 to 128; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.lru_pagevec_pages.to_string()),
        set: Some(set_lru_pagevec),
    },
    Attribute {
        name: "chain_size",
        help: "the most pages of a zspage, 4 to 16; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.chain_size.to_string()),
        set: Some(set_chain_size),
    },
    Attribute {
        name: "checksum",
        help: "1 to keep a checksum of each page and verify it at each read; before initialisation (uzram only)",
        get: Some(|device| u8::from(device.state.lock().params.checksum).to_string()),
        set: Some(set_checksum),
    },
    Attribute {
        name: "streams",
        help: "who may compress at once: percpu, or the number of streams on a locked list of idle ones, 1 to 1024; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.streams.to_string()),
        set: Some(set_streams),
    },
    Attribute {
        name: "stream_alloc",
        help: "held, or released to give the stream to others while the pool grows or is cut back, and compress the page again; before initialisation (uzram only)",
        get: Some(|device| device.state.lock().params.stream_alloc.to_string()),
        set: Some(set_stream_alloc),
    },
    Attribute {
        name: "run_cache_batch",
        help: "pages that the CPUs' caches of free runs move at a time, up to 512; 0 for none; at any time (uzram only)",
        get: Some(|device| device.state.lock().params.run_cache_batch_pages.to_string()),
        set: Some(set_run_cache_batch),
    },
];

/// The row of a name.
pub(super) fn find(name: &str) -> Result<&'static Attribute> {
    TABLE.iter().find(|row| row.name == name).ok_or_else(|| {
        let names: Vec<_> = TABLE.iter().map(|row| row.name).collect();
        let what = format!("no attribute '{name}'; there are: {}", names.join(", "));
        Error::new(ErrorKind::NotFound, what)
    })
}

impl Attribute {
    /// Whether it can be read.
    pub fn readable(&self) -> bool {
        self.get.is_some()
    }

    /// Whether it can be written.
    pub fn writable(&self) -> bool {
        self.set.is_some()
    }

    /// Whether its text grows with the disk: it is no part of a summary.
    pub fn is_long(&self) -> bool {
        self.name == BLOCK_STATE
    }

    pub(super) fn get(&self, device: &Device) -> Result<String> {
        let denied =
            || Error::new(ErrorKind::Permission, format!("attribute '{}' can only be written", self.name));
        self.get.map(|get| get(device)).ok_or_else(denied)
    }

    pub(super) fn set(&self, device: &Device, value: &str) -> Result<()> {
        let denied =
            || Error::new(ErrorKind::Permission, format!("attribute '{}' can only be read", self.name));
        self.set.ok_or_else(denied)?(device, value)
    }
}

fn set_disksize(device: &Device, value: &str) -> Result<()> {
    match parse_size(value)? {
        0 => Err(Error::invalid("a disk of 0 bytes is none").with_setting("disksize")),
        bytes => device.initialise(bytes),
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
    state.params.limit_pages = pages;
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

fn mm_stat(stats: &Stats) -> String {
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

fn io_stat(stats: &Stats) -> String {
    format!("{:8} {:8} {} {:8}", stats.failed_reads, stats.failed_writes, 0, stats.notify_free)
}

/// In the columns of the kernel's `/sys/kernel/debug/zsmalloc/POOL/classes`.
fn classes(device: &Device) -> String {
    let mut text = String::from(" class  size");
    let percent = ["10%", "20%", "30%", "40%", "50%", "60%", "70%", "80%", "90%", "99%", "100%"];
    let counts = ["obj_allocated", "obj_used", "pages_used", "pages_per_zspage", "freeable"];
    percent.iter().for_each(|column| text += &format!(" {column:>7}"));
    counts.iter().for_each(|column| text += &format!(" {column:>16}"));
    let mut total = [0u64; 15];
    for (index, stat) in device.class_stats().iter().enumerate() {
        let zspages = stat.zspages[1..].iter().map(|count| u64::from(*count));
        let shape = stat.class;
        let counts = [stat.obj_allocated, stat.obj_used, stat.pages_used];
        let row: Vec<u64> = zspages.chain(counts).chain([stat.freeable_pages()]).collect();
        row.iter().zip(&mut total).for_each(|(count, sum)| *sum += count);
        text += &format!("\n{index:6} {:5}", shape.size_bytes);
        row[..11].iter().for_each(|count| text += &format!(" {count:7}"));
        let [allocated, used, pages, freeable] = [row[11], row[12], row[13], row[14]];
        text += &format!(" {allocated:16} {used:16} {pages:16} {:16} {freeable:16}", shape.pages_per_zspage);
    }
    text += "\n Total      ";
    total[..11].iter().for_each(|count| text += &format!(" {count:7}"));
    text += &format!(" {:16} {:16} {:16} {:16} {:16}", total[11], total[12], total[13], "", total[14]);
    text
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

fn set_chain_size(device: &Device, value: &str) -> Result<()> {
    let pages = number_within("chain_size", value, CHAIN_SIZES)?;
    before_initialisation(device, "chain_size", pages, |params, pages| params.chain_size = pages)
}

fn set_checksum(device: &Device, value: &str) -> Result<()> {
    let on = match value {
        "0" => false,
        "1" => true,
        _ => return Err(Error::invalid(format!("'{value}' is no checksum: write 0 or 1"))),
    };
    before_initialisation(device, "checksum", on, |params, on| params.checksum = on)
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
    set_parsed(device, "streams", value, |params, design| params.streams = design)
}

fn set_stream_alloc(device: &Device, value: &str) -> Result<()> {
    set_parsed(device, "stream_alloc", value, |params, alloc| params.stream_alloc = alloc)
}

fn compact(device: &Device, _: &str) -> Result<()> {
    device.initialised()?.compact();
    Ok(())
}

fn set_compact_threshold(device: &Device, value: &str) -> Result<()> {
    let percent = number_within("compact_threshold", value, 0..=100)?;
    let mut state = device.state.lock();
    if let Some(store) = &state.store {
        store.set_compact_threshold_percent(percent);
    }
    state.params.compact_threshold_percent = percent;
    Ok(())
}

fn set_compact_rate(device: &Device, value: &str) -> Result<()> {
    let bytes = parse_size(value)?;
    if bytes < LEAST_COMPACT_RATE_BYTES {
        let what = format!("'{value}' is no compact_rate: write 1M or more, or compact_threshold=0");
        return Err(Error::invalid(what));
    }
    let mut state = device.state.lock();
    if let Some(store) = &state.store {
        store.set_compact_rate_bytes(bytes);
    }
    state.params.compact_rate_bytes = bytes;
    Ok(())
}

fn set_pool_design(device: &Device, value: &str) -> Result<()> {
    set_parsed(device, "pool_design", value, |params, design| params.pool_design = design)
}

fn set_lru_design(device: &Device, value: &str) -> Result<()> {
    set_parsed(device, "lru_design", value, |params, design| params.lru_design = design)
}

fn set_lru_pagevec(device: &Device, value: &str) -> Result<()> {
    let pages = number_within("lru_pagevec", value, 1..=MAX_PAGEVEC_PAGES)?;
    let mut state = device.state.lock();
    if let Some(store) = &state.store {
        store.set_lru_pagevec_pages(pages)?;
    }
    state.params.lru_pagevec_pages = pages;
    Ok(())
}

/// A line for each count.
fn lru(device: &Device) -> String {
    let stats = device.lru_stats();
    let counts = [
        ("inactive", stats.inactive),
        ("active", stats.active),
        ("added", stats.added),
        ("refaulted", stats.refaulted),
        ("activated", stats.activated),
        ("demoted", stats.demoted),
        ("removed", stats.removed),
        ("scanned", stats.scanned),
        ("isolated", stats.isolated),
        ("put_back", stats.put_back),
        ("evicted", stats.evicted),
        ("lru_lock", stats.lru_locks),
        ("lru_lock_contended", stats.lru_locks_contended),
        ("batch_locks", stats.batch_locks),
        ("batch_locks_contended", stats.batch_locks_contended),
    ];
    let lines = counts.map(|(name, count)| format!("{name:21} {count}"));
    lines.join("\n")
}

fn set_run_cache_batch(device: &Device, value: &str) -> Result<()> {
    let pages = number_within("run_cache_batch", value, 0..=MAX_BATCH_PAGES)?;
    let mut state = device.state.lock();
    if let Some(store) = &state.store {
        store.set_run_cache_batch_pages(pages)?;
    }
    state.params.run_cache_batch_pages = pages;
    Ok(())
}
