//! Daemons whose processes are killed, stopped and exchanged while their devices are used. Most for root,
//! with FUSE and loop devices.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::block::{BlockPlace, Cgroup, Hog, unable};
use crate::common::clients::{arg, missing, random_file, run, succeed};
use crate::common::nbd::Raw;
use crate::common::{Daemon, Place, finish, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use uzram::random::Random;

const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;
/// Kills of a disk's processes in each of the runs here; `UZRAM_CRASH_ROUNDS` times as many in the long run.
const DISK_KILLS: u64 = 50;
/// Kills while a program swaps.
const SWAP_KILLS: u64 = 10;

/// Returns how many times as many kills to do as usual.
fn rounds() -> u64 {
    std::env::var("UZRAM_CRASH_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

fn status(place: &Place) -> Option<Value> {
    let ended = place.run(&["status", "--json"]);
    ended.status.success().then(|| serde_json::from_str(&ended.stdout).unwrap())
}

/// A block aligned for direct I/O.
#[repr(align(4096))]
#[derive(Clone)]
struct Block([u8; PAGE]);

/// Writes, reads and discards pages of its part of a disk until told to end, and checks every read; then
/// reads all. Returns the number of operations.
fn exercise(disk: &Path, part: std::ops::Range<u64>, seed: u64, ends: &AtomicBool) -> io::Result<u64> {
    let direct = libc_o_direct();
    let file = OpenOptions::new().read(true).write(true).custom_flags(direct).open(disk)?;
    let mut random = Random::new(seed);
    let mut versions = vec![0u64; (part.end - part.start) as usize];
    let contents = |page: u64, version: u64| {
        let mut block = Block([0; PAGE]);
        if version > 0 {
            // Compresses by about half.
            let mut random = Random::new(page << 32 | version);
            block.0[..PAGE / 2]
                .chunks_mut(8)
                .for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
            block.0[PAGE - 8..].copy_from_slice(&version.to_le_bytes());
        }
        block
    };
    let check = |page: u64, version: u64| -> io::Result<()> {
        let mut read = Block([0; PAGE]);
        file.read_exact_at(&mut read.0, page * PAGE as u64)?;
        match read.0 == contents(page, version).0 {
            true => Ok(()),
            false => {
                Err(io::Error::other(format!("page {page} is not that of version {version}, seed {seed}")))
            }
        }
    };
    let (mut count, mut next) = (0, 1);
    while !ends.load(Ordering::Relaxed) {
        let page = part.start + random.below(versions.len()) as u64;
        let version = &mut versions[(page - part.start) as usize];
        match random.below(10) {
            0..5 => {
                file.write_all_at(&contents(page, next).0, page * PAGE as u64)?;
                (*version, next) = (next, next + 1);
            }
            5..9 => check(page, *version)?,
            _ => {
                rustix::fs::fallocate(
                    &file,
                    rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
                    page * PAGE as u64,
                    PAGE as u64,
                )?;
                *version = 0;
            }
        }
        count += 1;
    }
    for (page, version) in part.zip(&versions) {
        check(page, *version)?;
    }
    Ok(count)
}

fn libc_o_direct() -> i32 {
    rustix::fs::OFlags::DIRECT.bits() as i32
}

/// Exercises a disk by several threads while `disturb` runs. Fails if any I/O fails, or returns wrong bytes.
fn exercise_during(disk: &Path, pages: u64, disturb: impl FnOnce()) -> u64 {
    const THREADS: u64 = 4;
    let ends = AtomicBool::new(false);
    let share = pages / THREADS;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let (ends, part) = (&ends, number * share..(number + 1) * share);
                scope.spawn(move || exercise(disk, part, number + 1, ends))
            })
            .collect();
        let disturbed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(disturb));
        ends.store(true, Ordering::Relaxed);
        let counts = threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).sum();
        disturbed.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        counts
    })
}

/// What the kernel does with the requests that a dead process had received.
#[derive(Clone, Copy, PartialEq)]
enum Kernel {
    /// It sends them again, if it can.
    ThisOne,
    /// It does not, as before Linux 6.9.
    Older,
}

