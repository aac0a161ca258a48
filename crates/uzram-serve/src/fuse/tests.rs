//! Requests as the kernel sends them, without a mount.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use uzram::device::Device;

use super::proto::{
    Message, bytes_of, fuse_in_header, fuse_lseek_in, fuse_lseek_out, fuse_open_in, fuse_open_out,
    fuse_out_header, fuse_read_in, fuse_write_in, fuse_write_out, opcode, take,
};
use super::{Ledger, Loopback, MountOptions};
use crate::Exports;

const ROOT: u64 = 1;

/// The kernel's side of one device's files.
struct Kernel {
    exports: Exports,
    ledger: Arc<Ledger>,
    files: Loopback,
    unique: u64,
}

fn serve(exports: &Exports, ledger: &Arc<Ledger>) -> Loopback {
    let options = MountOptions { threads: 1, max_io_bytes: 1 << 16, ..MountOptions::default() };
    ledger.begin_life();
    Loopback::new(exports.clone(), &options, ledger)
}

/// Returns the errno and the data of the only reply.
fn parsed(replies: Vec<Vec<u8>>) -> (i32, Vec<u8>) {
    assert_eq!(replies.len(), 1);
    let mut data = &replies[0][..];
    let header: fuse_out_header = take(&mut data).unwrap();
    (-header.error, data.to_vec())
}

impl Kernel {
    fn new(size: &str) -> Kernel {
        let device = Device::new("zram0").unwrap();
        device.set("disksize", size).unwrap();
        let (exports, ledger) = (Exports::new([device]), Arc::new(Ledger::new().unwrap()));
        let files = serve(&exports, &ledger);
        Kernel { exports, ledger, files, unique: 0 }
    }

    fn request(&mut self, opcode: u32, nodeid: u64, body: &[&[u8]]) -> Vec<u8> {
        self.unique += 2;
        let body = body.concat();
        let len = (size_of::<fuse_in_header>() + body.len()) as u32;
        let header = fuse_in_header { len, opcode, unique: self.unique, nodeid, ..Default::default() };
        [bytes_of(&header), &body].concat()
    }

    fn ask(&mut self, opcode: u32, nodeid: u64, body: &[&[u8]]) -> (i32, Vec<u8>) {
        let request = self.request(opcode, nodeid, body);
        parsed(self.files.carry_out(&request))
    }

    fn answer<T: Message>(&mut self, opcode: u32, nodeid: u64, body: &[&[u8]]) -> Result<T, i32> {
        match self.ask(opcode, nodeid, body) {
            (0, data) => Ok(take(&mut &data[..]).unwrap()),
            (errno, _) => Err(errno),
        }
    }

    /// Returns the number and the handle of a file of the device that it opens.
    fn open(&mut self, name: &str, flags: i32) -> (u64, u64) {
        let mut ino = ROOT;
        for name in ["zram0", name] {
            let (errno, entry) = self.ask(opcode::FUSE_LOOKUP, ino, &[name.as_bytes(), &[0]]);
            assert_eq!(errno, 0, "{name}");
            ino = take(&mut &entry[..]).map(|word: fuse_lseek_out| word.offset).unwrap();
        }
        let open = fuse_open_in { flags: flags as u32, ..Default::default() };
        let opened: fuse_open_out = self.answer(opcode::FUSE_OPEN, ino, &[bytes_of(&open)]).unwrap();
        (ino, opened.fh)
    }

    fn read(&mut self, (ino, fh): (u64, u64), offset: u64) -> String {
        let read = fuse_read_in { fh, offset, size: 4096, ..Default::default() };
        let (errno, text) = self.ask(opcode::FUSE_READ, ino, &[bytes_of(&read)]);
        assert_eq!(errno, 0);
        String::from_utf8(text).unwrap()
    }

    fn write(&mut self, (ino, fh): (u64, u64), offset: u64, data: &[u8]) -> Result<u32, i32> {
        let write = fuse_write_in { fh, offset, size: data.len() as u32, ..Default::default() };
        let answer: Result<fuse_write_out, i32> =
            self.answer(opcode::FUSE_WRITE, ino, &[bytes_of(&write), data]);
        answer.map(|written| written.size)
    }
}

#[test]
fn an_attribute_is_read_anew_from_its_start_and_set_at_any_offset() {
    let mut kernel = Kernel::new("1M");
    let file = kernel.open("mem_limit", libc::O_RDWR);
    assert_eq!(kernel.read(file, 0), "0\n");
    // After a read, at the end that the file shows, and far behind.
    for (offset, value) in [(2, "8M"), (4096, "16M"), (u64::MAX / 2, "32M\n"), (0, "64M")] {
        assert_eq!(kernel.write(file, offset, value.as_bytes()), Ok(value.len() as u32));
        let bytes = uzram::units::parse_size(value.trim()).unwrap();
        assert_eq!(kernel.read(file, 0), format!("{bytes}\n"), "of the same open file");
    }
    // The rest is of the same text, although the value has changed.
    kernel.exports.named("zram0").unwrap().set("mem_limit", "9M").unwrap();
    assert_eq!(kernel.read(file, 3), "08864\n");
    assert_eq!((kernel.read(file, 9), kernel.read(file, 0)), (String::new(), "9437184\n".to_owned()));
    // In the next life, too.
    kernel.files = serve(&kernel.exports, &kernel.ledger);
    assert_eq!((kernel.read(file, 3), kernel.write(file, 8, b"1M")), ("7184\n".to_owned(), Ok(2)));
    assert_eq!(kernel.read(file, 0), "1048576\n");
    for (data, errno) in
        [(&b"much"[..], libc::EINVAL), (b"\xff", libc::EINVAL), (&[b' '; 65537], libc::E2BIG)]
    {
        assert_eq!(kernel.write(file, 0, data), Err(errno));
    }
    assert_eq!(kernel.read(file, 0), "1048576\n");
    // A device that was removed has no attributes.
    kernel.exports.remove("zram0").unwrap();
    assert_eq!(kernel.write(file, 0, b"1M"), Err(libc::ESTALE));
}

#[test]
fn an_attribute_has_no_holes() {
    let mut kernel = Kernel::new("1M");
    let mut seek = |name: &str, offset, whence: i32| {
        let (ino, fh) = kernel.open(name, libc::O_RDONLY);
        let seek = fuse_lseek_in { fh, offset, whence: whence as u32, ..Default::default() };
        let found: Result<fuse_lseek_out, i32> = kernel.answer(opcode::FUSE_LSEEK, ino, &[bytes_of(&seek)]);
        found.map(|found| found.offset)
    };
    for offset in [0, 5, 4095] {
        assert_eq!(seek("mm_stat", offset, libc::SEEK_DATA), Ok(offset));
        assert_eq!(seek("mm_stat", offset, libc::SEEK_HOLE), Ok(4096));
    }
    for whence in [libc::SEEK_DATA, libc::SEEK_HOLE] {
        assert_eq!(seek("mm_stat", 4096, whence), Err(libc::ENXIO));
        assert_eq!(seek("block_state", 0, whence), Err(libc::ENXIO), "it shows no size");
    }
    assert_eq!(seek("mm_stat", 0, libc::SEEK_SET), Err(libc::EINVAL));
}
