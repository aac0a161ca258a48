//! The attributes of cold pages: marking them idle, listing their states, and recompressing them.

use crate::base::error::{Error, Result};
use crate::codec::Kind;
use crate::store::{Candidates, Recompression};

use super::super::Device;
use super::super::task::Task;
use super::algorithms::{find, parse_priority};
use super::text::BlockStates;
use super::{Reading, refused, words};

/// Parses a minimum age in seconds; `None` for all pages.
pub(super) fn parse_idle_age(value: &str) -> Result<Option<u32>> {
    let bad =
        |_| Error::invalid(format!("'{value}' is not an age: write all, or seconds")).with_setting("idle");
    if value == "all" { Ok(None) } else { value.parse().map(Some).map_err(bad) }
}

/// Parses a type of pages that the kernel has for both recompression and writeback.
pub(super) fn page_type(name: &str) -> Option<Candidates> {
    let (idle, huge) = match name {
        "idle" => (true, false),
        "huge" => (false, true),
        "huge_idle" => (true, true),
        _ => return None,
    };
    Some(Candidates { idle, huge, ..Candidates::default() })
}

/// Returns the whole text, in the columns of the kernel's `block_state`.
pub(super) fn block_state(device: &Device) -> Reading {
    let (mut lines, mut text, mut piece) = (BlockStates::new(device), Vec::new(), [0; 4096]);
    while let len @ 1.. = lines.read_at(text.len() as u64, &mut piece) {
        text.extend_from_slice(&piece[..len]);
    }
    // Without the last newline.
    text.pop();
    String::from_utf8(text).unwrap_or_default().into()
}

#[derive(Default)]
pub(super) struct RecompressRequest {
    what: Recompression,
    kind: Option<Kind>,
    priority: Option<usize>,
}

impl RecompressRequest {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut request = RecompressRequest::default();
        let what = &mut request.what;
        for (name, value) in words(text) {
            let bad =
                || Error::invalid(format!("'{name}={value}' cannot be used")).with_setting("recompress");
            match name {
                "type" => {
                    what.candidates = page_type(value).ok_or_else(|| {
                        Error::invalid(format!("type={value}: write idle, huge or huge_idle"))
                    })?;
                }
                "threshold" => what.threshold_bytes = value.parse().map_err(|_| bad())?,
                "max_pages" => what.max_pages = value.parse().map_err(|_| bad())?,
                "algo" => request.kind = Some(value.parse()?),
                "priority" => request.priority = Some(parse_priority(value, 1)?),
                _ => {
                    let what = format!("'{name}' is not type, threshold, max_pages, algo or priority");
                    return refused("recompress", what);
                }
            }
        }
        Ok(request)
    }
}

pub(super) fn recompress(task: &Task<'_>, request: RecompressRequest) -> Result<()> {
    let RecompressRequest { mut what, kind, priority } = request;
    let most = task.huge_threshold();
    if what.threshold_bytes >= most {
        let what = format!("threshold={}: objects of {most} bytes take a page", what.threshold_bytes);
        return refused("recompress", what);
    }
    if !task.can_recompress() {
        return refused("recomp_algorithm", "there is no recompression algorithm");
    }
    if kind.is_some() || priority.is_some() {
        let at = find(&task.device().state.lock().params, priority, kind)?.0;
        if at == 0 {
            let what = "pages are compressed by that algorithm already when they are written";
            return refused("recompress", what);
        }
        what.priorities = at as u8..=at as u8;
    }
    task.recompress_interruptible(&what, &task.work).map(drop)
}