impl Kernel {
    fn command(self, place: &Place, args: &[&str]) -> std::process::Command {
        let mut command = place.command(args);
        if self == Kernel::Older {
            command.env("UZRAM_NO_RESEND", "1");
        }
        command
    }
}

#[test]
fn a_disk_outlives_the_processes_that_serve_it() {
    a_disk_outlives(Kernel::ThisOne, DISK_KILLS);
}

#[test]
fn a_disk_outlives_them_on_an_older_kernel() {
    a_disk_outlives(Kernel::Older, DISK_KILLS / 2);
}

/// With a limit, writeback, recompression and compaction under way.
fn a_disk_outlives(kernel: Kernel, kills: u64) {
    let Some(place) = BlockPlace::if_able() else { return };
    let cold = place.root().join("cold");
    let backing = format!("{}:64M", cold.display());
    let limit = ["--mem-limit", "32M", "--backing", &backing, "--recompress", "zstd:1:1s"];
    let args = [&["up", "--size", "96M", "--attach"][..], &limit].concat();
    let daemon = Daemon::start(kernel.command(&place, &args));
    let device = place.loops().pop().unwrap();
    let kills = kills * rounds();
    let (mut random, mut outages) = (Random::new(7), Vec::new());
    let count = exercise_during(Path::new(&device), 96 * MIB / PAGE as u64, || {
        for kill in 0..kills {
            thread::sleep(Duration::from_millis(random.below(100) as u64));
            // Most of the time the stand-by is ready; sometimes it is not.
            if kill % 5 > 0 {
                place.wait_for_standby();
            }
            if kill % 7 == 0 {
                place.run(&["set", "zram0", "compact=1"]).ok();
            }
            place.kill_worker();
            outages.push(status(&place).unwrap()["last_outage_ms"].as_f64().unwrap());
        }
    });
    outages.sort_by(f64::total_cmp);
    println!(
        "{kills} kills, {count} operations; outages of {} to {} ms",
        outages[0],
        outages[outages.len() - 1]
    );
    assert_eq!(place.statistic("failed_reads") + place.statistic("backing_corrupted"), 0);
    let said = place.end(daemon);
    assert!(!said.contains("damaged"), "{said}");
    place.assert_clean();
}

#[test]
fn a_program_that_swaps_outlives_them() {
    const HOG_MIB: u64 = 128;
    let Some(cgroup) = Cgroup::new("survive", HOG_MIB / 4 * MIB) else { return };
    let Some(place) = BlockPlace::if_able() else { return };
    place.run(&["swap", "on", "--size", "512M"]).ok();
    let device = place.swap_areas().pop().unwrap();
    let seconds = 3600;
    let mut hog = Hog::start(&cgroup, HOG_MIB, seconds).swaps_out(&device, HOG_MIB / 4 * MIB);
    let mut random = Random::new(8);
    for _ in 0..SWAP_KILLS * rounds() {
        thread::sleep(Duration::from_millis(random.below(300) as u64));
        place.wait_for_standby();
        place.kill_worker();
        assert!(hog.is_running());
    }
    // Ends it: it checks all its pages then.
    kill_process(Pid::from_raw(hog.id() as i32).unwrap(), Signal::TERM).unwrap();
    let ended = hog.ended(Duration::from_secs(120));
    assert!(ended.stdout.contains("all pages are as they were left"), "{}{}", ended.stdout, ended.stderr);
    assert_eq!(place.statistic("failed_writes") + place.statistic("failed_reads"), 0);
    place.run(&["swap", "off"]).ok();
    place.assert_clean();
}

