//! Daemons whose processes are killed, stopped and exchanged while their devices are used. Most for root,
//! with FUSE and loop devices.

use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, fallocate};

use crate::common::*;

const PAGE: usize = 4096;
/// Kills of a disk's processes in each of the runs here; `UZRAM_CRASH_ROUNDS` times as many in the long run.
const DISK_KILLS: u64 = 50;
/// Kills while a program swaps.
const SWAP_KILLS: u64 = 10;

fn rounds() -> u64 {
    std::env::var("UZRAM_CRASH_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// A block aligned for direct I/O.
#[repr(align(4096))]
#[derive(Clone)]
struct Block([u8; PAGE]);

/// Writes, reads and discards pages of its part of a disk until told to end, and checks every read; then
/// reads all. Returns the number of operations.
fn exercise(disk: &Path, part: std::ops::Range<u64>, seed: u64, ends: &AtomicBool) -> io::Result<u64> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(disk)?;
    let mut random = Random::new(seed);
    let mut versions = vec![0u64; (part.end - part.start) as usize];
    let contents = |page: u64, version: u64| {
        let mut block = Block([0; PAGE]);
        if version > 0 {
            // Compresses by about half.
            Random::new(page << 32 | version).fill(&mut block.0[..PAGE / 2]);
            block.0[PAGE - 8..].copy_from_slice(&version.to_le_bytes());
        }
        block
    };
    let check = |page: u64, version: u64| -> io::Result<()> {
        let mut read = Block([0; PAGE]);
        file.read_exact_at(&mut read.0, page * PAGE as u64)?;
        let is_right = read.0 == contents(page, version).0;
        let why = || io::Error::other(format!("page {page} is not that of version {version}, seed {seed}"));
        is_right.then_some(()).ok_or_else(why)
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
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&file, hole, page * PAGE as u64, PAGE as u64)?;
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

/// Exercises a disk by several threads while `disturb` runs. Fails if any I/O fails, or returns wrong bytes.
fn exercise_during(disk: &str, bytes: u64, disturb: impl FnOnce()) -> u64 {
    const THREADS: u64 = 4;
    let ends = AtomicBool::new(false);
    let share = bytes / PAGE as u64 / THREADS;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let (ends, part) = (&ends, number * share..(number + 1) * share);
                scope.spawn(move || exercise(disk.as_ref(), part, number + 1, ends))
            })
            .collect();
        let disturbed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(disturb));
        ends.store(true, Ordering::Relaxed);
        let counts = threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).sum();
        disturbed.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        counts
    })
}

/// Returns the command `uzram args`; `is_older` as on a kernel before Linux 6.9, which does not send requests
/// again that a dead process had received.
fn command(place: &Place, args: &str, is_older: bool) -> Command {
    let mut command = place.command(args);
    command.envs(is_older.then_some(("UZRAM_NO_RESEND", "1")));
    command
}

#[test]
fn a_disk_outlives_the_processes_that_serve_it() {
    a_disk_outlives(false, DISK_KILLS);
}

#[test]
fn a_disk_outlives_them_on_an_older_kernel() {
    a_disk_outlives(true, DISK_KILLS / 2);
}

/// With a limit, writeback, recompression and compaction under way.
fn a_disk_outlives(is_older_kernel: bool, kills: u64) {
    let Some(place) = BlockPlace::if_able() else { return };
    let options = format!("--mem-limit 32M --backing {} --recompress zstd:1:1s", place.path("cold:64M"));
    let daemon =
        Daemon::start(command(&place, &format!("up --size 96M --attach {options}"), is_older_kernel));
    let device = place.loops().pop().unwrap();
    let kills = kills * rounds();
    let (mut random, mut outages) = (Random::new(7), Vec::new());
    let count = exercise_during(&device, 96 * MIB, || {
        for kill in 0..kills {
            thread::sleep(Duration::from_millis(random.below_u64(100)));
            // Most of the time the stand-by is ready; sometimes it is not.
            if kill % 5 > 0 {
                place.wait_for_standby();
            }
            if kill % 7 == 0 {
                place.set("compact=1");
            }
            place.kill_worker();
            outages.push(place.json("status")["last_outage_ms"].as_f64().unwrap());
        }
    });
    outages.sort_by(f64::total_cmp);
    let most = outages[outages.len() - 1];
    println!("{kills} kills, {count} operations; outages of {} to {most} ms", outages[0]);
    place.assert_zero("failed_reads backing_corrupted");
    let said = place.end_clean(daemon);
    assert!(!said.contains("damaged"), "{said}");
}

