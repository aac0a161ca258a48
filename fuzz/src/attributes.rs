//! Fuzzes names and values of attributes, sizes, algorithms and devices with any text. The input is lines of
//! `NAME=VALUE`.
//!
//! Promises: a value is accepted, or rejected with a message, and an accepted one can be read back; sizes are
//! parsed as by an arithmetic that cannot overflow.

use uzram::codec::Algorithm;
use uzram::device::Device;
use uzram::stream::StreamDesign;
use uzram::units::{format_size, pages_to_bytes, parse_duration_s, parse_size};
use uzram::{Error, ErrorKind};

const MAX_LINES: usize = 24;
/// The largest device whose attributes are read: the statistics of larger ones take long.
const MAX_READ_BYTES: u64 = 16 << 20;

const MAX_RESERVE_BYTES: u64 = 8 << 20;

pub(crate) fn run(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let device = Device::new("zram0").expect("a good name");
    for line in text.split('\n').take(MAX_LINES) {
        let (name, value) = line.split_once('=').unwrap_or((line, ""));
        check_size(value);
        check_algorithm(value);
        check_name(value);
        if is_left_out(&device, name, value.trim()) {
            continue;
        }
        let initialised = device.size_bytes() > 0;
        match device.set(name, value) {
            Ok(()) => check_taken(&device, name, value.trim()),
            Err(error) => check_refused(name, &error, initialised),
        }
        if device.size_bytes() <= MAX_READ_BYTES {
            match device.get(name) {
                Ok(_) => assert!(Device::attributes().iter().any(|row| row.name == name && row.readable())),
                Err(error) => check_refused(name, &error, initialised),
            }
        }
    }
    device.set("reset", "1").expect("nobody uses it");
    assert_eq!(device.stats(), Default::default());
}

/// Returns whether a value is not set: one that visits every page of a large disk, opens a file of the user
/// who runs this, or takes much time or memory: many streams, and a reserve, with which tables are in memory.
fn is_left_out(device: &Device, name: &str, value: &str) -> bool {
    let is_more_than = |bytes| parse_size(value).is_ok_and(|size| size > bytes);
    match name {
        "idle" | "recompress" | "compact" | "writeback" | "recompress_after" | "writeback_after" => {
            device.size_bytes() > MAX_READ_BYTES
        }
        "backing_dev" => value.starts_with('/'),
        "streams" => matches!(value.parse(), Ok(StreamDesign::IdleList(count)) if count > 8),
        "disksize" => is_more_than(MAX_READ_BYTES) && device.get("reserve").is_ok_and(|bytes| bytes != "0"),
        "reserve" => is_more_than(MAX_RESERVE_BYTES),
        _ => false,
    }
}

fn check_taken(device: &Device, name: &str, value: &str) {
    let read = |name| device.get(name).expect("readable");
    match name {
        "disksize" => {
            let bytes = parse_size(value).expect("it was taken").next_multiple_of(4096);
            assert_eq!((read(name), read("initstate")), (bytes.to_string(), "1".to_owned()));
        }
        "mem_limit" if device.size_bytes() <= MAX_READ_BYTES => {
            // A value that rounds up to 2^64 becomes the largest number of pages below.
            let pages = parse_size(value).expect("it was taken").div_ceil(4096).min(u64::MAX / 4096);
            assert_eq!(read(name), (pages * 4096).to_string());
        }
        "mem_limit" => {}
        "reserve" => {
            let bytes = parse_size(value).expect("it was taken").next_multiple_of(2 << 20);
            let wanted = if bytes == 0 { 0 } else { bytes.max(4 << 20) };
            assert_eq!(read(name), wanted.to_string());
        }
        "comp_algorithm" => assert!(read(name).contains(&shown(value))),
        "recompress_after" | "writeback_after" => {
            assert_eq!(read(name), parse_duration_s(value).expect("it was taken").to_string(), "{name}");
        }
        "compact_rate" => assert_eq!(read(name), parse_size(value).expect("it was taken").to_string()),
        "writeback_budget" => {
            let bytes = parse_size(value.strip_suffix("/day").unwrap_or(value)).expect("it was taken");
            assert_eq!(read(name), bytes.to_string());
        }
        "streams" => assert_eq!(read(name).parse(), value.parse::<StreamDesign>()),
        "pool_design" | "lru_design" | "writeback_layout" | "reclaim" => assert_eq!(read(name), value),
        "backing_dev" => assert_eq!((value, read(name).as_str()), ("none", "none")),
        // Parameters are only visible in the algorithms.
        "algorithm_params" => assert!(read("comp_algorithm").contains('[')),
        "recomp_algorithm" => {
            let mut values = value.split_whitespace().filter_map(|word| word.split_once('='));
            let (_, last) = values.rfind(|(word, _)| *word == "algo").expect("it was taken");
            assert!(read(name).contains(&shown(last)));
        }
        "reset" => assert_eq!((device.size_bytes(), read("initstate")), (0, "0".to_owned())),
        "compact" | "idle" => assert!(device.size_bytes() > 0),
        "recompress" => assert!(!read("recomp_algorithm").is_empty()),
        "mem_used_max" => assert_eq!(value, "0"),
        _ => assert_eq!(read(name), value.parse::<u64>().expect("a number").to_string(), "{name}"),
    }
}