/// Over NBD, as a user without privileges: clients get a closed connection, and find everything again.
#[test]
fn contents_and_devices_outlive_them_for_any_user() {
    let place = Place::new();
    let run = |args: &[&str]| {
        let mut command = place.command(args);
        if rustix::process::geteuid().is_root() {
            use std::os::unix::process::CommandExt;
            command.uid(65534).gid(65534);
        }
        command
    };
    fs::set_permissions(place.root(), fs::Permissions::from_mode(0o777)).unwrap();
    let daemon = Daemon::start(run(&["up", "--size", "16M"]));
    let contents = [7; PAGE];
    let mut client = Raw::unix(&place).enter().unwrap();
    client.request(1, 3 * PAGE as u64, PAGE as u32, &contents).unwrap();
    assert!(client.reply(0).is_some());
    finish(run(&["add", "second", "--size", "8M", "--algorithm", "zstd:5", "--mem-limit", "4M"])).ok();
    finish(run(&["set", "second", "mem_limit=5M"])).ok();
    finish(run(&["add", "third", "--size", "8M"])).ok();
    finish(run(&["remove", "third"])).ok();
    finish(run(&["add", "empty", "--size", "1M"])).ok();
    finish(run(&["reset", "empty"])).ok();
    let shown = |name: &str| finish(run(&["stat", name])).stdout;
    let status = || -> Value { serde_json::from_str(&finish(run(&["status", "--json"])).ok()).unwrap() };
    for kill in 1..=3 {
        wait_until("a stand-by is ready", || status()["standby_ready"] == true);
        let worker = Pid::from_raw(status()["worker_pid"].as_i64().unwrap() as i32).unwrap();
        kill_process(worker, Signal::KILL).unwrap();
        wait_until("another process serves", || status()["take_overs"] == kill);
        let mut again = Raw::unix(&place).enter().unwrap();
        again.request(0, 3 * PAGE as u64, PAGE as u32, &[]).unwrap();
        assert_eq!(again.reply(PAGE).unwrap(), contents);
        let list = finish(run(&["list"])).ok();
        assert!(list.contains("second") && list.contains("empty") && !list.contains("third"), "{list}");
        assert_eq!(finish(run(&["stat", "second", "mem_limit"])).ok().trim(), (5 * MIB).to_string());
        assert!(
            finish(run(&["stat", "second", "comp_algorithm"])).ok().contains("[zstd:5]"),
            "{}",
            shown("second")
        );
    }
    // A connection whose process died is closed.
    assert!(client.request(0, 0, PAGE as u32, &[]).is_err() || client.reply(PAGE).is_none());
    finish(run(&["down"])).ok();
    let (status, said) = daemon.ended();
    assert!(status.success(), "{said}");
}

/// The stand-by dies, then at once the process that serves; both at once; each is stopped and goes on.
#[test]
fn whichever_process_dies_or_stops_the_disk_stays() {
    let Some(place) = BlockPlace::if_able() else { return };
    let daemon = place.up_sized("64M", &["--attach"]);
    let device = place.loops().pop().unwrap();
    exercise_during(Path::new(&device), 64 * MIB / PAGE as u64, || {
        for _ in 0..3 {
            place.wait_for_standby();
            let (worker, standby) = (place.worker_id(), place.process("standby_pid").unwrap());
            let before = place.take_overs();
            kill_process(standby, Signal::KILL).unwrap();
            kill_process(worker, Signal::KILL).unwrap();
            wait_until("another process serves", || place.take_overs() > before);
        }
        for stopped in ["worker_pid", "standby_pid"] {
            place.wait_for_standby();
            let process = place.process(stopped).unwrap();
            kill_process(process, Signal::STOP).unwrap();
            thread::sleep(Duration::from_millis(100));
            kill_process(process, Signal::CONT).unwrap();
        }
        // A stand-by that is stopped takes over when it goes on.
        place.wait_for_standby();
        let (worker, standby) = (place.worker_id(), place.process("standby_pid").unwrap());
        kill_process(standby, Signal::STOP).unwrap();
        kill_process(worker, Signal::KILL).unwrap();
        thread::sleep(Duration::from_millis(200));
        kill_process(standby, Signal::CONT).unwrap();
        wait_until("it serves", || place.worker_id() == standby);
    });
    place.end_clean(daemon);
}