#[test]
fn a_program_that_swaps_outlives_them() {
    const HOG_MIB: u64 = 128;
    let Some(cgroup) = Cgroup::new("survive", HOG_MIB / 4 * MIB) else { return };
    let Some(place) = BlockPlace::alone("") else { return };
    let device = place.swap_on("--size 512M");
    let mut hog = Hog::start(&cgroup, HOG_MIB, 3600).swaps_out(&device, HOG_MIB / 4 * MIB);
    let mut random = Random::new(8);
    for _ in 0..SWAP_KILLS * rounds() {
        thread::sleep(Duration::from_millis(random.below_u64(300)));
        place.take_over();
        assert!(hog.is_running());
    }
    hog.verified(Duration::from_secs(120), true);
    place.assert_zero("failed_writes failed_reads");
    place.swap_off();
}

/// Over NBD, as a user without privileges: clients get a closed connection, and find everything again.
#[test]
fn contents_and_devices_outlive_them_for_any_user() {
    let place = Place::without_rights();
    let daemon = place.up("");
    let contents = [7; PAGE];
    let mut client = place.nbd();
    assert_eq!(client.write(3 * PAGE as u64, &contents).error, 0);
    for change in [
        "add second --size 8M --algorithm zstd:5 --mem-limit 4M",
        "set second mem_limit=5M",
        "add third --size 8M",
        "remove third",
        "add empty --size 1M",
        "reset empty",
    ] {
        place.run(change).ok();
    }
    for _ in 0..3 {
        place.take_over();
        assert_eq!(place.nbd().read(0, 3 * PAGE as u64, PAGE as u32).data(), contents);
        let list = place.run("list").shows(&["second", "empty"]);
        assert!(!list.contains("third"), "{list}");
        assert_eq!(place.run("stat second mem_limit").ok().trim(), (5 * MIB).to_string());
        place.run("stat second comp_algorithm").shows(&["[zstd:5]"]);
    }
    assert_eq!(place.take_overs(), 3);
    // A connection whose process died is closed.
    assert!(client.at_end());
    place.run("down").ok();
    daemon.succeeds();
}

