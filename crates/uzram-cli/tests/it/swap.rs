//! `uzram swap`: real swap areas, programs that need them, and daemons that are killed. For root, with the
//! memory controller of cgroup v1.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::common::block::{BlockPlace, Cgroup, Hog, swapped_bytes, unable};
use crate::common::clients::{arg, succeed};
use crate::common::{Ended, finish, wait_until};
use rustix::process::{Pid, Signal, kill_process};

const MIB: u64 = 1 << 20;
/// The hog's memory; its limit is a quarter of it.
const HOG_MIB: u64 = 192;
const LIMIT_BYTES: u64 = HOG_MIB / 4 * MIB;
/// The limit of the daemon's cgroup, in tests with one.
const DAEMON_BYTES: u64 = 208 * MIB;
/// How long a hog runs, in seconds; `UZRAM_HOG_SECONDS` overrides it.
const HOG_SECONDS: u64 = 60;
const PATIENCE: Duration = Duration::from_secs(40);

fn swap_on(place: &BlockPlace, args: &[&str]) -> String {
    let args = [&["swap", "on", "--size", "512M"], args].concat();
    device_of(&place.run(&args).ok())
}

/// Returns the device in the output of `swap on`.
fn device_of(facts: &str) -> String {
    let line = facts.lines().find(|line| line.starts_with("swap ")).unwrap_or_else(|| panic!("{facts}"));
    line.split_whitespace().nth(1).unwrap().to_owned()
}

/// Starts a hog, and waits until it has much swapped out to a device.
fn start_hog(cgroup: &Cgroup, seconds: u64, device: &str) -> Hog {
    Hog::start(cgroup, HOG_MIB, seconds).swaps_out(device, LIMIT_BYTES)
}

fn assert_verified(ended: &Ended) {
    assert!(ended.status.success(), "{}: {}{}", ended.status, ended.stdout, ended.stderr);
    assert!(ended.stdout.contains("all pages are as they were left"), "{}", ended.stdout);
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
    let Some(place) = BlockPlace::if_able() else { return };
    let on = |limit: &str| {
        let mut command = daemons.command(Path::new(env!("CARGO_BIN_EXE_uzram")));
        command.args(["swap", "on", "--size", "512M", "--mem-limit", limit]);
        command.env("UZRAM_RUNTIME_DIR", place.dir());
        finish(command)
    };
    let refused = on("192M");
    assert!(refused.complaint(1).contains("this process's cgroup"), "{}", refused.stderr);
    let device = device_of(&on("160M").ok());
    assert_eq!(place.swap_areas(), [device.as_str()]);
    let mut hog = start_hog(&cgroup, hog_seconds(), &device);
    assert!(hog.is_running());
    let status = place.run(&["swap", "status"]).ok();
    assert!(status.contains(&device) && status.contains("memory locked            yes"), "{status}");
    let again = place.run(&["swap", "on", "--size", "64M"]);
    assert!(again.complaint(1).contains("already serves"), "{}", again.stderr);
    assert_verified(&hog.ended(Duration::from_secs(hog_seconds() + 60)));
    assert_eq!(place.statistic("failed_writes") + place.statistic("failed_reads"), 0);
    place.run(&["swap", "off"]).ok();
    place.assert_clean();
    let off = place.run(&["swap", "off"]);
    assert!(off.complaint(3).starts_with("there is no swap to switch off: no daemon"), "{}", off.stderr);
}

