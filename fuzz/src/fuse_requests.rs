//! Fuzzes the files of a device with the kernel's requests, most of them whole, some torn or of any bytes,
//! and with deaths of the process that serves: then the same files are served anew, by the same ledger, and
//! requests may come again.
//!
//! Promises: each request that waits for a reply gets one, of the form of the protocol; reads return what was
//! written; open files and numbers stay the same in the next life; an opening that comes again opens nothing
//! new; and when all is closed, the device is not in use.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use uzram::device::Device;
use uzram::units::PAGE_SIZE;
use uzram_serve::Exports;
use uzram_serve::fuse::{Ledger, Loopback, MountOptions};

use crate::input::Input;

const NAME: &str = "zram0";
const DISK_BYTES: usize = 16 * PAGE_SIZE;
const MAX_IO_BYTES: usize = 8 * PAGE_SIZE;
/// The most requests of an input, and the most files open at a time.
const MAX_REQUESTS: usize = 64;
const MAX_OPEN: usize = 12;

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const RELEASE: u32 = 18;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;
const FALLOCATE: u32 = 43;
const LSEEK: u32 = 46;
/// Requests that change nothing: attributes, directories, statistics, flush and fsync, and unknown ones.
const OTHERS: [u32; 16] = [3, 4, 5, 9, 13, 17, 20, 22, 25, 26, 27, 28, 29, 38, 44, 9999];

const RESEND: u64 = 1 << 63;
const ROOT: u64 = 1;
/// The bits of an inode number below the device's number.
const PLACE_BITS: u32 = 16;
const DISK_PLACE: u64 = 1;
/// Attributes that may be written to.
const SAFE: [&str; 3] = ["mem_used_max", "compact", "idle"];

/// The length of a request's header, and of what comes before the data of a write.
const HEADER_BYTES: usize = 40;
const REPLY_HEADER_BYTES: usize = 16;

thread_local! {
    /// State kept from one input to the next.
    static EXPORTS: RefCell<Exports> = RefCell::new(Exports::new([
        Device::builder(NAME).build(DISK_BYTES as u64).expect("memory"),
    ]));
}

pub(crate) fn run(bytes: &[u8]) {
    let exports = EXPORTS.with_borrow(Clone::clone);
    let device = exports.devices().remove(0);
    device.open().expect("it has a size").discard(0, DISK_BYTES as u64).expect("in range");
    let mut kernel = Kernel::new(exports);
    Input::new(bytes).each(MAX_REQUESTS, |input| kernel.step(input));
    kernel.close_all();
}

#[derive(Clone, Copy)]
struct Opened {
    handle: u64,
    ino: u64,
    unique: u64,
    writes: bool,
}

/// The kernel's side, with what it expects.
struct Kernel {
    exports: Exports,
    ledger: Arc<Ledger>,
    files: Option<Loopback>,
    contents: Vec<u8>,
    opened: Vec<Opened>,
    /// The numbers that names were found to have.
    numbers: BTreeMap<(u64, &'static str), u64>,
    unique: u64,
    answered: Option<(Vec<u8>, Reply)>,
}

type Reply = (i32, Vec<u8>);

fn request(opcode: u32, unique: u64, nodeid: u64, body: &[u8]) -> Vec<u8> {
    let len_and_opcode = (HEADER_BYTES + body.len()) as u64 | u64::from(opcode) << 32;
    [words(&[len_and_opcode, unique, nodeid, 0, 0]), body.to_vec()].concat()
}

/// Returns words as their bytes; two numbers of 32 bits are one word, the first one low.
fn words(words: &[u64]) -> Vec<u8> {
    words.iter().copied().flat_map(u64::to_le_bytes).collect()
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().copied().map_or(0, u64::from_le_bytes)
}

impl Kernel {
    fn new(exports: Exports) -> Self {
        let mut kernel = Kernel {
            exports,
            ledger: Arc::new(Ledger::new().expect("memory")),
            files: None,
            contents: vec![0; DISK_BYTES],
            opened: Vec::new(),
            numbers: BTreeMap::new(),
            unique: 0,
            answered: None,
        };
        kernel.begin_life();
        kernel
    }

