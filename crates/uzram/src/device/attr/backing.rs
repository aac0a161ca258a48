//! The attributes of the backing device: its path, writeback on request, and limits of writeback.

use std::ops::Range;

use crate::backing::Health;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::units::bytes_to_pages;
use crate::store::{Candidates, MAX_PAGES, Store, Writeback, WritebackLimit};

use super::super::backing::check_encrypts;
use super::super::task::Task;
use super::super::{Device, HowToOpen, NamedBacking, State};
use super::cold::page_type;
use super::{Reading, Value, live, refused, switch, words};

pub(super) fn backing_dev(device: &Device) -> Reading {
    device.backing().map_or_else(|| "none".to_owned(), |backing| backing.name().to_owned()).into()
}

pub(super) fn is_encrypted(device: &Device) -> bool {
    let params = &device.state.lock().params;
    params.backing.as_ref().map_or(params.how_to_open.encrypted, NamedBacking::is_encrypted)
}

/// Parses whether what goes to files is encrypted, which not every program can.
pub(super) fn parse_encrypted(value: &str) -> Result<bool> {
    let on = switch("backing_encrypted", value)?;
    if on { check_encrypts().map(|()| on) } else { Ok(on) }
}

pub(super) fn copies(device: &Device) -> u8 {
    let params = &device.state.lock().params;
    params.backing.as_ref().map_or(params.how_to_open.copies, NamedBacking::copies)
}

/// Parses the absolute path of a file or block device, the address of a store, several of these, or `none`.
pub(super) fn parse_backing_dev(value: &str) -> Result<Option<String>> {
    match value {
        "none" => Ok(None),
        path => NamedBacking::check(path).map(|()| Some(path.to_owned())),
    }
}

pub(super) fn set_backing_dev(device: &Device, path: Option<String>) -> Result<()> {
    // Check this before a file is created. The file is opened, and its space reserved, without the lock.
    let how = {
        let state = device.state.lock();
        state.uninitialised("backing_dev")?;
        HowToOpen { keeps: state.keeper.is_some(), ..state.params.how_to_open }
    };
    let is_at = |path: &String| device.backing().is_some_and(|backing| backing.is_at(path));
    if path.as_ref().is_some_and(is_at) {
        // Close it first: it cannot be opened twice.
        device.set_backing(None)?;
    }
    device.set_backing(path.map(|path| NamedBacking::open(&path, how)).transpose()?)
}

pub(super) fn writeback(task: &Task<'_>, wanted: Writeback) -> Result<()> {
    check_pages(&wanted, task.pages())?;
    task.write_back_interruptible(&wanted, &task.work).map(drop)
}

/// Parses a type of pages, or ranges of pages. The syntax is the kernel's with `all` added; what the kernel
/// ignores is refused.
pub(super) fn parse_writeback(value: &str) -> Result<Writeback> {
    let (mut kind, mut ranges) = (None, Vec::new());
    for (name, value) in words(value) {
        match name {
            "page_index" => ranges.push(parse_pages(value, value)?),
            "page_indexes" => match value.split_once('-') {
                Some((first, last)) => ranges.push(parse_pages(first, last)?),
                None => {
                    let what = format!("page_indexes={value}: write the first and last, as in 0-99");
                    return refused("writeback", what);
                }
            },
            _ if kind.is_some() => return refused("writeback", format!("'{name}' is one type too many")),
            "type" => kind = Some(parse_candidates(value)?),
            _ if value.is_empty() => kind = Some(parse_candidates(name)?),
            _ => return refused("writeback", format!("'{name}' is not type, page_index or page_indexes")),
        }
    }
    match kind {
        Some(_) if !ranges.is_empty() => {
            refused("writeback", "write a type of pages, or which pages, and not both")
        }
        Some(candidates) => Ok(Writeback { candidates, pages: ranges }),
        None if ranges.is_empty() => refused("writeback", "write a type of pages, as in type=idle"),
        None => Ok(Writeback { candidates: Candidates::default(), pages: ranges }),
    }
}

fn parse_candidates(name: &str) -> Result<Candidates> {
    let all = Candidates::default();
    match name {
        "incompressible" => Ok(Candidates { incompressible: true, ..all }),
        "all" => Ok(all),
        _ => page_type(name).ok_or_else(|| {
            let what = format!("'{name}' is no type: write idle, huge, huge_idle, incompressible or all");
            Error::invalid(what).with_setting("writeback")
        }),
    }
}

fn parse_pages(first: &str, last: &str) -> Result<Range<u64>> {
    let parse = |text: &str| {
        let bad = |_| Error::invalid(format!("'{text}' is no number of a page")).with_setting("writeback");
        text.parse::<u64>().map_err(bad)
    };
    let (first, last) = (parse(first)?, parse(last)?);
    if first > last {
        return refused("writeback", format!("{first}-{last}: the first page comes after the last"));
    }
    if last >= MAX_PAGES {
        return Err(beyond_the_end(last, "no disk has so many pages"));
    }
    Ok(first..last + 1)
}

