//! Backing devices and policies of the real program: what it accepts, shows and refuses.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::common::*;

fn attributes<const N: usize>(place: &Place, names: [&str; N]) -> [String; N] {
    let json = place.json("stat zram0");
    names.map(|name| match &json["attributes"][name] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    })
}

#[test]
fn a_policy_comes_from_a_file_and_options_win() {
    let (place, backing) = (Place::new(), "cold.img");
    let path = place.path(backing);
    let text = format!(
        "backing = '{path}:8M'\nhigh = 80\nlow = '60'\nreclaim = 'zspages'\n\
         [recompress]\nalgorithm = 'zstd:3'\nafter = '10m'\n\
         [writeback]\nafter = 90\nbudget = '1G/day'\nbatch_size = 7\n"
    );
    let policy = format!("--policy {}", place.write("policy.toml", text));
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
    let daemon = place.up(&policy);
    let shown = attributes(&place, names);
    assert_eq!(shown[..7], ["80", "60", "zspages", "600", "90", "1073741824", "7"]);
    assert!(shown[7].contains("[zstd:3]"), "{}", shown[7]);
    let fact = daemon.facts.lines().find(|line| line.starts_with("backing ")).unwrap();
    assert!(fact.contains(&format!("{path}, 8 MiB, ")), "{fact}");
    assert!(fact.contains("io_uring") || fact.contains("threads"), "{fact}");
    assert!(fact.contains("direct") || fact.contains("through the page cache"), "{fact}");
    // The file belongs to this device until that is reset.
    place.refuses(&[
        (&format!("add zram1 --backing {path}"), 1, &["in use"]),
        ("stat zram1", 1, &["zram1"]),
        ("set zram0 backing_dev=none", 1, &["before the device is initialised"]),
    ]);
    assert_eq!((place.run("reset zram0").ok(), place.get("backing_dev")), (String::new(), "none".to_owned()));
    // The command, not the daemon, makes a path absolute.
    finish(place.command(&["add", "zram1", "--backing", backing]).current_dir(place.root())).ok();
    assert_eq!(place.run("stat zram1 backing_dev").ok().trim(), path);
    drop(daemon);
    let options = "--writeback-after 2h --recompress deflate:1:1d --writeback-budget 4M/day";
    let _daemon = place.up(&format!("{policy} {options}"));
    let shown = attributes(&place, names);
    assert_eq!(shown[..7], ["80", "60", "zspages", "86400", "7200", "4194304", "7"]);
    assert!(shown[7].contains("[deflate:1]"), "{}", shown[7]);
    // Most settings can be changed at any time.
    place.set("policy_high=50 policy_low=40 recompress_after=30s writeback_after=0");
    assert_eq!(attributes(&place, names)[..5], ["50", "40", "zspages", "30", "0"]);
}

#[test]
fn what_makes_no_sense_is_one_line() {
    let place = Place::new();
    place.refuses(&[
        ("up --writeback-after 1h", 2, &["give --backing"]),
        ("up --writeback-budget 1G/day --backing none", 2, &["give --backing"]),
        ("up --backing /nonexistent/cold.img:1M", 1, &["/nonexistent/cold.img"]),
        ("up --backing /dev/null", 1, &["character device"]),
        ("up --size 1M --backing DIR/first:4M --backing DIR/nope/second:4M", 1, &["nope/second"]),
        ("up --backing DIR/cold.img:4M --writeback-after soon", 2, &["--writeback-after soon: "]),
        ("up --backing DIR/cold.img:4M --writeback-budget 1G/week", 2, &["--writeback-budget 1G/week: "]),
        ("up --recompress zstd:3:1w", 2, &["--recompress"]),
        ("up --policy /nonexistent/policy.toml", 1, &["--policy /nonexistent/policy.toml: No such file"]),
        ("up --policy /", 1, &["--policy /: "]),
    ]);
    let large = "#\n".repeat(40_000);
    let other = format!("backing = '{}'\nhigh = 101\n", place.path("other.img:1M"));
    for (text, status, said) in [
        ("[writeback]\nafter = '1w'\n", 2, "policy.toml:2: writeback.after: '1w' is not a duration"),
        ("high = 20\nlow = 30\n", 2, "policy.toml:2: low: policy_low=30 would be above policy_high"),
        (
            "[recompress]\nafter = '1m'\n",
            2,
            "policy.toml:2: recompress.after: nothing to compress pages again",
        ),
        ("[writeback]\ncompressed = false", 2, "compressed_writeback"),
        (&large, 1, "more than 64 KiB"),
        (&other, 2, ":2: high: "),
    ] {
        place.write("policy.toml", text);
        let backing = if text.starts_with("backing") { "" } else { "--backing DIR/cold.img:4M" };
        place.refuses(&[(&format!("up --policy DIR/policy.toml {backing}"), status, &[said])]);
    }
    // A file is created only if everything else is valid, or removed.
    assert!(["cold.img", "other.img", "first"].iter().all(|name| !place.root().join(name).exists()));
}

