//! The most memory that devices may take, and whether there is room for it.
//!
//! A daemon must never reach the limit of its cgroup: it would wait for memory that only it can free, or be
//! killed. So devices that might not fit are refused ([`check_cgroup`]). Of the machine's memory, which is
//! shared, [`swap_warning`] and [`fixed_warning`] only warn: swapped-out pages mostly compress.

use std::sync::Arc;

use uzram::device::{Device, DeviceStats};
use uzram::machine_memory::{self, Memory};
use uzram::mem::CHUNK_PAGES;
use uzram::units::{format_size, pages_to_bytes};
use uzram::{Error, ErrorKind};

/// Memory of the process besides its devices: program, buffers, stacks, heap; measured, with a margin.
const PROCESS_BYTES: u64 = 32 << 20;
/// The unit in which a reserve is filled.
const CHUNK_BYTES: u64 = pages_to_bytes(CHUNK_PAGES as u64);
/// The least reserve: smaller ones are made as large.
pub const LEAST_RESERVE_BYTES: u64 = 2 * CHUNK_BYTES;
/// The most memory of a pool, in sixteenths of its disk, if nothing compresses.
const POOL_SIXTEENTHS: u64 = 17;

/// Returns the most memory that a device's contents may take, without its fixed cost: `mem_limit`, or the
/// whole disk uncompressed plus the reserve, if that is less.
fn most_contents_bytes(device: &DeviceStats) -> u64 {
    let pool_bytes = uncompressed_bytes(device.disksize_bytes).saturating_add(device.reserve_bytes);
    match device.mem_limit_bytes {
        0 => pool_bytes,
        limit_bytes => limit_bytes.min(pool_bytes),
    }
}

fn uncompressed_bytes(disksize_bytes: u64) -> u64 {
    (disksize_bytes / 16).saturating_mul(POOL_SIXTEENTHS)
}

/// Returns the reserve of a device that makes all memory resident that its contents may take, in whole
/// chunks.
pub fn whole_reserve_bytes(disksize_bytes: u64, mem_limit_bytes: u64) -> u64 {
    // The pool and the slabs share no chunk.
    let most_bytes = uncompressed_bytes(disksize_bytes).next_multiple_of(CHUNK_BYTES) + CHUNK_BYTES;
    match mem_limit_bytes {
        0 => most_bytes,
        // A device with a limit below the least reserve is refused.
        limit_bytes => most_bytes.min(limit_bytes / CHUNK_BYTES * CHUNK_BYTES).max(LEAST_RESERVE_BYTES),
    }
}

/// Checks that a daemon's devices fit below the current limit of its cgroup.
pub fn check(devices: &[Arc<Device>]) -> uzram::Result<()> {
    match machine_memory::read() {
        Ok(memory) => check_cgroup(devices, &memory),
        // Without /proc the limit is unknown.
        Err(_) => Ok(()),
    }
}

fn check_cgroup(devices: &[Arc<Device>], memory: &Memory) -> uzram::Result<()> {
    // The cgroup has no limit.
    if memory.limit_bytes >= memory.ram_bytes {
        return Ok(());
    }
    let mut room_bytes = memory.limit_bytes.saturating_sub(PROCESS_BYTES);
    for device in devices {
        let stats = device.counts();
        let most_bytes = most_contents_bytes(&stats);
        let left_bytes = room_bytes.saturating_sub(stats.mem_fixed_bytes);
        if most_bytes > left_bytes {
            let [most, limit, left] = [most_bytes, memory.limit_bytes, left_bytes].map(format_size);
            let advice = match left_bytes {
                0 => "make it smaller (--size)".to_owned(),
                _ => format!("give it a --mem-limit of {left} or less"),
            };
            let what = format!(
                "{} may take {most}, and this process's cgroup, which has {limit} at most, leaves room for {left}: \
                 {advice}, or raise the cgroup's limit",
                device.name(),
            );
            return Err(Error::new(ErrorKind::NoMemory, what));
        }
        room_bytes = left_bytes - most_bytes;
    }
    Ok(())
}

/// Returns a warning if the devices of `swap` together may take more than the machine's memory.
pub fn swap_warning(swap: &[Arc<Device>], memory: &Memory) -> Option<String> {
    let stats: Vec<DeviceStats> = swap.iter().map(|device| device.counts()).collect();
    let contents_bytes: u64 = stats.iter().map(most_contents_bytes).sum();
    let fixed_bytes: u64 = stats.iter().map(|stats| stats.mem_fixed_bytes).sum();
    let all_bytes = contents_bytes.saturating_add(fixed_bytes);
    let [all, contents, fixed, ram] =
        [all_bytes, contents_bytes, fixed_bytes, memory.ram_bytes].map(format_size);
    (all_bytes > memory.ram_bytes).then(|| {
        format!(
            "swap on {} may take {all} ({contents} for contents that do not compress, {fixed} fixed), and this machine has \
             {ram}: bound it with --mem-limit",
            names(swap),
        )
    })
}

fn names(devices: &[Arc<Device>]) -> String {
    let names: Vec<&str> = devices.iter().map(|device| device.name()).collect();
    names.join(" and ")
}

/// Returns a warning if the tables of these devices together may take more than half of the machine's memory.
pub fn fixed_warning(devices: &[Arc<Device>], memory: &Memory) -> Option<String> {
    let fixed_bytes = devices.iter().map(|device| device.counts().mem_fixed_bytes).sum();
    warning_of_fixed(&names(devices), fixed_bytes, memory)
}

/// Returns the same for devices of these names, whose fixed cost is known.
pub fn warning_of_fixed(names: &str, fixed_bytes: u64, memory: &Memory) -> Option<String> {
    (fixed_bytes > memory.ram_bytes / 2).then(|| {
        format!(
            "the tables of {names} may take {}, besides contents, and this machine has {}: make the disk smaller (--size)",
            format_size(fixed_bytes),
            format_size(memory.ram_bytes)
        )
    })
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
        // A device without a size takes no memory yet.
        assert!(check_cgroup(&[device(&[])], &of(1)).is_ok());
    }

    #[test]
    fn a_whole_reserve_is_all_that_the_limit_or_the_disk_allows() {
        let whole_mib =
            |disk_mib: u64, limit_mib: u64| whole_reserve_bytes(disk_mib << 20, limit_mib << 20) >> 20;
        assert_eq!([whole_mib(1024, 91), whole_mib(1024, 90), whole_mib(1024, 1)], [90, 90, 4]);
        assert_eq!([whole_mib(64, 0), whole_mib(64, 1024), whole_mib(64, 70)], [70, 70, 70]);
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

    #[test]
    fn tables_that_take_half_of_the_machine_are_warned_about() {
        let memory = Memory { ram_bytes: 24 << 30, limit_bytes: 24 << 30 };
        let said = warning_of_fixed("a", 112 << 30, &memory).expect("a warning");
        let has_both = said.starts_with("the tables of a may take 112 GiB, ") && said.contains("has 24 GiB");
        assert!(has_both, "{said}");
        assert_eq!(warning_of_fixed("a", 12 << 30, &memory), None);
        let small = Memory { ram_bytes: 1 << 20, limit_bytes: 1 << 20 };
        let said = fixed_warning(&[device(&[("disksize", "1G")]), device(&[])], &small).expect("a warning");
        assert!(said.starts_with("the tables of a and a may take ") && said.contains("has 1 MiB"), "{said}");
        assert_eq!(fixed_warning(&[], &small), None);
    }
}
