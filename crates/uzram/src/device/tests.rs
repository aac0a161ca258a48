//! A device's life cycle, attributes and statistics. The fuzz target `device_ops` compares reads, writes,
//! discards and zeroes of any alignment with a model.

use super::*;
use crate::backing::MARK_BYTES;
use crate::base::clock::thread_cpu_time;
use crate::base::random::Random;
use crate::base::units::{PAGE_SIZE, page_of};
use crate::store::tests::noise;

pub(super) fn device(settings: &[(&str, &str)]) -> Arc<Device> {
    let device = Device::new("zram7").expect("a good name");
    set(&device, settings);
    device
}

pub(super) fn set(device: &Device, settings: &[(&str, &str)]) {
    settings.iter().for_each(|(name, value)| device.set(name, value).expect(name));
}

fn refusal<T>(result: Result<T>) -> (ErrorKind, Option<&'static str>) {
    let error = result.map(drop).expect_err("refused");
    (error.kind(), error.setting())
}

fn refused(device: &Device, name: &str, value: &str, kind: ErrorKind, hint: &str) {
    let error = device.set(name, value).expect_err(value);
    assert_eq!(error.kind(), kind, "{name}={value}: {error}");
    assert!(error.to_string().contains(hint), "{name}={value}: {error}");
}

#[test]
fn extents_agree_with_a_naive_model() {
    const PAGES: usize = 24;
    const BYTES: usize = PAGES * PAGE_SIZE;
    use PageState::*;
    for seed in 0..8 {
        let mut random = Random::new(seed);
        let device = device(&[("disksize", &BYTES.to_string())]);
        let disk = device.open().expect("initialised");
        let mut states = [Hole; PAGES];
        for step in 0..3000 {
            let first = random.below(PAGES);
            let pages = first..PAGES.min(first + 1 + random.below(6));
            let (offset, len) = ((first * PAGE_SIZE) as u64, (pages.len() * PAGE_SIZE) as u64);
            let fill = |page: [u8; PAGE_SIZE]| disk.write(offset, &page.repeat(pages.len()));
            let (done, state) = match random.below(12) {
                0 => (disk.discard(offset, len), Hole),
                1 => (disk.write_zeroes(offset, len), Hole),
                2 => (disk.zero_some(offset, len, true, Wait::Yes).map(drop), Zero),
                3 => (fill([0; PAGE_SIZE]), Zero),
                4 => (fill([7; PAGE_SIZE]), Same),
                5 => (fill(std::array::from_fn(|at| (at % 11) as u8)), Compressed),
                6 => (fill(noise(PAGE_SIZE, step)), Huge),
                7 => {
                    // Zeroing a part of a hole allocates the page only if asked to.
                    disk.write_zeroes(offset + 5, 100).expect("memory");
                    if states[first] == Hole {
                        disk.zero_some(offset + 5, 100, true, Wait::Yes).expect("memory");
                        states[first] = Zero;
                    } else if !states[first].is_zeros() {
                        states[first] = disk.extent(offset, 1).expect("in range").state;
                        assert!(!states[first].is_zeros(), "only 100 bytes became zeros");
                    }
                    continue;
                }
                _ => {
                    let at = random.below(BYTES);
                    let len = 1 + random.below(BYTES - at);
                    let run = |same: &dyn Fn(PageState) -> bool| {
                        (at..at + len).take_while(|byte| same(states[byte / PAGE_SIZE])).count()
                    };
                    let state = states[at / PAGE_SIZE];
                    let same = run(&|other| other == state) as u64;
                    let extent = disk.extent(at as u64, len as u64);
                    assert_eq!(extent, Ok(Extent { len_bytes: same, state }), "seed {seed} step {step}");
                    let zeros = run(&PageState::is_zeros);
                    assert_eq!(disk.zero_bytes(at as u64, len as u64), Ok(zeros as u64));
                    let (mut all, mut some) = (vec![1; len], vec![2; len]);
                    disk.read(at as u64, &mut all).expect("sound");
                    assert!(all[..zeros].iter().all(|byte| *byte == 0));
                    let done = disk.read_until_zeros(at as u64, &mut some, Wait::No).expect("sound");
                    let first = (PAGE_SIZE - at % PAGE_SIZE).min(len);
                    let more = (at + first..at + len).take_while(|at| !states[at / PAGE_SIZE].is_zeros());
                    assert_eq!(done, first + more.count(), "seed {seed} step {step}");
                    assert!(some[..done] == all[..done] && some[done..].iter().all(|byte| *byte == 2));
                    continue;
                }
            };
            done.expect("memory");
            states[pages].fill(state);
        }
    }
}