/// The stand-by dies, then at once the process that serves; both at once; each is stopped and goes on.
#[test]
fn whichever_process_dies_or_stops_the_disk_stays() {
    let Some(place) = BlockPlace::if_able() else { return };
    let (daemon, device) = place.up_attached("64M", "");
    exercise_during(&device, 64 * MIB, || {
        for _ in 0..3 {
            place.wait_for_standby();
            let (worker, standby) = (place.worker_id(), place.process("standby_pid").unwrap());
            let before = place.take_overs();
            kill(standby);
            kill(worker);
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
        kill(worker);
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
    for _ in 0..8 {
        let started = place.start("up --size 32M --attach");
        thread::sleep(Duration::from_millis(random.below_u64(60)));
        let children = of_process(started.process(), &format!("task/{}/children", started.id()));
        // The first one attaches, for the process that serves.
        for child in children.words().iter().skip(1) {
            kill(Pid::from_raw(child.parse().unwrap()).unwrap());
        }
        wait_until("it serves a block device", || {
            place.run("status").status.success() && place.loops().len() == 1
        });
        place.wait_for_standby();
        place.end(started);
        place.assert_clean();
    }
}

/// While processes die: detach, and the end.
#[test]
fn an_end_that_was_asked_for_comes_though_processes_die() {
    let Some(place) = BlockPlace::if_able() else { return };
    for ends in ["down", "signal", "detach zram0"] {
        let (daemon, _) = place.up_attached("32M", "");
        place.wait_for_standby();
        let worker = place.worker_id();
        let mut asked = None;
        match ends {
            "signal" => daemon.signal(Signal::TERM),
            ends => asked = Some(start(&mut place.command(ends))),
        }
        thread::sleep(Duration::from_millis(5));
        // It may have ended already.
        let _ = kill_process(worker, Signal::KILL);
        let answered = asked.map(collect);
        if ends == "detach zram0" {
            answered.unwrap().ok();
            place.down();
        }
        daemon.succeeds();
        place.assert_clean();
    }
}

#[test]
fn a_swap_area_goes_off_though_a_process_dies_meanwhile() {
    let Some(cgroup) = Cgroup::new("off", 16 * MIB) else { return };
    let Some(place) = BlockPlace::alone("") else { return };
    let device = place.swap_on("--size 256M");
    let hog = Hog::start(&cgroup, 48, 3600).swaps_out(&device, 16 * MIB);
    cgroup.set_limit(1 << 30);
    place.wait_for_standby();
    let worker = place.worker_id();
    let off = start(&mut place.command("swap off"));
    thread::sleep(Duration::from_millis(20));
    let _ = kill_process(worker, Signal::KILL);
    collect(off).ok();
    hog.verified(Duration::from_secs(60), true);
    place.assert_clean();
}

#[test]
fn another_program_goes_on_with_everything() {
    let Some(place) = BlockPlace::if_able() else { return };
    let next = place.root().join("next");
    fs::copy(UZRAM, &next).unwrap();
    let (daemon, device) = place.up_attached("64M", &format!("--backing {}", place.path("cold:32M")));
    place.run("add second --size 8M").ok();
    place.run("upgrade --program /bin/true").says(1, "cannot take over");
    place.run("upgrade --program /no/such/program").says(1, "cannot run /no/such/program");
    assert_eq!(place.take_overs(), 0);
    exercise_during(&device, 64 * MIB, || {
        let said = place.run(&format!("upgrade --program {}", next.display())).ok();
        assert!(said.starts_with("upgraded"), "{said}");
        place.run("upgrade").ok();
        place.kill_worker();
    });
    let exe = fs::read_link(format!("/proc/{}/exe", daemon.id())).unwrap();
    assert_eq!(exe, next.canonicalize().unwrap());
    place.run("list").shows(&["second"]);
    let said = place.end_clean(daemon);
    // The kill is a warning, the replacements are not.
    let warnings: Vec<&str> = said.lines().filter(|line| !line.contains(" INFO ")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains("the process that served has died"), "{said}");
    assert_eq!(said.matches("serves in the place of the one before").count(), 2, "{said}");
}

/// Nobody reads its log, which fills the pipe.
#[test]
fn a_log_that_nobody_reads_holds_up_nobody() {
    let place = Place::new();
    let daemon = place.up("--log debug");
    // A line for each.
    for round in 0..1200 {
        let request = format!(
            "PUT /v1/devices/zram0/attributes/compact_threshold HTTP/1.1\r\nContent-Length: 14\r\n\r\n\
             {{\"value\":\"{}\"}}",
            10 + round % 50
        );
        let answer = ask(&place.socket("control.sock"), request.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 204 "), "{answer}");
        if round == 1180 {
            place.take_over();
        }
    }
    place.end(daemon);
}

#[test]
fn a_command_and_its_status_outlive_them() {
    let place = Place::new();
    let exec = |command: &str, option: &[&str]| {
        place.run(&[&["up", "--size", "1M", "--exec", command], option].concat())
    };
    let status = format!("'{UZRAM}' status");
    let command = format!(
        "{status} | grep -q '^take-overs *0$' && {status} | grep -q '^files *none$' || exit 8; \
         kill -9 $({status} | awk '/^worker/ {{ print $2 }}'); \
         {status} | grep -q '^take-overs *1$' && exit 7"
    );
    let ended = exec(&command, &[]);
    assert_eq!(ended.status.code(), Some(7), "{ended}");
    let alone = exec(&format!("{status} --json"), &["--no-survive"]).ok();
    let status: Value = serde_json::from_str(&alone).unwrap();
    assert!(status["holder_pid"].is_u64() && status["standby_pid"].is_null(), "{status}");
    assert_eq!((&status["take_overs"], &status["last_outage_ms"]), (&0.into(), &Value::Null));
    let keys = "worker_pid standby_pid standby_ready gave_up pid files protection".words().into_iter();
    assert_eq!(keys.filter(|key| status.get(key).is_none()).collect::<Vec<_>>(), [""; 0], "{status}");
}

#[test]
fn without_a_stand_by_the_daemon_ends_with_the_process_that_serves() {
    let place = Place::new();
    let daemon = place.up("--no-survive");
    place.run("upgrade").says(1, "has no stand-by");
    kill(place.worker_id());
    let (status, said) = daemon.ended();
    assert!(status.code() == Some(1) && said.contains("and with it all contents"), "{said}");
    assert!(!place.socket("nbd.sock").exists());
}

/// With a stand-by alive, the memory of a swap daemon is not swapped out, even if its cgroup is emptied.
#[test]
fn nothing_of_a_swap_area_is_swapped_out() {
    let Some(daemons) = Cgroup::new("kept", 512 * MIB) else { return };
    let Some(cgroup) = Cgroup::new("swaps", 16 * MIB) else { return };
    let Some(place) = BlockPlace::alone("") else { return };
    finish(daemons.uzram(&place, "swap on --size 256M")).ok();
    let device = place.swap_areas().pop().unwrap();
    let hog = Hog::start(&cgroup, 64, 3600).swaps_out(&device, 32 * MIB);
    for _ in 0..3 {
        place.wait_for_standby();
        daemons.empty();
        for process in ["holder_pid", "worker_pid", "standby_pid"] {
            let status = of_process(place.process(process).unwrap(), "status");
            assert_eq!(status_field(&status, "VmSwap"), "0 kB");
        }
        // Only of the processes that attach, which nobody waits for.
        assert!(daemons.swapped_bytes() < 8 * MIB, "{}", daemons.swapped_bytes());
        place.kill_worker();
        daemons.empty();
        assert!(daemons.swapped_bytes() < 8 * MIB, "{}", daemons.swapped_bytes());
    }
    place.run("swap status").shows(&["contents kept out of swap yes"]);
    hog.verified(Duration::from_secs(60), true);
    place.swap_off();
}

#[test]
fn a_request_of_which_all_die_fails_and_the_contents_are_recovered() {
    all_die_of_a_request(false);
}

#[test]
fn a_request_of_which_all_die_fails_on_an_older_kernel() {
    all_die_of_a_request(true);
}

/// A request that kills each process that carries it out.
fn all_die_of_a_request(is_older_kernel: bool) {
    const DEADLY: u64 = 12 * MIB;
    let Some(place) = BlockPlace::if_able() else { return };
    let mut command = command(&place, "up --size 16M --attach --give-up-after 1", is_older_kernel);
    let daemon = Daemon::start(command.env("UZRAM_DIE_AT", DEADLY.to_string()));
    let device = place.loops().pop().unwrap();
    let open = |path: &Path| {
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
    };
    let file = open(Path::new(&device));
    let mut page = Block([0; PAGE]);
    page.0[..8].copy_from_slice(b"contents");
    file.write_all_at(&page.0, 0).unwrap();
    let mut read = Block([0; PAGE]);
    let began = Instant::now();
    assert!(file.read_exact_at(&mut read.0, DEADLY).is_err());
    assert!(began.elapsed() >= Duration::from_secs(1), "it waited for {:?}", began.elapsed());
    assert!(file.read_exact_at(&mut read.0, 0).is_err(), "all files have failed");
    drop(file);
    let gave_up = || {
        let status = place.run("status --json").stdout;
        serde_json::from_str(&status).map_or(Value::Null, |status: Value| status["gave_up"].clone())
    };
    wait_until("it serves again", || gave_up().is_string());
    let said = place.run("recover zram0").ok();
    let recovered = Path::new(said.words().last().unwrap()).to_owned();
    assert!(recovered.is_absolute(), "{said}");
    assert!(place.json("status")["gave_up"].is_null());
    for again in [false, true] {
        if again {
            place.take_over();
        }
        open(&recovered).read_exact_at(&mut read.0, 0).unwrap();
        assert!(read.0 == page.0);
    }
    place.run("down --force").ok();
    daemon.succeeds();
    place.assert_clean();
}

/// Its memory is overwritten while nobody serves it. Requests for it fail; another device goes on.
#[test]
fn a_damaged_device_fails_alone() {
    let Some(place) = BlockPlace::if_able() else { return };
    let daemon = place.up_mounted("16M", "");
    let cold = place.path("cold:8M");
    place.run(&format!("add second --size 16M --backing {cold}")).ok();
    let [first, second] =
        ["zram0", "second"].map(|name| open(place.dir().join("mnt").join(name).join("disk")));
    for file in [&first, &second] {
        file.write_all_at(b"contents", 0).unwrap();
    }
    place.wait_for_standby();
    let memory = || {
        let fds = fs::read_dir(format!("/proc/{}/fd", daemon.id())).unwrap();
        let mut fds = fds.map(|entry| entry.unwrap().path());
        let is_second = |link: PathBuf| link.to_string_lossy().contains("memfd:uzram-second");
        fds.find(|fd| fs::read_link(fd).is_ok_and(is_second))
    };
    let file = OpenOptions::new().write(true).open(memory().unwrap()).unwrap();
    let standby = place.process("standby_pid").unwrap();
    kill_process(standby, Signal::STOP).unwrap();
    let before = place.take_overs();
    kill(place.worker_id());
    file.write_all_at(&[0xff; PAGE], 0).unwrap();
    kill_process(standby, Signal::CONT).unwrap();
    wait_until("another process serves", || place.take_overs() > before);
    let mut read = [0; 8];
    first.read_exact_at(&mut read, 0).unwrap();
    assert_eq!(&read, b"contents");
    assert!(second.read_exact_at(&mut read, 0).is_err() && second.write_all_at(b"x", 0).is_err());
    drop((first, second));
    // Nobody keeps its memory, or its backing file locked: it can be set up anew.
    assert_eq!(memory(), None);
    place.run(&format!("set second backing_dev={cold} disksize=16M")).ok();
    let said = place.end_clean(daemon);
    assert!(said.contains("its contents cannot be used any more"), "{said}");
}

/// In a cgroup without any memory left. Block devices other than swap have no stand-by in one of version 1.
#[test]
fn a_process_takes_over_where_no_memory_is_left() {
    if unable() || missing("nbdcopy") {
        return;
    }
    let Some(cgroup) = Cgroup::new("full", 512 * MIB) else { return };
    let place = Place::new();
    let daemon = Daemon::start(cgroup.uzram(&place, "up --size 64M"));
    let image = random_file(&place, "image", 32 << 20);
    place.copy_in(&image);
    place.wait_for_standby();
    let worker = place.worker_id();
    cgroup.fill();
    place.kill_worker();
    // It is ended before the holder, with which all contents go.
    let score = |name: &str| of_process(place.process(name)?, "oom_score_adj").trim().parse::<i64>().ok();
    wait_until("another process has the higher score", || {
        score("holder_pid").zip(score("worker_pid")).is_some_and(|(holder, worker)| worker > holder + 100)
    });
    // The OOM killer may choose the process that serves: a client connects again. What sockets hold counts,
    // too: there is no room for many replies.
    let sparing = format!("--connections=1 --requests=1 --request-size=65536 {} copy", place.uri());
    wait_until("all is read", || run(&place, "nbdcopy", &sparing).status.success());
    let copy = fs::read(place.path("copy")).unwrap();
    assert!(copy.starts_with(&fs::read(image).unwrap()) && copy.len() == 64 << 20);
    cgroup.set_limit(512 * MIB);
    place.wait_for_standby();
    assert!(place.worker_id() != worker);
    place.end(daemon);
}
