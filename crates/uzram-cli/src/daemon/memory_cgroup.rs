//! Keeps threads that serve files from waiting for pages that only they can write out, in memory cgroups of
//! version 1: docs/block-device.md, "In a memory cgroup", says when that is, and what is done about it.
//!
//! The kernel waits in `shrink_folio_list` (`folio_wait_writeback`), unless the thread is an I/O flusher.
//! Where no thread can be one, what is in reach of a loop device or a shared mapping charges nothing while it
//! is served ([`Charging::InAdvance`]), or neither is allowed ([`Charging::Unsafe`]). The first holds for
//! planned devices by their defaults ([`DevicePlan::defaults`]), and for all that is added or set later by
//! [`setting_check`].

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

/// Returns the plan with what this process's memory cgroup demands.
pub fn fit(plan: DaemonPlan) -> Result<DaemonPlan> {
    let Some(limit) = plan.mount_dir().and_then(|_| machine_memory::version_1_limit()) else {
        return Ok(plan);
    };
    if protect::can_be_io_flusher() {
        return Ok(plan);
    }
    let Some(obstacle) = obstacle(&plan) else { return Ok(charged_in_advance(plan)) };
    let attached = plan.devices.iter().find(|device| device.attached != Attached::No);
    match attached {
        Some(device) => Err(Failure::line(format!("{}: {}", device.name, danger(&limit, &obstacle)))),
        None => Ok(DaemonPlan { charging: Charging::Unsafe(danger(&limit, &obstacle)), ..plan }),
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
    let is_small = parse_size(&reserve.value).ok()? < least_bytes;
    is_small
        .then(|| format!("{} charges less than it may take, {}", reserve.origin, format_size(least_bytes)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::plan::SwapPlan;
    use crate::config::settings::{DeviceSettings, SettingRow};

    fn planned(attached: Attached, set: &[(&str, &str)]) -> DevicePlan {
        let mut settings = DeviceSettings::default();
        for (word, value) in set {
            let (row, name) = SettingRow::find(word).expect("a setting");
            settings.add(row, name, value, &format!("--{word}")).expect("a value");
        }
        DevicePlan { attached, ..DevicePlan::new("a", settings) }
    }

    const SWAP: Attached = Attached::Swap(SwapPlan { priority: None, discard: true, page_cluster: None });

    fn plan(device: DevicePlan) -> DaemonPlan {
        DaemonPlan::new("/run/x".into(), vec![device]).expect("a short path")
    }

    #[test]
    fn what_cannot_be_charged_in_advance_is_named() {
        for (attached, set, why) in [
            (Attached::Block, ("backing_dev", "/var/cold:8M"), "--backing_dev takes memory"),
            (Attached::No, ("recompress", "zstd"), "--recompress takes memory"),
            (SWAP, ("recompress", "zstd"), "--recompress takes memory"),
            (SWAP, ("recompress_after", "1h"), "--recompress_after takes memory"),
            (SWAP, ("reserve", "0"), "--reserve charges less than it may take, 4 MiB"),
            (Attached::No, ("reserve", "64M"), "--reserve charges less than it may take, 70 MiB"),
        ] {
            let found = obstacle(&plan(planned(attached, &[("disksize", "64M"), set])));
            assert!(found.as_ref().is_some_and(|found| found.starts_with(why)), "{why}: {found:?}");
        }
        let whole = planned(Attached::Block, &[("disksize", "64M"), ("mem_limit", "8M"), ("reserve", "8M")]);
        assert_eq!(small_reserve(&whole), None);
        assert_eq!(small_reserve(&planned(SWAP, &[("reserve", "4M")])), None);
    }

    #[test]
    fn what_is_charged_in_advance_stays_so() {
        assert!(setting_check(&plan(planned(Attached::No, &[]))).is_none());
        let check = |attached| {
            let plan = charged_in_advance(plan(planned(attached, &[])));
            let check = setting_check(&plan).expect("a check");
            move |device: &Device, attribute: &str, value: &str| {
                check(device, attribute, value).map_err(|error| error.to_string())
            }
        };
        let (check, of_swap) = (check(Attached::No), check(SWAP));
        let device = Device::new("a").expect("a name");
        for (attribute, value) in [
            ("disksize", "64M"),
            ("backing_dev", "/var/cold:8M"),
            ("recomp_algorithm", "algo=zstd priority=2"),
        ] {
            let refused = check(&device, attribute, value).expect_err(attribute);
            assert!(refused.contains("charged in advance") && refused.contains(attribute), "{refused}");
        }
        for (attribute, value) in [
            ("backing_dev", "none"),
            ("recomp_algorithm", "algo=none priority=2"),
            ("mem_limit", "1G"),
            ("disksize", "much"),
            ("reserve", "8M"),
        ] {
            assert_eq!(check(&device, attribute, value), Ok(()), "{attribute}");
        }
        for (attribute, value) in [("reserve", "8M"), ("mem_limit", "8M")] {
            device.set(attribute, value).expect("a value");
        }
        assert_eq!(check(&device, "disksize", "64M"), Ok(()));
        device.set("disksize", "64M").expect("memory");
        assert_eq!(check(&device, "mem_limit", "9M"), Ok(()), "whole chunks");
        for more in ["10M", "0"] {
            let refused = check(&device, "mem_limit", more).expect_err(more);
            assert!(refused.contains("needs a reserve of"), "{refused}");
            assert_eq!(of_swap(&device, "mem_limit", more), Ok(()), "a swap area's write may fail");
        }
        assert!(of_swap(&device, "backing_dev", "/var/cold:8M").is_err());
    }
}