#[test]
fn extents_under_writers_are_states_that_pages_had() {
    const PAGES: u64 = 16;
    let device = device(&[("disksize", &(PAGES << 12).to_string())]);
    let disk = device.open().expect("initialised");
    let text: [u8; PAGE_SIZE] = std::array::from_fn(|at| (at % 11) as u8);
    std::thread::scope(|scope| {
        // Even pages alternate between holes and zeros, odd ones between same-filled and compressed.
        for parity in 0..2 {
            let disk = &disk;
            scope.spawn(move || {
                for round in 0..4000u64 {
                    let page = (round * 2 + parity) % PAGES;
                    let (offset, len) = (page << 12, PAGE_SIZE as u64);
                    match (parity, round / PAGES % 2) {
                        (0, 0) => disk.zero_some(offset, len, true, Wait::Yes).map(drop),
                        (0, _) => disk.discard(offset, len),
                        (_, 0) => disk.write(offset, &text),
                        _ => disk.write(offset, &[3; PAGE_SIZE]),
                    }
                    .expect("memory");
                }
            });
        }
        let mut random = Random::new(5);
        for _ in 0..20_000 {
            let offset = random.below((PAGES as usize) << 12) as u64;
            let extent = disk.extent(offset, (PAGES << 12) - offset).expect("in range");
            let (odd, state) = (page_of(offset) % 2 == 1, extent.state);
            let possible = if odd { state == PageState::Hole || !state.is_zeros() } else { state.is_zeros() };
            assert!(possible && state != PageState::Huge, "{extent:?} at {offset}");
        }
    });
}

#[test]
fn the_life_cycle_is_the_kernels() {
    let device = device(&[]);
    assert_eq!(device.get("initstate"), Ok("0".into()));
    assert_eq!(refusal(device.open()), (ErrorKind::Busy, Some("disksize")));
    device.set("mem_limit", "1M").expect("at any time");
    refused(&device, "disksize", "0", ErrorKind::Invalid, "");
    device.set("disksize", "4097").expect("a size");
    assert_eq!((device.size_bytes(), device.get("initstate")), (8192, Ok("1".into())));
    for (name, value) in [
        ("disksize", "1M"),
        ("comp_algorithm", "zstd"),
        ("algorithm_params", "level=3"),
        ("checksum", "1"),
        ("lru_enable", "0"),
    ] {
        refused(&device, name, value, ErrorKind::Busy, "");
    }
    let disk = device.open().expect("initialised");
    disk.write(0, &[9; 4096]).expect("memory");
    refused(&device, "reset", "1", ErrorKind::Busy, "");
    drop(disk);
    for bad in ["0", "", "x", "70000"] {
        refused(&device, "reset", bad, ErrorKind::Invalid, "");
    }
    device.set("reset", "1\n").expect("nobody uses it");
    assert_eq!((device.size_bytes(), device.get("mem_limit")), (0, Ok("0".into())));
    device.set("comp_algorithm", "zstd:3").expect("uninitialised again");
    assert_eq!(device.get("comp_algorithm"), Ok("lz4 lz4hc [zstd:3] deflate memory".into()));
    device.set("disksize", "8192").expect("a size");
    let mut read = [1; 4096];
    device.open().expect("initialised").read(0, &mut read).expect("sound");
    assert_eq!(read, [0; 4096], "nothing survives a reset");
    for name in ["", ".", "../x", "a b", "a/b", &"x".repeat(65)] {
        assert!(Device::new(name).is_err(), "{name}");
    }
}

pub(super) fn dictionary() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut random = Random::new(1);
    let lines = (0..).map(|_| format!("what every page begins with, and then {}\n", random.below(1000)));
    let text: Vec<u8> = lines.flat_map(String::into_bytes).take(64 * PAGE_SIZE).collect();
    let (samples, _) = text.as_chunks::<PAGE_SIZE>();
    std::fs::write(&file, crate::codec::train(samples, 4096).expect("enough pages")).expect("room");
    file
}

