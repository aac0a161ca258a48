//! One schema of settings: the same names, values and messages as options, in files and by `uzram set`.

use std::fs;

use crate::common::Place;

/// Returns the part of a message after the setting's origin.
fn why<'a>(line: &'a str, origin: &str) -> &'a str {
    line.strip_prefix(origin).unwrap_or_else(|| panic!("'{origin}' does not begin: {line}"))
}

#[test]
fn a_wrong_value_gets_the_same_message_wherever_it_is_written() {
    let place = Place::new();
    let other = Place::new();
    let _daemon = place.up(&[]);
    let path = |name: &str| place.root().join(name).display().to_string();
    let (config, policy) = (path("config.toml"), path("policy.toml"));
    for (name, is_policy, value) in [
        ("high", true, "many"),
        ("comp_algorithm", false, "nonesuch"),
        ("algorithm", false, "zstd:99"),
        ("disksize", false, "1X"),
        ("mem_limit", false, "12Q"),
        ("lru_enable", false, "exact"),
        ("checksum", false, "2"),
        ("compact_threshold", false, "101"),
        ("policy_high", true, "101"),
        ("low", true, "-1"),
        ("recomp_algorithm", true, "algo=lz5"),
        ("recompress_after", true, "soon"),
        ("reclaim", true, "all"),
        ("writeback_after", true, "1w"),
        ("writeback_batch_size", true, "129"),
    ] {
        let option = format!("--{}", name.replace('_', "-"));
        let ended = other.run(&["up", &format!("{option}={value}")]);
        let said = ended.complaint(2).to_owned();
        let wanted = why(&said, &format!("{option} {value}: "));

        fs::write(&config, format!("[zram0]\n{name} = '{value}'\n")).unwrap();
        let ended = other.run(&["check", "--config", &config]);
        assert_eq!(why(ended.complaint(2), &format!("{config}:2: {name}: ")), wanted, "{name}");
        let ended = other.run(&["add", "more", &format!("{option}={value}")]);
        assert_eq!(why(ended.complaint(2), &format!("{option} {value}: ")), wanted, "{name}");
        if is_policy {
            fs::write(&policy, format!("{name} = '{value}'\n")).unwrap();
            let ended = other.run(&["up", "--policy", &policy]);
            assert_eq!(why(ended.complaint(2), &format!("--policy {policy}:1: {name}: ")), wanted, "{name}");
        }
        let ended = place.run(&["set", "zram0", &format!("{name}={value}")]);
        let (_, set) = ended.complaint(1).split_once(&format!(" to '{value}': ")).unwrap();
        assert_eq!(set, wanted, "{name}");
    }
}

#[test]
fn parameters_of_algorithms_come_after_these_however_a_device_is_made() {
    let (place, added) = (Place::new(), ["zram0", "added"]);
    let options = ["--algorithm-params=level=5", "--algorithm=zstd", "--size=1M"];
    let _daemon = place.up_sized("2M", &["--algorithm-params=level=5", "--algorithm=zstd"]);
    place.run(&[&["add", "added"], &options[..]].concat()).ok();
    for name in added {
        assert!(place.run(&["stat", name, "comp_algorithm"]).ok().contains("[zstd:5]"), "{name}");
    }
    let again = ["--algorithm-params=priority=1 level=5", "--recompress=zstd", "--size=1M"];
    place.run(&[&["add", "again"], &again[..]].concat()).ok();
    assert!(place.run(&["stat", "again", "recomp_algorithm"]).ok().contains("[zstd:5]"));
}

#[test]
fn a_dictionary_is_for_the_daemon_to_read() {
    let place = Place::new();
    let _daemon = place.up(&[]);
    let with = |path: &str| place.run(&["add", "more", "--algorithm", &format!("zstd,dict={path}")]);
    // The daemon looked for the file.
    assert!(with("/nonexistent").complaint(1).contains("dict=/nonexistent: No such file"));
    assert!(with("near").complaint(2).contains("dict=near: write the whole path"));
    assert!(
        place
            .run(&["add", "more", "--algorithm", "deflate,dict=/a"])
            .complaint(2)
            .contains("deflate takes no dictionary")
    );
}

#[test]
fn short_words_and_the_attributes_names_mean_the_same_everywhere() {
    let place = Place::new();
    let _daemon = place.up(&["--low", "5", "--comp-algorithm=zstd:4", "--checksum", "--recompress=lz4hc:1h"]);
    let get = |name: &str| place.run(&["stat", "zram0", name]).ok();
    assert_eq!((get("policy_low").trim(), get("checksum").trim()), ("5", "1"));
    assert!(get("comp_algorithm").contains("[zstd:4]") && get("recomp_algorithm").contains("[lz4hc"));
    assert_eq!(get("recompress_after").trim(), "3600");
    place.run(&["set", "zram0", "low=10", "high=50"]).ok();
    assert_eq!((get("policy_low").trim(), get("policy_high").trim()), ("10", "50"));
    for (args, said) in [
        (&["--size", "1M", "--disksize", "2M"][..], "--size 1M: --disksize 2M already sets it"),
        (
            &["--recompress", "zstd:1h", "--recompress-after", "2h"],
            "--recompress-after 2h: --recompress zstd:1h",
        ),
        (&["--high", "101"], "--high 101: '101' is no policy_high"),
        (&["--backing-force"], "--backing-force: nothing to take: give --backing"),
    ] {
        let ended = Place::new().run(&[&["up"], args].concat());
        assert!(ended.complaint(2).starts_with(said), "{}", ended.stderr);
    }
}