/// Kills at any moment of a start: of the process that serves, at random times.
#[test]
fn a_daemon_starts_though_its_first_processes_die() {
    let Some(place) = BlockPlace::if_able() else { return };
    let mut random = Random::new(9);
    for round in 0..8 {
        let started = place.start(&["up", "--size", "32M", "--attach"]);
        thread::sleep(Duration::from_millis(random.below(60) as u64));
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", started.id())).unwrap();
        // The first one attaches, for the process that serves.
        for child in children.split_whitespace().skip(1) {
            kill_process(Pid::from_raw(child.parse().unwrap()).unwrap(), Signal::KILL).unwrap();
        }
        wait_until("it serves a block device", || {
            place.run(&["status"]).status.success() && place.loops().len() == 1
        });
        place.wait_for_standby();
        place.down();
        let (status, said) = started.ended();
        assert!(status.success(), "round {round}: {said}");
        place.assert_clean();
    }
}

/// While processes die: detach, and the end.
#[test]
fn an_end_that_was_asked_for_comes_though_processes_die() {
    let Some(place) = BlockPlace::if_able() else { return };
    for ends in ["down", "signal", "detach"] {
        let daemon = place.up_sized("32M", &["--attach"]);
        place.wait_for_standby();
        let worker = place.worker_id();
        let mut asked = None;
        match ends {
            "signal" => daemon.signal(Signal::TERM),
            ends => {
                let args = if ends == "detach" { &["detach", "zram0"][..] } else { &["down"] };
                asked = Some(place.command(args).stderr(std::process::Stdio::piped()).spawn().unwrap());
            }
        }
        thread::sleep(Duration::from_millis(5));
        // It may have ended already.
        let _ = kill_process(worker, Signal::KILL);
        let answered = asked.map(crate::common::collect);
        if ends == "detach" {
            answered.unwrap().ok();
            place.down();
        }
        let (status, said) = daemon.ended();
        assert!(status.success(), "{ends}: {said}");
        place.assert_clean();
    }
}

#[test]
fn a_swap_area_goes_off_though_a_process_dies_meanwhile() {
    let Some(cgroup) = Cgroup::new("off", 16 * MIB) else { return };
    let Some(place) = BlockPlace::if_able() else { return };
    place.run(&["swap", "on", "--size", "256M"]).ok();
    let device = place.swap_areas().pop().unwrap();
    let mut hog = Hog::start(&cgroup, 48, 3600).swaps_out(&device, 16 * MIB);
    cgroup.set_limit(1 << 30);
    place.wait_for_standby();
    let worker = place.worker_id();
    let off = place.command(&["swap", "off"]).stderr(std::process::Stdio::piped()).spawn().unwrap();
    thread::sleep(Duration::from_millis(20));
    let _ = kill_process(worker, Signal::KILL);
    crate::common::collect(off).ok();
    assert!(hog.is_running());
    kill_process(Pid::from_raw(hog.id() as i32).unwrap(), Signal::TERM).unwrap();
    let ended = hog.ended(Duration::from_secs(60));
    assert!(ended.stdout.contains("all pages are as they were left"), "{}{}", ended.stdout, ended.stderr);
    place.assert_clean();
}

/// Nothing outlives the holder; it is said, and cleared up as for any dead daemon.
#[test]
fn a_killed_holder_takes_all_with_it() {
    let Some(place) = BlockPlace::if_able() else { return };
    let daemon = place.up_sized("16M", &["--attach"]);
    place.wait_for_standby();
    let processes = ["worker_pid", "standby_pid"].map(|name| place.process(name).unwrap());
    daemon.signal(Signal::KILL);
    drop(daemon.ended());
    place.run(&["detach", "--force"]).ok();
    for process in processes {
        wait_until("it is gone", || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero()));
            stat.map_or(true, |stat| stat.contains(") Z "))
        });
    }
    place.assert_clean();
}