#[test]
fn algorithm_params_are_the_kernels() {
    let file = dictionary();
    let path = file.path().display();
    let device = device(&[("comp_algorithm", "zstd")]);
    let shown = |device: &Device| {
        let list = device.get("comp_algorithm").expect("readable");
        list.split_whitespace().find(|name| name.starts_with('[')).expect("one is in use").to_owned()
    };
    for (params, algorithm) in [
        ("level=8", "[zstd:8]".to_owned()),
        (&format!("algo=zstd level=-3 dict={path}"), format!("[zstd:-3,dict={path}]")),
        (&format!("priority=0 dict={path}"), format!("[zstd,dict={path}]")),
        ("algo=zstd", "[zstd]".to_owned()),
        ("level=4 algo=zstd", "[zstd:4]".to_owned()),
    ] {
        device.set("algorithm_params", params).expect(params);
        assert_eq!(shown(&device), algorithm, "{params}");
    }
    for (params, hint) in [
        ("algo=lz4 level=2", "the device has no algorithm lz4"),
        ("algo=zstdd", "no compression algorithm"),
        ("level=0", "'0' is no level"),
        ("level=", "'level' is not"),
        ("level", "'level' is not"),
        ("depth=3", "'depth' is not"),
        ("priority=1 level=3", "no algorithm with priority 1"),
        ("priority=4 level=3", "write 0 to 3"),
        ("deflate.winbits=15", "leave it out"),
        ("dict=relative", "whole path"),
        ("level=3 dict=/nonexistent/dictionary", "No such file"),
    ] {
        refused(&device, "algorithm_params", params, ErrorKind::Invalid, hint);
        assert_eq!(shown(&device), "[zstd:4]", "{params}: a refusal changes nothing");
    }
    let fixed = |params: &str| {
        let settings = [("comp_algorithm", "zstd"), ("algorithm_params", params), ("disksize", "1M")];
        let device = self::device(&settings);
        (Arc::clone(&device), device.stats().mem_fixed_bytes)
    };
    let ((_, without), (with, with_bytes)) = (fixed("level=1"), fixed(&format!("dict={path}")));
    assert!(with_bytes > without, "{with_bytes} with a dictionary, {without} without");
    // The dictionary was read when it was set.
    drop(file);
    let disk = with.open().expect("initialised");
    let page: Vec<u8> = b"what every page begins with, and then".iter().copied().cycle().take(4096).collect();
    let mut read = vec![0; 4096];
    disk.write(0, &page).expect("memory");
    disk.read(0, &mut read).expect("sound");
    assert!(read == page);
    drop(disk);
    with.set("reset", "1").expect("nobody uses it");
    assert_eq!(shown(&with), "[lz4]", "a reset clears them");
}

#[test]
fn statistics_are_the_kernels_columns() {
    let device = device(&[("disksize", "1M"), ("mem_limit", "512K")]);
    let disk = device.open().expect("initialised");
    let text: Vec<u8> = b"compressible ".iter().copied().cycle().take(4096).collect();
    for (offset, data) in
        [(0, &noise(PAGE_SIZE, 1)[..]), (4096, &[5; 4096]), (8192, &text), (12288, &text[..100]), (0, &text)]
    {
        disk.write(offset, data).expect("memory");
    }
    disk.discard(8192, 4096).expect("in range");
    let mm = device.get("mm_stat").expect("readable");
    let mm: Vec<u64> = mm.split_whitespace().map(|n| n.parse().expect("a number")).collect();
    let [orig, compr, used, limit, used_max, same, compacted, huge, huge_since] = mm[..] else {
        panic!("{mm:?}")
    };
    assert_eq!((orig, limit, same, compacted, huge, huge_since), (3 * 4096, 512 << 10, 1, 0, 0, 1));
    assert!(compr > 0 && compr < 400 && used <= 2 * 4096 && used_max >= 2 * 4096, "{mm:?}");
    assert_eq!(device.get("io_stat").expect("readable"), format!("{:8} {:8} {} {:8}", 0, 0, 0, 1));
    assert_eq!(device.get("debug_stat").expect("readable"), "version: 1\n       0        0");
    device.set("mem_used_max", "0").expect("starts anew");
    assert_eq!(device.get("mem_used_max"), Ok(used.to_string()));
    refused(&device, "mem_used_max", "1", ErrorKind::Invalid, "write 0");
    let stats = device.stats();
    assert!(stats.mem_charged_bytes >= used && stats.mem_tables_bytes <= stats.mem_fixed_bytes + (1 << 20));
    let classes = device.get("classes").expect("readable");
    let total: Vec<&str> = classes.lines().last().expect("a total").split_whitespace().collect();
    assert_eq!((total[0], total[13]), ("Total", "2"), "{classes}");
}