fn shown(algorithm: &str) -> String {
    format!("[{}]", algorithm.parse::<Algorithm>().expect("it was taken"))
}

fn check_refused(name: &str, error: &Error, initialised: bool) {
    assert!(!error.to_string().is_empty());
    match error.kind() {
        ErrorKind::Unsupported | ErrorKind::OutOfRange => {
            assert_eq!((name, initialised), ("writeback", true))
        }
        ErrorKind::Invalid | ErrorKind::NotFound | ErrorKind::Permission | ErrorKind::NoMemory => {}
        ErrorKind::Busy => assert!(initialised, "{error}"),
        other => panic!("{other:?}: {error}"),
    }
}

fn check_size(text: &str) {
    let trimmed = text.trim();
    let digits = trimmed.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match trimmed[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => Some(0),
        "k" | "kb" | "kib" => Some(10),
        "m" | "mb" | "mib" => Some(20),
        "g" | "gb" | "gib" => Some(30),
        "t" | "tb" | "tib" => Some(40),
        _ => None,
    };
    let number = digits.bytes().try_fold(0u128, |number, digit| {
        digit.is_ascii_digit().then(|| (number * 10 + u128::from(digit - b'0')).min(1 << 64))
    });
    let expected = match (number, shift) {
        (Some(number), Some(shift)) if !digits.is_empty() => u64::try_from(number << shift).ok(),
        _ => None,
    };
    assert_eq!(parse_size(text).ok(), expected, "{text:?}");
    if let Some(bytes) = expected {
        let shown = format_size(bytes);
        // A size shown without a fraction is exact.
        if !shown.contains('.') {
            assert_eq!(parse_size(&shown.replace(' ', "")), Ok(bytes), "{shown}");
        }
        assert!(bytes >> 52 != 0 || pages_to_bytes(bytes) >> 12 == bytes);
    }
}

fn check_algorithm(text: &str) {
    if let Ok(parsed) = text.parse::<Algorithm>() {
        assert_eq!(parsed.to_string().parse(), Ok(parsed), "{text:?}");
    }
}

fn check_name(text: &str) {
    match Device::new(text) {
        Ok(device) => {
            assert_eq!(device.name(), text);
            assert!(
                (1..=64).contains(&text.len()) && !text.contains(['/', '\0', ' ']) && !text.starts_with('.')
            );
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::Invalid),
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    [
        "comp_algorithm=zstd:3\nchain_size=4\nchecksum=1\nmem_limit=1M\nrun_cache_batch=0\ndisksize=64KiB\n\
         disksize=1M\nmm_stat\nio_stat\nclasses\ndebug_stat\nmem_charged\nmem_fixed\nreset=1",
        "disksize=16T\nmem_limit=512\nreset=65535\ndisksize= 5g \nchecksum=0",
        "comp_algorithm=zstd:-131072\ncomp_algorithm=lz4:1\ncomp_algorithm=zstd:22\ncomp_algorithm=zstd:0\ninitstate=1",
        "comp_algorithm=deflate:12\nalgorithm_params=algo=deflate level=1 priority=0\ncomp_algorithm=lz4hc:9\n\
         algorithm_params=dict=/nonexistent level=2\ncomp_algorithm=lz4,dict=/nonexistent\ndisksize=1M\nalgorithm_params=level=2",
        "disksize=18446744073709551615\ndisksize=16777216T\nmem_limit=4194304T\nmem_limit=18446744073709551615\nmem_used_max=0\nmem_used_max=1",
        "streams=2\ndisksize=64K\nstreams=percpu\ndebug_stat\nreset=1\nstreams= +1 \n\
         streams=0\nstreams=1025\nstreams=percpu",
        "backing_dev=none\nbacking_copies=2\nbacking_force=1\nbacking_dev=cold.img:1M\nwriteback_layout=blocks\ncompressed_writeback=0\ndisksize=64K\n\
         writeback=idle\nwriteback=page_index=3 page_indexes=0-15\nwriteback=page_index=16\nwriteback=type=huge\n\
         writeback_limit=7\nwriteback_limit_enable=1\nwriteback_batch_size=128\nbd_stat\nbacking\npolicy",
        "recomp_algorithm=algo=zstd:3 priority=2\npolicy_high=50\npolicy_low=51\npolicy_low=50\nreclaim=zspages\ndisksize=1M\n\
         recompress_after=10m\nwriteback_after=1d\nwriteback_budget=10G/day\nreclaim=pages\nidle=all\n\
         recompress=type=idle\ncompact=1\ncompact_rate=1M\ncompact_threshold=0\nlru_pagevec=1\npolicy\nreset=1",
        "reserve=1\nreserve=5M\ndisksize=1M\nreserve=8M\nmem_limit=4M\nmem_charged\nreset=1\nmem_limit=1M\nreserve=0\n\
         reserve=4096K\ndisksize=64K\nreserve=",
        "run_cache_batch=512\nrun_cache_batch=513\nchain_size=+16\nchain_size=17\nreset=0\nnonesuch=1\n=\nzram_0-a.b",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into()
}
