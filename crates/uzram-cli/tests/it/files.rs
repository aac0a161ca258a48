//! Devices as files (`uzram up --mount`), and as block devices (`uzram attach`): the real program, mounts and
//! tools.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate};
use rustix::io::Errno;

use crate::common::*;

const HOLE: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
const ZEROES: FallocateFlags = FallocateFlags::ZERO_RANGE.union(FallocateFlags::KEEP_SIZE);

fn write_and_read(file: &File, offset: u64, len: usize, seed: u8) {
    let bytes: Vec<u8> = (0..len).map(|at| (at / 50) as u8 ^ seed).collect();
    file.write_all_at(&bytes, offset).unwrap();
    assert!(read(file, offset, len) == bytes, "{len} bytes at {offset}");
}

fn read(file: &File, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![1; len];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

#[test]
fn the_disk_is_a_file_with_holes() {
    let Some(place) = BlockPlace::if_able() else { return };
    let daemon = place.up_mounted("16M", "");
    let disk = open(place.disk());
    assert_eq!(disk.metadata().unwrap().len(), 16 << 20);
    let stored = || place.statistic("orig_data_bytes");
    write_and_read(&disk, 1 << 20, 1 << 20, 3);
    assert_eq!(stored(), 1 << 20);
    for (to, wanted) in [
        (SeekFrom::Start(0), Ok(0)),
        (SeekFrom::Data(0), Ok(1 << 20)),
        (SeekFrom::Hole(1 << 20), Ok(2 << 20)),
        (SeekFrom::Data(2 << 20), Err(Errno::NXIO)),
        (SeekFrom::Hole(2 << 20), Ok(2 << 20)),
        (SeekFrom::Hole(16 << 20), Err(Errno::NXIO)),
    ] {
        assert_eq!(rustix::fs::seek(&disk, to), wanted, "{to:?}");
    }
    // Parts of pages are overwritten, whole ones freed.
    fallocate(&disk, HOLE, (1 << 20) + 100, (512 << 10) - 100).unwrap();
    let half = read(&disk, 1 << 20, 512 << 10);
    assert!(!is_zero(&half[..100]) && is_zero(&half[100..]));
    assert_eq!(stored(), (512 << 10) + 4096);
    fallocate(&disk, ZEROES, 1 << 20, 1 << 20).unwrap();
    assert!(is_zero(&read(&disk, 1 << 20, 512 << 10)));
    fallocate(&disk, HOLE, 0, 16 << 20).unwrap();
    assert_eq!(stored(), 0);
    wait_until("the kernel asks again", || fs::metadata(place.disk()).unwrap().blocks() == 0);
    assert!(fallocate(&disk, FallocateFlags::empty(), 0, 4096).is_err(), "no room can be promised");
    // At any offset and length, shorter and longer than the kernel's longest request.
    let end = 16 << 20;
    let ranges = [(0, 4096), (1, 1), (4095, 2), (8192, 3 << 20), (777, 2_000_001), (end - 5, 5)];
    for (seed, (offset, len)) in (0..).zip(ranges) {
        write_and_read(&disk, offset, len, seed);
    }
    assert_eq!(disk.set_len(0).unwrap_err().raw_os_error(), Some(22));
    // As with a block device, O_TRUNC does not truncate it.
    let cut = OpenOptions::new().write(true).truncate(true).open(place.disk()).unwrap();
    assert_eq!(cut.metadata().unwrap().len(), 16 << 20);
    disk.sync_all().unwrap();
    // While the file is open, the device cannot be reset.
    place.run("reset zram0").says(1, "in use");
    drop((disk, cut));
    wait_until("it is closed", || place.run("reset zram0").status.success());
    assert_eq!(File::open(place.disk()).unwrap_err().raw_os_error(), Some(16), "it has no size");
    daemon.terminate();
    place.assert_clean();
}

#[test]
fn the_disk_can_be_mapped() {
    const LEN: usize = 16 << 20;
    let Some(place) = BlockPlace::if_able() else { return };
    let daemon = place.up_mounted("16M", "");
    let disk = open(place.disk());
    let Some(map) = Map::if_able(&disk, LEN) else { return };
    let text = |seed: u8, len: usize| -> Vec<u8> { (0..len).map(|at| (at / 9) as u8 ^ seed).collect() };
    for (seed, at) in [(1, 0), (2, 4096 * 5 + 77), (3, LEN - (2 << 20))] {
        let bytes = text(seed, 2 << 20);
        map.write(at, &bytes);
        map.sync();
        // Also through another open file.
        for file in [&disk, &File::open(place.disk()).unwrap()] {
            assert!(read(file, at as u64, bytes.len()) == bytes, "written to the mapping at {at}");
        }
        let bytes = text(seed ^ 0x80, 100_000);
        disk.write_all_at(&bytes, at as u64 + 333).unwrap();
        assert!(map.read(at + 333, bytes.len()) == bytes, "written to the file at {at}");
    }
    assert!(place.statistic("orig_data_bytes") >= 4 << 20);
    // Dirty pages are written when the file is closed.
    map.write(9 << 20, b"at last");
    drop((map, disk));
    wait_until("it is written", || read(&File::open(place.disk()).unwrap(), 9 << 20, 7) == b"at last");
    daemon.terminate();
    place.assert_clean();
}

/// Holes longer than a thread makes at once, which begin and end within pages, or past the end.
#[test]
fn long_holes_are_made_whole() {
    const LEN: usize = 48 << 20;
    let Some(place) = BlockPlace::if_able() else { return };
    let _daemon = place.up_mounted("48M", "");
    let disk = open(place.disk());
    let mut model = Random::new(1).bytes((1 << 20) + 4097).repeat(48);
    model.truncate(LEN);
    disk.write_all_at(&model, 0).unwrap();
    for (how, offset, len) in [(HOLE, 100, 33 << 20), (ZEROES, (13 << 20) + 4095, (16 << 20) + 2)] {
        fallocate(&disk, how, offset as u64, len as u64).unwrap();
        model[offset..offset + len].fill(0);
        assert!(read(&disk, 0, LEN) == model, "zeros where they were asked for");
        disk.write_all_at(&vec![7; len], offset as u64).unwrap();
        model[offset..offset + len].fill(7);
        // A page past the end.
        fallocate(&disk, how, offset as u64, (LEN - offset + 4096) as u64).unwrap();
        model[offset..].fill(0);
        assert!(read(&disk, 0, LEN) == model, "zeros up to the end");
    }
}

#[test]
fn discarding_what_was_never_written_takes_no_memory_and_keeps_nobody_waiting() {
    const LEN: u64 = 1 << 40;
    let Some(place) = BlockPlace::if_able() else { return };
    let _daemon = place.up_mounted("1T", "");
    let disk = open(place.disk());
    write_and_read(&disk, 5 << 30, 1 << 20, 3);
    let before_bytes = place.statistic("mem_tables_bytes");
    // `turn` is odd during a discard; repeat until a read began and ended within one.
    let (turn, was_read) = (AtomicUsize::new(0), AtomicBool::new(false));
    let deadline = Instant::now() + PATIENCE;
    thread::scope(|scope| {
        let discarding = scope.spawn(|| {
            while !was_read.load(Ordering::Relaxed) && Instant::now() < deadline {
                turn.fetch_add(1, Ordering::SeqCst);
                fallocate(&disk, HOLE, 6 << 30, LEN - (6 << 30)).unwrap();
                turn.fetch_add(1, Ordering::SeqCst);
            }
        });
        let reader = File::open(place.disk()).unwrap();
        while !discarding.is_finished() {
            let before = turn.load(Ordering::SeqCst);
            read(&reader, 5 << 30, 4096);
            if before % 2 == 1 && turn.load(Ordering::SeqCst) == before {
                was_read.store(true, Ordering::Relaxed);
            }
        }
        discarding.join().unwrap();
    });
    assert!(was_read.into_inner(), "it could not be read meanwhile");
    let after_bytes = place.statistic("mem_tables_bytes");
    assert!(after_bytes <= before_bytes + MIB, "{before_bytes} before, {after_bytes} after");
}

/// Seeded reads, writes, holes and zeros at any offset and length, against plain bytes.
#[test]
fn random_operations_agree_with_a_model() {
    const LEN: u64 = 8 << 20;
    let Some(place) = BlockPlace::if_able() else { return };
    // Some pages leave memory and come back.
    let _daemon = place.up_mounted("8M", &format!("--mem-limit 3M --backing {}", place.path("cold:32M")));
    let disk = open(place.disk());
    for seed in 1..=4u64 {
        let mut numbers = Random::new(seed);
        let mut random = |end: u64| numbers.below_u64(end);
        let mut model = vec![0u8; LEN as usize];
        disk.write_all_at(&model, 0).unwrap();
        for step in 0..1500 {
            let most = [1, 100, 4096, 65536, 1 << 20][random(5) as usize];
            let len = random(most) + 1;
            let mut offset = random(LEN - len + 1);
            if random(2) == 0 {
                offset &= !4095;
            }
            let range = offset as usize..(offset + len) as usize;
            match random(8) {
                0..3 => {
                    // One repeated byte, or noise.
                    let bytes = match random(2) {
                        0 => vec![random(256) as u8; len as usize],
                        _ => Random::new(random(1 << 32)).bytes(len as usize),
                    };
                    disk.write_all_at(&bytes, offset).unwrap();
                    model[range].copy_from_slice(&bytes);
                }
                3..6 => {
                    let bytes = read(&disk, offset, len as usize);
                    assert!(bytes == model[range], "seed {seed}, step {step}: {len} bytes at {offset}");
                }
                what => {
                    fallocate(&disk, if what == 6 { HOLE } else { ZEROES }, offset, len).unwrap();
                    model[range].fill(0);
                }
            }
        }
        assert!(read(&disk, 0, LEN as usize) == model, "seed {seed}");
    }
    assert!(place.statistic("pages_written_back") > 0);
    place.assert_zero("failed_reads failed_writes");
}

#[test]
fn devices_that_are_added_and_removed_are_directories() {
    let Some(place) = BlockPlace::if_able() else { return };
    let _daemon = place.up_mounted("16M", "");
    assert_eq!(fs::remove_file(place.disk()).unwrap_err().kind(), ErrorKind::PermissionDenied);
    place.run("add logs --size 8M").ok();
    let logs = place.dir().join("mnt/logs/disk");
    assert_eq!(fs::metadata(&logs).unwrap().len(), 8 << 20);
    let names = |dir| -> Vec<String> {
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!(names(place.dir().join("mnt")), ["zram0", "logs"]);
    assert!(names(place.files()).contains(&"mm_stat".to_owned()));
    place.run("remove logs").ok();
    wait_until("it is gone", || !logs.exists());
    assert_eq!(place.json("stat zram0")["file"], arg(&place.disk()));
}

#[test]
fn a_block_device_is_attached_once_and_detached_when_free() {
    let Some(place) = BlockPlace::needing("mkfs.ext4 mount umount") else { return };
    let daemon = place.up_mounted("64M", "");
    let device = place.run("attach zram0").ok();
    let device = device.trim();
    assert_eq!(place.loops(), [device]);
    place.run("attach zram0").says(1, &format!("attached already, as {device}"));
    place.run("attach zram1").says(1, "no device 'zram1'");
    let queue = |name: &str| {
        let path = format!("/sys/block/{}/queue/{name}", device.trim_start_matches("/dev/"));
        // Not every kernel throttles writes.
        fs::read_to_string(path).unwrap_or("0".to_owned()).trim().to_owned()
    };
    let queue = ["logical_block_size", "rotational", "write_cache", "wbt_lat_usec"].map(queue);
    assert_eq!(queue, ["4096", "0", "write through", "0"]);

    let dir = place.with_file_system(device);
    fs::write(dir.join("a"), "something").unwrap();
    // A device in use cannot be detached.
    place.run("detach zram0").says(1, &format!("{device} is mounted on"));
    place.run("down").says(1, "zram0 is in use");
    place.run("detach --force").says(1, "lives");
    let held = File::open(dir.join("a")).unwrap();
    complain(&place, "umount", &[arg(&dir)]);
    drop(held);
    succeed(&place, "umount", &[arg(&dir)]);
    place.run("detach zram0").ok();
    assert_eq!(place.loops(), [""; 0]);
    place.run("detach zram0").says(1, "zram0 is not attached");

    // Its contents are unchanged.
    let device = place.run("attach zram0").ok();
    succeed(&place, "mount", &[device.trim(), arg(&dir)]);
    assert_eq!(fs::read_to_string(dir.join("a")).unwrap(), "something");
    succeed(&place, "umount", &[arg(&dir)]);
    place.run("detach zram0").ok();
    place.end_clean(daemon);
}

/// The daemon runs until it is unmounted, or forced to end.
#[test]
fn what_a_command_leaves_mounted_is_not_lost_without_a_word() {
    for force in [false, true] {
        let Some(place) = BlockPlace::needing("mkfs.ext4 mount umount") else { return };
        let dir = place.mount_point("fs");
        let command = format!("mkfs.ext4 -q $device && mount $device {}; exit 7", dir.display());
        let up = place.start(&["up", "--size", "64M", "--attach", "--exec", &command]);
        wait_until("it says why it goes on", || up.said().contains("is mounted on"));
        assert!(up.said().contains("uzram down --force"), "{}", up.said());
        up.signal(Signal::TERM);
        up.signal(Signal::TERM);
        fs::write(dir.join("a"), "something").unwrap();
        place.run("down").says(1, "zram0 is in use");
        if force {
            let unmounted = format!("unmounted {}", dir.display());
            place.run("down --force").shows(&[&unmounted, "freed /dev/loop"]);
        } else {
            succeed(&place, "umount", &[arg(&dir)]);
        }
        assert_eq!(up.ended().0.code(), Some(7));
        place.assert_clean();
    }
}

/// And nothing outlives its holder.
#[test]
fn a_dead_daemons_block_device_is_cleared() {
    let Some(place) = BlockPlace::needing("mkfs.ext4 mount umount") else { return };
    let (daemon, device) = place.up_attached("64M", "");
    let dir = place.with_file_system(&device);
    let mut file = File::create(dir.join("a")).unwrap();
    file.write_all(&[7; 100_000]).unwrap();
    place.wait_for_standby();
    let processes = ["worker_pid", "standby_pid"].map(|name| place.process(name).unwrap());
    daemon.kill();
    // Requests fail, and never hang.
    wait_until("writes fail", || file.sync_all().is_err());
    place.run("up --size 64M --attach").says(1, "uzram detach --force");
    drop(file);
    let (unmounted, freed) = (format!("unmounted {}", dir.display()), format!("freed {device}"));
    place.run("detach --force").shows(&[unmounted, freed]);
    wait_until("they are gone", || !processes.into_iter().any(is_running));
    place.assert_clean();
    assert_eq!(place.run("detach --force").ok(), "nothing was left\n");
    // Another daemon can start.
    place.run(&["up", "--size", "64M", "--attach", "--exec", "mkfs.ext4 -q $device"]).ok();
    place.assert_clean();
}

#[test]
fn two_daemons_do_not_meet() {
    let Some(place) = BlockPlace::needing("mkfs.ext4") else { return };
    let (_one, first) = place.up_attached("16M", "");
    // Not in the same place…
    let (other_dir, mount) = (place.path("other"), place.dir().join("mnt"));
    let taken = format!("up --size 16M --runtime-dir {other_dir} --mount {}", mount.display());
    place.run(&taken).says(1, "something is mounted there");
    // …but in another.
    let command = format!("test $device != {first} && mkfs.ext4 -q $device");
    let mut other = place.command(&["up", "--size", "16M", "--attach", "--exec", &command]);
    finish(other.env("UZRAM_RUNTIME_DIR", &other_dir)).ok();
    assert_eq!(place.loops(), [first]);
    place.run("down").ok();
    place.assert_clean();
}

#[test]
fn fio_finds_what_it_wrote_on_the_block_device() {
    let Some(place) = BlockPlace::needing("fio") else { return };
    let command = "fio --name=verify --filename=$device --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite \
                   --bssplit=4k/60:64k/30:1m/10 --size=96M --norandommap=0 --verify=crc32c --verify_fatal=1 \
                   --verify_state_save=0 --trim_percentage=10 --output=/dev/null";
    place.run(&["up", "--size", "128M", "--attach", "--exec", command]).ok();
    place.assert_clean();
}

#[test]
fn file_systems_fill_empty_and_give_their_memory_back() {
    let programs = "mkfs.ext4 mkfs.xfs mkfs.btrfs mount umount fstrim";
    let Some(place) = BlockPlace::needing(programs) else { return };
    // The least that xfs takes is 300 MiB.
    for (kind, size) in [("ext4", "192M"), ("xfs", "384M"), ("btrfs", "384M")] {
        if !fs::read_to_string("/proc/filesystems").unwrap().words().contains(&kind) {
            println!("skipped: this kernel has no {kind}");
            continue;
        }
        let (daemon, device) = place.up_attached(size, "");
        let stored = || place.statistic("orig_data_bytes");
        succeed(&place, &format!("mkfs.{kind}"), &["-q", &device]);
        let dir = place.mount_point("fs");
        succeed(&place, "mount", &[&device, arg(&dir)]);
        let empty = stored();
        let mut file = File::create(dir.join("a")).unwrap();
        let piece: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 7) as u8).collect();
        let mut written = 0u64;
        let full = loop {
            match file.write(&piece).and_then(|len| file.sync_data().map(|()| len)) {
                Ok(len) => written += len as u64,
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), ErrorKind::StorageFull, "{kind}: {full}");
        assert!(written > 128 << 20, "{kind}: {written}");
        let mut read = Vec::new();
        File::open(dir.join("a")).unwrap().take(64 << 20).read_to_end(&mut read).unwrap();
        assert!(read.chunks(piece.len()).all(|part| part == &piece[..part.len()]), "{kind}");
        drop(file);
        assert!(stored() > written / 2, "{kind}: {} of {written}", stored());
        fs::remove_file(dir.join("a")).unwrap();
        succeed(&place, "sync", &["-f", arg(&dir)]);
        // Some file systems discard freed blocks only at their next commit.
        wait_until(&format!("{kind} gives back"), || {
            succeed(&place, "fstrim", &[arg(&dir)]);
            stored() < empty + (24 << 20)
        });
        wait_until("its memory is given back", || place.statistic("mem_charged_bytes") < 24 << 20);
        succeed(&place, "umount", &[arg(&dir)]);
        place.end_clean(daemon);
    }
}

