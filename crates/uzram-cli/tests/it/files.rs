//! Devices as files (`uzram up --mount`), and as block devices (`uzram attach`): the real program, mounts and
//! tools.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use crate::common::block::{BlockPlace, unable};
use crate::common::clients::{arg, complain, missing, succeed};
use crate::common::{Daemon, PATIENCE, wait_until};
use rustix::process::Signal;
use uzram::random::Random;

/// Starts a daemon that shows its devices as files at [`BlockPlace::files`].
fn up(place: &BlockPlace, size: &str, args: &[&str]) -> Daemon {
    let mount = place.dir().join("mnt");
    let args = [&["--mount", arg(&mount)], args].concat();
    place.up_sized(size, &args)
}

fn fallocate(file: &File, mode: i32, offset: u64, len: u64) -> std::io::Result<()> {
    // SAFETY: the descriptor is open.
    match unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, len as i64) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

fn write_and_read(file: &File, offset: u64, len: usize, seed: u8) {
    let bytes: Vec<u8> = (0..len).map(|at| (at / 50) as u8 ^ seed).collect();
    file.write_all_at(&bytes, offset).unwrap();
    let mut read = vec![0; len];
    file.read_exact_at(&mut read, offset).unwrap();
    assert!(read == bytes, "{len} bytes at {offset}");
}

#[test]
fn the_disk_is_a_file() {
    let Some(place) = BlockPlace::if_able() else { return };
    let daemon = up(&place, "16M", &[]);
    let disk = OpenOptions::new().read(true).write(true).open(place.disk()).unwrap();
    assert_eq!(disk.metadata().unwrap().len(), 16 << 20);
    // At any offset and length, shorter and longer than the kernel's longest request.
    for (seed, (offset, len)) in
        [(0, 4096), (1, 1), (4095, 2), (8192, 3 << 20), (777, 2_000_001), ((16 << 20) - 5, 5)]
            .into_iter()
            .enumerate()
    {
        write_and_read(&disk, offset, len, seed as u8);
    }
    assert_eq!(disk.set_len(0).unwrap_err().raw_os_error(), Some(22));
    // As with a block device, O_TRUNC does not truncate it.
    let cut = OpenOptions::new().write(true).truncate(true).open(place.disk()).unwrap();
    assert_eq!(cut.metadata().unwrap().len(), 16 << 20);
    disk.sync_all().unwrap();
    // While the file is open, the device cannot be reset.
    assert!(place.run(&["reset", "zram0"]).complaint(1).contains("in use"));
    drop((disk, cut));
    wait_until("it is closed", || place.run(&["reset", "zram0"]).status.success());
    assert_eq!(File::open(place.disk()).unwrap_err().raw_os_error(), Some(16), "it has no size");
    daemon.terminate();
    place.assert_clean();
}

#[test]
fn holes_are_punched_found_and_free() {
    let Some(place) = BlockPlace::if_able() else { return };
    let _daemon = up(&place, "16M", &[]);
    let mut disk = OpenOptions::new().read(true).write(true).open(place.disk()).unwrap();
    let allocated = || fs::metadata(place.disk()).unwrap().blocks() * 512;
    write_and_read(&disk, 1 << 20, 1 << 20, 3);
    assert_eq!(place.statistic("orig_data_bytes"), 1 << 20);
    assert_eq!(disk.seek(SeekFrom::Start(0)).unwrap(), 0);
    let seek = |whence, from| {
        // SAFETY: the descriptor is open.
        unsafe { libc::lseek(disk.as_raw_fd(), from, whence) }
    };
    assert_eq!(seek(libc::SEEK_DATA, 0), 1 << 20);
    assert_eq!(seek(libc::SEEK_HOLE, 1 << 20), 2 << 20);
    assert_eq!(seek(libc::SEEK_DATA, 2 << 20), -1);
    assert_eq!(seek(libc::SEEK_HOLE, 2 << 20), 2 << 20);
    assert_eq!(seek(libc::SEEK_HOLE, 16 << 20), -1);
    let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // Parts of pages are overwritten, whole ones freed.
    fallocate(&disk, hole, (1 << 20) + 100, (512 << 10) - 100).unwrap();
    let mut read = vec![1; 512 << 10];
    disk.read_exact_at(&mut read, 1 << 20).unwrap();
    assert!(read[..100].iter().any(|byte| *byte != 0) && read[100..].iter().all(|byte| *byte == 0));
    assert_eq!(place.statistic("orig_data_bytes"), (512 << 10) + 4096);
    fallocate(&disk, libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, 1 << 20, 1 << 20).unwrap();
    disk.read_exact_at(&mut read, 1 << 20).unwrap();
    assert!(read.iter().all(|byte| *byte == 0));
    fallocate(&disk, hole, 0, 16 << 20).unwrap();
    assert_eq!(place.statistic("orig_data_bytes"), 0);
    wait_until("the kernel asks again", || allocated() == 0);
    assert!(fallocate(&disk, 0, 0, 4096).is_err(), "no room can be promised");
}