/// Creates a file of compressible pages, all different, and of incompressible ones.
fn mixed_file(place: &Place) -> PathBuf {
    let mut random = Random::new(1);
    let mut bytes = random.bytes(4 << 20);
    for page in bytes.chunks_exact_mut(4096) {
        if random.below(8) > 0 {
            page[1000 + random.below(2000)..].fill(7);
        }
    }
    PathBuf::from(place.write("mixed", bytes))
}

/// Returns the columns of `bd_stat`: held, read and written, in units of 4 KiB.
fn bd_stat(place: &Place) -> [u64; 3] {
    let text = place.run("stat zram0 bd_stat").ok();
    assert_eq!(text.trim_end().len(), 26, "not the kernel's columns: {text}");
    let columns: Vec<_> = text.words().iter().map(|column| column.parse().unwrap()).collect();
    columns.try_into().unwrap()
}

fn written_back(place: &Place) -> usize {
    let states = place.run("stat zram0 block_state").ok();
    assert_eq!(states.lines().count(), 1024, "{states}");
    states.lines().filter(|line| line.words()[2].contains('w')).count()
}

#[test]
fn pages_are_written_on_request_and_come_back() {
    let Some(place) = Place::needing("nbdcopy nbdinfo") else { return };
    let backing = place.path("cold.img:16M");
    let _daemon = place.up_sized("4M", &format!("--backing {backing} --log warn"));
    let file = mixed_file(&place);
    place.copy_in(&file);
    let used_bytes = place.statistic("mem_used_bytes");

    // Nothing is idle yet.
    place.set("writeback=idle");
    assert_eq!((bd_stat(&place), written_back(&place)), ([0; 3], 0));
    place.set("writeback=huge");
    let huge = written_back(&place);
    assert!((50..250).contains(&huge), "{huge}");
    place.set(&["writeback=page_index=1023 page_indexes=0-9"]);
    let some = written_back(&place);
    assert!((huge..=huge + 11).contains(&some), "{huge} {some}");
    place.set("idle=all writeback=type=idle");
    assert_eq!((written_back(&place), place.statistic("pages_backed")), (1024, 1024));
    assert!(place.statistic("mem_used_bytes") * 20 < used_bytes, "memory was not freed");
    let [held, read, written] = bd_stat(&place);
    assert!(read == 0 && held <= written, "{held} {read} {written}");
    assert!(held * 4096 < used_bytes * 21 / 20 && written < held + 200, "{held} {written}");
    place.run("stat zram0").shows(&["\n  backed           1024 pages  not in memory: "]);
    let map = succeed(&place, "nbdinfo", &["--map=uzram:state", &place.uri()]);
    assert!(map.lines().count() == 1 && map.contains(" 5"), "{map}");

    place.assert_holds(&file);
    assert!(bd_stat(&place)[1] > 0 && written_back(&place) < 1024, "nothing came back");
    place.assert_zero("backing_failed_reads backing_failed_writes backing_corrupted failed_reads");
}

/// The buffers of a connection.
const CONNECTION_BYTES: u64 = 1 << 20;

