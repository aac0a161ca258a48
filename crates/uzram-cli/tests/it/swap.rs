//! `uzram swap`: real swap areas, programs that need them, and daemons that are killed. For root, with the
//! memory controller of cgroup v1.

use crate::common::*;

const HOG_MIB: u64 = 192;
const LIMIT_BYTES: u64 = HOG_MIB / 4 * MIB;
/// The limit of the daemon's cgroup, in tests with one.
const DAEMON_BYTES: u64 = 208 * MIB;
/// How long a hog runs, in seconds; `UZRAM_HOG_SECONDS` overrides it.
const HOG_SECONDS: u64 = 60;
/// How long a hog may take to end.
const TO_END: Duration = Duration::from_secs(40);

fn swap_on(place: &BlockPlace, options: &str) -> String {
    place.swap_on(&format!("--size 512M {options}"))
}

/// Ends the daemon by a signal, or kills it, and waits until a command says so.
fn end_by(place: &BlockPlace, signal: Signal) {
    kill_process(place.daemon_id(), signal).unwrap();
    let said = if signal == Signal::KILL { "is dead" } else { "no daemon is running" };
    wait_until("the daemon is gone", || place.run("swap status").stderr.contains(said));
}

fn start_hog(cgroup: &Cgroup, seconds: u64, device: &str) -> Hog {
    Hog::start(cgroup, HOG_MIB, seconds).swaps_out(device, LIMIT_BYTES)
}