/// A program that is stopped leaves its pages unused.
#[test]
fn what_a_parked_program_left_is_compressed_again() {
    let Some(place) = BlockPlace::if_able() else { return };
    let Some(cgroup) = Cgroup::new("parked", LIMIT_BYTES) else { return };
    let shown = |name: &str| place.run(&["stat", "zram0", name]).ok().trim().to_owned();
    let device = swap_on(&place, &[]);
    assert!(shown("recomp_algorithm").contains("[zstd"), "{}", shown("recomp_algorithm"));
    assert_eq!([shown("recompress_after"), shown("recompress_cpu")], ["600", "2"]);
    place.run(&["set", "zram0", "recompress_after=1s", "recompress_cpu=50"]).ok();
    let mut hog = start_hog(&cgroup, 3600, &device);
    let tell = |signal| kill_process(Pid::from_raw(hog.id() as i32).unwrap(), signal).unwrap();
    tell(Signal::STOP);
    wait_until("pages are compressed again", || place.statistic("pages_recompressed") > 20);
    tell(Signal::CONT);
    assert!(hog.is_running());
    let tell = |signal| kill_process(Pid::from_raw(hog.id() as i32).unwrap(), signal).unwrap();
    tell(Signal::TERM);
    assert_verified(&hog.ended(PATIENCE));
    place.run(&["swap", "off"]).ok();
    swap_on(&place, &["--recompress", "none"]);
    assert_eq!(shown("recomp_algorithm"), "");
    place.run(&["swap", "off"]).ok();
    place.assert_clean();
}

#[test]
fn swap_goes_off_under_load_where_memory_suffices() {
    let Some(place) = BlockPlace::if_able() else { return };
    let Some(cgroup) = Cgroup::new("load", LIMIT_BYTES) else { return };
    let device = swap_on(&place, &[]);
    let mut hog = start_hog(&cgroup, 8, &device);
    // Its cgroup has no room for the pages that would come back.
    let off = place.run(&["swap", "off"]);
    let line = off.complaint(1);
    assert!(line.contains("stays on") && line.contains("uzram-load"), "{line}");
    assert!(hog.is_running());
    assert_eq!(place.swap_areas(), [device.as_str()]);
    // Now it has.
    cgroup.set_limit(4 * HOG_MIB * MIB);
    place.run(&["swap", "off"]).ok();
    place.assert_clean();
    assert_verified(&hog.ended(PATIENCE));
}

#[test]
fn freed_places_stay_stored_without_discards_alone() {
    let Some(cgroup) = Cgroup::new("places", LIMIT_BYTES) else { return };
    let Some(place) = BlockPlace::if_able() else { return };
    for (args, goes_back) in [(&["--no-discard"][..], false), (&[], true)] {
        let device = swap_on(&place, args);
        let hog = start_hog(&cgroup, 8, &device);
        assert_verified(&hog.ended(PATIENCE));
        let stored = || place.statistic("orig_data_bytes");
        if goes_back {
            wait_until("it is freed", || swapped_bytes(&device) < MIB && stored() < 8 * MIB);
        } else {
            wait_until("it is freed", || swapped_bytes(&device) < MIB);
            // How many never-used slots the kernel takes before it reuses freed ones is not specified.
            assert!(stored() >= LIMIT_BYTES, "{}", stored());
        }
        place.run(&["swap", "off"]).ok();
    }
    place.assert_clean();
}

#[test]
fn writes_that_find_no_memory_fail_and_nobody_waits() {
    let Some(place) = BlockPlace::if_able() else { return };
    let Some(cgroup) = Cgroup::new("drained", 16 * MIB) else { return };
    // The whole limit is the reserve, which cannot be refilled.
    let device = swap_on(&place, &["--mem-limit", "8M", "--reserve", "8M"]);
    let mut hog = Hog::start(&cgroup, 80, 60);
    wait_until("writes fail", || place.statistic("failed_writes") > 1000);
    // The kernel keeps refused pages, and keeps trying; other requests succeed.
    assert!(hog.is_running());
    assert!(place.statistic("mem_charged_bytes") <= 8 * MIB);
    let status = place.run(&["swap", "status"]).ok();
    assert!(status.contains(&device) && status.contains("of 8 MiB"), "{status}");
    let warnings = || {
        let log = std::fs::read_to_string(place.dir().join("uzram.log")).unwrap();
        log.matches("WARN zram0: writes are refused: ").count()
    };
    wait_until("its log says so", || warnings() == 1);
    drop(hog);
    // A smaller hog gets all its memory.
    let small = Hog::start(&cgroup, 20, 2);
    assert_verified(&small.ended(PATIENCE));
    place.run(&["swap", "off"]).ok();
    place.assert_clean();
}