#[test]
fn a_disk_of_several_times_its_limit_keeps_what_fio_writes() {
    let Some(place) = Place::needing("fio") else { return };
    let backing = place.path("cold.img:128M");
    let options = format!("--mem-limit 8M --backing {backing} --log warn --recompress zstd:3");
    let daemon = place.up_sized("64M", &options);
    let writers = "--rw=randwrite --bs=4k --iodepth=4 --numjobs=8 --size=6M --offset_increment=6M \
                   --verify=crc32c --do_verify=1 --buffer_compress_percentage=30";
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
        let written = catch_unwind(AssertUnwindSafe(|| place.fio(writers)));
        ended.store(true, Relaxed);
        let sampled = sampler.join();
        written.unwrap_or_else(|panic| resume_unwind(panic));
        sampled.unwrap();
    });
    assert!(place.number("mem_charged") <= 8 << 20);
    assert!(place.statistic("pages_backed") > 6000, "{}", place.statistic("pages_backed"));
    let policy = place.get("policy");
    let count = |name: &str| {
        let mut rows = policy.lines().map(Words::words);
        rows.find(|row| row[0] == name).unwrap()[1].parse::<u64>().unwrap()
    };
    assert!(count("written_back") > 6000 && count("high_pages") == 2048 * 95 / 100, "{policy}");
    assert!(count("recompressed") > 0, "{policy}");
    place.assert_zero("failed_reads failed_writes backing_corrupted corrupted_objects");
}

fn figure(place: &Place, name: &str) -> u64 {
    let figures = place.get("backing");
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
    figures.lines().find_map(value).unwrap()
}

/// Checks that nothing is written to the backing device for so long, once what is under way has ended.
fn expect_no_writes(place: &Place, duration: Duration) {
    let written = || figure(place, "written_bytes");
    let mut before = written();
    wait_until("nothing more is written", || {
        thread::sleep(Duration::from_millis(300));
        std::mem::replace(&mut before, written()) == written()
    });
    thread::sleep(duration);
    assert_eq!(written(), before);
}

/// Returns how many bytes are written for each that leaves where pages are overwritten at random and the
/// share `live` of a device is live, as the engine's `store/writeback/clean.rs` says.
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
    let Some(place) = Place::needing("fio") else { return };
    let seconds = std::env::var("UZRAM_CLEAN_SECONDS").ok().and_then(|text| text.parse::<u64>().ok());
    // In the short form the reserve, and the extents that are being filled, are not small.
    let (backing_mib, limit_mib, percent, unused_extents): (u64, u64, u64, u64) =
        if seconds.is_some() { (1024, 64, 97, 0) } else { (32, 4, 85, 4) };
    let backing = place.path(&format!("cold.img:{backing_mib}M"));
    // What is not on the device is in memory, where the limit is nearly reached while pages are written.
    let pages = ((backing_mib << 20) * percent / 100 / 4112) + (limit_mib << 20) * 97 / 100 / 4096;
    let options = format!("--mem-limit {limit_mib}M --backing {backing} --log error");
    let _daemon = place.up_sized(&format!("{}K", pages * 4), &options);
    place.fio("--rw=write --bs=64k --refill_buffers --iodepth=8");
    let figures = || {
        ["written_bytes", "pages_written_back", "held_bytes", "len_bytes"].map(|name| figure(&place, name))
    };
    let (before, began) = (figures(), Instant::now());
    let io_size = if seconds.is_some() { "128M" } else { "24M" };
    for round in 1.. {
        // Without --randrepeat=0 all rounds overwrite the same pages, in the same order.
        let options = "--rw=randwrite --bs=4k --verify=crc32c --randrepeat=0 --refill_buffers --iodepth=8";
        place.fio(&format!("{options} --io_size={io_size} --randseed={round}"));
        if round > 1 && began.elapsed() >= Duration::from_secs(seconds.unwrap_or(0)) {
            break;
        }
    }
    let [written, left, held, len] = figures();
    let left = left - before[1];
    let cost = (written - before[0]) as f64 / (left * 4112) as f64;
    let live = held as f64 / (len - unused_extents * len / 128) as f64;
    let told = format!(
        "{left} pages left in {:?}, {:.2} % live: {cost:.2} bytes written for each, in theory {:.2}",
        began.elapsed(),
        100.0 * live,
        theory(live)
    );
    println!("{told}");
    assert!(cost <= 1.3 * theory(live), "{told}");
    expect_no_writes(&place, Duration::from_secs(if seconds.is_some() { 60 } else { 1 }));
    place.assert_zero("failed_reads failed_writes backing_corrupted corrupted_objects");
}
