//! Who keeps what, and when; and what an attached device has. `tests/it/crash.rs` kills processes.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::tests::{dictionary, set};
use super::*;
use crate::backing::{Engine, FaultyBacking, FileBacking, FileOptions};
use crate::base::units::PAGE_SIZE;
use crate::store::tests::noise;

/// Duplicates of what it was given, and the name of what it was called for last.
#[derive(Default)]
struct Kept {
    refuses: bool,
    memory: Option<OwnedFd>,
    backing: Vec<KeptPart<OwnedFd>>,
    calls: Vec<&'static str>,
}

struct Shelf(std::sync::Mutex<Kept>);

impl Shelf {
    fn new() -> Arc<Self> {
        Arc::new(Shelf(Default::default()))
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.0.lock().expect("no panic")
    }

    fn calls(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.kept().calls)
    }
}

impl Keeper for Shelf {
    fn keep(&self, device: &str, memory: BorrowedFd<'_>, backing: Option<&NamedBacking>) -> Result<()> {
        assert_eq!(device, "zram7");
        let kept = &mut *self.kept();
        kept.calls.push("keep");
        if kept.refuses {
            return Err(Error::new(ErrorKind::NoSpace, "the shelf is full"));
        }
        kept.memory = Some(memory.try_clone_to_owned().expect("a descriptor"));
        kept.backing =
            backing.and_then(NamedBacking::parts).unwrap_or_default().iter().map(duplicate).collect();
        Ok(())
    }

    fn give_up(&self, device: &str) {
        assert_eq!(device, "zram7");
        let kept = &mut *self.kept();
        kept.calls.push("give up");
        // Another process may still have the backing device's descriptor.
        kept.memory = None;
    }
}

fn duplicate<D: AsFd>(part: &KeptPart<D>) -> KeptPart<OwnedFd> {
    let descriptor = part.descriptor.as_fd().try_clone_to_owned().expect("a descriptor");
    KeptPart { name: part.name.clone(), len_bytes: part.len_bytes, descriptor }
}

fn device(keeper: &Arc<Shelf>) -> Arc<Device> {
    let device = Device::new("zram7").expect("a good name");
    device.set_keeper(Arc::<Shelf>::clone(keeper)).expect("uninitialised");
    device
}

fn attach(name: &str, keeper: &Arc<Shelf>) -> Result<Arc<Device>> {
    let (memory, backing) = {
        let kept = keeper.kept();
        let memory = kept.memory.as_ref().expect("it is kept").try_clone().expect("a descriptor");
        let parts: Vec<_> = kept.backing.iter().map(duplicate).collect();
        (memory, (!parts.is_empty()).then(|| NamedBacking::from_parts(parts).expect("the locks are ours")))
    };
    let stand_by = StandBy::new(memory.try_clone().expect("a descriptor"));
    let memory = match stand_by.and_then(|memory| memory.catch_up().map(|_| memory)) {
        Ok(stand_by) => KeptMemory::from(stand_by),
        Err(_) => memory.into(),
    };
    // SAFETY: the device that had the memory was dropped.
    let attached = unsafe { Device::attach(name, memory, backing, Arc::<Shelf>::clone(keeper), |_| ()) };
    attached.map(|(device, attached)| {
        assert_eq!(attached.pages_lost, 0);
        device
    })
}

#[test]
fn a_store_is_kept_until_the_device_is_reset_or_removed() {
    let keeper = Shelf::new();
    let device = device(&keeper);
    device.can_survive().expect("it can");
    device.reset().expect("unused");
    assert_eq!(keeper.calls(), Vec::<&str>::new(), "there was nothing to keep");
    for end in ["reset", "reset", "remove"] {
        device.set("disksize", "1M").expect("kept");
        assert!(device.open().expect("initialised").write(0, &[7; PAGE_SIZE]).is_ok());
        assert_eq!(device.set_keeper(Shelf::new()).map_err(|error| error.kind()), Err(ErrorKind::Busy));
        let user = device.open().expect("initialised");
        assert!(device.reset().is_err() && device.remove().is_err(), "it is in use");
        assert_eq!(keeper.calls(), ["keep"]);
        drop(user);
        if end == "reset" { device.reset() } else { device.remove() }.expect("unused");
        assert_eq!(keeper.calls(), ["give up"], "{end}");
    }
    drop(device);
    assert_eq!(keeper.calls(), Vec::<&str>::new());
}

