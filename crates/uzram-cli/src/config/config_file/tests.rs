//! Configuration files: what they say, and how what is wrong with them is said.

use super::*;
use crate::config::settings::{SETTINGS, Setting};
use uzram::device::Device;

const MEMORY: Memory = Memory { ram_bytes: 16 << 30, limit_bytes: 2 << 30 };

fn parsed(text: &str) -> Result<ConfigFile> {
    parse(Source { name: "u.toml", text }, &MEMORY, ListenArgs::default())
}

fn complaint(text: &str) -> String {
    match parsed(text) {
        Err(failure) => failure.into_line(),
        other => panic!("{text}: {other:?}"),
    }
}

fn value<'a>(device: &'a DevicePlan, attribute: &str) -> Option<&'a str> {
    device.settings.get(attribute).map(|setting| setting.value.as_str())
}

fn swap(priority: Option<u16>, discard: bool) -> Attached {
    Attached::Swap(SwapPlan { priority, discard, page_cluster: None })
}

/// Returns the example with its commented-out settings enabled, and the directory of its policy file.
fn whole_example(policy: &str) -> (String, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.toml");
    std::fs::write(&path, policy).unwrap();
    let example = include_str!("../../../../../dist/uzram.toml");
    let setting = |line: &&str| !line.is_empty() && !line.starts_with(' ');
    let lines = example.lines().map(|line| line.strip_prefix('#').filter(setting).unwrap_or(line));
    let text = lines.collect::<Vec<_>>().join("\n");
    (text.replace("/etc/uzram-policy.toml", path.to_str().unwrap()), dir)
}

#[test]
fn the_example_has_every_key_and_makes_sense() {
    let plain = parsed(include_str!("../../../../../dist/uzram.toml")).unwrap();
    assert_eq!((plain.mount, plain.nbd, plain.devices.len()), (None, ListenArgs::default(), 1));
    assert_eq!(plain.devices[0].attached, swap(Some(100), true));

    let (text, _dir) = whole_example("high = 80\nlow = 70\nwriteback.after = \"2h\"\n");
    let whole = parsed(&text).unwrap();
    assert_eq!(whole.mount.as_deref(), Some(Path::new("/run/uzram/mnt")));
    assert_eq!(whole.cpu_latency, Some(CpuLatencyLimit::NONE));
    let nbd = ListenArgs {
        listen: vec!["tcp:127.0.0.1:10809".parse().unwrap()],
        socket_owner: Some(0),
        socket_group: Some(0),
        socket_mode: Some(0o660),
        tls_cert: Some("/etc/uzram/server-cert.pem".into()),
        tls_key: Some("/etc/uzram/server-key.pem".into()),
        tls_client_ca: Some("/etc/uzram/ca-cert.pem".into()),
        tls_anyone: Some(false),
        max_connections: Some(256),
    };
    assert_eq!(whole.nbd, nbd);
    let device = &whole.devices[0];
    assert_eq!(device.attached, swap(Some(100), false));
    for (attribute, wanted) in [
        ("disksize", "4294967296"),
        ("mem_limit", "4294967296"),
        ("comp_algorithm", "lz4"),
        ("recomp_algorithm", "algo=zstd:3"),
        ("recompress_after", "10m"),
        ("backing_dev", "/var/lib/uzram/cold.img:4G"),
        ("backing_force", "1"),
        ("checksum", "1"),
        ("compact_rate", "67108864"),
        // Settings of the device override the policy file.
        ("writeback_after", "1h"),
        ("policy_high", "90"),
        ("policy_low", "85"),
    ] {
        assert_eq!(value(device, attribute), Some(wanted), "{attribute}");
    }
    assert_eq!(device.settings.last().unwrap().attribute, "disksize");

    let table: toml::Table = toml::from_str(&text).unwrap();
    for key in USE_KEYS {
        assert!(table["zram0"].get(key).is_some(), "the example has no {key}");
    }
    let is_there = |attribute: &str| device.settings.get(attribute).is_some();
    let missing = SETTINGS.iter().map(|row| row.attribute).find(|attribute| !is_there(attribute));
    assert_eq!(missing, None, "the example has no such setting");
    assert!(TOP_KEYS.iter().all(|key| table.contains_key(*key)));
    assert!(text.contains(&format!("size = \"{DEFAULT_SIZE}\"\n")));
}