#[test]
fn every_attribute_keeps_its_word() {
    for row in Device::attributes() {
        let device = device(&[]);
        assert!(row.readable() || row.writable(), "{}", row.name);
        match device.get(row.name) {
            Ok(_) => assert!(row.readable(), "{}", row.name),
            Err(error) => assert_eq!((row.readable(), error.kind()), (false, ErrorKind::Permission)),
        }
        let expected = if row.writable() { ErrorKind::Invalid } else { ErrorKind::Permission };
        refused(&device, row.name, "nonsense", expected, "");
    }
    let error = device(&[]).get("nonesuch").unwrap_err();
    assert!(error.kind() == ErrorKind::NotFound && error.to_string().contains("mm_stat"), "{error}");
}

#[test]
fn pages_are_compressed_again_on_request() {
    let device =
        device(&[("recomp_algorithm", "algo=zstd:9"), ("recomp_algorithm", "priority=3 algo=deflate")]);
    let algorithms = |zstd: &str, deflate: &str| {
        let lines = format!(
            "#1: lz4 lz4hc [zstd:{zstd}] deflate memory\n#3: lz4 lz4hc zstd [deflate{deflate}] memory"
        );
        assert_eq!(device.get("recomp_algorithm"), Ok(lines));
    };
    algorithms("9", "");
    set(&device, &[("algorithm_params", "algo=deflate level=9"), ("algorithm_params", "priority=1 level=4")]);
    algorithms("4", ":9");
    for (name, value) in [("recompress", "type=idle"), ("idle", "all")] {
        assert_eq!(refusal(device.set(name, value)), (ErrorKind::Invalid, Some("disksize")), "{name}");
    }
    assert_eq!(device.get("block_state"), Ok(String::new()));
    device.set("disksize", "1M").expect("a size");
    refused(&device, "recomp_algorithm", "algo=zstd", ErrorKind::Busy, "");
    let disk = device.open().expect("initialised");
    let text: Vec<u8> = (0..4096).map(|at| (at * at / 7 % 250) as u8).collect();
    disk.write(0, &text).expect("memory");
    disk.write(8192, &[5; 4096]).expect("memory");
    let states = |device: &Device| -> Vec<String> {
        let text = device.get("block_state").expect("readable");
        text.lines().map(|line| format!("{} {}", line[..12].trim(), &line[33..])).collect()
    };
    let line = device.get("block_state").expect("readable").lines().next().expect("a page").to_owned();
    let (used_s, now_s) = (line[13..25].trim().parse::<u32>(), crate::base::clock::uptime_s());
    assert!((now_s - 5..=now_s).contains(&used_s.expect("seconds")) && line[25..33] == *".000000 ", "{line}");
    assert_eq!(states(&device), ["0 ......", "2 s....."]);
    device.set("idle", "3600").expect("an age");
    assert_eq!(states(&device), ["0 ......", "2 s....."]);
    device.set("idle", "all").expect("all");
    assert_eq!(states(&device), ["0 ...i..", "2 s....."]);
    device.set("recompress", "type=idle threshold=0 max_pages=10 algo=zstd").expect("there is one");
    assert_eq!(states(&device), ["0 ....r.", "2 s....."]);
    assert_eq!(device.stats().pages_recompressed, 1);
    let mut read = vec![0; 4096];
    disk.read(0, &mut read).expect("sound");
    assert_eq!(read, text);
    for (value, hint) in [
        ("type=cold", "write idle, huge or huge_idle"),
        ("threshold=4096", "take a page"),
        ("threshold=-1", "cannot be"),
        ("max_pages=many", "cannot be"),
        ("algo=lz5", "no compression algorithm"),
        ("algo=lz4", "already when they are written"),
        ("priority=2", "no algorithm with priority 2"),
        ("priority=4", "write 1 to 3"),
        ("depth=3", "'depth' is not"),
    ] {
        refused(&device, "recompress", value, ErrorKind::Invalid, hint);
    }
    let without = self::device(&[("disksize", "1M")]);
    assert_eq!(without.get("recomp_algorithm"), Ok(String::new()));
    assert_eq!(refusal(without.set("recompress", "")), (ErrorKind::Invalid, Some("recomp_algorithm")));
    for bad in ["priority=1", "algo=", "algo=zstd priority=0", "algo=zstd level=3"] {
        refused(&self::device(&[]), "recomp_algorithm", bad, ErrorKind::Invalid, "");
    }
    drop(disk);
    device.set("reset", "1").expect("unused");
    assert_eq!(device.get("recomp_algorithm"), Ok(String::new()), "a reset forgets them");
}