#[test]
fn a_store_that_cannot_be_kept_is_not_made() {
    let keeper = Shelf::new();
    keeper.kept().refuses = true;
    let device = device(&keeper);
    let error = device.set("disksize", "1M").expect_err("refused");
    assert_eq!((error.kind(), keeper.calls()), (ErrorKind::NoSpace, vec!["keep"]));
    assert_eq!(device.get("initstate").as_deref(), Ok("0"));
    keeper.kept().refuses = false;
    let directory = tempfile::tempdir().expect("a directory");
    let options = FileOptions {
        size_bytes: Some(1 << 20),
        engine: Engine::Threads,
        ..FileOptions::new(directory.path().join("backing"))
    };
    let faulty = FaultyBacking::new(FileBacking::open(&options).expect("a file"), 1);
    device.set_backing(Some(NamedBacking::new("faulty", "in a test", Arc::new(faulty)))).expect("unused");
    for error in [device.can_survive(), device.check("1M", None), device.set("disksize", "1M")] {
        let error = error.expect_err("nobody can go on with it");
        assert_eq!((error.kind(), error.setting()), (ErrorKind::Unsupported, Some("backing_dev")));
    }
    assert_eq!(keeper.calls(), Vec::<&str>::new());
}

#[test]
fn a_dropped_device_is_kept_and_a_reset_one_unlocks_its_file() {
    let keeper = Shelf::new();
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("backing").to_str().expect("a path").to_owned();
    let first = device(&keeper);
    let settings = [("writeback_limit", "100"), ("writeback_limit_enable", "1"), ("writeback_budget", "1M")];
    first.set("backing_dev", &format!("{path}:4M")).expect("room");
    set(&first, &settings);
    first.set("disksize", "1M").expect("memory");
    // The engine keeps its length, whatever is appended.
    std::fs::OpenOptions::new().write(true).open(&path).and_then(|file| file.set_len(9 << 20)).expect("ours");
    first.open().expect("initialised").write(0, &[1, 2, 3].repeat(PAGE_SIZE)).expect("memory");
    first.set("writeback", "all").expect("room");
    let left = |device: &Device| {
        let policy = device.get("policy").expect("readable");
        let budget = policy.lines().find(|line| line.starts_with("budget_left_bytes")).map(str::to_owned);
        (device.get("writeback_limit").expect("readable"), budget.expect("it is listed"))
    };
    let had = left(&first);
    assert_ne!(had.0, "100");
    drop(first);
    assert_eq!(keeper.calls(), ["keep"]);
    let wrong = attach("zram8", &keeper).map(drop).expect_err("it is the memory of another device");
    assert_eq!(wrong.kind(), ErrorKind::Invalid);
    let second = attach("zram7", &keeper).expect("attached");
    assert_eq!(left(&second), had);
    assert!(second.counts().pages_backed > 0);
    let mut read = [0; 3 * PAGE_SIZE];
    second.open().expect("initialised").read(0, &mut read).expect("sound");
    assert!(read[..] == [1, 2, 3].repeat(PAGE_SIZE));
    // What is left goes on to count.
    second.set("writeback_limit", "1").expect("at any time");
    second.open().expect("initialised").write(0, &[4, 5].repeat(PAGE_SIZE)).expect("memory");
    drop(second);
    let third = attach("zram7", &keeper).expect("attached again");
    assert_eq!(left(&third).0, "1");
    let busy = NamedBacking::open(&path, HowToOpen::default()).map(drop).expect_err("the device has it");
    assert_eq!(busy.kind(), ErrorKind::Busy);
    third.reset().expect("unused");
    assert_eq!(keeper.calls(), ["give up"]);
    assert_eq!(third.get("backing_dev").as_deref(), Ok("none"));
    let kept = keeper.kept().backing.pop().expect("it was kept");
    let (fd, len_bytes) = (kept.descriptor, kept.len_bytes);
    NamedBacking::open(&path, HowToOpen::default()).expect("though somebody has the descriptor");
    let resume = |descriptor, len_bytes| {
        NamedBacking::from_parts([KeptPart { name: "/backing".to_owned(), len_bytes, descriptor }]).map(drop)
    };
    let refused = |fd, len_bytes| {
        let error = resume(fd, len_bytes).expect_err("refused");
        (error.kind(), error.setting())
    };
    let other = || fd.try_clone().expect("a descriptor");
    assert_eq!(refused(other(), 16 << 20), (ErrorKind::Invalid, Some("backing_dev")));
    assert_eq!(refused(other(), len_bytes - 1), (ErrorKind::Invalid, Some("backing_dev")));
    let null = std::fs::File::open("/dev/null").expect("a file");
    assert_eq!(refused(null.into(), 4096), (ErrorKind::Invalid, Some("backing_dev")));
    let lock = NamedBacking::open(&path, HowToOpen::default()).expect("nobody has it");
    assert_eq!(refused(other(), len_bytes), (ErrorKind::Busy, Some("backing_dev")));
    drop(lock);
    assert_eq!(resume(fd, len_bytes), Ok(()));
    third.set("disksize", "1M").expect("it is kept as any other");
    assert_eq!(keeper.calls(), ["keep"]);
}

