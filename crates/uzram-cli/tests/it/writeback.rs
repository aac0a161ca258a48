//! Backing devices and policies of the real program: what it accepts, shows and refuses.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::clients::{arg, complain, fio, missing, random_file, same, succeed};
use crate::common::{Place, finish, wait_until};
use serde_json::Value;
use uzram::backing::MARK_BYTES;
use uzram::random::Random;

/// Returns attributes of a device, from its JSON.
fn attributes<const N: usize>(place: &Place, names: [&str; N]) -> [String; N] {
    let json = place.json(&["stat", "zram0"]);
    names.map(|name| match &json["attributes"][name] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    })
}

/// Returns the value of `--backing` for a file of that size.
fn cold(place: &Place, size: &str) -> String {
    format!("{}:{size}", place.root().join("cold.img").display())
}

#[test]
fn a_file_is_made_taken_and_let_go() {
    let place = Place::new();
    let path = place.root().join("cold.img");
    let backing = format!("{}:4M", path.display());
    let daemon = place.up(&["--backing", &backing]);
    let fact = daemon.facts.lines().find(|line| line.starts_with("backing ")).unwrap();
    assert!(fact.contains(&format!("{}, 4 MiB, ", path.display())), "{fact}");
    assert!(fact.contains("io_uring") || fact.contains("threads"), "{fact}");
    assert!(fact.contains("direct") || fact.contains("through the page cache"), "{fact}");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), (4 << 20) + MARK_BYTES as u64);
    assert_eq!(place.run(&["stat", "zram0", "backing_dev"]).ok().trim(), path.to_str().unwrap());

    // The file belongs to this device, and cannot be changed any more.
    let taken = place.run(&["add", "zram1", "--backing", path.to_str().unwrap()]);
    assert!(taken.complaint(1).contains("in use"), "{}", taken.stderr);
    assert!(place.run(&["stat", "zram1"]).complaint(1).contains("zram1"));
    let late = place.run(&["set", "zram0", "backing_dev=none"]);
    assert!(late.complaint(1).contains("before the device is initialised"), "{}", late.stderr);

    assert_eq!(place.run(&["reset", "zram0"]).ok(), "");
    assert_eq!(place.run(&["stat", "zram0", "backing_dev"]).ok(), "none\n");
    // The command, not the daemon, makes a path absolute.
    let mut add = place.command(&["add", "zram1", "--backing", "cold.img"]);
    add.current_dir(place.root());
    finish(add).ok();
    assert_eq!(place.run(&["stat", "zram1", "backing_dev"]).ok().trim(), path.to_str().unwrap());
}

#[test]
fn a_policy_comes_from_a_file_and_options_win() {
    let place = Place::new();
    let (file, image) = (place.root().join("policy.toml"), place.root().join("cold.img"));
    let text = format!(
        "backing = '{}:8M'\nhigh = 80\nlow = '60'\nreclaim = 'zspages'\n\
         [recompress]\nalgorithm = 'zstd:3'\nafter = '10m'\n\
         [writeback]\nafter = 90\nbudget = '1G/day'\nbatch_size = 7\n",
        image.display()
    );
    std::fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    let names = [
        "policy_high",
        "policy_low",
        "reclaim",
        "recompress_after",
        "writeback_after",
        "writeback_budget",
        "writeback_batch_size",
        "recomp_algorithm",
    ];
    let daemon = place.up(&["--policy", file]);
    let of_file = ["80", "60", "zspages", "600", "90", "1073741824", "7"];
    let shown = attributes(&place, names);
    assert_eq!(shown[..7], of_file);
    assert!(shown[7].contains("[zstd:3]"), "{}", shown[7]);
    drop(daemon);
    let options = ["--writeback-after", "2h", "--recompress", "deflate:1:1d", "--writeback-budget", "4M/day"];
    let _daemon = place.up(&[&["--policy", file][..], &options].concat());
    let with_options = ["80", "60", "zspages", "86400", "7200", "4194304", "7"];
    let shown = attributes(&place, names);
    assert_eq!(shown[..7], with_options);
    assert!(shown[7].contains("[deflate:1]"), "{}", shown[7]);
    // Most settings can be changed at any time.
    let settings = ["policy_high=50", "policy_low=40", "recompress_after=30s", "writeback_after=0"];
    assert_eq!(place.run(&[&["set", "zram0"][..], &settings].concat()).ok(), "");
    assert_eq!(attributes(&place, names)[..5], ["50", "40", "zspages", "30", "0"]);
}