#[cfg(feature = "designs")]
#[test]
fn streams_cost_what_there_are_of_them() {
    let fixed = |streams: &str| {
        let device = device(&[("streams", streams), ("disksize", "1M")]);
        assert_eq!(device.get("streams"), Ok(streams.into()));
        device.open().expect("initialised").write(0, &b"text of a page, ".repeat(256)).expect("memory");
        let stats = device.stats();
        assert_eq!(stats.stream_sleeps, 0);
        stats.mem_fixed_bytes
    };
    let (one, two, eleven) = (fixed("1"), fixed("2"), fixed("11"));
    assert!(two > one && eleven - two == 9 * (two - one), "{one} {two} {eleven}");
    let cpus = crate::base::cpu::possible() as u64;
    assert_eq!(fixed("percpu") - one, (cpus - 1) * (two - one));
    let device = device(&[]);
    for value in ["0", "1025"] {
        assert_eq!(refusal(device.set("streams", value)), (ErrorKind::Invalid, Some("streams")));
    }
    set(&device, &[("streams", "3"), ("reset", "1")]);
    assert_eq!(device.get("streams"), Ok("percpu".into()), "a reset forgets it");
}

#[test]
fn the_lru_has_the_pages_that_take_memory() {
    for settings in [
        &[("lru_enable", "1")][..],
        &[("lru_enable", "0")],
        #[cfg(feature = "designs")]
        &[("lru_design", "batched"), ("lru_pagevec", "1")],
        #[cfg(feature = "designs")]
        &[("lru_design", "single-lock"), ("lru_pagevec", "1")],
    ] {
        let has_lru = settings[0] != ("lru_enable", "0");
        let device = device(&[settings, &[("disksize", "4M")]].concat());
        let disk = device.open().expect("initialised");
        let mut random = Random::new(1);
        let mut page = [0; 4096];
        for _ in 0..4000 {
            let offset = 4096 * random.below(1024) as u64;
            match random.below(8) {
                0..4 => {
                    random.fill(&mut page[..2000]);
                    disk.write(offset, &page).expect("memory");
                }
                4 => disk.write(offset, &[7; 4096]).expect("memory"),
                5 => disk.write(offset + 100, &[8; 50]).expect("memory"),
                6 => disk.discard(offset, (4 << 20) - offset).expect("in range"),
                _ => disk.read(offset, &mut page).expect("sound"),
            }
            let (stats, lru) = (device.counts(), device.lru_stats());
            let stored = (stats.orig_data_bytes / 4096).saturating_sub(stats.same_pages);
            let wanted = if has_lru { stored } else { 0 };
            // The others are in pagevecs.
            let waiting = if settings.len() > 1 { 0 } else { 14 * crate::base::cpu::possible() as u64 };
            let listed = lru.active + lru.inactive;
            assert!((wanted.saturating_sub(waiting)..=wanted).contains(&listed), "{stats:?} {lru:?}");
        }
        let lru = device.lru_stats();
        assert_eq!(lru.activated > 0 && lru.removed > 100, has_lru, "{lru:?}");
        let shown = device.get("lru").expect("readable");
        assert!(shown.contains(&format!("\nactivated             {}\n", lru.activated)), "{shown}");
    }
}

