//! What devices may take at most, and whether there is room for that.
//!
//! The limit of this process's cgroup is one that a daemon must never meet: it would wait there for memory that only it
//! can free, or be killed, and all contents with it. So devices that might not fit are refused ([`check_cgroup`]), at the
//! start and when they are added. The machine's memory is shared with others, and what is swapped out mostly
//! compresses: there, [`swap_warning`] says what may come.

use std::sync::Arc;

use uzram::device::{Device, DeviceStats};
use uzram::machine_memory::{self, Memory};
use uzram::units::format_size;
use uzram::{Error, ErrorKind};

/// What the process takes beside its devices: program, buffers, stacks, heap; measured, and some more.
const PROCESS_BYTES: u64 = 32 << 20;
/// What a pool takes at most, if nothing compresses, for the pages of its disk: a sixteenth more.
const POOL_SIXTEENTHS: u64 = 17;

/// What a device's contents may take at most, beside its fixed cost: `mem_limit`, or all of its disk uncompressed, and
/// its reserve.
fn most_contents_bytes(device: &DeviceStats) -> u64 {
    let uncompressed_bytes = (device.disksize_bytes / 16).saturating_mul(POOL_SIXTEENTHS);
    let pool_bytes = uncompressed_bytes.saturating_add(device.reserve_bytes);
    match device.mem_limit_bytes {
        0 => pool_bytes,
        limit_bytes => limit_bytes.min(pool_bytes),
    }
}

/// Makes sure that a daemon's devices fit into what its cgroup may have now.
///
/// # Errors
/// As [`check_cgroup`].
pub fn check(devices: &[Arc<Device>]) -> uzram::Result<()> {
    match machine_memory::read() {
        Ok(memory) => check_cgroup(devices, &memory),
        // Without /proc nothing is known of a limit.
        Err(_) => Ok(()),
    }
}

/// Makes sure that the devices, in this order, fit into what this process's cgroup may have.
///
/// # Errors
/// `NoMemory` for the first that does not: with the numbers, and what to set.
fn check_cgroup(devices: &[Arc<Device>], memory: &Memory) -> uzram::Result<()> {
    // Then it has no limit.
    if memory.limit_bytes >= memory.ram_bytes {
        return Ok(());
    }
    let mut room_bytes = memory.limit_bytes.saturating_sub(PROCESS_BYTES);
    for device in devices {
        let stats = device.counts();
        let most_bytes = most_contents_bytes(&stats);
        let left_bytes = room_bytes.saturating_sub(stats.mem_fixed_bytes);
        if most_bytes > left_bytes {
            let advice = match left_bytes {
                0 => "make it smaller (--size), or raise the cgroup's limit".to_owned(),
                left => {
                    format!(
                        "give it a --mem-limit of {} or less, or raise the cgroup's limit",
                        format_size(left)
                    )
                }
            };
            let what = format!(
                "{} may take {}, and this process's cgroup, which has {} at most, leaves room for {}: {advice}",
                device.name(),
                format_size(most_bytes),
                format_size(memory.limit_bytes),
                format_size(left_bytes),
            );
            return Err(Error::new(ErrorKind::NoMemory, what));
        }
        room_bytes = left_bytes - most_bytes;
    }
    Ok(())
}

/// A line about the devices of `swap`, if together they may take more than the machine has.
pub fn swap_warning(swap: &[Arc<Device>], memory: &Memory) -> Option<String> {
    let stats: Vec<DeviceStats> = swap.iter().map(|device| device.counts()).collect();
    let contents_bytes: u64 = stats.iter().map(most_contents_bytes).sum();
    let fixed_bytes: u64 = stats.iter().map(|stats| stats.mem_fixed_bytes).sum();
    if contents_bytes.saturating_add(fixed_bytes) <= memory.ram_bytes {
        return None;
    }
    let names: Vec<&str> = swap.iter().map(|device| device.name()).collect();
    Some(format!(
        "swap on {} may take {} ({} for contents that do not compress, {} fixed), and this machine has {}: bound it with \
         --mem-limit",
        names.join(" and "),
        format_size(contents_bytes.saturating_add(fixed_bytes)),
        format_size(contents_bytes),
        format_size(fixed_bytes),
        format_size(memory.ram_bytes),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(settings: &[(&str, &str)]) -> Arc<Device> {
        let device = Device::new("a").expect("a name");
        settings.iter().for_each(|(name, value)| device.set(name, value).expect("a value"));
        device
    }

    #[test]
    fn devices_fit_into_the_cgroup_or_it_is_said_what_would() {
        let of = |limit_mib: u64| Memory { ram_bytes: 8 << 30, limit_bytes: limit_mib << 20 };
        let limited = || device(&[("mem_limit", "100M"), ("disksize", "1G")]);
        let unlimited = || device(&[("disksize", "1G")]);
        let complaint = |devices: &[Arc<Device>], limit_mib| match check_cgroup(devices, &of(limit_mib)) {
            Err(error) => error.to_string(),
            Ok(()) => panic!("it fits into {limit_mib} MiB"),
        };
        assert!(check_cgroup(&[unlimited()], &of(8 << 10)).is_ok(), "no cgroup");
        assert!(check_cgroup(&[limited()], &of(160)).is_ok());
        assert!(check_cgroup(&[unlimited()], &of(1200)).is_ok());
        assert!(complaint(&[limited()], 130).contains("may take 100 MiB"));
        assert!(complaint(&[unlimited()], 1000).contains("1000 MiB at most"));
        assert!(complaint(&[limited(), limited()], 240).contains("give it a --mem-limit of"));
        assert!(complaint(&[limited()], 32).contains("leaves room for 0 B: make it smaller (--size)"));
        assert!(check_cgroup(&[limited(), limited()], &of(280)).is_ok());
        // One without a size takes nothing yet.
        assert!(check_cgroup(&[device(&[])], &of(1)).is_ok());
    }

    #[test]
    fn swap_that_may_outgrow_the_machine_is_warned_about_with_the_figures() {
        let memory = Memory { ram_bytes: 1 << 30, limit_bytes: 1 << 30 };
        let warning = |settings: &[(&str, &str)]| swap_warning(&[device(settings)], &memory);
        let said = warning(&[("disksize", "1G")]).expect("a warning");
        assert!(said.contains("1.1 GiB for contents") && said.contains("has 1 GiB"), "{said}");
        assert!(said.starts_with("swap on a may take 1.1 GiB (") && said.ends_with("--mem-limit"), "{said}");
        assert_eq!(warning(&[("disksize", "768M")]), None);
        assert_eq!(warning(&[("mem_limit", "512M"), ("disksize", "64G")]), None);
        let half = || device(&[("disksize", "512M")]);
        assert_eq!(swap_warning(&[half()], &memory), None);
        assert!(
            swap_warning(&[half(), half()], &memory).is_some_and(|said| said.contains("swap on a and a"))
        );
        assert_eq!(swap_warning(&[], &memory), None);
    }
}