    fn begin_life(&mut self) {
        self.files = None;
        self.ledger.begin_life();
        let max_io_bytes = MAX_IO_BYTES as u32;
        let options = MountOptions { threads: 1, max_io_bytes, ..MountOptions::default() };
        self.files = Some(Loopback::new(self.exports.clone(), &options, &self.ledger));
    }

    /// The last request is found where it was received, with its outcome: it is answered as before, and
    /// changes nothing.
    fn finish_answered(&mut self) {
        let Some((request, reply)) = self.answered.take() else { return };
        let again = self.replied(&request, |files| files.finish(&request, Some(reply.0))).expect("a reply");
        match (u64_at(&request, 0) >> 32) as u32 {
            WRITE | FALLOCATE => assert_eq!(again, reply),
            OPEN if again.0 == 0 => {
                let handle = u64_at(&again.1, 0);
                assert!(self.opened.iter().any(|opened| opened.handle == handle), "a file is open");
            }
            _ => {}
        }
    }

    fn next_unique(&mut self) -> u64 {
        self.unique += 2;
        self.unique
    }

    /// Sends a request; returns the error and the data of its reply, if it waits for one.
    fn send(&mut self, bytes: &[u8]) -> Option<Reply> {
        let reply = self.replied(bytes, |files| files.carry_out(bytes))?;
        self.answered = Some((bytes.to_vec(), reply.clone()));
        Some(reply)
    }

    fn replied(&self, bytes: &[u8], carry_out: impl Fn(&Loopback) -> Vec<Vec<u8>>) -> Option<Reply> {
        let replies = self.files.as_ref().map(carry_out).unwrap_or_default();
        assert!(replies.len() <= 1, "a request gets one reply");
        let reply = replies.first()?;
        let (head, data) = reply.split_at(REPLY_HEADER_BYTES);
        assert_eq!(u64_at(head, 0) as u32 as usize, reply.len());
        assert_eq!(u64_at(head, 8), u64_at(bytes, 8), "a reply is for its request");
        let error = -((u64_at(head, 0) >> 32) as i32);
        assert!((0..4096).contains(&error) && (error == 0 || data.is_empty()));
        Some((error, data.to_vec()))
    }

    fn ask(&mut self, opcode: u32, nodeid: u64, body: &[u8]) -> Reply {
        let unique = self.next_unique();
        self.send(&request(opcode, unique, nodeid, body)).expect("a reply")
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 16 {
            0 => {
                self.begin_life();
                self.finish_answered();
            }
            1 => {
                let (parent, name) = input.one_of(&[(ROOT, NAME), (ROOT, "none"), (ROOT, ".warm-up-0")]);
                self.look_up(parent, name);
            }
            2 => drop(self.file(input)),
            3 | 4 => self.open(input),
            5 => self.open_again(input),
            6 => self.release(input),
            7..=9 => self.read(input),
            10 | 11 => self.write(input),
            12 => self.zero(input),
            13 => self.seek(input),
            14 => {
                let (opcode, nodeid) = (input.one_of(&OTHERS), self.any_ino(input));
                let body_bytes = usize::from(input.byte());
                let body = input.bytes(body_bytes);
                self.ask(opcode, nodeid, body);
            }
            _ => self.any_bytes(input),
        }
        let files = self.exports.users(NAME).files();
        assert_eq!(files, self.opened.iter().filter(|opened| Self::is_disk(opened)).count());
    }

    fn any_ino(&self, input: &mut Input<'_>) -> u64 {
        u64::from(input.byte() % 3) << PLACE_BITS | u64::from(input.byte() % 64)
    }

    /// Looks a name up; returns its number, which never changes.
    fn look_up(&mut self, parent: u64, name: &'static str) -> Option<u64> {
        let (error, entry) = self.ask(LOOKUP, parent, &[name.as_bytes(), &[0]].concat());
        if error != 0 {
            assert!(!self.numbers.contains_key(&(parent, name)));
            return None;
        }
        let ino = u64_at(&entry, 0);
        assert_eq!(*self.numbers.entry((parent, name)).or_insert(ino), ino);
        Some(ino)
    }

