//! Keeps threads that serve files from waiting for pages that only they can write out.
//!
//! In a memory cgroup of version 1 that has reached its limit, the kernel frees memory for a thread by waiting until pages
//! of the cgroup are written out (`folio_wait_writeback` in `shrink_folio_list`; version 2 starts writing, and does not wait
//! for it). If the pages are of a file system on a device of ours, a thread that serves the device waits for itself, for
//! ever, and so does all that waits for that file system. Such a daemon must not charge memory to its cgroup while it
//! serves. So, unless the kernel makes its threads I/O flushers, which do not wait (CAP_SYS_RESOURCE):
//!
//! - all of its memory is charged, and locked, before it serves: [`Charging::InAdvance`]. Then no other process can take
//!   over, because to start threads takes memory;
//! - if that cannot be, block devices are refused. Files are served, but not in the page cache: [`Charging::Unsafe`].

use uzram::machine_memory::{self, Version1Limit};
use uzram::units::{format_size, parse_size};

use crate::config::plan::{Attached, Charging, DaemonPlan, DevicePlan};
use crate::failure::{Failure, Result};
use crate::swap::room;
use crate::system::protect;

/// Returns the plan with what this process's memory cgroup demands.
///
/// # Errors
/// A device is to be a block device, which cannot be served safely in this cgroup.
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
    let reclaims = plan.devices.iter().find_map(DevicePlan::reclaims_by);
    let reclaims = reclaims.map(|setting| format!("{} takes memory when it is short", setting.origin));
    reclaims.or_else(|| protect::lock_memory().err().map(|why| format!("memory cannot be locked: {why}")))
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
    // A swap area has its reserve: the kernel keeps a page that it cannot store.
    for device in plan.devices.iter_mut().filter(|device| !device.is_swap()) {
        let bytes = |attribute| parse_size(&device.settings.get(attribute)?.value).ok();
        let disk_bytes = bytes("disksize");
        let limit_bytes = bytes("mem_limit").unwrap_or(0);
        device.advance_bytes =
            disk_bytes.map(|disk_bytes| room::whole_reserve_bytes(disk_bytes, limit_bytes));
    }
    plan
}