#[test]
fn what_makes_no_sense_is_one_line() {
    let place = Place::new();
    let image = cold(&place, "4M");
    let image = image.as_str();
    for (args, status, hint) in [
        (&["--writeback-after", "1h"][..], 2, "give --backing"),
        (&["--writeback-budget", "1G/day", "--backing", "none"], 2, "give --backing"),
        (&["--backing", "/nonexistent/cold.img:1M"], 1, "/nonexistent/cold.img"),
        (&["--backing", "/dev/null"], 1, "character device"),
        (&["--backing", image, "--writeback-after", "soon"], 2, "--writeback-after soon: "),
        (&["--backing", image, "--writeback-budget", "1G/week"], 2, "--writeback-budget 1G/week: "),
        (&["--recompress", "zstd:3:1w"], 2, "--recompress"),
        (&["--policy", "/nonexistent/policy.toml"], 1, "--policy /nonexistent/policy.toml: No such file"),
        (&["--policy", "/"], 1, "--policy /: "),
    ] {
        let refused = place.run(&[&["up", "--exec", "true"][..], args].concat());
        let line = refused.complaint(status);
        assert!(line.contains(hint), "{args:?}: {line}");
        assert!(!place.root().join("cold.img").exists(), "{args:?}: made before anything else was refused");
    }
    let file = place.root().join("policy.toml");
    let with = |text: &str, status| {
        std::fs::write(&file, text).unwrap();
        let args = ["up", "--exec", "true", "--backing", image, "--policy", file.to_str().unwrap()];
        place.run(&args).complaint(status).to_owned()
    };
    for (text, hint) in [
        ("high = 95\nlowe = 3\n", "policy.toml:2: 'lowe = 3': unknown key `lowe`; did you mean `low`?"),
        ("[writeback]\nafter = '1w'\n", "policy.toml:2: writeback.after: '1w' is not a duration"),
        ("high = 20\nlow = 30\n", "policy.toml:2: low: policy_low=30 would be above policy_high"),
        ("[recompress]\nafter = '1m'\n", "policy.toml:2: recompress.after: nothing to compress pages again"),
        ("high = 101", "policy.toml:1: high: '101' is no policy_high: write 1 to 100"),
        ("[writeback]\ncompressed = false", "compressed_writeback"),
        ("[[[", "policy.toml:1: '[[['"),
    ] {
        let line = with(text, 2);
        assert!(line.contains(hint), "{text}: {line}");
    }
    assert!(with(&"#\n".repeat(40_000), 1).contains("more than 64 KiB"));
    // A file is created only if everything else is valid.
    let other = place.root().join("other.img");
    std::fs::write(&file, format!("backing = '{}:1M'\nhigh = 101\n", other.display())).unwrap();
    let refused = place.run(&["up", "--exec", "true", "--policy", file.to_str().unwrap()]);
    assert!(refused.complaint(2).contains(":2: high: ") && !other.exists(), "{}", refused.stderr);
}