#[test]
fn another_program_goes_on_with_everything() {
    let Some(place) = BlockPlace::if_able() else { return };
    let next = place.root().join("next");
    fs::copy(env!("CARGO_BIN_EXE_uzram"), &next).unwrap();
    let cold = format!("{}:32M", place.root().join("cold").display());
    let daemon = place.up_sized("64M", &["--attach", "--backing", &cold]);
    place.run(&["add", "second", "--size", "8M"]).ok();
    let device = place.loops().pop().unwrap();
    let refused = place.run(&["upgrade", "--program", "/bin/true"]);
    assert!(refused.complaint(1).contains("cannot take over"), "{}", refused.stderr);
    let refused = place.run(&["upgrade", "--program", "/no/such/program"]);
    assert!(refused.complaint(1).contains("cannot run /no/such/program"), "{}", refused.stderr);
    assert_eq!(place.take_overs(), 0);
    exercise_during(Path::new(&device), 64 * MIB / PAGE as u64, || {
        let said = place.run(&["upgrade", "--program", next.to_str().unwrap()]).ok();
        assert!(said.starts_with("upgraded"), "{said}");
        place.run(&["upgrade"]).ok();
        place.kill_worker();
    });
    let exe = fs::read_link(format!("/proc/{}/exe", daemon.id())).unwrap();
    assert_eq!(exe, next.canonicalize().unwrap());
    assert!(place.run(&["list"]).ok().contains("second"));
    let said = place.end(daemon);
    // The kill is a warning, the replacements are not.
    let warnings: Vec<&str> = said.lines().filter(|line| !line.contains(" INFO ")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains("the process that served has died"), "{said}");
    assert_eq!(said.matches("serves in the place of the one before").count(), 2, "{said}");
    place.assert_clean();
}

/// Nobody reads its log, which fills the pipe.
#[test]
fn a_log_that_nobody_reads_holds_up_nobody() {
    let place = Place::new();
    let daemon = place.up(&["--log", "debug"]);
    // A line for each.
    for round in 0..600 {
        place
            .run(&["set", "zram0", &format!("compact_threshold={}", 10 + round % 50), "compact_rate=1M"])
            .ok();
        if round == 590 {
            place.wait_for_standby();
            place.kill_worker();
        }
    }
    place.end(daemon);
}

/// A command that runs within the daemon's lifetime hears nothing of it.
#[test]
fn a_command_and_its_status_outlive_them() {
    let place = Place::new();
    let uzram = env!("CARGO_BIN_EXE_uzram");
    let command = format!(
        "'{uzram}' status | grep -q '^take-overs *0$'; kill -9 $('{uzram}' status | awk '/^worker/ {{ print $2 }}'); \
         '{uzram}' status | grep -q '^take-overs *1$' && exit 7"
    );
    let ended = place.run(&["up", "--size", "1M", "--exec", &command]);
    assert_eq!(ended.status.code(), Some(7), "{}", ended.stderr);
    let alone =
        place.run(&["up", "--size", "1M", "--no-survive", "--exec", &format!("'{uzram}' status --json")]);
    let status: Value = serde_json::from_str(&alone.ok()).unwrap();
    assert!(status["holder_pid"].is_u64() && status["standby_pid"].is_null(), "{status}");
}

#[test]
fn without_a_stand_by_the_daemon_ends_with_the_process_that_serves() {
    let place = Place::new();
    let daemon = place.up(&["--no-survive"]);
    let refused = place.run(&["upgrade"]);
    assert!(refused.complaint(1).contains("has no stand-by"), "{}", refused.stderr);
    kill_process(place.worker_id(), Signal::KILL).unwrap();
    let (status, said) = daemon.ended();
    assert!(status.code() == Some(1) && said.contains("and with it all contents"), "{said}");
    assert!(!place.socket("nbd.sock").exists());
}

