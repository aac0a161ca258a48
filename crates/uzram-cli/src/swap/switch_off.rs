//! Switching a swap area off: swapped-out pages come back to memory, so there must be room for them first.

use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use uzram::units::format_size;
use uzram_serve::loop_device::LoopAttachment;
use uzram_serve::swap_area;

use crate::failure::{Context, Failure, Result};
use crate::swap::cgroups::{Tight, find_tight};
use crate::terminal::live;

/// How often the kernel may lack memory in a row, without a page that came back, until it is believed…
const TRIES: u32 = 10;

/// …and how long to wait before it is asked again.
const TRY_AGAIN: Duration = Duration::from_millis(10);

/// Switches a swap area off unless there is too little memory; the daemon keeps `kept_bytes` of its contents
/// in memory.
pub fn switch_off(attachment: LoopAttachment, kept_bytes: u64) -> Result<()> {
    let failed = || "cannot read /proc/swaps";
    // Held, so that its number is not reused meanwhile.
    let Some(held) = attachment.hold()? else { return Ok(()) };
    let Some(area) = attachment.swap_area().context(failed)? else { return Ok(()) };
    let active = swap_area::active().context(failed)?;
    let others = active.iter().filter(|other| other.path != area.path);
    let elsewhere_bytes: u64 = others.map(|other| other.size_bytes.saturating_sub(other.used_bytes)).sum();
    let available_bytes = uzram::machine_memory::available_bytes()?;
    let path = attachment.path();
    let shown = path.display();
    let stays = |why: String| Failure::line(format!("swap on {shown} stays on: {why}"));
    // The daemon frees what it keeps as pages come back.
    let room_bytes = available_bytes + elsewhere_bytes + kept_bytes;
    if area.used_bytes > room_bytes {
        let [used, room, available, kept, elsewhere] =
            [area.used_bytes, room_bytes, available_bytes, kept_bytes, elsewhere_bytes].map(format_size);
        return Err(stays(format!(
            "{used} would come back, and there is room for {room} ({available} available, {kept} kept by the daemon for \
             it, {elsewhere} in other swap areas): end something first",
        )));
    }
    if let Some(Tight { dir, swapped_bytes, room_bytes }) = find_tight(area.used_bytes) {
        let [swapped, room] = [swapped_bytes, room_bytes].map(format_size);
        return Err(stays(format!(
            "cgroup '{}' has {swapped} swapped out, and its limit leaves room for {room}: raise the limit, or end what \
             runs in it",
            dir.display(),
        )));
    }
    let still_out = || {
        let area = attachment.swap_area().ok()??;
        Some(format!("swap on {shown}: {} still out", format_size(area.used_bytes)))
    };
    let still_used = || attachment.swap_area().ok().flatten().map_or(0, |area| area.used_bytes);
    // The kernel sometimes reports a lack of memory although there is some, while a program uses the area
    // (seen with Linux 6.18; why is not known).
    let switch_off = || {
        let (mut used_bytes, mut tries) = (area.used_bytes, TRIES);
        loop {
            match held.switch_swap_off() {
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NOMEM) && tries > 1 => {}
                done => return done,
            }
            let left_bytes = still_used();
            tries = if left_bytes < used_bytes { TRIES } else { tries - 1 };
            used_bytes = left_bytes;
            thread::sleep(TRY_AGAIN);
        }
    };
    live::while_showing(still_out, switch_off).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NOMEM) => {
            stays("the kernel found no memory for all of it: end something first".to_owned())
        }
        Some(Errno::INTR) => stays("switching it off was interrupted".to_owned()),
        _ => Failure::line(format!("cannot switch swap on {shown} off: {error}")),
    })
}
