//! Keeps threads that serve files from waiting for pages that only they can write out, in memory cgroups of
//! version 1: docs/block-device.md, "In a memory cgroup", says when that is, and what is done about it.
//!
//! The kernel waits in `shrink_folio_list` (`folio_wait_writeback`), unless the thread is an I/O flusher.
//! Where none can be one, what a loop device or a shared mapping reaches charges nothing while it is served
//! ([`Charging::InAdvance`]: by [`DevicePlan::defaults`], and by [`setting_check`] for what is added or set
//! later), or neither is allowed ([`Charging::Unsafe`]).

use std::sync::Arc;

use uzram::device::Device;
use uzram::machine_memory::{self, Version1Limit};
use uzram::units::{format_size, parse_size};
use uzram::{Error, ErrorKind};
use uzram_serve::SettingCheck;

use crate::config::plan::{Attached, Charging, DaemonPlan, DevicePlan, SWAP_RESERVE_BYTES, is_reclaim};
use crate::failure::{Failure, Result};
use crate::swap::room;
use crate::system::protect;

pub fn fit(plan: DaemonPlan) -> Result<DaemonPlan> {
    let limit = plan.mount_dir().and_then(|_| machine_memory::version_1_limit());
    let Some(limit) = limit.filter(|_| !protect::can_be_io_flusher()) else { return Ok(plan) };
    let Some(obstacle) = obstacle(&plan) else { return Ok(charged_in_advance(plan)) };
    let danger = danger(&limit, &obstacle);
    match plan.devices.iter().find(|device| device.attached != Attached::No) {
        Some(device) => Err(Failure::line(format!("{}: {danger}", device.name))),
        None => Ok(DaemonPlan { charging: Charging::Unsafe(danger), ..plan }),
    }
}

/// Returns why a daemon's memory cannot be charged in advance, if it cannot.
fn obstacle(plan: &DaemonPlan) -> Option<String> {
    let of_device = |device: &DevicePlan| {
        let reclaims = device.reclaims_by();
        let reclaims = reclaims.map(|setting| format!("{} takes memory while it works", setting.origin));
        reclaims.or_else(|| small_reserve(device))
    };
    let of_devices = plan.devices.iter().find_map(of_device);
    of_devices.or_else(|| protect::lock_memory().err().map(|why| format!("memory cannot be locked: {why}")))
}

/// Returns what a device's reserve lacks, if it was set too small.
fn small_reserve(device: &DevicePlan) -> Option<String> {
    let reserve = device.settings.get("reserve")?;
    let least_bytes =
        if device.is_swap() { room::LEAST_RESERVE_BYTES } else { planned_reserve_bytes(device)? };
    let (origin, least) = (&reserve.origin, format_size(least_bytes));
    let is_small = parse_size(&reserve.value).ok()? < least_bytes;
    is_small.then(|| format!("{origin} charges less than it may take, {least}"))
}

fn danger(limit: &Version1Limit, obstacle: &str) -> String {
    format!(
        "a block device in the memory cgroup of version 1 '{}', which has {} at most, could wait for ever for pages that \
         only this daemon can write out. All memory would have to be charged in advance, but {obstacle}. Give the daemon \
         CAP_SYS_RESOURCE (`docker run --cap-add SYS_RESOURCE`), start it outside of that cgroup, or use cgroups of version 2",
        limit.cgroup,
        format_size(limit.limit_bytes),
    )
}

fn charged_in_advance(mut plan: DaemonPlan) -> DaemonPlan {
    plan.charging = Charging::InAdvance;
    for device in &mut plan.devices {
        device.advance_bytes = planned_reserve_bytes(device);
    }
    plan
}

/// Returns the reserve that charges all memory of a device while it is served; `None` for a device without a
/// size.
fn planned_reserve_bytes(device: &DevicePlan) -> Option<u64> {
    // The kernel keeps a page that a swap area cannot store.
    if device.is_swap() {
        return Some(SWAP_RESERVE_BYTES);
    }
    let bytes = |attribute| parse_size(&device.settings.get(attribute)?.value).ok();
    Some(room::whole_reserve_bytes(bytes("disksize")?, bytes("mem_limit").unwrap_or(0)))
}

/// Returns the check of settings in a daemon whose memory is charged in advance, which keeps it so.
pub fn setting_check(plan: &DaemonPlan) -> Option<SettingCheck> {
    let swaps = plan.devices.iter().filter(|device| device.is_swap());
    let swaps: Vec<_> = swaps.map(|device| device.name.clone()).collect();
    let check = move |device: &Device, attribute: &str, value: &str| {
        let is_swap = swaps.iter().any(|name| name == device.name());
        check_setting(device, is_swap, attribute, value)
    };
    (plan.charging == Charging::InAdvance).then(|| Arc::new(check) as SettingCheck)
}

fn check_setting(device: &Device, is_swap: bool, attribute: &str, value: &str) -> uzram::Result<()> {
    let refused = |what: &str| {
        let why = "in this daemon's memory cgroup, all memory of its devices is charged in advance";
        Error::new(ErrorKind::Invalid, format!("{why}: {what}, or give the daemon CAP_SYS_RESOURCE"))
    };
    if is_reclaim(attribute, value) {
        return Err(refused(&format!("leave {attribute} out, which takes memory while it works")));
    }
    if is_swap || !["disksize", "mem_limit"].contains(&attribute) {
        return Ok(());
    }
    // The attribute itself refuses a value that is no size.
    let bytes = |name| if name == attribute { parse_size(value) } else { parse_size(&device.get(name)?) };
    let Ok(new_bytes) = bytes(attribute) else { return Ok(()) };
    let whole_bytes = match (bytes("disksize")?, bytes("mem_limit")?) {
        (0, _) => return Ok(()),
        (disksize_bytes, limit_bytes) => room::whole_reserve_bytes(disksize_bytes, limit_bytes),
    };
    if bytes("reserve")? >= whole_bytes {
        return Ok(());
    }
    let what = format!(
        "{attribute} of {} needs a reserve of {}, set before the size (--reserve)",
        format_size(new_bytes),
        format_size(whole_bytes)
    );
    Err(refused(&what).with_setting("reserve"))
}
