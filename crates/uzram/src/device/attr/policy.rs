//! The attributes of the reclaim policy: its settings and its statistics.

use crate::base::error::{Error, Result};
use crate::base::units::{parse_duration_s, parse_size};
use crate::store::ReclaimPolicy;

use super::super::Device;
use super::Reading;

pub(super) fn change_policy(device: &Device, change: impl FnOnce(&mut ReclaimPolicy)) -> Result<()> {
    try_change_policy(device, |policy| {
        change(policy);
        Ok(())
    })
}

fn try_change_policy(device: &Device, change: impl FnOnce(&mut ReclaimPolicy) -> Result<()>) -> Result<()> {
    let mut state = device.state.lock();
    let mut policy = state.params.store.policy;
    change(&mut policy)?;
    if let Some(store) = &state.store {
        store.set_policy(policy);
    }
    state.params.store.policy = policy;
    Ok(())
}

/// Sets the high watermark, and lowers the low watermark to it, so that both can be set in either order from
/// the defaults.
pub(super) fn set_policy_high(device: &Device, percent: u64) -> Result<()> {
    change_policy(device, |policy| {
        policy.high_percent = percent;
        policy.low_percent = policy.low_percent.min(percent);
    })
}

pub(super) fn set_policy_low(device: &Device, percent: u64) -> Result<()> {
    try_change_policy(device, |policy| {
        if percent > policy.high_percent {
            let high = policy.high_percent;
            let what = format!("policy_low={percent} would be above policy_high, which is {high}");
            return Err(Error::invalid(what).with_setting("policy_high"));
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

/// Parses a size, optionally followed by `/day`.
pub(super) fn parse_writeback_budget(value: &str) -> Result<u64> {
    parse_size(value.strip_suffix("/day").unwrap_or(value))
}

pub(super) fn policy(device: &Device) -> Reading {
    // Without the device's lock: counting may take a while.
    let store = device.state.lock().store.clone();
    Reading::lines(&store.map(|store| store.policy_stats()).unwrap_or_default())
}
