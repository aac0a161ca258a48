//! The attributes of a device: one table, which the command line and the control API show.
//!
//! Names, formats and life cycle are the kernel's where the kernel has the attribute; attributes of uzram's
//! own are marked so. Some that are write-only in the kernel can also be read here.

use std::borrow::Cow;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::named::hint;
use crate::base::units::{bytes_to_pages, page_of, parse_size};
use crate::store::{Store, StoreBuilder, check_limit};

mod algorithms;
mod backing;
mod cold;
mod pool;
mod reading;
mod table;
mod text;

pub use reading::{Reading, Value};
pub(super) use table::TABLE;
pub use text::AttributeText;

use super::task::TaskProgress;
use super::{Device, DeviceStats, Params};

const BLOCK_STATE: &str = "block_state";

/// One row of the table.
#[derive(Clone, Copy)]
pub struct Attribute {
    /// Its name.
    pub name: &'static str,
    /// A description that also says when it may be written.
    pub help: &'static str,
    get: Option<fn(&Device) -> Reading>,
    /// `None` if it is read-only.
    set: Option<Set>,
}

/// How an attribute is set: its text is parsed, without a device, and then applied to one.
#[derive(Clone, Copy)]
struct Set {
    /// Whether that starts a task over all pages, which can be interrupted.
    is_task: bool,
    check: fn(&str) -> Result<()>,
    apply: fn(&'static str, &Device, &str, &dyn Fn() -> bool) -> Result<()>,
}

pub(super) fn find(name: &str) -> Result<&'static Attribute> {
    TABLE.iter().find(|row| row.name == name).ok_or_else(|| {
        let names: Vec<_> = TABLE.iter().map(|row| row.name).collect();
        Error::new(ErrorKind::NotFound, format!("no attribute '{name}'; {}", hint(name, &names)))
    })
}

impl Attribute {
    /// Returns the rank of an attribute when several are set on a new device, lowest first. `disksize` comes
    /// last, because it builds the store from the others; `backing_dev` just before it, because it may create
    /// a file. Parameters of algorithms come after the algorithms, which reset them.
    pub fn turn(name: &str) -> u8 {
        match name {
            "comp_algorithm" | "recomp_algorithm" => 0,
            "algorithm_params" => 1,
            "backing_dev" => 3,
            "disksize" => 4,
            _ => 2,
        }
    }

    /// Returns whether the attribute can be read.
    pub fn readable(&self) -> bool {
        self.get.is_some()
    }

    /// Returns whether the attribute can be written.
    pub fn writable(&self) -> bool {
        self.set.is_some()
    }

    /// Returns whether the text grows with the disk: such an attribute is left out of summaries, and read
    /// piece by piece ([`Device::text`]).
    pub fn is_long(&self) -> bool {
        self.name == BLOCK_STATE
    }

    pub(super) fn get(&self, device: &Device) -> Result<Reading> {
        self.get.map(|get| get(device)).ok_or_else(|| self.can_only_be("written"))
    }

    /// Returns whether setting the attribute starts a task over all pages, which may take long and can be
    /// interrupted ([`Device::set_interruptible`]).
    pub fn works(&self) -> bool {
        self.set.is_some_and(|set| set.is_task)
    }

    /// Checks the text of a value, but not whether a device accepts it now. Fails as [`Device::set`]:
    /// `Permission` for a read-only attribute, `Invalid` for a value that no device accepts.
    pub fn check(&self, value: &str) -> Result<()> {
        (self.setter()?.check)(value.trim())
    }

    pub(super) fn set(&self, device: &Device, value: &str, is_wanted: &dyn Fn() -> bool) -> Result<()> {
        (self.setter()?.apply)(self.name, device, value, is_wanted)
    }

    fn setter(&self) -> Result<Set> {
        self.set.ok_or_else(|| self.can_only_be("read"))
    }

    fn can_only_be(&self, done: &str) -> Error {
        Error::new(ErrorKind::Permission, format!("attribute '{}' can only be {done}", self.name))
    }
}

pub(super) fn parse_disksize(value: &str) -> Result<u64> {
    match parse_size(value)? {
        0 => refused("disksize", "disksize must be greater than 0"),
        bytes => Ok(bytes),
    }
}

fn parse_reset(value: &str) -> Result<()> {
    match value.parse::<u16>() {
        Ok(number) if number != 0 => Ok(()),
        _ => Err(Error::invalid(format!("'{value}' does not reset: write 1"))),
    }
}