/// A file mapped shared, unmapped when dropped.
struct Map {
    start: *mut u8,
    len: usize,
}

impl Map {
    fn new(file: &File, len: usize) -> std::io::Result<Map> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Map { start: start.cast(), len })
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: the range lies in the mapping, and no reference to it exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(at), bytes.len()) };
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(self.start.add(at), bytes.as_mut_ptr(), len) };
        bytes
    }

    fn sync(&self) {
        // SAFETY: the range is the mapping.
        let synced = unsafe { libc::msync(self.start.cast(), self.len, libc::MS_SYNC) };
        assert_eq!(synced, 0, "msync: {}", std::io::Error::last_os_error());
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// What is written to a mapping is read from the file, and the other way round.
#[test]
fn the_disk_can_be_mapped() {
    const LEN: usize = 16 << 20;
    let Some(place) = BlockPlace::if_able() else { return };
    let daemon = up(&place, "16M", &[]);
    let disk = OpenOptions::new().read(true).write(true).open(place.disk()).unwrap();
    let map = match Map::new(&disk, LEN) {
        Ok(map) => map,
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) && !since_linux(6, 6) => {
            println!("skipped: files without page cache can be mapped shared since Linux 6.6");
            return;
        }
        Err(error) => panic!("mmap: {error}"),
    };
    let text = |seed: u8, len: usize| -> Vec<u8> { (0..len).map(|at| (at / 9) as u8 ^ seed).collect() };
    let mut read = vec![0; 2 << 20];
    for (seed, at) in [(1, 0), (2, 4096 * 5 + 77), (3, LEN - (2 << 20))] {
        let bytes = text(seed, 2 << 20);
        map.write(at, &bytes);
        map.sync();
        disk.read_exact_at(&mut read, at as u64).unwrap();
        assert!(read == bytes, "written to the mapping at {at}");
        // Through another open file.
        File::open(place.disk()).unwrap().read_exact_at(&mut read, at as u64).unwrap();
        assert!(read == bytes);
        let bytes = text(seed ^ 0x80, 100_000);
        disk.write_all_at(&bytes, at as u64 + 333).unwrap();
        assert!(map.read(at + 333, bytes.len()) == bytes, "written to the file at {at}");
    }
    assert!(place.statistic("orig_data_bytes") >= 4 << 20);
    // Dirty pages are written when the file is closed.
    map.write(9 << 20, b"at last");
    drop((map, disk));
    wait_until("it is written", || {
        let mut read = [0; 7];
        File::open(place.disk()).unwrap().read_exact_at(&mut read, 9 << 20).unwrap();
        read == *b"at last"
    });
    daemon.terminate();
    place.assert_clean();
}

fn since_linux(major: u32, minor: u32) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    let here: (u32, u32) = (numbers.next().unwrap(), numbers.next().unwrap());
    here >= (major, minor)
}

