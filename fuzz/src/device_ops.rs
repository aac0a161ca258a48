//! Fuzzes a device with a sequence of operations: reads, writes, discards, zeroes, attributes, resets;
//! recompression, writeback and read-back.
//!
//! Promises: all agrees with a naive model, including errors and statistics; a failed write leaves the pages
//! before the failing one new and the others old; over `mem_limit` nothing grows; discarded contents return
//! their memory.

use std::sync::Arc;

use tempfile::NamedTempFile;
use uzram::device::{Device, DeviceStats, OpenDevice};
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind};

use crate::input::Input;
use crate::model::Model;

/// The largest disk, and the most operations of one input: a bound on its time.
const MAX_DISK_PAGES: usize = 96;
const MAX_OPS: usize = 100;
/// The size of the backing device: the smallest that packed pages can be written to.
const BACKING_SIZE: &str = "512K";
/// What the first pages of a device take: it can have no lower limit.
const LEAST_LIMIT_BYTES: u64 = 24 << 10;

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let device = Device::new("zram0").expect("a good name");
    let mut machine = Machine::start(&device, &mut input);
    input.each(MAX_OPS, |input| machine.step(input));
    machine.finish();
}

/// An initialised device, open, and its model.
struct Machine<'a> {
    device: &'a Arc<Device>,
    disk: OpenDevice,
    model: Model,
    limited: bool,
    /// The charge when the limit was set or last checked.
    charged_bytes: u64,
    /// Whether it has a reserve, which may be drained briefly.
    reserves: bool,
    recompresses: bool,
    /// The backing device, if it has one: a separate file.
    backing: Option<NamedTempFile>,
}

