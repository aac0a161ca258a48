//! Interrupting tasks over all pages.

use super::tests::device;
use super::*;
use crate::base::units::PAGE_SIZE;
use crate::base::work::Unit;
use crate::store::tests::until;

/// Returns a device with 1024 pages that zstd makes smaller than lz4 does.
fn compressible(settings: &[(&str, &str)]) -> Arc<Device> {
    let device = device(settings);
    device.set("recomp_algorithm", "algo=zstd:1").expect("known");
    device.set("disksize", "4M").expect("memory");
    let disk = device.open().expect("initialised");
    for page in 0..1024 {
        disk.write(page * 4096, &digits(page)).expect("memory");
    }
    device
}

fn digits(page: u64) -> Vec<u8> {
    let mut random = crate::base::random::Random::new(page);
    let mut text = String::new();
    while text.len() < 4096 {
        text += &random.below(10_000).to_string();
    }
    text.into_bytes()[..4096].to_vec()
}

#[test]
fn what_is_no_longer_wanted_ends_and_what_was_done_stays_done() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = format!("{}:8M", directory.path().join("file").display());
    for (name, value) in [("recompress", ""), ("writeback", "all"), ("idle", "all"), ("compact", "1")] {
        let device = compressible(&[("backing_dev", &file)]);
        let disk = device.open().expect("initialised");
        if name == "compact" {
            (0..1024)
                .filter(|page| page % 4 > 0)
                .for_each(|page| disk.discard(page * 4096, 4096).expect("in range"));
        }
        let asked = Counter::new(0);
        let is_wanted = || asked.add(1) < 3;
        let error = device.set_interruptible(name, value, &is_wanted).expect_err("it is no longer wanted");
        assert_eq!((error.kind(), error.errno()), (ErrorKind::Interrupted, 4), "{name}");
        let done = error.to_string();
        let unit = if name == "compact" { " objects moved" } else { " pages done" };
        let done = done.strip_prefix("interrupted: ").and_then(|rest| rest.strip_suffix(unit));
        let done: u64 = done.expect(name).parse().expect(name);
        let stats = device.stats();
        match name {
            "recompress" => assert_eq!((done, stats.pages_recompressed), (48, 48)),
            "writeback" => assert_eq!((done, stats.pages_backed), (48, 48)),
            "idle" => assert_eq!(done, 48),
            _ => assert!(done < 256),
        }
        assert!(device.tasks().is_empty(), "{name}");
        let mut read = vec![0; 4096];
        for page in (0..1024).filter(|page| name != "compact" || page % 4 == 0) {
            disk.read(page * 4096, &mut read).expect("sound");
            assert!(read == digits(page), "{name}: page {page}");
        }
        // The task can be started again.
        device.set(name, value).expect(name);
        drop(disk);
        device.set("reset", "1").expect("nobody uses it");
    }
}

#[test]
fn reset_and_removal_end_what_is_being_done_unless_somebody_has_the_device_open() {
    for end in [|device: &Device| device.set("reset", "1"), |device: &Device| device.remove()] {
        let device = compressible(&[]);
        let (begun, goes_on) = (Counter::new(0), || true);
        std::thread::scope(|scope| {
            // A task that never ends unless it is interrupted.
            let task = scope.spawn(|| {
                let task = device.begin("recompress", Unit::Pages, &goes_on)?;
                task.work.expect(1 << 40);
                loop {
                    task.work.step()?;
                    begun.add(1);
                    std::thread::yield_now();
                }
            });
            until("the task", || begun.get() > 0);
            let progress = device.get("progress").expect("readable");
            let words: Vec<_> = progress.split(' ').collect();
            assert!(words[0] == "recompress" && words[1] != "0" && words[2] == "1099511627776", "{progress}");
            let disk = device.open().expect("initialised");
            assert_eq!(end(&device).expect_err("it is open").kind(), ErrorKind::Busy);
            let done = begun.get();
            until("more of the task", || begun.get() > done);
            drop(disk);
            end(&device).expect("it ends");
            let ended: Result<()> = task.join().expect("no panic");
            assert_eq!(ended.expect_err("it was interrupted").kind(), ErrorKind::Interrupted);
        });
        assert_eq!(device.get("progress"), Ok(String::new()));
        assert_eq!(device.size_bytes(), 0);
    }
}

#[test]
fn what_is_done_to_an_open_device_goes_on_when_another_task_ends() {
    let device = device(&[("disksize", "4M")]);
    let disk = device.open().expect("initialised");
    let goes_on = || true;
    let begin = || device.begin("recompress", Unit::Pages, &goes_on).expect("initialised");
    let task = begin();
    let ended = Counter::new(0);
    std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            for _ in 0..500_000 {
                drop(begin());
            }
            ended.set(1);
        });
        while ended.get() == 0 {
            let refused = device.set("reset", "1").expect_err("it is open");
            assert_eq!(refused.kind(), ErrorKind::Busy);
            task.work.check().expect("it is still wanted");
        }
        others.join().expect("no panic");
    });
    drop((task, disk));
    device.set("reset", "1").expect("nobody uses it");
}

#[test]
fn looking_at_pages_ends_when_it_is_no_longer_wanted() {
    const PAGES: u64 = 10_000;
    let directory = tempfile::tempdir().expect("a directory");
    let file = format!("{}:8M", directory.path().join("file").display());
    let device = device(&[("recomp_algorithm", "algo=zstd:1"), ("backing_dev", &file), ("disksize", "64M")]);
    let disk = device.open().expect("initialised");
    (0..PAGES).for_each(|page| disk.write(page * 4096, &[7; PAGE_SIZE]).expect("memory"));
    for (name, value) in [("recompress", ""), ("writeback", "all"), ("idle", "all")] {
        let asked = Counter::new(0);
        let is_wanted = || asked.add(1) < 2;
        let error = device.set_interruptible(name, value, &is_wanted).expect_err("it is not wanted");
        assert_eq!((error.kind(), asked.get()), (ErrorKind::Interrupted, 2), "{name}");
        device.set(name, value).expect(name);
    }
}