/// Creates a file of compressible pages, all different, and of incompressible ones.
fn mixed_file(place: &Place, len_bytes: usize) -> PathBuf {
    let path = random_file(place, "mixed", len_bytes);
    let mut bytes = std::fs::read(&path).unwrap();
    let mut random = Random::new(1);
    for page in bytes.chunks_exact_mut(4096) {
        if random.below(8) > 0 {
            page[1000 + random.below(2000)..].fill(7);
        }
    }
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Returns the columns of `bd_stat`: held, read and written, in units of 4 KiB.
fn bd_stat(place: &Place) -> [u64; 3] {
    let text = place.run(&["stat", "zram0", "bd_stat"]).ok();
    assert_eq!(text.trim_end().len(), 26, "not the kernel's columns: {text}");
    let columns: Vec<_> = text.split_whitespace().map(|column| column.parse().unwrap()).collect();
    columns.try_into().unwrap()
}

/// Returns the number of pages with a flag in `block_state`.
fn flagged(place: &Place, flag: char) -> usize {
    let states = place.run(&["stat", "zram0", "block_state"]).ok();
    states.lines().filter(|line| line.split_whitespace().nth(2).unwrap().contains(flag)).count()
}

#[test]
fn pages_are_written_on_request_and_come_back() {
    if missing(&["nbdcopy", "nbdinfo"]) {
        return;
    }
    let place = Place::new();
    let backing = cold(&place, "16M");
    let _daemon = place.up_sized("4M", &["--backing", &backing, "--log", "warn"]);
    let file = mixed_file(&place, 4 << 20);
    succeed(&place, "nbdcopy", &[arg(&file), &place.uri()]);
    let used_bytes = place.statistic("mem_used_bytes");

    // Nothing is idle yet.
    assert_eq!(place.run(&["set", "zram0", "writeback=idle"]).ok(), "");
    assert_eq!((bd_stat(&place), flagged(&place, 'w')), ([0; 3], 0));
    assert_eq!(place.run(&["set", "zram0", "writeback=huge"]).ok(), "");
    let huge = flagged(&place, 'w');
    assert!((50..250).contains(&huge), "{huge}");
    assert_eq!(place.run(&["set", "zram0", "writeback=page_index=1023 page_indexes=0-9"]).ok(), "");
    let some = flagged(&place, 'w');
    assert!((huge..=huge + 11).contains(&some), "{huge} {some}");
    assert_eq!(place.run(&["set", "zram0", "idle=all", "writeback=type=idle"]).ok(), "");
    let states = place.run(&["stat", "zram0", "block_state"]).ok();
    assert!(states.lines().count() == 1024 && flagged(&place, 'w') == 1024, "{states}");
    assert_eq!(place.statistic("pages_backed"), 1024);
    assert!(place.statistic("mem_used_bytes") * 20 < used_bytes, "memory was not freed");
    let [held, read, written] = bd_stat(&place);
    assert!(read == 0 && held <= written, "{held} {read} {written}");
    assert!(held * 4096 < used_bytes * 21 / 20 && written < held + 200, "{held} {written}");
    let table = place.run(&["stat", "zram0"]).ok();
    assert!(table.contains("\n  backed           1024 pages  not in memory: "), "{table}");
    let map = succeed(&place, "nbdinfo", &["--map=uzram:state", &place.uri()]);
    assert!(map.lines().count() == 1 && map.contains(" 5"), "{map}");

    let copy = place.root().join("copy");
    succeed(&place, "nbdcopy", &[&place.uri(), arg(&copy)]);
    assert!(same(&file, &copy), "the contents changed");
    assert!(bd_stat(&place)[1] > 0 && flagged(&place, 'w') < 1024, "nothing came back");
    for failures in ["backing_failed_reads", "backing_failed_writes", "backing_corrupted", "failed_reads"] {
        assert_eq!(place.statistic(failures), 0, "{failures}");
    }
}

#[test]
fn what_is_written_is_limited() {
    let Some(place) = Place::needing(&["nbdcopy"]) else { return };
    let backing = cold(&place, "16M");
    let _daemon = place.up_sized("4M", &["--backing", &backing]);
    let file = mixed_file(&place, 4 << 20);
    succeed(&place, "nbdcopy", &[arg(&file), &place.uri()]);
    let limit = ["set", "zram0", "writeback_limit=100", "writeback_limit_enable=1", "idle=all"];
    assert_eq!(place.run(&limit).ok(), "");
    let spent = place.run(&["set", "zram0", "writeback=idle"]);
    assert!(spent.complaint(1).contains("writeback_limit"), "{}", spent.stderr);
    let (left, [_, _, written]) = (flagged(&place, 'w'), bd_stat(&place));
    assert!((90..1024).contains(&left) && written <= 100, "{left} pages in {written} units");
    assert_eq!(place.run(&["set", "zram0", "writeback_limit_enable=0", "writeback=idle"]).ok(), "");
    assert_eq!(flagged(&place, 'w'), 1024);
    // Pages on the backing device need no writeback.
    for (value, hint) in [
        ("writeback=warm", "'warm' is no type"),
        ("writeback=page_index=1024", "the disk has 1024 pages"),
        ("writeback=page_indexes=9-3", "comes after the last"),
    ] {
        let refused = place.run(&["set", "zram0", value]);
        assert!(refused.complaint(1).contains(hint), "{}", refused.stderr);
    }
    assert_eq!(place.run(&["set", "zram0", "writeback=all"]).ok(), "");
}

/// The buffers of a connection.
const CONNECTION_BYTES: u64 = 1 << 20;

#[test]
fn a_disk_of_several_times_its_limit_keeps_what_fio_writes() {
    if missing(&["fio"]) {
        return;
    }
    for more in [&[][..], &["--recompress", "zstd:3"]] {
        let place = Place::new();
        let backing = cold(&place, "128M");
        let args = ["--mem-limit", "8M", "--backing", &backing, "--log", "warn"];
        let daemon = place.up_sized("64M", &[&args, more].concat());
        let uri = format!("--uri={}", place.uri());
        let writers = ["--numjobs=8", "--size=6M", "--offset_increment=6M"];
        let mut args = fio(&uri, &["--rw=randwrite", "--bs=4k", "--iodepth=4"]);
        args.extend(writers);
        args.extend(["--verify=crc32c", "--do_verify=1", "--buffer_compress_percentage=30"]);
        // The program's memory now, a margin, the fixed cost, and some for each connection.
        let most = daemon.resident_bytes() + (8 << 20) + place.number("mem_fixed") + 8 * CONNECTION_BYTES;
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let sampler = scope.spawn(|| {
                while !ended.load(Relaxed) {
                    assert!(daemon.resident_bytes() <= most, "more than {most} bytes are resident");
                    thread::sleep(Duration::from_millis(2));
                }
            });
            // The sampler must end even if fio fails.
            let written = catch_unwind(AssertUnwindSafe(|| succeed(&place, "fio", &args)));
            ended.store(true, Relaxed);
            let sampled = sampler.join();
            written.unwrap_or_else(|panic| resume_unwind(panic));
            sampled.unwrap();
        });
        assert!(place.number("mem_charged") <= 8 << 20);
        assert!(place.statistic("pages_backed") > 6000, "{}", place.statistic("pages_backed"));
        let policy = place.run(&["stat", "zram0", "policy"]).ok();
        let count = |name: &str| {
            let line = policy.lines().find(|line| line.split_whitespace().next() == Some(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
        };
        assert!(count("written_back") > 6000 && count("high_pages") == 2048 * 95 / 100, "{policy}");
        assert_eq!(count("recompressed") > 0, !more.is_empty(), "{policy}");
        for failures in ["failed_reads", "failed_writes", "backing_corrupted", "corrupted_objects"] {
            assert_eq!(place.statistic(failures), 0, "{failures}: {policy}");
        }
    }
}

/// Returns a figure of the attribute `backing`.
fn figure(place: &Place, name: &str) -> u64 {
    let figures = place.run(&["stat", "zram0", "backing"]).ok();
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    figures.lines().find_map(value).unwrap()
}

fn backing_state(place: &Place) -> String {
    place.run(&["stat", "zram0", "backing_state"]).ok()
}

/// Checks that nothing is written to the backing device for so long, once what is under way has ended.
fn expect_no_writes(place: &Place, duration: Duration) {
    let mut before = figure(place, "written_bytes");
    wait_until("nothing more is written", || {
        thread::sleep(Duration::from_millis(300));
        std::mem::replace(&mut before, figure(place, "written_bytes")) == figure(place, "written_bytes")
    });
    thread::sleep(duration);
    assert_eq!(figure(place, "written_bytes"), before);
}

/// What does not fit is refused; then nothing is written, as long as nobody uses the disk; and it goes on
/// when there is room.
#[test]
fn a_full_backing_device_is_left_alone_until_there_is_room() {
    let Some(place) = Place::needing(&["fio"]) else { return };
    let backing = cold(&place, "24M");
    let _daemon = place.up_sized("64M", &["--mem-limit", "8M", "--backing", &backing, "--log", "error"]);
    let uri = format!("--uri={}", place.uri());
    let random = ["--bs=64k", "--refill_buffers"];
    let with = |args: &[&'static str]| [&fio(&uri, args)[..], &random].concat();
    assert_eq!(backing_state(&place), "ok\n");
    // Some of what is on it dies, and is what cleaning could go for.
    succeed(&place, "fio", &with(&["--rw=write", "--size=28M"]));
    succeed(&place, "fio", &with(&["--rw=randwrite", "--size=28M", "--io_size=8M"]));
    let refused = complain(&place, "fio", &with(&["--rw=write", "--size=60M"]));
    assert!(refused.contains("No space left on device"), "{refused}");
    expect_no_writes(&place, Duration::from_secs(1));
    assert!(backing_state(&place).starts_with("full: "), "{}", backing_state(&place));
    assert!(place.run(&["stat", "zram0"]).ok().contains("the backing device is full: "));
    let most = (32 * (28 + 8 + 60)) << 20;
    assert!(figure(&place, "written_bytes") < most, "{} bytes", figure(&place, "written_bytes"));
    succeed(&place, "fio", &fio(&uri, &["--rw=trim", "--bs=1M", "--size=20M"]));
    assert_eq!(backing_state(&place), "ok\n");
    succeed(&place, "fio", &with(&["--rw=write", "--offset=44M", "--size=10M", "--verify=crc32c"]));
}

/// Returns how many bytes are written for each that leaves where pages are overwritten at random and the share
/// `live` of a device is live, as the engine's `store/writeback/clean.rs` says.
fn theory(live: f64) -> f64 {
    let (mut low, mut high) = (0.0f64, 1.0f64);
    for _ in 0..60 {
        let s = (low + high) / 2.0;
        if (s - 1.0) / s.ln() < live { low = s } else { high = s }
    }
    1.0 / (1.0 - low)
}

/// Pages of a disk are overwritten at random, with contents that do not compress, while the backing device is
/// nearly full of live pages. In the long form, of `UZRAM_CLEAN_SECONDS`, that is 97 % of a device of 1 GiB.
#[test]
fn overwriting_at_random_costs_what_the_theory_says() {
    if missing(&["fio"]) {
        return;
    }
    let seconds = std::env::var("UZRAM_CLEAN_SECONDS").ok().and_then(|text| text.parse::<u64>().ok());
    // In the short form the reserve, and the extents that are being filled, are not small.
    let (backing_mib, limit_mib, percent, unused_extents): (u64, u64, u64, u64) =
        if seconds.is_some() { (1024, 64, 97, 0) } else { (32, 4, 85, 4) };
    let place = Place::new();
    let backing = cold(&place, &format!("{backing_mib}M"));
    // What is not on the device is in memory, where the limit is nearly reached while pages are written.
    let pages = ((backing_mib << 20) * percent / 100 / 4112) + (limit_mib << 20) * 97 / 100 / 4096;
    let (size, limit) = (format!("{}K", pages * 4), format!("{limit_mib}M"));
    let _daemon = place.up_sized(&size, &["--mem-limit", &limit, "--backing", &backing, "--log", "error"]);
    let uri = format!("--uri={}", place.uri());
    let of = |args: &[&'static str]| [&fio(&uri, args)[..], &["--refill_buffers", "--iodepth=8"]].concat();
    succeed(&place, "fio", &of(&["--rw=write", "--bs=64k"]));
    let figures = || {
        ["written_bytes", "pages_written_back", "held_bytes", "len_bytes"].map(|name| figure(&place, name))
    };
    let (before, began) = (figures(), Instant::now());
    let io_size = format!("--io_size={}", if seconds.is_some() { "128M" } else { "24M" });
    for round in 1.. {
        let seed = format!("--randseed={round}");
        // Without --randrepeat=0 all rounds overwrite the same pages, in the same order.
        let args = ["--rw=randwrite", "--bs=4k", "--verify=crc32c", "--randrepeat=0"];
        succeed(&place, "fio", &[&of(&args)[..], &[&io_size, &seed]].concat());
        if round > 1 && began.elapsed() >= Duration::from_secs(seconds.unwrap_or(0)) {
            break;
        }
    }
    let [written, left, held, len] = figures();
    let cost = (written - before[0]) as f64 / ((left - before[1]) * 4112) as f64;
    let live = held as f64 / (len - unused_extents * len / 128) as f64;
    println!(
        "{} pages left in {:?}, {:.2} % live: {cost:.2} bytes written for each, in theory {:.2}",
        left - before[1],
        began.elapsed(),
        100.0 * live,
        theory(live)
    );
    assert!(cost <= 1.3 * theory(live), "{live} live, {cost} bytes, in theory {}", theory(live));
    expect_no_writes(&place, Duration::from_secs(if seconds.is_some() { 60 } else { 1 }));
    for failures in ["failed_reads", "failed_writes", "backing_corrupted", "corrupted_objects"] {
        assert_eq!(place.statistic(failures), 0, "{failures}");
    }
}

/// Waits for pages to leave after their idle time: some seconds.
#[test]
fn pages_that_nobody_uses_leave_by_themselves() {
    let Some(place) = Place::needing(&["nbdcopy"]) else { return };
    let backing = cold(&place, "16M");
    let args = ["--backing", &backing, "--writeback-after", "1s", "--writeback-budget", "1M/day"];
    let _daemon = place.up_sized("4M", &args);
    let file = mixed_file(&place, 4 << 20);
    succeed(&place, "nbdcopy", &[arg(&file), &place.uri()]);
    wait_until("as much is written as may be in a day", || place.statistic("pages_backed") > 300);
    assert!(bd_stat(&place)[2] <= 256, "{:?}", bd_stat(&place));
    assert!(flagged(&place, 'w') < 1024);
    assert_eq!(place.run(&["set", "zram0", "writeback_budget=0"]).ok(), "");
    wait_until("all is written", || place.statistic("pages_backed") == 1024);
    let copy = place.root().join("copy");
    succeed(&place, "nbdcopy", &[&place.uri(), arg(&copy)]);
    assert!(same(&file, &copy), "the contents changed");
}

#[test]
fn without_a_backing_device_there_is_nowhere_to_write_to() {
    let place = Place::new();
    let _daemon = place.up(&[]);
    let refused = place.run(&["set", "zram0", "writeback=huge"]);
    assert!(refused.complaint(1).contains("no backing device (setting: backing_dev)"), "{}", refused.stderr);
    assert!(!place.run(&["stat", "zram0"]).ok().contains("backed"));
}