#[test]
fn a_backing_device_is_opened_at_once_and_forgotten_by_a_reset() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (path, device) = (at("b.img"), device(&[]));
    let refused = |device: &Device, value: &str, kind, hint: &str| {
        self::refused(device, "backing_dev", value, kind, hint);
        assert_eq!(refusal(device.set("backing_dev", value)), (kind, Some("backing_dev")));
    };
    refused(&device, "b.img:1M", ErrorKind::Invalid, "whole path");
    refused(&device, "", ErrorKind::Invalid, "whole path");
    refused(&device, "/dev/null", ErrorKind::Invalid, "character device");
    refused(&device, &path, ErrorKind::NotFound, "with a size");
    assert_eq!(device.get("backing_dev"), Ok("none".into()));
    assert!(device.backing().is_none() && !std::fs::exists(&path).expect("readable"));

    device.set("backing_dev", &format!("{path}:1M")).expect("room");
    assert_eq!(device.get("backing_dev"), Ok(path.clone()));
    assert_eq!(std::fs::metadata(&path).expect("it was made").len(), (1 << 20) + MARK_BYTES as u64);
    let shown = device.backing().expect("it was set").to_string();
    assert!(shown.starts_with(&format!("{path}, 1 MiB, ")), "{shown}");
    // The file belongs to the device, which keeps it if another one cannot be opened.
    refused(&self::device(&[]), &path, ErrorKind::Busy, "in use");
    refused(&device, "/dev/null", ErrorKind::Invalid, "character device");
    assert_eq!(device.get("backing_dev"), Ok(path.clone()));
    // Another size of the same file can be set.
    for value in [format!("{path}:2M"), path.clone()] {
        device.set("backing_dev", &value).expect("it is its own");
        assert_eq!(device.backing().map(|backing| backing.len_bytes()), Some(2 << 20));
    }

    device.set("disksize", "1M").expect("a size");
    let other = format!("{}:1M", at("other.img"));
    for (name, value) in [("backing_dev", other.as_str()), ("backing_dev", "none"), ("backing_force", "1")] {
        self::refused(&device, name, value, ErrorKind::Busy, "");
    }
    assert!(!dir.path().join("other.img").exists(), "a file was made for nothing");
    device.set("reset", "1").expect("nobody uses it");
    assert_eq!(device.get("backing_dev"), Ok("none".into()));
    self::device(&[("backing_dev", &path), ("backing_dev", "none")]).set("backing_dev", &path).expect("free");
}

#[test]
fn what_a_backing_device_needs_is_checked() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("b.img");
    std::fs::write(&path, [1; 8192]).expect("a file");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("ours");
    let value = format!("{}:16M", path.display());
    let device = device(&[]);
    // What holds something else is taken by force only.
    assert_eq!(refusal(device.set("backing_dev", &value)), (ErrorKind::Busy, Some("backing_force")));
    assert_eq!(std::fs::read(&path).expect("a file"), [1; 8192]);
    set(&device, &[("backing_force", "1"), ("backing_dev", &value), ("reset", "1")]);
    assert_eq!(device.get("backing_force"), Ok("0".into()));
    device.set("backing_dev", &value).expect("it is uzram's now");
    device.set("backing_copies", "2").expect("uninitialised");
    let too_late = refusal(device.set("disksize", "16M"));
    assert_eq!(too_late, (ErrorKind::Invalid, Some("backing_dev")), "pages would be there once");
    let encrypted = refusal(device.set("backing_encrypted", "1"));
    assert_eq!(encrypted, (ErrorKind::Unsupported, Some("backing_encrypted")), "the library alone does not");
    #[cfg(feature = "designs")]
    {
        // Only blocks can be written uncompressed.
        set(&device, &[("backing_copies", "1"), ("compressed_writeback", "0")]);
        refused(&device, "disksize", "1M", ErrorKind::Invalid, "writeback_layout to blocks");
        assert_eq!(refusal(device.set("disksize", "1M")).1, Some("compressed_writeback"));
        set(&device, &[("writeback_layout", "blocks"), ("disksize", "1M")]);
        // Without a backing device the combination is accepted.
        self::device(&[("compressed_writeback", "0"), ("disksize", "1M")]);
    }
}