fn parse_limit_pages(value: &str) -> Result<u64> {
    // Clamp so that the limit in bytes fits into a u64.
    Ok(bytes_to_pages(parse_size(value)?).min(page_of(u64::MAX)))
}

fn set_mem_limit(device: &Device, pages: u64) -> Result<()> {
    let mut state = device.state.lock();
    // Before, the reserve may not be set yet: the limit is checked with it then.
    if let Some(store) = &state.store {
        check_limit(pages, state.params.store.reserve_pages)?;
        store.set_limit_pages(pages);
    }
    state.params.store.limit_pages = pages;
    Ok(())
}

fn parse_mem_used_max(value: &str) -> Result<()> {
    match value {
        "0" => Ok(()),
        _ => Err(Error::invalid(format!("'{value}' cannot be mem_used_max: write 0 to reset it"))),
    }
}

fn reset_mem_used_max(device: &Device, (): ()) -> Result<()> {
    if let Some(store) = &device.state.lock().store {
        store.reset_pool_max();
    }
    Ok(())
}

fn mm_stat(stats: &DeviceStats) -> Reading {
    Reading::columns(&[
        ("orig_data_bytes", stats.orig_data_bytes),
        ("compr_data_bytes", stats.compr_data_bytes),
        ("mem_used_bytes", stats.mem_used_bytes),
        ("mem_limit_bytes", stats.mem_limit_bytes),
        ("mem_used_max_bytes", stats.mem_used_max_bytes),
        ("same_pages", stats.same_pages),
        ("pages_compacted", stats.pages_compacted),
        ("huge_pages", stats.huge_pages),
        ("huge_pages_since", stats.huge_pages_since),
    ])
}

fn io_stat(stats: &DeviceStats) -> Reading {
    let DeviceStats { failed_reads, failed_writes, notify_free, .. } = *stats;
    Reading {
        text: format!("{failed_reads:8} {failed_writes:8} {} {notify_free:8}", 0),
        value: Value::counts(&[
            ("failed_reads", failed_reads),
            ("failed_writes", failed_writes),
            ("invalid_io", 0),
            ("notify_free", notify_free),
        ]),
    }
}

/// The kernel's counts of writes that waited for a stream, and of failed opens, do not exist here.
fn debug_stat(_: &Device) -> Reading {
    Reading {
        text: format!("version: 1\n{:8} {:8}", 0, 0),
        value: Value::counts(&[("version", 1), ("writestall", 0), ("miss_free", 0)]),
    }
}

fn progress(device: &Device) -> Reading {
    let line =
        |task: &TaskProgress| format!("{} {} {}", task.name, task.progress.done(), task.progress.all());
    let fields = |task: &TaskProgress| {
        let counts = [("done", task.progress.done()), ("all", task.progress.all())];
        Value::named("name", task.name.to_owned(), &counts)
    };
    let tasks = device.tasks();
    Reading {
        text: tasks.iter().map(line).collect::<Vec<_>>().join("\n"),
        value: Value::List(tasks.iter().map(fields).collect()),
    }
}

fn refused<T>(setting: &'static str, what: impl Into<Cow<'static, str>>) -> Result<T> {
    Err(Error::invalid(what).with_setting(setting))
}

fn words(value: &str) -> impl Iterator<Item = (&str, &str)> {
    value.split_whitespace().map(|word| word.split_once('=').unwrap_or((word, "")))
}

/// Sets a parameter of a device that is not initialised yet.
fn put<T>(name: &str, device: &Device, value: T, put: impl FnOnce(&mut Params, T)) -> Result<()> {
    let mut state = device.state.lock();
    state.uninitialised(name)?;
    put(&mut state.params, value);
    Ok(())
}

/// Changes a setting that can be changed at any time: in the store, if there is one, and in the parameters.
fn live(device: &Device, change: impl FnOnce(&Store), put: impl FnOnce(&mut StoreBuilder)) -> Result<()> {
    let mut state = device.state.lock();
    if let Some(store) = &state.store {
        change(store);
    }
    put(&mut state.params.store);
    Ok(())
}

fn number_within<T>(name: &str, value: &str, range: RangeInclusive<T>) -> Result<T>
where
    T: FromStr + PartialOrd + Display,
{
    let wanted =
        || Error::invalid(format!("'{value}' is no {name}: write {} to {}", range.start(), range.end()));
    value.parse().ok().filter(|number| range.contains(number)).ok_or_else(wanted)
}

fn switch(name: &str, value: &str) -> Result<bool> {
    match value {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(Error::invalid(format!("'{value}' is no {name}: write 0 or 1"))),
    }
}