/// Returns the current limit on CPU wake-up latency of all processes together; `None` if it cannot be read.
fn cpu_latency_us() -> Option<i32> {
    let mut limit_us = [0; 4];
    File::open("/dev/cpu_dma_latency").ok()?.read_exact(&mut limit_us).unwrap();
    Some(i32::from_ne_bytes(limit_us))
}

#[test]
fn cpus_wake_fast_while_requests_come() {
    const LIMIT_US: i32 = 3;
    // Daemons of other tests ask, too.
    let Some(place) = BlockPlace::alone("dd") else { return };
    let Some(usual_us) = cpu_latency_us().filter(|usual_us| *usual_us > LIMIT_US) else {
        return println!("skipped: no /dev/cpu_dma_latency, or others ask for as much there");
    };
    for (limit, is_asked) in [("3", true), ("none", false)] {
        let daemon = place.up_mounted("64M", &format!("--cpu-latency-us {limit}"));
        assert!(daemon.facts.contains(if is_asked { "CPU latency 3 us" } else { "CPU latency none" }));
        let mut dd = Command::new("dd");
        dd.args([&format!("if={}", place.disk().display()), "of=/dev/null", "bs=4k", "status=none"]);
        let mut asked = false;
        wait_until("many requests were answered", || {
            let mut read = dd.spawn().unwrap();
            while read.try_wait().unwrap().is_none() {
                asked |= cpu_latency_us() == Some(LIMIT_US);
            }
            asked == is_asked
        });
        wait_until("it is asked for no longer", || cpu_latency_us() == Some(usual_us));
        daemon.terminate();
    }
}

