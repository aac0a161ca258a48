//! The attributes of the pool, its compaction, the LRU and the reclaim policy: their settings and statistics.

use crate::base::error::{Error, Result};
use crate::base::mem::{CHUNK_PAGES, reserve_chunks};
use crate::base::units::{bytes_to_pages, page_of, parse_duration_s, parse_size};
use crate::store::ReclaimPolicy;

use super::super::Device;
use super::super::task::Task;
use super::{Reading, Value, refused};

/// The minimum compaction rate; a lower one would move less than one object in a step.
const LEAST_COMPACT_RATE_BYTES: u64 = 1 << 20;

/// Returns a table in the columns of the kernel's `/sys/kernel/debug/zsmalloc/POOL/classes`.
pub(super) fn classes(device: &Device) -> Reading {
    let mut text = String::from(" class  size");
    let percent = ["10%", "20%", "30%", "40%", "50%", "60%", "70%", "80%", "90%", "99%", "100%"];
    let counts = ["obj_allocated", "obj_used", "pages_used", "pages_per_zspage", "freeable"];
    percent.iter().for_each(|column| text += &format!(" {column:>7}"));
    counts.iter().for_each(|column| text += &format!(" {column:>16}"));
    let (mut total, mut classes) = ([0u64; 15], Vec::new());
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
        if allocated == 0 {
            continue;
        }
        let zspages = row[..11].iter().map(|count| Value::Number(*count)).collect();
        classes.push(Value::Fields(vec![
            ("size_bytes", Value::Number(shape.size_bytes as u64)),
            ("zspages_by_fullness", Value::List(zspages)),
            ("obj_allocated", Value::Number(allocated)),
            ("obj_used", Value::Number(used)),
            ("pages_used", Value::Number(pages)),
            ("pages_per_zspage", Value::Number(shape.pages_per_zspage as u64)),
            ("freeable_pages", Value::Number(freeable)),
        ]));
    }
    text += "\n Total      ";
    total[..11].iter().for_each(|count| text += &format!(" {count:7}"));
    text += &format!(" {:16} {:16} {:16} {:16} {:16}", total[11], total[12], total[13], "", total[14]);
    Reading { text, value: Value::List(classes) }
}

pub(super) fn compact(task: &Task<'_>) -> Result<()> {
    task.compact_interruptible(&task.work);
    task.work.check()
}

pub(super) fn parse_compact_rate(value: &str) -> Result<u64> {
    let bytes = parse_size(value)?;
    if bytes < LEAST_COMPACT_RATE_BYTES {
        let what = format!("'{value}' is no compact_rate: write 1M or more, or compact_threshold=0");
        return Err(Error::invalid(what));
    }
    Ok(bytes)
}

pub(super) fn parse_reserve_pages(value: &str) -> Result<u64> {
    let chunks = reserve_chunks(bytes_to_pages(parse_size(value)?));
    // Clamp so that the size in bytes fits into a u64.
    Ok((chunks * u64::from(CHUNK_PAGES)).min(page_of(u64::MAX)))
}

pub(super) fn lru(device: &Device) -> Reading {
    let stats = device.lru_stats();
    Reading::lines(&[
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
    ])
}

pub(super) fn change_policy(
    device: &Device,
    change: impl FnOnce(&mut ReclaimPolicy) -> Result<()>,
) -> Result<()> {
    let mut state = device.state.lock();
    let mut policy = state.params.store.policy;
    change(&mut policy)?;
    if let Some(store) = &state.store {
        store.set_policy(policy);
    }
    state.params.store.policy = policy;
    Ok(())
}

/// Sets the high watermark, and lowers the low one to it: both can be set in either order.
pub(super) fn set_policy_high(device: &Device, percent: u64) -> Result<()> {
    change_policy(device, |policy| {
        policy.high_percent = percent;
        policy.low_percent = policy.low_percent.min(percent);
        Ok(())
    })
}

pub(super) fn set_policy_low(device: &Device, percent: u64) -> Result<()> {
    change_policy(device, |policy| {
        if percent > policy.high_percent {
            let high = policy.high_percent;
            let what = format!("policy_low={percent} would be above policy_high, which is {high}");
            return refused("policy_high", what);
        }
        policy.low_percent = percent;
        Ok(())
    })
}

/// Parses a duration in seconds that fits into a u32, as the access times in slots do.
pub(super) fn parse_age_s(name: &'static str, value: &str) -> Result<u32> {
    let bad = |why: &str| Error::invalid(why.to_owned()).with_setting(name);
    let seconds = parse_duration_s(value).map_err(|error| bad(&error.to_string()))?;
    u32::try_from(seconds).map_err(|_| bad(&format!("{value} is more than {} seconds", u32::MAX)))
}

pub(super) fn parse_writeback_budget(value: &str) -> Result<u64> {
    parse_size(value.strip_suffix("/day").unwrap_or(value))
}

pub(super) fn policy(device: &Device) -> Reading {
    // Without the device's lock: counting may take a while.
    let store = device.state.lock().store.clone();
    Reading::lines(&store.map(|store| store.policy_stats()).unwrap_or_default())
}