#[test]
fn options_and_keys_are_said_once_and_places_add_up() {
    let with = |options: ListenArgs, keys: &str| {
        parse(Source { name: "u.toml", text: &format!("{keys}\n[a]") }, &MEMORY, options)
    };
    let place = |text: &str| vec![text.parse::<Listen>().unwrap()];
    let whole = || ListenArgs {
        listen: place("unix:/a"),
        socket_owner: Some(1),
        socket_group: Some(2),
        socket_mode: Some(0o660),
        tls_cert: Some("/c".into()),
        tls_key: Some("/k".into()),
        tls_client_ca: Some("/a".into()),
        tls_anyone: Some(true),
        max_connections: Some(3),
    };
    assert_eq!(with(whole(), "").unwrap().nbd, whole());
    let keys = "listen = 'unix:/a'\nsocket-owner = 1\nsocket-group = 2\nsocket-mode = '0660'\n\
        tls-cert = '/c'\ntls-key = '/k'\ntls-client-ca = '/a'\ntls-anyone = true\nmax-connections = 3";
    assert_eq!(with(ListenArgs::default(), keys).unwrap().nbd, whole());
    let both = with(whole(), "listen = 'unix:/b'").unwrap().nbd.listen;
    assert_eq!(both, [place("unix:/a"), place("unix:/b")].concat());
    for key in keys.lines().skip(1) {
        let name = key.split_once(' ').unwrap().0;
        let said = with(whole(), key).unwrap_err().into_line();
        assert_eq!(said, format!("--{name}: u.toml sets {name} already: give it in one of them"));
    }
}

#[test]
fn the_example_s_attributes_are_those_of_a_device() {
    let (whole, _dir) = whole_example("");
    let text = whole.replace("/var/lib/uzram/cold.img:4G", "none").replace("min(ram / 2, 4G)", "64K");
    let backed = ["writeback-", "compressed-writeback", "force", "copies", "encrypt"];
    let lines = text.lines().filter(|line| !backed.iter().any(|key| line.starts_with(key)));
    let config = parsed(&lines.collect::<Vec<_>>().join("\n")).unwrap();
    let device = Device::new(&config.devices[0].name).unwrap();
    for Setting { origin, attribute, value } in config.devices[0].settings.iter() {
        device.set(attribute, value).unwrap_or_else(|error| panic!("{origin}: {error}"));
    }
    assert_eq!(device.size_bytes(), 64 << 10);
}

#[test]
fn several_backing_devices_are_an_array() {
    let config = parsed("[a]\nbacking = ['/b.img:2G', '/c d.img']\n[b]\nbacking = '/b.img:1G /c'\n").unwrap();
    let [one, other] = &config.devices[..] else { panic!("{config:?}") };
    assert_eq!(value(one, "backing_dev"), Some("/b.img:2G /c d.img"));
    assert_eq!(value(other, "backing_dev"), Some("/b.img:1G /c"));
    for text in ["[]", "[1]", "['/b', ['/c']]", "true"] {
        assert!(parsed(&format!("[a]\nbacking = {text}\n")).is_err(), "{text}");
    }
}

#[test]
fn a_device_needs_nothing_but_a_name() {
    let config = parsed("[zram0]\n[\"logs.1\"]\nsize = '8K'\nmem-limit = 0\n").unwrap();
    let [first, second] = &config.devices[..] else { panic!("{config:?}") };
    assert_eq!((first.name.as_str(), second.name.as_str()), ("zram0", "logs.1"));
    assert_eq!(first.attached, Attached::No);
    assert_eq!(value(first, "disksize"), Some("4294967296"));
    assert_eq!(first.settings.len(), 1);
    // Plain sizes are as on a command line: 0 is no limit.
    assert_eq!((value(second, "disksize"), value(second, "mem_limit")), (Some("8192"), Some("0")));
    // In the file's order.
    let config = parsed("[b]\n[a]\n[c.attributes]\nchecksum = false\n").unwrap();
    let names: Vec<_> = config.devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["b", "a", "c"]);
    assert_eq!(value(&config.devices[2], "checksum"), Some("0"));
    // The table `attributes` also takes plain bytes; a budget is a size per day.
    let config = parsed(
        "[a]\nbacking = '/a:1M'\nwriteback-budget = 'min(1G, 2G)/day'\n[a.attributes]\ncompact_rate = 67108864\n",
    );
    let device = &config.unwrap().devices[0];
    assert_eq!(value(device, "writeback_budget"), Some("1073741824"));
    assert_eq!(value(device, "compact_rate"), Some("67108864"));
}