impl<'a> Machine<'a> {
    fn start(device: &'a Arc<Device>, input: &mut Input<'_>) -> Machine<'a> {
        let size_bytes = PAGE_SIZE * (1 + usize::from(input.byte()) % MAX_DISK_PAGES);
        for (name, value) in [
            ("comp_algorithm", &["lz4", "zstd", "lz4hc:3", "zstd:-3", "deflate:1", "lz4:9", "memory"][..]),
            ("checksum", &["0", "1"]),
            ("chain_size", &["4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16"]),
            ("run_cache_batch", &["0", "1", "32", "512"]),
            ("streams", &["percpu", "1", "percpu", "3"]),
            ("reserve", &["0", "0", "1", "6M"]),
        ] {
            device.set(name, input.one_of(value)).expect(name);
        }
        let again = input.one_of(&["", "algo=zstd:3", "priority=2 algo=deflate:9", "priority=3 algo=lz4hc"]);
        if !again.is_empty() {
            device.set("recomp_algorithm", again).expect("uninitialised");
        }
        let backing = Self::take_backing(device, input);
        device.set("disksize", &size_bytes.to_string()).expect("a size");
        Machine {
            device,
            disk: device.open().expect("it has a size"),
            model: Model::new(size_bytes, backing.is_some()),
            limited: false,
            // A reserve is charged from the start.
            charged_bytes: device.stats().mem_charged_bytes,
            reserves: device.get("reserve").expect("readable") != "0",
            recompresses: !again.is_empty(),
            backing,
        }
    }

    fn take_backing(device: &Device, input: &mut Input<'_>) -> Option<NamedTempFile> {
        let layouts = [("", ""), ("", ""), ("packed", "1"), ("blocks", "1"), ("blocks", "0")];
        let (layout, compressed) = input.one_of(&layouts);
        if layout.is_empty() {
            return None;
        }
        let file = NamedTempFile::new().expect("a directory for such files");
        let path = file.path().to_str().expect("a path of text");
        for (name, value) in [
            ("backing_dev", format!("{path}:{BACKING_SIZE}").as_str()),
            ("writeback_layout", layout),
            ("compressed_writeback", compressed),
        ] {
            device.set(name, value).expect(name);
        }
        Some(file)
    }

    /// Writes pages back to the backing device: their contents stay the same.
    fn write_back(&mut self, input: &mut Input<'_>) {
        self.device.set("idle", input.one_of(&["all", "1"])).expect("initialised");
        let last = self.model.size_bytes() / PAGE_SIZE as u64 - 1;
        let some = format!("page_indexes=0-{} page_index={last}", last / 2);
        let what = ["all", "type=idle", "huge", "huge_idle", "incompressible", &some];
        match self.device.set("writeback", input.one_of(&what)) {
            Ok(()) => assert!(self.backing.is_some(), "where to?"),
            Err(error) if self.backing.is_none() => assert_eq!(error.kind(), ErrorKind::Unsupported),
            // The backing device is full, or its budget is used up.
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Io), "{error}");
                assert!(error.setting().is_some(), "{error}");
            }
        }
        self.check_charged();
    }

    /// Marks pages as idle and recompresses them: their contents stay the same.
    fn recompress(&mut self, input: &mut Input<'_>) {
        self.device.set("idle", input.one_of(&["all", "1", "0"])).expect("initialised");
        let what =
            ["", "type=idle", "type=huge", "type=huge_idle threshold=3000", "max_pages=3", "threshold=700"];
        match self.device.set("recompress", input.one_of(&what)) {
            Ok(()) => assert!(self.recompresses, "by which algorithm?"),
            Err(error) if error.kind() == ErrorKind::Invalid => assert!(!self.recompresses, "{error}"),
            Err(error) => assert!(self.may_fail(&error), "{error}"),
        }
        self.check_charged();
    }

    /// Returns whether an operation that needs memory may fail with this error.
    fn may_fail(&self, error: &Error) -> bool {
        match (error.kind(), error.setting()) {
            (ErrorKind::NoSpace, Some("mem_limit")) => self.limited,
            (ErrorKind::NoMemory, Some("reserve")) => self.reserves,
            _ => false,
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 18 {
            0..=3 => self.read(input),
            4..=9 => self.write(input),
            10 => self.discard(input),
            11 | 12 => self.write_zeroes(input),
            13 => self.limit(input),
            14 => self.set_at_any_time(input),
            16 => self.recompress(input),
            17 => self.write_back(input),
            _ => self.set_too_late(input),
        }
    }

    /// Checks that the charge is within `mem_limit`, or at least not above its last value.
    fn check_charged(&mut self) {
        let stats = self.device.stats();
        let bound_bytes = self.charged_bytes.max(stats.mem_limit_bytes);
        assert!(stats.mem_limit_bytes == 0 || stats.mem_charged_bytes <= bound_bytes, "grown over the limit");
        let adds_up = |stats: &DeviceStats| {
            stats.mem_used_bytes <= stats.mem_charged_bytes && stats.compr_data_bytes <= stats.mem_used_bytes
        };
        // The policy may write pages back between one count and the next.
        let again = || (0..100).any(|_| adds_up(&self.device.stats()));
        assert!(adds_up(&stats) || again(), "{stats:?}");
        self.charged_bytes = stats.mem_charged_bytes;
    }

    /// Returns a range of bytes: on the disk, or across its end.
    fn range(&self, input: &mut Input<'_>) -> (u64, u64) {
        let pages = self.model.size_bytes() / PAGE_SIZE as u64;
        let page = u64::from(input.byte()) % pages;
        let offset = match input.byte() {
            0..=127 => page << 12,
            128..=247 => (page << 12) + u64::from(input.u16() % 4096),
            _ => input.u64(),
        };
        let len = match input.byte() {
            count @ 0..=127 => u64::from(count % 6) << 12,
            _ => u64::from(input.u16() % 20_000),
        };
        // Most ranges that would exceed the disk are cut at its end.
        let left_bytes = self.model.size_bytes().saturating_sub(offset);
        (offset, if input.byte() == 0xff { len } else { len.min(left_bytes) })
    }

    fn read(&mut self, input: &mut Input<'_>) {
        let (offset, len) = self.range(input);
        let mut data = vec![0xa5; len as usize];
        let result = self.disk.read(offset, &mut data);
        if self.model.range(offset, len).is_some() {
            result.expect("what is stored can be read");
            self.model.check_read(offset, &data, "a read");
        } else {
            assert_eq!(result.err().map(|error| error.kind()), Some(ErrorKind::OutOfRange));
        }
    }

    fn write(&mut self, input: &mut Input<'_>) {
        let (offset, len) = self.range(input);
        let data = input.contents(len as usize);
        let result = self.disk.write(offset, &data);
        if self.settled(result, offset, &data, false) {
            self.model.write(offset, &data);
        }
        if self.limited {
            self.check_charged();
        }
    }

    fn write_zeroes(&mut self, input: &mut Input<'_>) {
        let (offset, len) = self.range(input);
        let result = self.disk.write_zeroes(offset, len);
        if self.settled(result, offset, &vec![0; len as usize], true) {
            self.model.write_zeroes(self.model.range(offset, len).expect("it succeeded"));
        }
    }

    /// Returns whether a change to `data` succeeded; if not, checks that it failed with an allowed error.
    fn settled(&mut self, result: uzram::Result<()>, offset: u64, data: &[u8], zeroes: bool) -> bool {
        let in_range = self.model.range(offset, data.len() as u64).is_some();
        match result {
            Ok(()) => assert!(in_range, "a change beyond the end"),
            Err(error) if !in_range => assert_eq!(error.kind(), ErrorKind::OutOfRange),
            Err(error) => {
                assert!(self.may_fail(&error), "{error}");
                self.model.settle(&self.disk, offset, data, zeroes);
                return false;
            }
        }
        in_range
    }

    fn discard(&mut self, input: &mut Input<'_>) {
        let (offset, len) = self.range(input);
        let result = self.disk.discard(offset, len);
        match self.model.range(offset, len) {
            Some(range) => {
                result.expect("it is on the disk");
                self.model.discard(range);
            }
            None => assert!(result.is_err(), "a discard beyond the end"),
        }
    }

    fn limit(&mut self, input: &mut Input<'_>) {
        let before = self.device.get("mem_limit");
        let limit_bytes = input.one_of(&[0, 4096, LEAST_LIMIT_BYTES, 64 << 10, 256 << 10]);
        let has_room = limit_bytes == 0 || (limit_bytes >= LEAST_LIMIT_BYTES && !self.reserves);
        self.charged_bytes = self.device.stats().mem_charged_bytes;
        let set = self.device.set("mem_limit", &limit_bytes.to_string());
        assert_eq!(set.is_ok(), has_room, "{set:?}");
        self.limited = if has_room { limit_bytes != 0 } else { self.limited };
        assert_eq!(self.device.get("mem_limit"), if has_room { Ok(limit_bytes.to_string()) } else { before });
    }

    fn set_at_any_time(&mut self, input: &mut Input<'_>) {
        let batch = input.one_of(&["0", "1", "7", "32", "512"]);
        self.device.set("run_cache_batch", batch).expect("at any time");
        self.device.set("mem_used_max", "0").expect("at any time");
        let (name, value) = input.one_of(&[
            ("policy_high", "50"),
            ("policy_high", "100"),
            ("policy_low", "10"),
            ("writeback_batch_size", "1"),
            ("writeback_limit", "3"),
            ("writeback_limit_enable", "1"),
            ("writeback_limit_enable", "0"),
            ("writeback_budget", "8K/day"),
            ("writeback_budget", "0"),
        ]);
        self.device.set(name, value).expect(name);
        let readable: Vec<_> = Device::attributes().iter().filter(|row| row.readable()).collect();
        let row = input.one_of(&readable);
        self.device.get(row.name).expect(row.name);
        self.model.check_stats(&self.device.stats());
    }

    /// Sets attributes that are refused once the device is initialised, and resets it while it is in use.
    fn set_too_late(&mut self, input: &mut Input<'_>) {
        let (name, value) = input.one_of(&[
            ("disksize", "1M"),
            ("comp_algorithm", "zstd"),
            ("chain_size", "8"),
            ("checksum", "1"),
            ("streams", "1"),
            ("reserve", "4M"),
            ("backing_dev", "none"),
            ("backing_force", "1"),
            ("writeback_layout", "blocks"),
            ("compressed_writeback", "0"),
            ("reset", "1"),
        ]);
        let error = self.device.set(name, value).expect_err(name);
        assert_eq!(error.kind(), ErrorKind::Busy, "{name}");
    }

    fn finish(mut self) {
        self.check_charged();
        self.model.check_stats(&self.device.stats());
        self.model.check_all(&self.disk);
        self.disk.discard(0, self.model.size_bytes()).expect("it is on the disk");
        let stats = self.device.stats();
        let kept = (stats.orig_data_bytes, stats.compr_data_bytes, stats.same_pages, stats.huge_pages);
        assert_eq!(kept, (0, 0, 0, 0), "an empty disk holds something");
        assert_eq!(stats.mem_used_bytes, 0, "an empty disk uses memory: {stats:?}");
        drop(self.disk);
        self.device.set("reset", "1").expect("nobody uses it");
        assert_eq!(self.device.stats(), Default::default());
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    // An operation; its page; its offset from the page's edge; its number of pages, within the disk; its
    // other parameters.
    let op = |op: u8, page: u8, pages: u8, rest: &[u8]| [&[op, page, 0, pages, 0], rest].concat();
    let write = |page, pages, contents: &[u8]| op(4, page, pages, contents);
    let (same, text, noise) = (&[0, 0x77][..], b"\x01\x0bcompressible", &[2, 9][..]);
    let unaligned =
        [&[4, 2, 128, 100, 7, 200, 0x28, 0x23, 0], noise, &[0, 2, 128, 0, 7, 200, 0, 0x30, 0]].concat();
    let some = [
        write(0, 5, text),
        write(3, 4, noise),
        write(9, 2, same),
        unaligned,
        op(10, 3, 2, &[]),
        op(11, 0, 2, &[]),
        op(0, 0, 5, &[]),
        vec![14, 2],
        vec![15, 1],
        vec![16, 0, 0, 0, 4, 0],
    ]
    .concat();
    let fill: Vec<u8> = (0..24).flat_map(|index| write(index * 4, 4, &[2, index])).collect();
    let refill: Vec<u8> = (0..24).flat_map(|index| write(index * 4, 4, &[3, 0, index * 3, index])).collect();
    let limited = [&[13, 3], &fill[..], &[13, 1], &refill[..], &some[..], &[13, 0], &fill[..]].concat();
    // Written back, some of them read back, and written back again.
    let out = [&[17, 0, 0][..], &op(0, 0, 5, &[]), &write(3, 2, text), &[17, 0, 1], &some[..]].concat();
    let with = |settings: [u8; 10], ops: &[u8]| [&settings, ops].concat();
    vec![
        with([20, 0, 0, 12, 2, 0, 0, 0, 1, 0], &some),
        with([20, 1, 1, 0, 0, 0, 0, 2, 2, 0], &some),
        with([95, 0, 0, 4, 3, 0, 0, 0, 1, 0], &limited),
        with([95, 3, 1, 12, 1, 0, 1, 3, 1, 0], &limited),
        with([0, 0, 0, 12, 2, 0, 0, 0, 0, 0], &some),
        with([64, 0, 0, 12, 2, 0, 0, 0, 3, 0], &[&fill[..], &refill[..], &fill[..]].concat()),
        with([40, 0, 0, 12, 2, 0, 0, 2, 0, 2], &[&fill[..], &out, &refill, &out].concat()),
        with([40, 1, 1, 12, 2, 0, 0, 0, 1, 3], &[&some[..], &out, &fill, &out].concat()),
        with([95, 0, 0, 12, 2, 0, 0, 0, 0, 4], &[&limited[..], &out].concat()),
        with([95, 0, 1, 12, 2, 0, 0, 3, 1, 2], &[&limited[..], &out].concat()),
    ]
}