/// Statistics, which start anew or depend on it.
const STATISTICS: &str =
    "backing bd_stat classes io_stat lru mem_charged mem_chunks mem_fixed mem_used_max mm_stat policy";

fn attributes(device: &Device) -> Vec<(&'static str, String)> {
    let rows = Device::attributes().iter().filter(|row| STATISTICS.split(' ').all(|name| name != row.name));
    rows.filter_map(|row| Some((row.name, device.get(row.name).ok()?))).collect()
}

#[test]
fn an_attached_device_has_all_its_attributes_and_contents() {
    const PAGES: u64 = 600;
    let (keeper, dictionary) = (Shelf::new(), dictionary());
    let directory = tempfile::tempdir().expect("a directory");
    let first = device(&keeper);
    #[cfg(feature = "designs")]
    set(
        &first,
        &[
            ("writeback_layout", "blocks"),
            ("compressed_writeback", "0"),
            ("chain_size", "8"),
            ("pool_design", "class-indexed"),
            ("lru_design", "single-lock"),
            ("streams", "2"),
            ("lru_pagevec", "3"),
            ("run_cache_batch", "16"),
        ],
    );
    set(
        &first,
        &[
            ("comp_algorithm", &format!("zstd:2,dict={}", dictionary.path().display())),
            ("recomp_algorithm", "algo=deflate:7 priority=1"),
            ("recomp_algorithm", "algo=zstd priority=3"),
            ("backing_dev", &format!("{}:8M", directory.path().join("backing").display())),
            ("writeback_limit", "5000"),
            ("writeback_limit_enable", "1"),
            ("writeback_batch_size", "9"),
            ("mem_limit", "64M"),
            ("reserve", "4M"),
            ("checksum", "1"),
            ("reclaim", "zspages"),
            ("policy_high", "70"),
            ("policy_low", "60"),
            ("writeback_budget", "64M/day"),
            ("disksize", &(PAGES * PAGE_SIZE as u64).to_string()),
            // At any time.
            ("mem_limit", "80M"),
            ("writeback_batch_size", "7"),
            ("policy_low", "50"),
            ("recompress_after", "9h"),
            ("writeback_after", "8h"),
            ("compact_threshold", "33"),
            ("compact_rate", "9M"),
        ],
    );
    let contents = |page: u64| noise(page as usize % 4 * 1300, page);
    let disk = first.open().expect("initialised");
    for page in 0..PAGES {
        // The reserve is filled in the background.
        while disk.write(page * PAGE_SIZE as u64, &contents(page)).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
    }
    set(
        &first,
        &[("recompress", "priority=1 max_pages=50"), ("idle", "all"), ("writeback", "page_indexes=100-199")],
    );
    // Same-filled pages stay.
    let left: u64 = first.get("writeback_limit").expect("readable").parse().expect("a number");
    assert!((4925..5000).contains(&left), "{left}");
    set(&first, &[("writeback_limit_enable", "0"), ("writeback_limit_enable", "1")]);
    let (had, had_bytes) = (attributes(&first), first.counts().orig_data_bytes);
    drop((disk, first));
    let second = attach("zram7", &keeper).expect("attached");
    assert_eq!((attributes(&second), second.counts().orig_data_bytes), (had.clone(), had_bytes));
    assert!(had.len() > 25, "{had:?}");
    let disk = second.open().expect("initialised");
    for page in 0..PAGES {
        let mut read = [0; PAGE_SIZE];
        disk.read(page * PAGE_SIZE as u64, &mut read).expect("sound");
        assert!(read == contents(page), "page {page}");
    }
    // The device goes on as any other.
    second.set("writeback", "page_indexes=200-249").expect("room");
    if cfg!(feature = "designs") {
        assert_eq!(second.get("writeback_limit").as_deref(), Ok("4888"));
    }
}