    fn file(&mut self, input: &mut Input<'_>) -> u64 {
        let directory = self.look_up(ROOT, NAME).expect("the device is there");
        let name = input.one_of(&["disk", "disk", "disksize", "mm_stat", SAFE[0], SAFE[1], SAFE[2]]);
        self.look_up(directory, name).expect("the file is there")
    }

    fn open(&mut self, input: &mut Input<'_>) {
        if self.opened.len() == MAX_OPEN {
            return;
        }
        let (ino, mode) = (self.file(input), u64::from(input.byte() % 3));
        let (error, opened) = self.ask(OPEN, ino, &words(&[mode]));
        if error == 0 {
            let handle = u64_at(&opened, 0);
            assert!(self.opened.iter().all(|other| other.handle != handle), "a handle is of one file");
            self.opened.push(Opened { handle, ino, unique: self.unique, writes: mode != 0 });
        }
    }

    /// An opening that comes again, after its first reply was lost.
    fn open_again(&mut self, input: &mut Input<'_>) {
        let Some(opened) = self.any_opened(input) else { return };
        let mode = u64::from(opened.writes);
        let again = request(OPEN, opened.unique | RESEND, opened.ino, &words(&[mode]));
        let (error, reply) = self.send(&again).expect("a reply");
        assert_eq!((error, u64_at(&reply, 0)), (0, opened.handle));
    }

    fn any_opened(&self, input: &mut Input<'_>) -> Option<Opened> {
        let choice = usize::from(input.byte());
        self.opened.get(choice.checked_rem(self.opened.len())?).copied()
    }

    fn release(&mut self, input: &mut Input<'_>) {
        let Some(opened) = self.any_opened(input) else { return };
        self.release_one(opened);
        if input.byte().is_multiple_of(4) {
            // It comes again, and closes no other file.
            assert_eq!(self.ask(RELEASE, opened.ino, &words(&[opened.handle, 0, 0])).0, 0);
        }
    }

    fn release_one(&mut self, opened: Opened) {
        assert_eq!(self.ask(RELEASE, opened.ino, &words(&[opened.handle, 0, 0])).0, 0);
        self.opened.retain(|other| other.handle != opened.handle);
    }

    fn any_range(input: &mut Input<'_>) -> (u64, usize) {
        let unit = input.one_of(&[1, 512, PAGE_SIZE]);
        let offset = usize::from(input.byte()) * unit % (DISK_BYTES + PAGE_SIZE);
        (offset as u64, usize::from(input.byte()) * unit % (MAX_IO_BYTES + 1))
    }

    fn before_end(offset: u64, len: usize) -> Range<usize> {
        let start = DISK_BYTES.min(offset as usize);
        start..DISK_BYTES.min(start + len)
    }

    fn is_disk(opened: &Opened) -> bool {
        opened.ino & ((1 << PLACE_BITS) - 1) == DISK_PLACE
    }

    fn read(&mut self, input: &mut Input<'_>) {
        let Some(opened) = self.any_opened(input) else { return };
        let (offset, len) = Self::any_range(input);
        let (error, data) = self.ask(READ, opened.ino, &words(&[opened.handle, offset, len as u64, 0, 0]));
        if Self::is_disk(&opened) {
            assert_eq!(error, 0);
            assert!(data == self.contents[Self::before_end(offset, len)]);
        }
    }

    fn write(&mut self, input: &mut Input<'_>) {
        let Some(opened) = self.any_opened(input) else { return };
        let (offset, len) = Self::any_range(input);
        let data = input.contents(len);
        let body = [words(&[opened.handle, offset, len as u64, 0, 0]), data.clone()].concat();
        let (error, reply) = self.ask(WRITE, opened.ino, &body);
        if Self::is_disk(&opened) {
            let range = Self::before_end(offset, len);
            assert_eq!(error == 0, range.start < DISK_BYTES, "{error}");
            if error == 0 {
                assert_eq!(u64_at(&reply, 0), range.len() as u64);
                self.contents[range.clone()].copy_from_slice(&data[..range.len()]);
            }
        }
    }

