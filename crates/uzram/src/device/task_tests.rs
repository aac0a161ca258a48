//! Work on all pages that is no longer wanted.

use super::tests::device;
use super::*;

/// A device of 1024 pages that zstd makes smaller than lz4 does.
fn compressible() -> Arc<Device> {
    let device = device(&[("recomp_algorithm", "algo=zstd:1"), ("disksize", "4M")]);
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
        let device =
            device(&[("recomp_algorithm", "algo=zstd:1"), ("backing_dev", &file), ("disksize", "4M")]);
        let disk = device.open().expect("initialised");
        for page in 0..1024 {
            disk.write(page * 4096, &digits(page)).expect("memory");
        }
        if name == "compact" {
            (0..1024)
                .filter(|page| page % 4 > 0)
                .for_each(|page| disk.discard(page * 4096, 4096).expect("in range"));
        }
        let asked = Counter::new(0);
        let is_wanted = || asked.add(1) < 3;
        let error = device.set_for(name, value, &is_wanted).expect_err("it is no longer wanted");
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
        // And it can be taken up again.
        device.set(name, value).expect(name);
        drop(disk);
        device.set("reset", "1").expect("nobody uses it");
    }
}

#[test]
fn reset_and_removal_end_what_is_being_done_unless_somebody_has_the_device_open() {
    for end in [|device: &Device| device.set("reset", "1"), |device: &Device| device.remove()] {
        let device = compressible();
        let (begun, goes_on) = (Counter::new(0), || true);
        std::thread::scope(|scope| {
            // It would never end by itself.
            let task = scope.spawn(|| {
                let task = device.begin("recompress", &goes_on)?;
                task.work.expect(1 << 40);
                loop {
                    task.work.step()?;
                    begun.add(1);
                    std::thread::yield_now();
                }
            });
            while begun.get() == 0 {
                std::thread::yield_now();
            }
            let progress = device.get("progress").expect("readable");
            let words: Vec<_> = progress.split(' ').collect();
            assert!(words[0] == "recompress" && words[1] != "0" && words[2] == "1099511627776", "{progress}");
            let disk = device.open().expect("initialised");
            assert_eq!(end(&device).expect_err("it is open").kind(), ErrorKind::Busy);
            let done = begun.get();
            while begun.get() == done {
                std::thread::yield_now();
            }
            drop(disk);
            end(&device).expect("it ends");
            let ended: Result<()> = task.join().expect("no panic");
            assert_eq!(ended.expect_err("it was interrupted").kind(), ErrorKind::Interrupted);
        });
        assert_eq!(device.get("progress"), Ok(String::new()));
        assert_eq!(device.size_bytes(), 0);
    }
}
