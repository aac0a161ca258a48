//! Fuzzes the start of a daemon with any text: the options of `uzram up`, one a line, and after an empty line
//! the text of the file that `--config` names, which is also tried as a file of `--policy`. The first bytes
//! of the input describe the machine.
//!
//! Promises: a rejection has a one-line message; an accepted plan is consistent: devices have distinct names,
//! a size that a disk can have, and each attribute once, in an order in which a device accepts them; a device
//! accepts those of its attributes that allocate nothing.

use std::collections::BTreeSet;

use uzram::device::{Attribute, Device};
use uzram::machine_memory::Memory;
use uzram::units::parse_size;
use uzram_cli::start::{Planned, Values, plan, policy};

use crate::input::{Input, on_a_machine};

/// The longest error message, beside the text itself: the names of all attributes.
const MAX_TOLD_BYTES: usize = 4096;
const MAX_DISK_BYTES: u64 = 16 << 40;

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let memory = input.machine();
    start(&memory, &String::from_utf8_lossy(input.rest()));
}

/// Returns whether the options are accepted, or the file as one of a policy of several settings.
fn start(memory: &Memory, text: &str) -> bool {
    if names_files(text) {
        return false;
    }
    let (options, config) = text.split_once("\n\n").unwrap_or((text, ""));
    let words: Vec<String> = options.lines().map(str::to_owned).collect();
    let planned = plan(&words, config, memory);
    match &planned {
        Ok(planned) => check(planned),
        Err(line) => check_refusal(line, text),
    }
    match policy(config) {
        Ok(settings) => {
            assert!(settings.iter().all(|(name, _)| is_writable(name)));
            planned.is_ok() || settings.len() > 3
        }
        Err(line) => {
            check_refusal(&line, text);
            planned.is_ok()
        }
    }
}

/// Returns whether the text names files. Policies, certificates and dictionaries are read when they are
/// named, and the user who runs this may have files that must not be read, or never end. Names of users may
/// be looked up over a socket.
fn names_files(text: &str) -> bool {
    let text = text.replace("policy_", "");
    ["policy", "tls-cert", "dict", "socket-owner", "socket-group", "\\"]
        .iter()
        .any(|word| text.contains(word))
}

fn check(planned: &Planned) {
    assert!((1..=65536).contains(&planned.max_connections));
    assert!(!planned.devices.is_empty() || planned.left_out > 0);
    let names: BTreeSet<_> = planned.devices.iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), planned.devices.len(), "{planned:?}");
    planned.devices.iter().for_each(check_device);
}

fn check_device(planned: &(String, Values)) {
    let (name, settings) = planned;
    let device = Device::new(name).expect("it was accepted");
    assert!(settings.is_sorted_by_key(|(name, _)| Attribute::turn(name)), "{planned:?}");
    let names: BTreeSet<_> = settings.iter().map(|(name, _)| name).collect();
    assert!(names.len() == settings.len() && names.iter().all(|name| is_writable(name)), "{planned:?}");
    for (name, value) in settings {
        match *name {
            "disksize" => {
                let bytes = parse_size(value).expect("it was accepted");
                assert!((1..=MAX_DISK_BYTES).contains(&bytes), "{value}");
            }
            "backing_dev" => assert!(value == "none" || value.starts_with('/'), "{value}"),
            _ => device.set(name, value).unwrap_or_else(|error| panic!("{name}={value}: {error}")),
        }
    }
    assert!(names.contains(&"disksize") && device.size_bytes() == 0, "{planned:?}");
}

fn is_writable(name: &str) -> bool {
    Device::attributes().iter().any(|attribute| attribute.name == name && attribute.writable())
}

fn check_refusal(line: &str, text: &str) {
    assert!(!line.is_empty() && line.len() <= MAX_TOLD_BYTES + 8 * text.len(), "{line}");
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let files = [
        "[zram0]\nsize = 'min(ram / 2, 4G)'\nmem-limit = 'ram / 4'\nswap = true\nswap-priority = 100\n",
        "mount = '/run/uzram/mnt'\ncpu-latency-us = 'none'\nlisten = ['tcp:127.0.0.1:10809', 'a@unix:/a']\n\
         max-connections = 20\n[a]\nsize = '1G'\n[b]\nhost-memory-limit = '8G'\nattach = true\nexport = true\n",
        "[a]\nalgorithm = 'zstd:3'\nrecompress = 'deflate:6:10m'\nbacking = '/nonexistent:4G'\nforce = true\n\
         writeback-after = '1h'\nwriteback-budget = '10G/day'\nwriteback-layout = 'packed'\nchain = 8\n\
         streams = 'percpu'\npool-design = 'pinned'\nlru-design = 'batched'\ncompact-threshold = 10\n",
        "[a]\nreserve = '8M'\nmem-limit = '64M'\n[a.attributes]\nchecksum = true\npolicy_high = 90\ncompact_rate = '64M'\n",
        "[a]\nsize = 64\n[a]\nsawp = 1\n",
        "[a]\nsize = ' max(min(limit, 8192k), (ram - 4G)) * 0.75 + 1T / 3'\n\
         mem-limit = '((ram-limit))/4/2*1T'\n\
         reserve = 'min(ram, 1G) / (limit - limit)'\n",
        "backing = '/b:2G'\nhigh = 95\nlow = 90\nreclaim = 'zspages'\n[recompress]\nalgorithm = 'zstd'\nafter = '1m'\n\
         [writeback]\nafter = 9\nbudget = '1G/day'\nlayout = 'blocks'\ncompressed = false\nbatch_size = 7\n",
    ];
    let options = [
        "--size=64M\n--mem-limit=24K\n--name=a.b\n--read-only\n--listen=tcp:[::1]:0\n--exec=true",
        "--size\n4G\n--algorithm\nlz4hc:9\n--backing=/nonexistent\n--writeback-after=90s\n--streams=2\n--export=false",
        "--reserve=1G\n--mem-limit=4M\n--attach\n--mount=m\n--log=debug\n--tls-anyone\n--max-connections=7",
    ];
    let of_files = files.map(|config| format!("--config=u.toml\n\n{config}"));
    let texts = of_files.into_iter().chain(options.map(str::to_owned));
    texts.map(|text| on_a_machine(&text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_get_somewhere() {
        let accepted = seeds().into_iter().filter(|seed| {
            let mut input = Input::new(seed);
            start(&input.machine(), &String::from_utf8_lossy(input.rest()))
        });
        assert_eq!(accepted.count(), 7);
    }
}