    fn zero(&mut self, input: &mut Input<'_>) {
        let Some(opened) = self.any_opened(input) else { return };
        let ((offset, len), mode) = (Self::any_range(input), input.one_of(&[3u64, 1 | 0x10, 0, 8]));
        let (error, _) = self.ask(FALLOCATE, opened.ino, &words(&[opened.handle, offset, len as u64, mode]));
        let range = Self::before_end(offset, len);
        let is_done = Self::is_disk(&opened) && matches!(mode, 3 | 0x11) && !range.is_empty();
        assert_eq!(error == 0, is_done, "{error}");
        if is_done {
            self.contents[range].fill(0);
        }
    }

    fn seek(&mut self, input: &mut Input<'_>) {
        let Some(opened) = self.any_opened(input) else { return };
        let ((offset, _), whence) = (Self::any_range(input), input.one_of(&[3u64, 4, 0]));
        let (error, reply) = self.ask(LSEEK, opened.ino, &words(&[opened.handle, offset, whence]));
        if error == 0 {
            let found = u64_at(&reply, 0);
            assert!((offset..=DISK_BYTES as u64).contains(&found));
            // Data between would have been skipped.
            let skipped = &self.contents[offset as usize..found as usize];
            assert!(whence == 4 || skipped.iter().all(|byte| *byte == 0));
        }
    }

    /// A request of any bytes: whole, or with a wrong length.
    fn any_bytes(&mut self, input: &mut Input<'_>) {
        let kept = [3, 4, 28, 9999];
        let opcodes = [LOOKUP, FORGET, READ, WRITE, INTERRUPT, BATCH_FORGET, FALLOCATE, LSEEK];
        let opcode = input.one_of(&[&opcodes[..], &kept].concat());
        let (nodeid, unique) = (self.any_ino(input), self.next_unique());
        let body_bytes = usize::from(input.byte());
        let mut bytes = request(opcode, unique, nodeid, input.bytes(body_bytes));
        let torn = usize::from(input.byte() % 8);
        if torn < 4 {
            bytes.truncate(bytes.len().saturating_sub(torn * 9));
        }
        let fh = bytes.get(HEADER_BYTES..HEADER_BYTES + 8).map_or(0, |_| u64_at(&bytes, HEADER_BYTES));
        if self.opened.iter().any(|opened| opened.handle == fh) && matches!(opcode, WRITE | FALLOCATE) {
            // The contents would not be known.
            return;
        }
        let is_whole = bytes.len() >= HEADER_BYTES && u64_at(&bytes, 0) as u32 as usize == bytes.len();
        let waits = is_whole && !matches!(opcode, FORGET | INTERRUPT | BATCH_FORGET);
        assert_eq!(self.send(&bytes).is_some(), waits);
    }