#[cfg(feature = "designs")]
#[test]
fn as_many_writes_are_in_flight_as_suit_the_layout_unless_it_is_set() {
    let device = device(&[]);
    for (name, value, shown) in [
        ("writeback_layout", "packed", "4"),
        ("writeback_layout", "blocks", "32"),
        ("writeback_batch_size", "5", "5"),
        ("writeback_layout", "packed", "5"),
    ] {
        device.set(name, value).expect("uninitialised");
        assert_eq!(device.get("writeback_batch_size").as_deref(), Ok(shown), "{name}={value}");
    }
}

#[test]
fn settings_keep_their_ranges() {
    let device = device(&[]);
    for is_initialised in [false, true] {
        if is_initialised {
            device.set("disksize", "1M").expect("a size");
        }
        for (name, values, refused) in [
            ("writeback_limit", &["5", "0", "18446744073709551615"][..], &["", "-1", "1K"][..]),
            ("writeback_limit_enable", &["1", "0"], &["2", "", "on"]),
            ("writeback_batch_size", &["1", "128", "32"], &["0", "129", "x"]),
            #[cfg(feature = "designs")]
            ("compressed_writeback", &["0", "1"], &["2", ""]),
            #[cfg(feature = "designs")]
            ("writeback_layout", &["blocks", "packed"], &["", "extents"]),
            #[cfg(feature = "designs")]
            ("run_cache_batch", &["0"], &["513"]),
            #[cfg(feature = "designs")]
            ("lru_pagevec", &["64"], &["0"]),
            ("backing_force", &["1", "0"], &["2", "yes"]),
            ("policy_high", &["100", "1", "95"], &["0", "101", "95%"]),
            ("policy_low", &["0", "95"], &["96", "-1"]),
            ("recompress_after", &["0", "4294967295"], &["4294967296", "1w", ""]),
            ("writeback_after", &["0", "90"], &["2000000h", "soon"]),
            ("writeback_budget", &["0", "4096"], &["-1", "1G/week", "/day"]),
            ("reclaim", &["pages", "zspages"], &["", "slabs"]),
        ] {
            let before = ["compressed_writeback", "writeback_layout", "backing_force", "reclaim"];
            if is_initialised && before.contains(&name) {
                self::refused(&device, name, values[0], ErrorKind::Busy, "");
                continue;
            }
            for value in values {
                device.set(name, value).expect(name);
                assert_eq!(device.get(name).as_deref(), Ok(*value), "{name}");
            }
            for value in refused {
                self::refused(&device, name, value, ErrorKind::Invalid, "");
                assert_eq!(device.get(name).as_deref(), Ok(values[values.len() - 1]), "{name}={value}");
            }
        }
    }
    for (name, value, shown) in [
        ("recompress_after", "10m", "600"),
        ("writeback_after", "1h", "3600"),
        ("writeback_budget", "10G/day", "10737418240"),
        ("writeback_budget", "512K", "524288"),
    ] {
        device.set(name, value).expect(name);
        assert_eq!(device.get(name).as_deref(), Ok(shown), "{name}={value}");
    }
    // Lowering the high watermark lowers the low one, which cannot be above it.
    device.set("policy_high", "50").expect("at any time");
    assert_eq!(device.get("policy_low"), Ok("50".into()));
    assert_eq!(refusal(device.set("policy_low", "51")).1, Some("policy_high"));
    device.set("reset", "1").expect("nobody uses it");
    let forgotten = ["writeback_limit", "policy_high", "reclaim", "writeback_budget"];
    assert_eq!(forgotten.map(|name| device.get(name).expect(name)), ["0", "95", "pages", "0"]);
}