#[test]
fn settings_say_where_they_come_from() {
    let text = "\n[zram0]\nalgorithm = \"zstd\"\nmem-limit = 'limit/2'\n[zram0.attributes]\npolicy_high = 50\n\
        algorithm_params = 'level=3'\npolicy_low = 40";
    let config = parsed(text).unwrap();
    let shown: Vec<_> = config.devices[0]
        .settings
        .iter()
        .map(|Setting { origin, attribute, value }| format!("{origin}={value} ({attribute})"))
        .collect();
    let wanted = [
        "u.toml:3: algorithm=zstd (comp_algorithm)",
        "u.toml:7: attributes.algorithm_params=level=3 (algorithm_params)",
        "u.toml:6: attributes.policy_high=50 (policy_high)",
        "u.toml:8: attributes.policy_low=40 (policy_low)",
        "u.toml:4: mem-limit=1073741824 (mem_limit)",
        "u.toml:2: size=4294967296 (disksize)",
    ];
    assert_eq!(shown, wanted);
}

#[test]
fn swap_space_is_a_block_device() {
    let device = |keys: &str| parsed(&format!("[zram0]\n{keys}")).unwrap().devices.remove(0);
    for (keys, attached) in [
        ("", Attached::No),
        ("attach = true", Attached::Block),
        ("swap = false", Attached::No),
        ("swap = true", swap(None, true)),
        ("swap = true\nattach = true", swap(None, true)),
        ("swap-priority = 0", swap(Some(0), true)),
        ("swap-priority = 32767\nswap-discard = false", swap(Some(32767), false)),
        ("swap-discard = true\nswap = true", swap(None, true)),
    ] {
        assert_eq!(device(keys).attached, attached, "{keys}");
    }
    for (keys, why) in [
        ("swap = false\nswap-priority = 3", "u.toml:3: swap-priority: the device is not swap space"),
        ("swap-discard = true", "u.toml:2: swap-discard: the device is not swap space: write swap = true"),
        ("swap = true\nattach = false", "u.toml:3: attach: swap space is a block device"),
        ("swap-priority = 32768", "u.toml:2: swap-priority: write a number from 0 to 32767"),
        ("swap-priority = -1", "u.toml:2: swap-priority: write a number from 0 to 32767"),
        ("swap-priority = true", "u.toml:2: swap-priority: write a number from 0 to 32767"),
        ("swap = 1", "u.toml:2: swap: write true or false"),
        ("attach = 'yes'", "u.toml:2: attach: write true or false"),
    ] {
        let line = complaint(&format!("[zram0]\n{keys}"));
        assert!(line.starts_with(why), "{keys}: {line}");
    }
}

#[test]
fn a_device_is_only_made_on_machines_with_little_memory_if_it_says_so() {
    let made = |limit: &str| {
        let config = parsed(&format!("[a]\nhost-memory-limit = {limit}\n[b]\n")).unwrap();
        config.devices.len() == 2
    };
    // `MEMORY` is 16 GiB.
    for limit in ["'16G'", "'none'", "'ram'", "'32G / 2'", "'ram + 1M'"] {
        assert!(made(limit), "{limit}");
    }
    for limit in ["'16383M'", "'8G'", "0", "'limit'", "'ram / 2'"] {
        assert!(!made(limit), "{limit}");
    }
    let config = parsed("[a]\nhost-memory-limit = '2G'\n[b]\n").unwrap();
    let line = "no device a: the machine has 16 GiB, more than its host-memory-limit, 2G";
    assert_eq!((config.devices[0].name.as_str(), config.left_out), ("b", vec![line.to_owned()]));
    let line = complaint("[a]\nhost-memory-limit = 'much'");
    assert!(line.starts_with("u.toml:2: host-memory-limit: 'much' is not a size: column 1: "), "{line}");
    // A file may have no device for this machine.
    assert!(parsed("[a]\nhost-memory-limit = 0\n").unwrap().devices.is_empty());
    // An invalid value is refused on every machine.
    assert!(complaint("[a]\nhost-memory-limit = 0\nhigh = 99999999999").starts_with("u.toml:3: high: "));
}

/// zram-generator would read it as MiB, a command line as bytes.
#[test]
fn a_size_without_a_unit_is_refused() {
    for (key, value) in [
        ("size", "64"),
        ("size", "'64'"),
        ("size", "' 64 '"),
        ("mem-limit", "64"),
        ("reserve", "64"),
        ("host-memory-limit", "64"),
        ("writeback-budget", "64"),
        ("writeback-budget", "'64/day'"),
    ] {
        let line = complaint(&format!("[zram0]\n{key} = {value}\n"));
        assert!(line.starts_with(&format!("u.toml:2: {key}: '")), "{key} = {value}: {line}");
        let readings = "64 has no unit: write 64M for MiB, as zram-generator reads it, or 64B for bytes";
        assert!(line.ends_with(readings), "{key} = {value}: {line}");
    }
    let line = complaint("[zram0]\nsize = 'min(ram / 2, 4096)'\n");
    assert!(line.contains("column 14: 4096 has no unit"), "{line}");
    for (key, size, attribute, value) in
        [("size", "8192B", "disksize", "8192"), ("mem-limit", "64m", "mem_limit", "67108864")]
    {
        let config = parsed(&format!("[zram0]\n{key} = '{size}'\n")).unwrap();
        assert_eq!(self::value(&config.devices[0], attribute), Some(value));
    }
}

