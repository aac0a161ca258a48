//! Compares seeded transfers with a model.

use std::collections::BTreeMap;

use super::*;
use crate::base::random::Random;
use crate::base::units::PAGE_SIZE;

/// 64 blocks that are written, read and discarded, many at a time, without overlaps.
struct Model {
    seed: u64,
    random: Random,
    block_bytes: usize,
    /// The seed of each block's contents; `None` if they are undefined.
    blocks: Vec<Option<u64>>,
    busy: Vec<bool>,
    in_flight: BTreeMap<u64, (Direction, std::ops::Range<usize>)>,
    ends: Arc<Ends>,
}

const BLOCKS: usize = 64;
const MOST_BLOCKS: usize = 8;

impl Model {
    fn start_one(&mut self, backing: &dyn Blocks, buffers: &Buffers, token: u64) {
        let first = self.random.below(BLOCKS);
        let range = first..(first + 1 + self.random.below(MOST_BLOCKS)).min(BLOCKS);
        if self.busy[range.clone()].contains(&true) {
            return;
        }
        let offset = (range.start * self.block_bytes) as u64;
        let len_bytes = range.len() * self.block_bytes;
        let direction = match self.random.below(5) {
            0 => {
                backing.discard(offset, len_bytes as u64);
                self.blocks[range].fill(None);
                return;
            }
            1..3 => Direction::Read,
            _ => Direction::Write,
        };
        let Some(mut buffer) = buffers.take() else { return };
        if direction == Direction::Write {
            for (block, bytes) in range.clone().zip(buffer.chunks_mut(self.block_bytes)) {
                let seed = self.random.next();
                Random::new(seed).fill(bytes);
                self.blocks[block] = Some(seed);
            }
        }
        self.busy[range.clone()].fill(true);
        self.in_flight.insert(token, (direction, range));
        self.ends.start_part(backing, (direction, offset), len_bytes, buffer, token);
    }

    fn end_one(&mut self) {
        let Some((token, (direction, range))) = self.in_flight.pop_first() else { return };
        let (buffer, result) = self.ends.wait(token);
        assert_eq!(result, Ok(()), "seed {} transfer {token}", self.seed);
        self.busy[range.clone()].fill(false);
        if direction == Direction::Read {
            self.check(range, &buffer, token);
        }
    }

    fn check(&self, range: std::ops::Range<usize>, buffer: &[u8], token: u64) {
        let mut wanted = vec![0; self.block_bytes];
        for (block, bytes) in range.zip(buffer.chunks(self.block_bytes)) {
            if let Some(seed) = self.blocks[block] {
                Random::new(seed).fill(&mut wanted);
                assert!(bytes == wanted, "seed {} transfer {token}: block {block}", self.seed);
            }
        }
    }
}

pub(super) fn agrees(backing: &dyn Blocks, seed: u64, steps: u64) {
    let block_bytes = backing.block_bytes();
    assert!(backing.len_bytes() >= (BLOCKS * block_bytes) as u64);
    let buffers = Buffers::new(24, (MOST_BLOCKS * block_bytes).next_multiple_of(PAGE_SIZE)).expect("memory");
    let ends = Ends::new();
    let mut model = Model {
        seed,
        random: Random::new(seed),
        block_bytes,
        blocks: vec![None; BLOCKS],
        busy: vec![false; BLOCKS],
        in_flight: BTreeMap::new(),
        ends,
    };
    for step in 0..steps {
        model.start_one(backing, &buffers, step);
        if model.random.below(3) == 0 {
            model.end_one();
        }
    }
    while !model.in_flight.is_empty() {
        model.end_one();
    }
    assert_eq!(buffers.free(), 24, "seed {seed}: every buffer came back");
}

#[test]
fn many_in_flight_agree_with_a_model() {
    for engine in ENGINES {
        for (seed, through_page_cache, reserved) in [(1, false, true), (2, true, true), (3, false, false)] {
            let directory = directory();
            let path = directory.path().join("file");
            let options = FileOptions { through_page_cache, ..options(&path, 1 << 20, engine) };
            let mut backing = FileBacking::open(&options).expect("a backing");
            assert_eq!((backing.engine(), backing.is_reserved()), (engine, true));
            assert!(!(through_page_cache && backing.is_direct()));
            backing.pretend_sparse(!reserved);
            agrees(&backing, seed, 3000);
        }
    }
}

#[test]
fn a_loop_device_agrees_with_a_model() {
    let directory = directory();
    let Some(device) = LoopDevice::attach(directory.path(), 4 << 20) else { return };
    for engine in ENGINES {
        let options = FileOptions { engine, ..FileOptions::new(device.path()) };
        let backing = FileBacking::open(&options).expect("a block device");
        assert!(backing.is_reserved());
        assert_eq!(backing.len_bytes(), (4 << 20) - HEADER_BYTES);
        agrees(&backing, 4, 1500);
        let again = FileBacking::open(&options).map(|_| ()).expect_err("it is open already");
        assert_eq!((again.kind(), again.setting()), (ErrorKind::Busy, Some("backing_dev")), "{again}");
        // The full size is refused: the header takes a part of it.
        let too_large = FileOptions { size_bytes: Some(4 << 20), ..options };
        drop(backing);
        let error = FileBacking::open(&too_large).map(|_| ()).expect_err("it has 4 MiB");
        assert!(error.to_string().contains("only 4 MiB"), "{error}");
    }
}

pub(super) struct LoopDevice(String);

impl LoopDevice {
    pub(super) fn attach(directory: &Path, size_bytes: u64) -> Option<Self> {
        let file = directory.join("disk");
        std::fs::File::create(&file).and_then(|file| file.set_len(size_bytes)).expect("a file");
        let losetup = std::process::Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
        match losetup {
            Ok(output) if output.status.success() => {
                Some(LoopDevice(String::from_utf8_lossy(&output.stdout).trim().to_owned()))
            }
            Ok(output) => {
                println!("skipped: no loop device: {}", String::from_utf8_lossy(&output.stderr).trim());
                None
            }
            Err(error) => {
                println!("skipped: no losetup: {error}");
                None
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        Path::new(&self.0)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
        if !detached.is_ok_and(|status| status.success()) {
            eprintln!("{} is still attached", self.0);
        }
    }
}