/// Discarding a TiB that was never written takes no memory, and does not delay other requests.
#[test]
fn discarding_what_was_never_written_takes_no_memory_and_keeps_nobody_waiting() {
    const LEN: u64 = 1 << 40;
    let Some(place) = BlockPlace::if_able() else { return };
    let _daemon = up(&place, "1T", &[]);
    let disk = OpenOptions::new().read(true).write(true).open(place.disk()).unwrap();
    write_and_read(&disk, 5 << 30, 1 << 20, 3);
    let tables_bytes = || place.statistic("mem_tables_bytes");
    let before_bytes = tables_bytes();
    let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // `turn` is odd during a discard; repeat until a read began and ended within one.
    let (turn, was_read) = (AtomicUsize::new(0), AtomicBool::new(false));
    let deadline = Instant::now() + PATIENCE;
    std::thread::scope(|scope| {
        let discarding = scope.spawn(|| {
            while !was_read.load(Ordering::Relaxed) && Instant::now() < deadline {
                turn.fetch_add(1, Ordering::SeqCst);
                fallocate(&disk, hole, 6 << 30, LEN - (6 << 30)).unwrap();
                turn.fetch_add(1, Ordering::SeqCst);
            }
        });
        let reader = File::open(place.disk()).unwrap();
        while !discarding.is_finished() {
            let before = turn.load(Ordering::SeqCst);
            reader.read_exact_at(&mut [0; 4096], 5 << 30).unwrap();
            if before % 2 == 1 && turn.load(Ordering::SeqCst) == before {
                was_read.store(true, Ordering::Relaxed);
            }
        }
        discarding.join().unwrap();
    });
    assert!(was_read.into_inner(), "it could not be read meanwhile");
    let after_bytes = tables_bytes();
    assert!(after_bytes <= before_bytes + (1 << 20), "{before_bytes} before, {after_bytes} after");
}

/// Holes longer than a thread makes at once, which begin and end within pages, or past the end.
#[test]
fn long_holes_are_made_whole() {
    const LEN: usize = 48 << 20;
    let Some(place) = BlockPlace::if_able() else { return };
    let _daemon = up(&place, "48M", &[]);
    let disk = OpenOptions::new().read(true).write(true).open(place.disk()).unwrap();
    let mut model: Vec<u8> = (0..LEN).map(|at| (at / 64) as u8 | 1).collect();
    let expect = |model: &[u8], what: &str| {
        let mut all = vec![1; LEN];
        disk.read_exact_at(&mut all, 0).unwrap();
        assert!(all == model, "{what}");
    };
    disk.write_all_at(&model, 0).unwrap();
    for (how, offset, len) in [
        (libc::FALLOC_FL_PUNCH_HOLE, 100, 33 << 20),
        (libc::FALLOC_FL_ZERO_RANGE, (13 << 20) + 4095, (16 << 20) + 2),
    ] {
        fallocate(&disk, how | libc::FALLOC_FL_KEEP_SIZE, offset as u64, len as u64).unwrap();
        model[offset..offset + len].fill(0);
        expect(&model, "zeros where they were asked for");
        disk.write_all_at(&vec![7; len], offset as u64).unwrap();
        model[offset..offset + len].fill(7);
        // A page past the end.
        let beyond = LEN - offset + 4096;
        fallocate(&disk, how | libc::FALLOC_FL_KEEP_SIZE, offset as u64, beyond as u64).unwrap();
        model[offset..].fill(0);
        expect(&model, "zeros up to the end");
    }
}

