//! Backing devices and policies of the real program: what it accepts, shows and refuses.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use crate::common::clients::{fio, missing, succeed};
use crate::common::{Place, finish};
use serde_json::Value;
use uzram::backing::MARK_BYTES;

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
    place.run(&["add", "zram1", "--backing", path.to_str().unwrap()]).says(1, "in use");
    place.run(&["stat", "zram1"]).says(1, "zram1");
    place.run(&["set", "zram0", "backing_dev=none"]).says(1, "before the device is initialised");

    assert_eq!(place.run(&["reset", "zram0"]).ok(), "");
    assert_eq!(place.run(&["stat", "zram0", "backing_dev"]).ok(), "none\n");
    // The command, not the daemon, makes a path absolute.
    finish(place.command(&["add", "zram1", "--backing", "cold.img"]).current_dir(place.root())).ok();
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
        ("[[[", "policy.toml:1: '[[['"),
    ] {
        let line = with(text, 2);
        assert!(line.contains(hint), "{text}: {line}");
    }
    assert!(with(&"#\n".repeat(40_000), 1).contains("more than 64 KiB"));
    // A file is created only if everything else is valid.
    let other = place.root().join("other.img");
    std::fs::write(&file, format!("backing = '{}:1M'\nhigh = 101\n", other.display())).unwrap();
    place.run(&["up", "--exec", "true", "--policy", file.to_str().unwrap()]).says(2, ":2: high: ");
    assert!(!other.exists());
}

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