fn hog_seconds() -> u64 {
    std::env::var("UZRAM_HOG_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(HOG_SECONDS)
}

#[test]
fn a_program_runs_in_a_quarter_of_the_memory_it_needs() {
    let Some(cgroup) = Cgroup::new("hog", LIMIT_BYTES) else { return };
    // The daemon has its own limit, which it never reaches.
    let Some(daemons) = Cgroup::new("daemon", DAEMON_BYTES) else { return };
    // Dropped before its cgroup.
    let Some(place) = BlockPlace::alone("") else { return };
    let on = |limit: &str| finish(daemons.uzram(&place, &format!("swap on --size 512M --mem-limit {limit}")));
    on("192M").says(1, "this process's cgroup");
    let device = swap_device(&on("160M").ok());
    assert_eq!(place.swap_areas(), [device.as_str()]);
    let mut hog = start_hog(&cgroup, hog_seconds(), &device);
    assert!(hog.is_running());
    place.run("swap status").shows(&[&device, "memory locked            yes"]);
    place.run("swap on --size 64M").says(1, "already serves");
    hog.verified(Duration::from_secs(hog_seconds() + 60), false);
    place.assert_zero("failed_writes failed_reads");
    place.swap_off();
    place.run("swap off").begins(3, "there is no swap to switch off: no daemon");
}

/// A program that is stopped leaves its pages unused.
#[test]
fn what_a_parked_program_left_is_compressed_again() {
    let Some(place) = BlockPlace::alone("") else { return };
    let Some(cgroup) = Cgroup::new("parked", LIMIT_BYTES) else { return };
    let device = swap_on(&place, "");
    assert!(place.get("recomp_algorithm").contains("[zstd"), "{}", place.get("recomp_algorithm"));
    assert_eq!(["recompress_after", "recompress_cpu"].map(|name| place.number(name)), [600, 2]);
    place.set("recompress_after=1s recompress_cpu=50");
    let hog = start_hog(&cgroup, 3600, &device);
    hog.signal(Signal::STOP);
    wait_until("pages are compressed again", || place.statistic("pages_recompressed") > 20);
    hog.signal(Signal::CONT);
    hog.verified(TO_END, true);
    place.swap_off();
}

#[test]
fn swap_goes_off_under_load_where_memory_suffices() {
    let Some(place) = BlockPlace::alone("") else { return };
    let Some(cgroup) = Cgroup::new("load", LIMIT_BYTES) else { return };
    let device = swap_on(&place, "");
    let mut hog = start_hog(&cgroup, 3600, &device);
    // Its cgroup has no room for the pages that would come back.
    place.run("swap off").says(1, "stays on").says(1, "uzram-load");
    assert!(hog.is_running());
    assert_eq!(place.swap_areas(), [device.as_str()]);
    // Now it has.
    cgroup.set_limit(4 * HOG_MIB * MIB);
    place.swap_off();
    hog.verified(TO_END, true);
}

#[test]
fn freed_places_stay_stored_without_discards_alone() {
    let Some(cgroup) = Cgroup::new("places", LIMIT_BYTES) else { return };
    let Some(place) = BlockPlace::alone("") else { return };
    for (options, goes_back) in [("--no-discard --recompress none", false), ("", true)] {
        let device = swap_on(&place, options);
        assert_eq!(place.get("recomp_algorithm").is_empty(), !goes_back);
        start_hog(&cgroup, 8, &device).verified(TO_END, false);
        let stored = || place.statistic("orig_data_bytes");
        wait_until("it is freed", || swapped_bytes(&device) < MIB && (!goes_back || stored() < 8 * MIB));
        // How many never-used slots the kernel takes before it reuses freed ones is not specified.
        assert!(goes_back || stored() >= LIMIT_BYTES, "{}", stored());
        place.swap_off();
    }
}

#[test]
fn writes_that_find_no_memory_fail_and_nobody_waits() {
    let Some(place) = BlockPlace::alone("") else { return };
    let Some(cgroup) = Cgroup::new("drained", 16 * MIB) else { return };
    // The whole limit is the reserve, which cannot be refilled.
    let device = swap_on(&place, "--mem-limit 8M --reserve 8M");
    let mut hog = Hog::start(&cgroup, 80, 60);
    wait_until("writes fail", || place.statistic("failed_writes") > 1000);
    // The kernel keeps refused pages, and keeps trying; other requests succeed.
    assert!(hog.is_running());
    assert!(place.statistic("mem_charged_bytes") <= 8 * MIB);
    place.run("swap status").shows(&[&device, "of 8 MiB"]);
    let warnings = || {
        let log = fs::read_to_string(place.dir().join("uzram.log")).unwrap();
        log.matches("WARN zram0: writes are refused: ").count()
    };
    wait_until("its log says so", || warnings() == 1);
    drop(hog);
    // A smaller hog gets all its memory.
    Hog::start(&cgroup, 20, 2).verified(TO_END, false);
    place.swap_off();
}

#[test]
fn a_daemon_that_is_killed_takes_what_was_swapped_out_and_nothing_else() {
    let Some(place) = BlockPlace::alone("") else { return };
    let Some(cgroup) = Cgroup::new("kill", LIMIT_BYTES) else { return };
    let device = swap_on(&place, "");
    let hog = start_hog(&cgroup, 30, &device);
    end_by(&place, Signal::KILL);
    // The hog is killed at its first lost page; the machine goes on.
    assert!(!hog.ended(TO_END).status.success());
    place.run("swap on --size 64M").says(1, "uzram swap off");
    let off = [format!("switched swap on {device} (zram0) off"), format!("freed {device}")];
    place.run("swap off").shows(&off);
    place.assert_clean();
    // Swap works again.
    swap_on(&place, "");
    place.swap_off();
}

/// By command, by a signal, by a command after the daemon was killed, and when it did not go on.
#[test]
fn the_kernel_reads_as_many_pages_at_once_as_told_until_swap_is_off() {
    let Some(place) = BlockPlace::alone("") else { return };
    let setting = || fs::read_to_string("/proc/sys/vm/page-cluster").unwrap().trim().to_owned();
    let before = setting();
    let other = if before == "1" { "2" } else { "1" };
    let on = || {
        swap_on(&place, &format!("--page-cluster {other}"));
        assert_eq!(setting(), other);
    };
    on();
    place.swap_off();
    assert_eq!(setting(), before);
    on();
    end_by(&place, Signal::TERM);
    assert_eq!(setting(), before);
    on();
    end_by(&place, Signal::KILL);
    place.run("swap off").ok();
    assert_eq!(setting(), before);
    place.run("swap on --size 64M --page-cluster 32").says(2, "page-cluster");
    let refused = place.run(&format!("swap on --size 4K --page-cluster {other}"));
    assert!(!refused.status.success() && refused.stderr.contains("too small"), "{refused}");
    assert_eq!(setting(), before);
    place.assert_clean();
}

#[test]
fn the_daemon_keeps_nothing_of_its_callers_busy() {
    let Some(place) = BlockPlace::alone("mount umount") else { return };
    let root = place.root().canonicalize().unwrap();
    let dir = place.mount_point("callers").canonicalize().unwrap();
    succeed(&place, "mount", &["-t", "tmpfs", "none", arg(&dir)]);
    // Start it in a directory that will be unmounted, with a file open there; its paths are elsewhere.
    let on = "swap on --size 64M --runtime-dir ../run --backing ../cold.img:16M";
    let mut caller = place.command_after("exec 9>open", on);
    let facts = finish(caller.current_dir(&dir).env_remove("UZRAM_RUNTIME_DIR")).ok();
    assert_eq!(place.swap_areas(), [swap_device(&facts)]);
    let process = format!("/proc/{}", place.daemon_id().as_raw_nonzero());
    assert_eq!(fs::read_link(format!("{process}/cwd")).unwrap(), Path::new("/"));
    let files = fs::read_dir(format!("{process}/fd")).unwrap();
    let files: Vec<_> = files.filter_map(|file| fs::read_link(file.unwrap().path()).ok()).collect();
    assert!(files.iter().all(|file| !file.starts_with(&dir)), "{files:?}");
    succeed(&place, "umount", &[arg(&dir)]);
    let backing = place.get("backing_dev");
    assert_eq!(Path::new(&backing).canonicalize().unwrap(), root.join("cold.img"));
    place.swap_off();
}

#[test]
fn a_swap_area_keeps_its_daemon() {
    let Some(place) = BlockPlace::alone("swapoff") else { return };
    let device = swap_on(&place, "--priority 7");
    let shown = fs::read_to_string("/proc/swaps").unwrap();
    assert!(shown.lines().any(|line| line.starts_with(&device) && line.ends_with("\t7")), "{shown}");
    let status = place.json("swap status");
    let [area] = &status["areas"].as_array().unwrap()[..] else { panic!("{status}") };
    assert_eq!((&area["name"], &area["priority"]), (&"zram0".into(), &7.into()), "{status}");
    assert_eq!(area["path"], device, "{status}");
    assert_eq!(area["stats"]["disksize_bytes"], 512 * MIB, "{status}");
    assert!(area["used_bytes"].is_u64() && area["size_bytes"].as_u64() > Some(511 * MIB), "{status}");
    let measures = status["protection"].as_array().unwrap();
    assert!(measures.iter().any(|measure| measure["what"] == "memory locked"), "{status}");
    let files = &status["files"];
    assert!(files["cpu_latency_us"].is_u64() || files["cpu_latency_refused"].is_string(), "{status}");
    for command in ["down", "detach zram0"] {
        place.run(command).says(1, "swapped to");
    }
    // On a signal it ends in the safe order.
    end_by(&place, Signal::TERM);
    place.assert_clean();
    // A swap area that was switched off elsewhere does not matter.
    let device = swap_on(&place, "");
    succeed(&place, "swapoff", &[device]);
    place.swap_off();
}

#[test]
fn swap_that_may_outgrow_the_machine_is_warned_about() {
    let Some(place) = BlockPlace::alone("") else { return };
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let facts = place.run(&format!("swap on --size {}K", meminfo.words()[1])).ok();
    let is_warning = |line: &&str| line.starts_with("warning ") && line.contains("swap on zram0 may take");
    let warnings: Vec<&str> = facts.lines().filter(is_warning).collect();
    assert!(warnings.len() == 1 && warnings[0].contains("--mem-limit"), "{facts}");
    let log = fs::read_to_string(place.dir().join("uzram.log")).unwrap();
    assert!(log.contains("WARN") && log.contains("swap on zram0 may take"), "{log}");
    place.swap_off();
}

#[test]
fn pages_leave_in_time_for_those_that_are_swapped_out() {
    let Some(place) = BlockPlace::alone("") else { return };
    let Some(cgroup) = Cgroup::new("leaving", 80 * MIB) else { return };
    let backing = place.path("cold.img:1G");
    let device = place.swap_on(&format!("--size 1G --mem-limit 40M --backing {backing}"));
    let mut hog = Hog::start(&cgroup, 240, 5);
    wait_until("pages have left", || place.statistic("pages_backed") > 1000 || !hog.is_running());
    hog.verified(TO_END, false);
    let status = place.run("swap status").shows(&[&device, "refused at mem_limit     0 writes"]);
    assert!(place.statistic("pages_written_back") > 1000, "{status}");
    wait_until("the reserve is free", || place.statistic("reserve_free_bytes") >= 8 * MIB);
    place.assert_zero("failed_writes failed_reads");
    place.swap_off();
}