#[test]
fn pages_leave_in_time_for_those_that_are_swapped_out() {
    let Some(place) = BlockPlace::if_able() else { return };
    let Some(cgroup) = Cgroup::new("leaving", 80 * MIB) else { return };
    let backing = format!("{}:1G", place.root().join("cold.img").display());
    let on = ["swap", "on", "--size", "1G", "--mem-limit", "40M", "--backing", &backing];
    let device = device_of(&place.run(&on).ok());
    let mut hog = Hog::start(&cgroup, 240, 8);
    wait_until("pages have left", || place.statistic("pages_backed") > 1000 || !hog.is_running());
    assert_verified(&hog.ended(PATIENCE));
    let count = |name: &str| place.statistic(name);
    let status = place.run(&["swap", "status"]).ok();
    assert!(status.contains(&device) && status.contains("refused at mem_limit     0 writes"), "{status}");
    assert!(count("pages_written_back") > 1000, "{status}");
    wait_until("the reserve is free", || count("reserve_free_bytes") >= 8 * MIB);
    assert_eq!((count("failed_writes"), count("failed_reads")), (0, 0), "{status}");
    place.run(&["swap", "off"]).ok();
    place.assert_clean();
}

#[test]
fn a_daemon_that_is_killed_takes_what_was_swapped_out_and_nothing_else() {
    let Some(place) = BlockPlace::if_able() else { return };
    let Some(cgroup) = Cgroup::new("kill", LIMIT_BYTES) else { return };
    let device = swap_on(&place, &[]);
    let hog = start_hog(&cgroup, 30, &device);
    kill_process(place.daemon_id(), Signal::KILL).unwrap();
    // The hog is killed at its first lost page; the machine goes on.
    assert!(!hog.ended(PATIENCE).status.success());
    wait_until("the daemon is gone", || place.run(&["swap", "status"]).stderr.contains("is dead"));
    let on = place.run(&["swap", "on", "--size", "64M"]);
    assert!(on.complaint(1).contains("uzram swap off"), "{}", on.stderr);
    let said = place.run(&["swap", "off"]).ok();
    assert!(said.contains(&format!("switched swap on {device} (zram0) off")), "{said}");
    assert!(said.contains(&format!("freed {device}")), "{said}");
    place.assert_clean();
    // Swap works again.
    swap_on(&place, &[]);
    place.run(&["swap", "off"]).ok();
    place.assert_clean();
}

/// However swap goes off: by command, by a signal, by a command after the daemon was killed, and when it did
/// not go on.
#[test]
fn the_kernel_reads_as_many_pages_at_once_as_told_until_swap_is_off() {
    if unable() {
        return;
    }
    let setting = || fs::read_to_string("/proc/sys/vm/page-cluster").unwrap().trim().to_owned();
    let (place, before) = (BlockPlace::new(), setting());
    let other = if before == "1" { "2" } else { "1" };
    let on = || {
        swap_on(&place, &["--page-cluster", other]);
        assert_eq!(setting(), other);
    };
    on();
    place.run(&["swap", "off"]).ok();
    assert_eq!(setting(), before);
    on();
    kill_process(place.daemon_id(), Signal::TERM).unwrap();
    wait_until("the daemon has ended", || place.run(&["status"]).stderr.contains("no daemon is running"));
    assert_eq!(setting(), before);
    on();
    kill_process(place.daemon_id(), Signal::KILL).unwrap();
    wait_until("the daemon is gone", || place.run(&["swap", "status"]).stderr.contains("is dead"));
    place.run(&["swap", "off"]).ok();
    assert_eq!(setting(), before);
    let refused = place.run(&["swap", "on", "--size", "64M", "--page-cluster", "32"]);
    assert!(refused.complaint(2).contains("page-cluster"), "{}", refused.stderr);
    let refused = place.run(&["swap", "on", "--size", "4K", "--page-cluster", other]);
    assert!(!refused.status.success() && refused.stderr.contains("too small"), "{}", refused.stderr);
    assert_eq!(setting(), before);
    place.assert_clean();
}