/// With a stand-by alive, the memory of a swap daemon is not swapped out, even if its cgroup is emptied.
#[test]
fn nothing_of_a_swap_area_is_swapped_out() {
    let Some(daemons) = Cgroup::new("kept", 512 * MIB) else { return };
    let Some(cgroup) = Cgroup::new("swaps", 16 * MIB) else { return };
    let Some(place) = BlockPlace::if_able() else { return };
    let mut command = daemons.command(Path::new(env!("CARGO_BIN_EXE_uzram")));
    command.args(["swap", "on", "--size", "256M"]).env("UZRAM_RUNTIME_DIR", place.dir());
    finish(command).ok();
    let device = place.swap_areas().pop().unwrap();
    let mut hog = Hog::start(&cgroup, 64, 3600).swaps_out(&device, 32 * MIB);
    for _ in 0..3 {
        place.wait_for_standby();
        daemons.empty();
        for process in ["holder_pid", "worker_pid", "standby_pid"] {
            let process = place.process(process).unwrap().as_raw_nonzero();
            let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
            assert_eq!(crate::common::status_field(&status, "VmSwap"), "0 kB");
        }
        // Only of the processes that attach, which nobody waits for.
        assert!(daemons.swapped_bytes() < 8 * MIB, "{}", daemons.swapped_bytes());
        place.kill_worker();
        daemons.empty();
        assert!(daemons.swapped_bytes() < 8 * MIB, "{}", daemons.swapped_bytes());
    }
    let status = place.run(&["swap", "status"]).ok();
    assert!(status.contains("contents kept out of swap yes"), "{status}");
    assert!(hog.is_running());
    kill_process(Pid::from_raw(hog.id() as i32).unwrap(), Signal::TERM).unwrap();
    let ended = hog.ended(Duration::from_secs(60));
    assert!(ended.stdout.contains("all pages are as they were left"), "{}{}", ended.stdout, ended.stderr);
    place.run(&["swap", "off"]).ok();
    place.assert_clean();
}

#[test]
fn a_request_of_which_all_die_fails_and_the_contents_are_recovered() {
    all_die_of_a_request(Kernel::ThisOne);
}

#[test]
fn a_request_of_which_all_die_fails_on_an_older_kernel() {
    all_die_of_a_request(Kernel::Older);
}

/// A request that kills each process that carries it out.
fn all_die_of_a_request(kernel: Kernel) {
    const DEADLY: u64 = 12 * MIB;
    let Some(place) = BlockPlace::if_able() else { return };
    let args = ["up", "--size", "16M", "--attach", "--give-up-after", "1"];
    let mut command = kernel.command(&place, &args);
    command.env("UZRAM_DIE_AT", DEADLY.to_string());
    let daemon = Daemon::start(command);
    let device = place.loops().pop().unwrap();
    let open = |path: &Path| {
        OpenOptions::new().read(true).write(true).custom_flags(libc_o_direct()).open(path).unwrap()
    };
    let file = open(Path::new(&device));
    let mut page = Block([0; PAGE]);
    page.0[..8].copy_from_slice(b"contents");
    file.write_all_at(&page.0, 0).unwrap();
    let mut read = Block([0; PAGE]);
    let began = std::time::Instant::now();
    assert!(file.read_exact_at(&mut read.0, DEADLY).is_err());
    assert!(began.elapsed() >= Duration::from_secs(1), "it waited for {:?}", began.elapsed());
    assert!(file.read_exact_at(&mut read.0, 0).is_err(), "all files have failed");
    drop(file);
    wait_until("it serves again", || status(&place).is_some_and(|status| status["gave_up"].is_string()));
    let said = place.run(&["recover", "zram0"]).ok();
    let recovered = Path::new(said.split_whitespace().last().unwrap()).to_owned();
    assert!(recovered.is_absolute(), "{said}");
    open(&recovered).read_exact_at(&mut read.0, 0).unwrap();
    assert!(read.0 == page.0);
    assert!(status(&place).unwrap()["gave_up"].is_null());
    place.wait_for_standby();
    place.kill_worker();
    open(&recovered).read_exact_at(&mut read.0, 0).unwrap();
    assert!(read.0 == page.0);
    place.run(&["down", "--force"]).ok();
    let (status, said) = daemon.ended();
    assert!(status.success(), "{said}");
    place.assert_clean();
}