#[test]
fn a_file_that_makes_no_sense_says_where_and_why() {
    let none = ": it has no device: write a table for each, as in [zram0]";
    for (text, said) in [
        ("", none),
        ("\n# [zram0]\n", none),
        ("mount = '/a'", none),
        ("mnt = '/a'", "1: 'mnt = '/a'': unknown key `mnt`; "),
        ("mnt = '/a'", "tls-anyone, max-connections, and a table for each device, as in [zram0]"),
        ("[[zram0]]", "1: '[[zram0]]': unknown key `zram0`; there are"),
        (
            "[zram0]\nalgoritm = 'lz4'",
            "2: 'algoritm = 'lz4'': unknown key `algoritm`; did you mean `algorithm`?",
        ),
        ("[zram0]\nsawp = true", "unknown key `sawp`; did you mean `swap`?"),
        ("[zram0.atributes]\nchecksum = true", "unknown key `atributes`; did you mean `attributes`?"),
        ("[zram0]\npolicy = true", "2: policy: write a path"),
        ("[zram0]\nspace = true", "unknown key `space`; there are: comp_algorithm, algorithm, "),
        ("max-conections = 3", "unknown key `max-conections`; did you mean `max-connections`?"),
        ("[zram0.attributes]\ncheksum = 1", "unknown key `cheksum`; did you mean `checksum`?"),
        (
            "[zram0]\nname = 'a'",
            "attributes, attach, export, read-only, swap, swap-priority, swap-discard, host-",
        ),
        ("['../a']", "1: '['../a']': a name is a letter or digit"),
        ("[mount]", "1: mount: write a path"),
        ("cpu-latency-us = '1ms'", "1: cpu-latency-us: write a number of microseconds from 0"),
        ("listen = 3", "1: listen: write a place"),
        ("listen = ['tcp:127.0.0.1:1', 'x']", "1: listen: 'x' is not a place to listen"),
        ("socket-owner = 'no such'", "1: socket-owner: there is no user 'no such'"),
        ("socket-group = -1", "1: socket-group: there is no group '-1'"),
        ("socket-mode = 660", "1: socket-mode: write permissions as a text, as in"),
        ("socket-mode = '0990'", "1: socket-mode: write permissions in octal"),
        ("tls-cert = ''", "1: tls-cert: write a path"),
        ("tls-anyone = 'yes'", "1: tls-anyone: write true or false"),
        ("max-connections = 0", "1: max-connections: write a number from 1 to 65536"),
        ("max-connections = '7'", "1: max-connections: write a number from 1 to 65536"),
        ("[zram0]\nsize = 'ram /'", "2: size: 'ram /' is not a size: column 6: expected a size"),
        ("[zram0]\nsize = true", "2: size: write a value other than true or false"),
        ("[zram0]\nsize = 1.5", "2: size: invalid type: floating point"),
        ("[zram0]\nhigh = -1", "2: high: '-1' is no policy_high: write 1 to 100"),
        ("[zram0]\nwriteback-after = '1h'", "2: writeback-after: nothing to write pages to: give backing"),
        ("[zram0]\nattributes = 1", "2: attributes: write a table"),
        ("[zram0.attributes]\nmm_stat = 1", "2: 'mm_stat = 1': unknown key `mm_stat`; there are: "),
        ("[zram0.attributes]\nchecksum = []", "2: checksum: invalid type: sequence"),
        (
            "[zram0]\nsize = '1G'\n[zram0.attributes]\ndisksize = '2G'",
            "disksize: u.toml:2: size already sets it",
        ),
        (
            "[zram0.attributes]\nrecompress_after = '1h'",
            "2: attributes.recompress_after: nothing to compress ",
        ),
        ("[zram0]\npolicy = '/nonexistent'", "2: policy /nonexistent: No such file"),
        ("[zram0]\n[zram0]", "duplicate"),
        ("[zram0]\nsize = '1G'\nsize = '2G'", "duplicate"),
        ("[zram0", "1: '[zram0': "),
    ] {
        let line = complaint(text);
        assert!(line.starts_with("u.toml:") && line.contains(said) && !line.contains("--"), "{text}: {line}");
    }
    assert!(parsed(&format!("a = {}", "[".repeat(60_000))).is_err());
}