/// Seeded reads, writes, holes and zeros at any offset and length, against plain bytes.
#[test]
fn random_operations_agree_with_a_model() {
    const LEN: u64 = 8 << 20;
    let Some(place) = BlockPlace::if_able() else { return };
    // Some pages leave memory and come back.
    let cold = place.root().join("cold");
    let backing = format!("{}:32M", cold.display());
    let _daemon = up(&place, "8M", &["--backing", &backing, "--mem-limit", "3M"]);
    let disk = OpenOptions::new().read(true).write(true).open(place.disk()).unwrap();
    for seed in 1..=4u64 {
        let mut numbers = Random::new(seed);
        let mut random = |end: u64| numbers.below(end as usize) as u64;
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
                    let (first, factor) = (random(256), random(2) * 0x9e37_79b9_7f4a_7c15);
                    let byte =
                        |at: u64| first.wrapping_add((at * at).wrapping_mul(factor).rotate_left(17)) as u8;
                    let bytes: Vec<u8> = (0..len).map(byte).collect();
                    disk.write_all_at(&bytes, offset).unwrap();
                    model[range].copy_from_slice(&bytes);
                }
                3..6 => {
                    let mut bytes = vec![1; len as usize];
                    disk.read_exact_at(&mut bytes, offset).unwrap();
                    assert!(bytes == model[range], "seed {seed}, step {step}: {len} bytes at {offset}");
                }
                what => {
                    let how = if what == 6 { libc::FALLOC_FL_PUNCH_HOLE } else { libc::FALLOC_FL_ZERO_RANGE };
                    fallocate(&disk, how | libc::FALLOC_FL_KEEP_SIZE, offset, len).unwrap();
                    model[range].fill(0);
                }
            }
        }
        let mut all = vec![1; LEN as usize];
        disk.read_exact_at(&mut all, 0).unwrap();
        assert!(all == model, "seed {seed}");
    }
    assert!(place.statistic("pages_written_back") > 0);
    assert_eq!(place.statistic("failed_reads") + place.statistic("failed_writes"), 0);
}