/// Its memory is overwritten while nobody serves it. Requests for it fail; another device goes on.
#[test]
fn a_damaged_device_fails_alone() {
    let Some(place) = BlockPlace::if_able() else { return };
    let files = place.root().join("files");
    let daemon = place.up_sized("16M", &["--mount", files.to_str().unwrap()]);
    let cold = format!("{}:8M", place.root().join("cold").display());
    place.run(&["add", "second", "--size", "16M", "--backing", &cold]).ok();
    let [first, second] = ["zram0", "second"].map(|name| {
        let path = files.join(name).join("disk");
        OpenOptions::new().read(true).write(true).open(path).unwrap()
    });
    for file in [&first, &second] {
        file.write_all_at(b"contents", 0).unwrap();
    }
    place.wait_for_standby();
    let fds = fs::read_dir(format!("/proc/{}/fd", daemon.id())).unwrap().map(|entry| entry.unwrap().path());
    let is_second = |fd: &std::path::PathBuf| {
        fs::read_link(fd).is_ok_and(|link| link.to_string_lossy().contains("memfd:uzram-second"))
    };
    let memory = fds.into_iter().find(is_second).unwrap();
    let memory = OpenOptions::new().write(true).open(memory).unwrap();
    kill_process(place.process("standby_pid").unwrap(), Signal::STOP).unwrap();
    let before = place.take_overs();
    let standby = place.process("standby_pid").unwrap();
    kill_process(place.worker_id(), Signal::KILL).unwrap();
    memory.write_all_at(&[0xff; PAGE], 0).unwrap();
    kill_process(standby, Signal::CONT).unwrap();
    wait_until("another process serves", || place.take_overs() > before);
    let mut read = [0; 8];
    first.read_exact_at(&mut read, 0).unwrap();
    assert_eq!(&read, b"contents");
    assert!(second.read_exact_at(&mut read, 0).is_err() && second.write_all_at(b"x", 0).is_err());
    drop((first, second));
    // Nobody keeps its memory, or its backing file locked: it can be set up anew.
    let holder =
        fs::read_dir(format!("/proc/{}/fd", daemon.id())).unwrap().map(|entry| entry.unwrap().path());
    assert_eq!(holder.filter(is_second).count(), 0);
    place.run(&["set", "second", &format!("backing_dev={cold}"), "disksize=16M"]).ok();
    place.down();
    let (status, said) = daemon.ended();
    assert!(status.success() && said.contains("its contents cannot be used any more"), "{said}");
    place.assert_clean();
}

/// In a cgroup without any memory left. Block devices other than swap have no stand-by in one of version 1.
#[test]
fn a_process_takes_over_where_no_memory_is_left() {
    if unable() || missing(&["nbdcopy"]) {
        return;
    }
    let Some(cgroup) = Cgroup::new("full", 512 * MIB) else { return };
    let place = Place::new();
    let mut command = cgroup.command(Path::new(env!("CARGO_BIN_EXE_uzram")));
    command.args(["up", "--size", "64M"]).env("UZRAM_RUNTIME_DIR", place.dir());
    let daemon = Daemon::start(command);
    let (image, copy) = (random_file(&place, "image", 32 << 20), place.root().join("copy"));
    succeed(&place, "nbdcopy", &[arg(&image), &place.uri()]);
    place.wait_for_standby();
    let worker = place.worker_id();
    cgroup.fill();
    place.kill_worker();
    // It is ended before the holder, with which all contents go.
    let score = |process: Pid| {
        let path = format!("/proc/{}/oom_score_adj", process.as_raw_pid());
        fs::read_to_string(path).ok()?.trim().parse::<i64>().ok()
    };
    wait_until("another process has the higher score", || {
        let [holder, worker] = ["holder_pid", "worker_pid"].map(|name| place.process(name).and_then(score));
        holder.zip(worker).is_some_and(|(holder, worker)| worker > holder + 100)
    });
    // The OOM killer may choose the process that serves: a client connects again. What sockets hold counts,
    // too: there is no room for many replies.
    let sparing = ["--connections=1", "--requests=1", "--request-size=65536", &place.uri(), arg(&copy)];
    let read = || run(&place, "nbdcopy", &sparing).status.success();
    wait_until("all is read", read);
    let (image, copy) = (fs::read(image).unwrap(), fs::read(copy).unwrap());
    assert!(copy.starts_with(&image) && copy.len() == 64 << 20);
    cgroup.set_limit(512 * MIB);
    place.wait_for_standby();
    assert!(place.worker_id() != worker);
    place.end(daemon);
}