#[test]
fn the_daemon_keeps_nothing_of_its_callers_busy() {
    let Some(place) = BlockPlace::needing(&["mount", "umount"]) else { return };
    let root = place.root().canonicalize().unwrap();
    let dir = place.mount_point("callers").canonicalize().unwrap();
    succeed(&place, "mount", &["-t", "tmpfs", "none", arg(&dir)]);
    // Start it in a directory that will be unmounted, with a file open there; its paths are elsewhere.
    let mut caller = Command::new("sh");
    caller.args(["-c", "exec 9>open && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_uzram")]);
    caller.args(["swap", "on", "--size", "64M", "--runtime-dir", "../run", "--backing", "../cold.img:16M"]);
    caller.current_dir(&dir).env_remove("UZRAM_RUNTIME_DIR");
    let facts = finish(caller).ok();
    assert_eq!(place.swap_areas(), [device_of(&facts)]);
    let process = format!("/proc/{}", place.daemon_id().as_raw_nonzero());
    assert_eq!(fs::read_link(format!("{process}/cwd")).unwrap(), Path::new("/"));
    let files = fs::read_dir(format!("{process}/fd")).unwrap();
    let files: Vec<_> = files.filter_map(|file| fs::read_link(file.unwrap().path()).ok()).collect();
    assert!(files.iter().all(|file| !file.starts_with(&dir)), "{files:?}");
    succeed(&place, "umount", &[arg(&dir)]);
    let backing = place.run(&["stat", "zram0", "backing_dev"]).ok();
    assert_eq!(Path::new(backing.trim()).canonicalize().unwrap(), root.join("cold.img"));
    place.run(&["swap", "off"]).ok();
    place.assert_clean();
}

#[test]
fn a_swap_area_keeps_its_daemon() {
    let Some(place) = BlockPlace::needing(&["swapoff"]) else { return };
    let device = swap_on(&place, &["--priority", "7"]);
    let shown = fs::read_to_string("/proc/swaps").unwrap();
    assert!(shown.lines().any(|line| line.starts_with(&device) && line.ends_with("\t7")), "{shown}");
    let status = place.json(&["swap", "status"]);
    let [area] = &status["areas"].as_array().unwrap()[..] else { panic!("{status}") };
    assert_eq!((&area["name"], &area["priority"]), (&"zram0".into(), &7.into()), "{status}");
    assert_eq!(area["path"], device, "{status}");
    assert_eq!(area["stats"]["disksize_bytes"], 512 * MIB, "{status}");
    assert!(area["used_bytes"].is_u64() && area["size_bytes"].as_u64() > Some(511 * MIB), "{status}");
    let measures = status["protection"].as_array().unwrap();
    assert!(measures.iter().any(|measure| measure["what"] == "memory locked"), "{status}");
    let files = &status["files"];
    assert!(files["cpu_latency_us"].is_u64() || files["cpu_latency_refused"].is_string(), "{status}");
    for command in [&["down"][..], &["detach", "zram0"]] {
        let refused = place.run(command);
        assert!(refused.complaint(1).contains("swapped to"), "{command:?}: {}", refused.stderr);
    }
    // On a signal it ends in the safe order.
    kill_process(place.daemon_id(), Signal::TERM).unwrap();
    wait_until("the daemon has ended", || place.run(&["status"]).stderr.contains("no daemon is running"));
    place.assert_clean();
    // A swap area that was switched off elsewhere does not matter.
    let device = swap_on(&place, &[]);
    assert!(
        Command::new("swapoff")
            .arg(&device)
            .env("PATH", crate::common::program_path())
            .status()
            .unwrap()
            .success()
    );
    place.run(&["swap", "off"]).ok();
    place.assert_clean();
}