#[test]
fn attributes_are_files() {
    let Some(place) = BlockPlace::if_able() else { return };
    let _daemon = up(&place, "16M", &[]);
    let attribute = |name: &str| place.files().join(name);
    let read = |name: &str| fs::read_to_string(attribute(name)).unwrap();
    assert_eq!(read("disksize"), "16777216\n");
    assert_eq!(read("initstate"), "1\n");
    assert_eq!(read("mm_stat").split_whitespace().count(), 9);
    fs::write(attribute("mem_limit"), "8M\n").unwrap();
    assert_eq!(read("mem_limit"), "8388608\n");
    assert_eq!(fs::write(attribute("mem_limit"), "much").unwrap_err().raw_os_error(), Some(22));
    assert_eq!(fs::write(attribute("comp_algorithm"), "zstd").unwrap_err().raw_os_error(), Some(16));
    assert_eq!(fs::write(attribute("nothing"), "1").unwrap_err().kind(), ErrorKind::PermissionDenied);
    assert_eq!(fs::remove_file(attribute("disk")).unwrap_err().kind(), ErrorKind::PermissionDenied);
    assert!(fs::read(attribute("reset")).is_err(), "it is only written");
    // Added devices appear, removed ones disappear.
    place.run(&["add", "logs", "--size", "8M"]).ok();
    let logs = place.dir().join("mnt/logs/disk");
    assert_eq!(fs::metadata(&logs).unwrap().len(), 8 << 20);
    let names = |dir| -> Vec<String> {
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!(names(place.dir().join("mnt")), ["zram0", "logs"]);
    assert!(names(place.files()).contains(&"mm_stat".to_owned()));
    place.run(&["remove", "logs"]).ok();
    wait_until("it is gone", || !logs.exists());
    let json = place.json(&["stat", "zram0"]);
    assert_eq!(json["file"], arg(&place.disk()));
}

#[test]
fn a_block_device_is_attached_once_and_detached_when_free() {
    let Some(place) = BlockPlace::needing(&["mkfs.ext4", "mount", "umount"]) else { return };
    let daemon = up(&place, "64M", &[]);
    let device = place.run(&["attach", "zram0"]).ok();
    let device = device.trim();
    assert_eq!(place.loops(), [device]);
    let again = place.run(&["attach", "zram0"]);
    assert!(again.complaint(1).contains(&format!("attached already, as {device}")), "{}", again.stderr);
    let none = place.run(&["attach", "zram1"]);
    assert!(none.complaint(1).contains("no device 'zram1'"), "{}", none.stderr);
    let queue = |name: &str| {
        let path = format!("/sys/block/{}/queue/{name}", device.trim_start_matches("/dev/"));
        // Not every kernel throttles writes.
        fs::read_to_string(path).unwrap_or("0".to_owned()).trim().to_owned()
    };
    let queue = ["logical_block_size", "rotational", "write_cache", "wbt_lat_usec"].map(queue);
    assert_eq!(queue, ["4096", "0", "write through", "0"]);

    succeed(&place, "mkfs.ext4", &["-q", device]);
    let dir = place.mount_point("fs");
    succeed(&place, "mount", &[device, arg(&dir)]);
    fs::write(dir.join("a"), "something").unwrap();
    // A device in use cannot be detached.
    let detach = place.run(&["detach", "zram0"]);
    assert!(detach.complaint(1).contains(&format!("{device} is mounted on")), "{}", detach.stderr);
    let down = place.run(&["down"]);
    assert!(down.complaint(1).contains("zram0 is in use"), "{}", down.stderr);
    let force = place.run(&["detach", "--force"]);
    assert!(force.complaint(1).contains("lives"), "{}", force.stderr);
    let held = File::open(dir.join("a")).unwrap();
    complain(&place, "umount", &[arg(&dir)]);
    drop(held);
    succeed(&place, "umount", &[arg(&dir)]);
    place.run(&["detach", "zram0"]).ok();
    assert_eq!(place.loops(), [""; 0]);
    let detach = place.run(&["detach", "zram0"]);
    assert!(detach.complaint(1).contains("zram0 is not attached"), "{}", detach.stderr);

    // Its contents are unchanged.
    let device = place.run(&["attach", "zram0"]).ok();
    succeed(&place, "mount", &[device.trim(), arg(&dir)]);
    assert_eq!(fs::read_to_string(dir.join("a")).unwrap(), "something");
    succeed(&place, "umount", &[arg(&dir)]);
    place.run(&["detach", "zram0"]).ok();
    place.end_clean(daemon);
}

#[test]
fn a_commands_block_device_goes_with_it() {
    let Some(place) = BlockPlace::needing(&["mkfs.ext4", "mount", "umount"]) else { return };
    let dir = place.mount_point("fs");
    let command = format!(
        "test -b $device && mkfs.ext4 -q $device && mount $device {0} && echo hello >{0}/a && cat {0}/a && umount {0}",
        dir.display()
    );
    let ended = place.run(&["up", "--size", "64M", "--attach", "--exec", &command]);
    assert_eq!(ended.ok(), "hello\n");
    place.assert_clean();
}

/// A file system that a command leaves mounted keeps the daemon running until it is unmounted or the daemon
/// is forced.
#[test]
fn what_a_command_leaves_mounted_is_not_lost_without_a_word() {
    if unable() || missing(&["mkfs.ext4", "mount", "umount"]) {
        return;
    }
    for force in [false, true] {
        let place = BlockPlace::new();
        let dir = place.mount_point("fs");
        let command = format!("mkfs.ext4 -q $device && mount $device {}; exit 7", dir.display());
        let up = place.start(&["up", "--size", "64M", "--attach", "--exec", &command]);
        wait_until("it says why it goes on", || up.said().contains("is mounted on"));
        assert!(up.said().contains("uzram down --force"), "{}", up.said());
        up.signal(Signal::TERM);
        up.signal(Signal::TERM);
        fs::write(dir.join("a"), "something").unwrap();
        let down = place.run(&["down"]);
        assert!(down.complaint(1).contains("zram0 is in use"), "{}", down.stderr);
        if force {
            let said = place.run(&["down", "--force"]).ok();
            assert!(said.contains(&format!("unmounted {}", dir.display())), "{said}");
            assert!(said.contains("freed /dev/loop"), "{said}");
        } else {
            succeed(&place, "umount", &[arg(&dir)]);
        }
        assert_eq!(up.ended().0.code(), Some(7));
        place.assert_clean();
    }
}

#[test]
fn a_dead_daemons_block_device_is_cleared() {
    let Some(place) = BlockPlace::needing(&["mkfs.ext4", "mount", "umount"]) else { return };
    let daemon = up(&place, "64M", &["--attach"]);
    let device = place.loops().remove(0);
    succeed(&place, "mkfs.ext4", &["-q", &device]);
    let dir = place.mount_point("fs");
    succeed(&place, "mount", &[&device, arg(&dir)]);
    let mut file = File::create(dir.join("a")).unwrap();
    file.write_all(&[7; 100_000]).unwrap();
    daemon.signal(Signal::KILL);
    daemon.ended();
    // Requests fail, and never hang.
    wait_until("writes fail", || file.sync_all().is_err());
    let up = place.run(&["up", "--size", "64M", "--attach"]);
    assert!(up.complaint(1).contains("uzram detach --force"), "{}", up.stderr);
    drop(file);
    let said = place.run(&["detach", "--force"]).ok();
    assert!(said.contains(&format!("unmounted {}", dir.display())), "{said}");
    assert!(said.contains(&format!("freed {device}")), "{said}");
    place.assert_clean();
    assert_eq!(place.run(&["detach", "--force"]).ok(), "nothing was left\n");
    // Another daemon can start.
    let ended = place.run(&["up", "--size", "64M", "--attach", "--exec", "mkfs.ext4 -q $device"]);
    ended.ok();
    place.assert_clean();
}

#[test]
fn two_daemons_do_not_meet() {
    let Some(place) = BlockPlace::needing(&["mkfs.ext4"]) else { return };
    let _one = up(&place, "16M", &["--attach"]);
    let first = place.loops();
    // Not in the same place…
    let same = place.run(&["up", "--size", "16M", "--attach"]);
    assert!(same.complaint(1).contains("already serves"), "{}", same.stderr);
    let other_dir = place.root().join("other");
    let mount = place.dir().join("mnt");
    let taken = ["up", "--size", "16M", "--runtime-dir", arg(&other_dir), "--mount", arg(&mount)];
    let taken = place.run(&taken);
    assert!(taken.complaint(1).contains("something is mounted there"), "{}", taken.stderr);
    // …but in another.
    let command = "test $device != \"$UZRAM_OTHER\" && mkfs.ext4 -q $device";
    let mut other = place.command(&["up", "--size", "16M", "--attach", "--exec", command]);
    other.env("UZRAM_RUNTIME_DIR", &other_dir).env("UZRAM_OTHER", &first[0]);
    crate::common::finish(other).ok();
    assert_eq!(place.loops(), first);
    place.run(&["down"]).ok();
    place.assert_clean();
}

#[test]
fn fio_finds_what_it_wrote_on_the_block_device() {
    let Some(place) = BlockPlace::needing(&["fio"]) else { return };
    let command = "fio --name=verify --filename=$device --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite \
                   --bssplit=4k/60:64k/30:1m/10 --size=96M --norandommap=0 --verify=crc32c --verify_fatal=1 \
                   --verify_state_save=0 --trim_percentage=10 --output=/dev/null";
    place.run(&["up", "--size", "128M", "--attach", "--exec", command]).ok();
    place.assert_clean();
}

#[test]
fn file_systems_fill_empty_and_give_their_memory_back() {
    let Some(place) =
        BlockPlace::needing(&["mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "mount", "umount", "fstrim"])
    else {
        return;
    };
    for kind in ["ext4", "xfs", "btrfs"] {
        let known = fs::read_to_string("/proc/filesystems").unwrap();
        if !known.split_whitespace().any(|name| name == kind) {
            println!("skipped: this kernel has no {kind}");
            continue;
        }
        let daemon = up(&place, "384M", &["--attach"]);
        let device = place.loops().remove(0);
        succeed(&place, &format!("mkfs.{kind}"), &["-q", &device]);
        let dir = place.mount_point("fs");
        succeed(&place, "mount", &[&device, arg(&dir)]);
        let empty = place.statistic("orig_data_bytes");
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
        let filled = place.statistic("orig_data_bytes");
        assert!(filled > written / 2, "{kind}: {filled} of {written}");
        fs::remove_file(dir.join("a")).unwrap();
        succeed(&place, "sync", &[]);
        succeed(&place, "fstrim", &[arg(&dir)]);
        // Some file systems discard freed blocks only at their next commit.
        wait_until(&format!("{kind} gives back"), || {
            succeed(&place, "fstrim", &[arg(&dir)]);
            place.statistic("orig_data_bytes") < empty + (24 << 20)
        });
        wait_until("its memory is given back", || place.statistic("mem_charged_bytes") < 24 << 20);
        succeed(&place, "umount", &[arg(&dir)]);
        place.end_clean(daemon);
    }
}

#[test]
fn a_daemon_whose_terminal_is_gone_takes_its_block_device_along() {
    if unable() {
        return;
    }
    for signal in [Signal::HUP, Signal::QUIT] {
        let place = BlockPlace::new();
        let daemon = place.up_sized("16M", &["--attach"]);
        assert_eq!(place.loops().len(), 1);
        daemon.signal(signal);
        assert!(daemon.ended().0.success());
        place.assert_clean();
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
    let Some(usual_us) = cpu_latency_us().filter(|usual_us| *usual_us > LIMIT_US) else {
        println!("skipped: no /dev/cpu_dma_latency, or others ask for as much there");
        return;
    };
    let Some(place) = BlockPlace::needing(&["dd"]) else { return };
    for (limit, is_asked) in [("3", true), ("none", false)] {
        let daemon = up(&place, "64M", &["--cpu-latency-us", limit]);
        assert!(daemon.facts.contains(if is_asked { "CPU latency 3 us" } else { "CPU latency none" }));
        let mut read = std::process::Command::new("dd");
        read.args([&format!("if={}", place.disk().display()), "of=/dev/null", "bs=4k", "status=none"]);
        let mut asked = false;
        wait_until("many requests were answered", || {
            let mut read = read.spawn().unwrap();
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
    let Some(place) = BlockPlace::needing(&["unshare", "mount"]) else { return };
    // /dev without a node, in the command's own namespace.
    let without = |node: &str, args: &str| {
        let program = env!("CARGO_BIN_EXE_uzram");
        let hide =
            format!("mount -t tmpfs none /dev && mknod /dev/null c 1 3 && {node} && exec {program} {args}");
        let mut command = std::process::Command::new("unshare");
        command.args(["-m", "sh", "-c", &hide]).env("UZRAM_RUNTIME_DIR", place.dir());
        crate::common::finish(command)
    };
    let fuse = "mknod /dev/fuse c 10 229";
    for (node, args, what) in [
        ("true", "up --size 16M --mount /tmp", "/dev/fuse"),
        ("true", "swap on --size 64M", "/dev/fuse"),
        (fuse, "up --size 16M --attach", "/dev/loop-control"),
        (fuse, "swap on --size 64M", "/dev/loop-control"),
    ] {
        let ended = without(node, args);
        assert!(ended.complaint(1).contains(what), "{args}: {}", ended.stderr);
    }
    // The daemon works without this node.
    let ended = without(fuse, &format!("up --size 16M --mount {}/mnt --exec true", place.dir().display()));
    let said = "CPU latency none: /dev/cpu_dma_latency: No such file";
    assert!(ended.status.success() && ended.stderr.contains(said), "{}", ended.stderr);
    let nobody = |args: &[&str]| {
        use std::os::unix::process::CommandExt;
        let mut command = crate::common::bare_command(args);
        command.env("UZRAM_RUNTIME_DIR", "/tmp/uzram-nobody").uid(65534).gid(65534);
        crate::common::finish(command)
    };
    for args in
        [&["attach", "zram0"][..], &["detach", "zram0"], &["swap", "on", "--size", "64M"], &["swap", "off"]]
    {
        let ended = nobody(args);
        assert!(ended.complaint(1).contains("as root"), "{args:?}: {}", ended.stderr);
    }
    place.assert_clean();
}