#[test]
fn without_what_it_needs_there_is_one_clear_line() {
    let Some(place) = BlockPlace::needing("unshare mount") else { return };
    // /dev without a node, in the command's own namespace.
    let without = |node: &str, args: &str| {
        let hide =
            format!("mount -t tmpfs none /dev && mknod /dev/null c 1 3 && {node} && exec {UZRAM} {args}");
        finish(isolated(&hide).env("UZRAM_RUNTIME_DIR", place.dir()))
    };
    let fuse = "mknod /dev/fuse c 10 229";
    for (node, args, what) in [
        ("true", "up --size 16M --mount /tmp", "/dev/fuse"),
        ("true", "swap on --size 64M", "/dev/fuse"),
        (fuse, "up --size 16M --attach", "/dev/loop-control"),
        (fuse, "swap on --size 64M", "/dev/loop-control"),
    ] {
        without(node, args).says(1, what);
    }
    // The daemon works without this node.
    let ended = without(fuse, &format!("up --size 16M --mount {}/mnt --exec true", place.dir().display()));
    let said = "CPU latency none: /dev/cpu_dma_latency: No such file";
    assert!(ended.status.success() && ended.stderr.contains(said), "{ended}");
    for args in ["attach zram0", "detach zram0", "swap on --size 64M", "swap off"] {
        let mut command = bare_command(args);
        command.env("UZRAM_RUNTIME_DIR", "/tmp/uzram-nobody").uid(NOBODY).gid(NOBODY);
        finish(command).says(1, "as root");
    }
    place.assert_clean();
}
