//! The text of an attribute, read piece by piece like a file.
//!
//! A text that grows with the disk is generated while it is read: the reader keeps one line of it, and holds
//! the store only while a piece is generated. Pages may change meanwhile, so that the lines are of different
//! moments; a page has at most one line.

use std::io::Write;

use crate::base::error::Result;
use crate::base::sync::{Arc, Weak};
use crate::store::Store;

use super::super::Device;
use super::{BLOCK_STATE, find};

/// The maximum number of lines of `block_state`.
const MAX_LINES: u64 = 1 << 20;
/// The length of each line: numbers have 12 places, enough for 32 bits, and 6 places after the point.
const LINE_BYTES: usize = 40;

/// An attribute's text, which ends with a newline.
pub struct AttributeText(Kind);

enum Kind {
    Whole(String),
    BlockStates(BlockStates),
}

pub(super) struct BlockStates {
    store: Weak<Store>,
    /// The number of lines generated so far.
    made: u64,
    line: [u8; LINE_BYTES],
    /// The page to continue from.
    next: u64,
}

impl AttributeText {
    /// Copies the text at an offset into `out`. Returns the number of bytes, 0 at the end. Reading
    /// `block_state` at a smaller offset than before starts from the first page again.
    pub fn read_at(&mut self, offset: u64, out: &mut [u8]) -> usize {
        match &mut self.0 {
            Kind::Whole(text) => {
                let rest = usize::try_from(offset).ok().and_then(|from| text.as_bytes().get(from..));
                copy(rest.unwrap_or_default(), out)
            }
            Kind::BlockStates(lines) => lines.read_at(offset, out),
        }
    }
}

impl Device {
    /// Returns an attribute's text, to be read piece by piece. [`Device::get`] returns it whole, without the
    /// last newline. Fails as [`Device::get`].
    pub fn text(&self, name: &str) -> Result<AttributeText> {
        let attribute = find(name)?;
        Ok(AttributeText(match attribute.name {
            BLOCK_STATE => Kind::BlockStates(BlockStates::new(self)),
            _ => Kind::Whole(attribute.get(self)?.text + "\n"),
        }))
    }
}

impl BlockStates {
    /// Returns the lines of a device; none while it is uninitialised, or once it is reset.
    pub(super) fn new(device: &Device) -> Self {
        let store = device.state.lock().store.as_ref().map(Arc::downgrade).unwrap_or_default();
        BlockStates { store, made: 0, line: [0; LINE_BYTES], next: 0 }
    }

    pub(super) fn read_at(&mut self, offset: u64, out: &mut [u8]) -> usize {
        let Some(store) = self.store.upgrade() else { return 0 };
        let (mut wanted, mut from) = (offset / LINE_BYTES as u64, (offset % LINE_BYTES as u64) as usize);
        let mut filled = 0;
        if wanted + 1 == self.made {
            filled = copy(&self.line[from..], out);
            (wanted, from) = (wanted + 1, 0);
        } else if wanted < self.made {
            (self.made, self.next) = (0, 0);
        }
        if filled == out.len() || self.made == MAX_LINES {
            return filled;
        }
        store.block_states(self.next..store.pages(), |page, used_s, flags| {
            if self.made >= wanted {
                self.line = line(page, used_s, flags);
                filled += copy(&self.line[from..], &mut out[filled..]);
                from = 0;
            }
            (self.made, self.next) = (self.made + 1, page + 1);
            filled < out.len() && self.made < MAX_LINES
        });
        filled
    }
}

fn copy(from: &[u8], to: &mut [u8]) -> usize {
    let len = from.len().min(to.len());
    to[..len].copy_from_slice(&from[..len]);
    len
}

fn line(page: u64, used_s: u32, flags: [u8; 6]) -> [u8; LINE_BYTES] {
    let mut line = [b'\n'; LINE_BYTES];
    // It cannot fail: the line has room for the largest numbers.
    let _ = write!(&mut line[..], "{page:12} {used_s:12}.{:06} ", 0);
    line[LINE_BYTES - 7..LINE_BYTES - 1].copy_from_slice(&flags);
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::tests::device;

    /// A disk of 64 MiB of which every third page is same-filled.
    fn sparse_device() -> Arc<Device> {
        let device = device(&[("disksize", "64M")]);
        let disk = device.open().expect("initialised");
        for page in (0..16384).step_by(3) {
            disk.write(page * 4096, &[7; 4096]).expect("memory");
        }
        device
    }

    fn read_all(text: &mut AttributeText, piece_bytes: usize) -> String {
        let (mut all, mut piece) = (Vec::new(), vec![0; piece_bytes]);
        loop {
            match text.read_at(all.len() as u64, &mut piece) {
                0 => return String::from_utf8(all).expect("text"),
                len => all.extend(&piece[..len]),
            }
        }
    }

    #[test]
    fn a_line_has_the_kernels_columns_and_is_as_long_for_all_numbers() {
        assert_eq!(&line(5, 61, *b"swhirn"), b"           5           61.000000 swhirn\n");
        let longest = line(u64::from(u32::MAX), u32::MAX, *b".w.ir.");
        assert_eq!(&longest, b"  4294967295   4294967295.000000 .w.ir.\n");
    }

    #[test]
    fn pieces_of_any_length_make_the_same_text() {
        let device = sparse_device();
        let whole = device.get(BLOCK_STATE).expect("readable") + "\n";
        assert_eq!(whole.len(), 5462 * LINE_BYTES);
        let mut text = device.text(BLOCK_STATE).expect("readable");
        for piece_bytes in [1 << 20, 4096, 40, 39, 7] {
            assert!(read_all(&mut text, piece_bytes) == whole, "{piece_bytes}");
        }
        // At any offset, back and forth.
        let mut random = crate::base::random::Random::new(1);
        for _ in 0..300 {
            let (offset, len) = (random.below(whole.len() + 50), random.below(200));
            let mut piece = vec![0; len];
            let read = text.read_at(offset as u64, &mut piece);
            let rest = whole.as_bytes().get(offset..).unwrap_or_default();
            assert_eq!(piece[..read], rest[..rest.len().min(len)], "{offset} {len}");
        }
        assert_eq!(text.read_at(u64::MAX, &mut [0; 9]), 0);
        assert_eq!(read_all(&mut device.text("initstate").expect("readable"), 1), "1\n");
        assert!(device.text("reset").is_err() && device.text("nothing").is_err());
    }

    #[test]
    fn a_reader_keeps_no_memory_of_a_device_that_is_reset() {
        let device = sparse_device();
        let mut text = device.text(BLOCK_STATE).expect("readable");
        assert_eq!(text.read_at(0, &mut [0; 100]), 100);
        let store = Arc::downgrade(device.state.lock().store.as_ref().expect("initialised"));
        device.set("reset", "1").expect("nobody has it open");
        assert!(store.upgrade().is_none());
        device.set("disksize", "1M").expect("memory");
        assert_eq!(text.read_at(100, &mut [0; 100]), 0, "it is another disk");
        assert_eq!(read_all(&mut device.text(BLOCK_STATE).expect("readable"), 100), "");
    }
}