#[test]
fn without_a_backing_device_nothing_is_written_back() {
    let device = device(&[]);
    assert_eq!(refusal(device.set("writeback", "idle")).1, Some("disksize"));
    device.set("disksize", "1M").expect("a size");
    assert_eq!(refusal(device.set("writeback", "idle")), (ErrorKind::Unsupported, Some("backing_dev")));
    let error = device.set("writeback", "page_index=256").unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::OutOfRange, 22));
    assert_eq!(device.get("bd_stat"), Ok(format!("{0:8} {0:8} {0:8}", 0)));
    let backing = device.get("backing").expect("readable");
    assert!(backing.lines().all(|line| line.ends_with(" 0")) && backing.contains("\npages "), "{backing}");
}

#[test]
fn a_reserve_is_whole_chunks_and_set_before_the_size() {
    let device = device(&[]);
    assert_eq!(device.get("reserve"), Ok("0".into()));
    for (value, bytes) in [("1", 4 << 20), ("4M", 4 << 20), ("4097K", 6 << 20), ("0", 0), ("5M", 6 << 20)] {
        device.set("reserve", value).expect("a size");
        assert_eq!(device.get("reserve"), Ok(bytes.to_string()), "{value}");
    }
    assert!(device.set("reserve", "much").is_err());
    device.set("disksize", "1M").expect("memory");
    refused(&device, "reserve", "8M", ErrorKind::Busy, "");
    let stats = device.stats();
    assert_eq!((stats.reserve_bytes, stats.reserve_free_bytes, stats.reserve_drained), (6 << 20, 6 << 20, 0));
    assert_eq!((stats.mem_charged_bytes, stats.mem_chunk_bytes), (6 << 20, 6 << 20));
    device.set("reset", "1").expect("not in use");
    assert_eq!(device.get("reserve"), Ok("0".into()));
    device.set("reserve", "16777215T").expect("a size");
    assert!(device.get("reserve").expect("readable").parse::<u64>().is_ok());
    assert_eq!(refusal(device.set("disksize", "1M")).1, Some("reserve"), "too much");
}

/// With a reserve, writes at the limit fail rather than wait, and start reclaim for later writes.
#[test]
fn pages_leave_at_the_limit_with_a_reserve() {
    const PAGES: u64 = 6 << 10;
    let directory = tempfile::tempdir().expect("a directory");
    let backing = format!("{}:64M", directory.path().join("cold").display());
    let size = (PAGES * PAGE_SIZE as u64).to_string();
    let device =
        device(&[("backing_dev", &backing), ("mem_limit", "12M"), ("reserve", "4M"), ("disksize", &size)]);
    let disk = device.open().expect("it has a size");
    let until = Instant::now() + Duration::from_secs(60);
    for number in 0..PAGES {
        while let Err(error) = disk.write(number * PAGE_SIZE as u64, &noise(PAGE_SIZE, number)) {
            assert!(matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::NoMemory), "{error}");
            assert!(Instant::now() < until, "page {number} finds no room: {:?}", device.stats());
            thread::sleep(Duration::from_millis(1));
        }
    }
    let mut page = [0; PAGE_SIZE];
    for number in 0..PAGES {
        disk.read(number * PAGE_SIZE as u64, &mut page).expect("it is somewhere");
        assert!(page == noise(PAGE_SIZE, number), "page {number}");
    }
}

#[test]
fn a_disk_that_was_never_written_is_discarded_at_once() {
    const LEN: u64 = 16 << 40;
    const PAGE: u64 = PAGE_SIZE as u64;
    let device = device(&[("disksize", "16T")]);
    let disk = device.open().expect("it has a size");
    disk.write(5, b"some").expect("no limit");
    let (before_bytes, begun) = (device.stats().mem_tables_bytes, thread_cpu_time());
    disk.discard(PAGE, LEN - PAGE).expect("in range");
    disk.write_zeroes(7, LEN - 9).expect("in range");
    assert_eq!(disk.extent(PAGE, LEN - PAGE).expect("in range").state, PageState::Hole);
    // Visiting each page took more than ten seconds. Only this thread's CPU time counts.
    let took = thread_cpu_time() - begun;
    assert!(took.as_secs() < 5, "{took:?}");
    assert_eq!(device.stats().mem_tables_bytes, before_bytes);
    let mut read = [0; 12];
    disk.read(0, &mut read).expect("sound");
    assert_eq!(&read, b"\0\0\0\0\0so\0\0\0\0\0");
}