    fn close_all(mut self) {
        while let Some(opened) = self.opened.last().copied() {
            self.release_one(opened);
        }
        assert_eq!(self.exports.users(NAME).files(), 0);
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    // The bytes are the choices of `step`, each with its own.
    let open = |mode| [3, 0, mode];
    let write = [10, 0, 2, 1, 4, 0, 77];
    let read = [7, 0, 2, 0, 7];
    let mut seeds = vec![
        [&open(2)[..], &write, &read, &[0], &read, &[5, 0], &[6, 0, 0], &read].concat(),
        [&open(0)[..], &open(2), &[10, 1, 1, 3, 9, 2, 5], &[12, 1, 2, 0, 3, 0], &read, &[13, 0, 2, 0, 0]]
            .concat(),
        [&open(2)[..], &[0], &[6, 0, 1], &open(2), &[6, 0, 0], &[0], &open(1), &[5, 0]].concat(),
        [&[3, 2, 0][..], &[7, 0, 0, 0, 9], &[3, 4, 1], &[10, 0, 0, 0, 1, 4, 1, b'0'], &[2, 3]].concat(),
        [
            &[1, 0, 1, 1, 1, 2][..],
            &[14, 10, 0, 1, 0, 40],
            &[0; 40],
            &[15, 2, 1, 1, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1],
        ]
        .concat(),
    ];
    seeds.extend(OTHERS.iter().enumerate().map(|(at, _)| vec![14, at as u8, 1, 1, 24]));
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;

    const EINVAL: i32 = 22;
    const ENXIO: i32 = 6;
    const SEEK_SET: u64 = 0;
    const SEEK_DATA: u64 = 3;
    const SEEK_HOLE: u64 = 4;

    fn kernel() -> Kernel {
        Kernel::new(Exports::new([Device::builder(NAME).build(DISK_BYTES as u64).expect("memory")]))
    }

    fn open(kernel: &mut Kernel, name: &'static str, mode: u64) -> (u64, u64) {
        let directory = kernel.look_up(ROOT, NAME).expect("the device is there");
        let ino = kernel.look_up(directory, name).expect("the file is there");
        let (error, opened) = kernel.ask(OPEN, ino, &words(&[mode]));
        assert_eq!(error, 0);
        (ino, u64_at(&opened, 0))
    }

    fn read(kernel: &mut Kernel, (ino, handle): (u64, u64), offset: u64) -> String {
        let (error, text) = kernel.ask(READ, ino, &words(&[handle, offset, 4096, 0, 0]));
        assert_eq!(error, 0);
        String::from_utf8(text).expect("a text")
    }

    fn write(kernel: &mut Kernel, (ino, handle): (u64, u64), offset: u64, data: &[u8]) -> Result<u64, i32> {
        let head = words(&[handle, offset, data.len() as u64, 0, 0]);
        let (error, reply) = kernel.ask(WRITE, ino, &[&head, data].concat());
        if error == 0 { Ok(u64_at(&reply, 0)) } else { Err(error) }
    }

    #[test]
    fn an_attribute_is_read_anew_from_its_start_and_set_at_any_offset() {
        let kernel = &mut kernel();
        let file = open(kernel, "mem_limit", 2);
        assert_eq!(read(kernel, file, 0), "0\n");
        // After a read, at the end that the file shows, and far behind.
        for (offset, value) in [(2, "8M"), (4096, "16M"), (u64::MAX / 2, "32M\n"), (0, "64M")] {
            assert_eq!(write(kernel, file, offset, value.as_bytes()), Ok(value.len() as u64));
            let bytes = uzram::units::parse_size(value.trim()).expect("a size");
            assert_eq!(read(kernel, file, 0), format!("{bytes}\n"), "of the same open file");
        }
        // The rest is of the same text, although the value has changed.
        kernel.exports.devices()[0].set("mem_limit", "9M").expect("at any time");
        assert_eq!(read(kernel, file, 3), "08864\n");
        assert_eq!((read(kernel, file, 9), read(kernel, file, 0)), (String::new(), "9437184\n".to_owned()));
        // In the next life, too.
        kernel.begin_life();
        assert_eq!((read(kernel, file, 3), write(kernel, file, 8, b"1M")), ("7184\n".to_owned(), Ok(2)));
        assert_eq!(read(kernel, file, 0), "1048576\n");
        const E2BIG: i32 = 7;
        for (data, error) in [(&b"much"[..], EINVAL), (b"\xff", EINVAL), (&[b' '; 65537], E2BIG)] {
            assert_eq!(write(kernel, file, 0, data), Err(error));
        }
        assert_eq!(read(kernel, file, 0), "1048576\n");
        // A device that was removed has no attributes.
        const ESTALE: i32 = 116;
        kernel.exports.remove(NAME).expect("no disk is open");
        assert_eq!(write(kernel, file, 0, b"1M"), Err(ESTALE));
    }

    #[test]
    fn an_attribute_has_no_holes() {
        let kernel = &mut kernel();
        let mut seek = |name, offset, whence| {
            let (ino, handle) = open(kernel, name, 0);
            let (error, found) = kernel.ask(LSEEK, ino, &words(&[handle, offset, whence]));
            if error == 0 { Ok(u64_at(&found, 0)) } else { Err(error) }
        };
        for offset in [0, 5, 4095] {
            assert_eq!(seek("mm_stat", offset, SEEK_DATA), Ok(offset));
            assert_eq!(seek("mm_stat", offset, SEEK_HOLE), Ok(4096));
        }
        for whence in [SEEK_DATA, SEEK_HOLE] {
            assert_eq!(seek("mm_stat", 4096, whence), Err(ENXIO));
            assert_eq!(seek("block_state", 0, whence), Err(ENXIO), "it shows no size");
        }
        assert_eq!(seek("mm_stat", 0, SEEK_SET), Err(EINVAL));
    }
}