fn check_pages(wanted: &Writeback, disk_pages: u64) -> Result<()> {
    let beyond = wanted.pages.iter().find(|pages| pages.end > disk_pages);
    beyond.map_or(Ok(()), |pages| {
        Err(beyond_the_end(pages.end - 1, &format!("the disk has {disk_pages} pages")))
    })
}

fn beyond_the_end(page: u64, why: &str) -> Error {
    Error::new(ErrorKind::OutOfRange, format!("page {page} is beyond the end: {why}"))
        .with_setting("writeback")
}

pub(super) fn writeback_limit(device: &Device) -> WritebackLimit {
    let State { params, store, .. } = &*device.state.lock();
    let backed = params.backing.as_ref().and(store.as_ref());
    backed.map_or(params.store.writeback_limit, |store| store.writeback_limit())
}

pub(super) fn change_writeback_limit(device: &Device, change: impl Fn(&mut WritebackLimit)) -> Result<()> {
    let change_store = |store: &Store| store.change_writeback_limit(&change);
    live(device, change_store, |config| change(&mut config.writeback_limit))
}

pub(super) fn writeback_batch_size(device: &Device) -> u64 {
    let params = &device.state.lock().params;
    params.store.writeback_batch.unwrap_or_else(|| params.writeback_layout.default_batch())
}

pub(super) fn bd_stat(device: &Device) -> Reading {
    let stats = device.backing_stats();
    let [count, reads, writes] =
        [stats.held_bytes, stats.read_bytes, stats.written_bytes].map(bytes_to_pages);
    Reading::columns(&[("bd_count_pages", count), ("bd_reads_pages", reads), ("bd_writes_pages", writes)])
}

pub(super) fn backing(device: &Device) -> Reading {
    Reading::lines(&device.backing_stats().named())
}

pub(super) fn backing_state(device: &Device) -> Reading {
    let (Some(state), Some(backing)) = (device.backing_state(), device.backing()) else {
        return state_and_counts("none".to_owned(), &[]);
    };
    let counts = backing.backing().health().map(|Health { expired, left_behind, .. }| {
        let lost = device.backing_stats().lost_reads;
        vec![("lost", lost), ("expired", expired), ("left_behind", left_behind)]
    });
    state_and_counts(state.to_string(), &counts.unwrap_or_default())
}

fn state_and_counts(state: String, counts: &[(&'static str, u64)]) -> Reading {
    let lines: String = counts.iter().map(|(name, count)| format!("\n{name} {count}")).collect();
    Reading { text: format!("{state}{lines}"), value: Value::named("state", state, counts) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_to_write_are_named_as_the_kernel_names_them() {
        let kinds = [
            ("idle", true, false, false),
            ("huge", false, true, false),
            ("huge_idle", true, true, false),
            ("incompressible", false, false, true),
            ("all", false, false, false),
        ];
        for (name, idle, huge, incompressible) in kinds {
            let candidates = Candidates { idle, huge, incompressible };
            for value in [name, &format!("type={name}")] {
                assert_eq!(parse_writeback(value), Ok(Writeback { candidates, pages: Vec::new() }));
            }
        }
        let ranges = |value: &str| {
            let all = parse_writeback(value).expect(value);
            assert_eq!(all.candidates, Candidates::default());
            all.pages
        };
        assert_eq!(ranges("page_index=7 page_index=0"), [7..8, 0..1]);
        assert_eq!(ranges("page_indexes=0-7 page_index=3  page_indexes=2-2"), [0..8, 3..4, 2..3]);
    }

    #[test]
    fn what_is_not_to_be_written_is_refused_with_words() {
        for (value, hint) in [
            ("", "write a type"),
            ("warm", "'warm' is no type"),
            ("type=", "'' is no type"),
            ("type=idle huge", "one type too many"),
            ("idle page_index=1", "and not both"),
            ("page_index=1 type=idle", "and not both"),
            ("page=1", "'page' is not"),
            ("page_index=", "'' is no number"),
            ("page_index=-1", "'-1' is no number"),
            ("page_indexes=3", "as in 0-99"),
            ("page_indexes=3-", "'' is no number"),
            ("page_indexes=3-1", "comes after the last"),
            ("page_index=18446744073709551616", "is no number"),
        ] {
            let error = parse_writeback(value).unwrap_err();
            assert_eq!((error.kind(), error.setting()), (ErrorKind::Invalid, Some("writeback")), "{value}");
            assert!(error.to_string().contains(hint), "{value}: {error}");
        }
        for value in ["page_index=8", "page_indexes=0-8", "page_index=18446744073709551615"] {
            let refused = parse_writeback(value).and_then(|wanted| check_pages(&wanted, 8)).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::OutOfRange, "{value}");
        }
    }
}
