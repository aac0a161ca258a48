//! An object on a backing device: its header, and the CRC that protects it.
//!
//! ```text
//!  0   page       u32   the page's number
//!  4   crc        u32   CRC-32 of its extent's generation, this header with crc = 0, the object's bytes
//!  8   checksum   u32   of the decompressed page, where the store keeps checksums
//! 12   len        u16   length of the object's bytes, 1..=4096
//! 14   priority   u8    of the algorithm that compressed it
//! 15   mark       u8    never 0, so that a header is not all zeros
//! ```
//!
//! The generation changes whenever an extent is reused, so that an old object, left over after a lost write,
//! is not taken for a new one.

use crate::base::units::{PAGE_SIZE, PageNo};

pub(super) const HEADER_BYTES: usize = 16;
pub(super) const ALIGN_BYTES: usize = 8;
const MARK: u8 = 0xb5;

/// The header fields of an object but for its CRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) page: PageNo,
    pub(super) checksum: u32,
    pub(super) len: u16,
    pub(super) priority: u8,
}

impl Object {
    pub(super) fn crc(&self, generation: u32, bytes: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&generation.to_le_bytes());
        hasher.update(&self.header(0));
        hasher.update(bytes);
        hasher.finalize()
    }

    pub(super) fn header(&self, crc: u32) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&self.page.0.to_le_bytes());
        header[4..8].copy_from_slice(&crc.to_le_bytes());
        header[8..12].copy_from_slice(&self.checksum.to_le_bytes());
        header[12..14].copy_from_slice(&self.len.to_le_bytes());
        header[14] = self.priority;
        header[15] = MARK;
        header
    }

    /// Returns the object at the start of `bytes`, and its own bytes, if it is there as it was written.
    pub(super) fn parse(bytes: &[u8], generation: u32) -> Option<(Object, &[u8])> {
        let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
        let word =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let object = Object {
            page: PageNo(word(0)),
            checksum: word(8),
            len: u16::from_le_bytes([header[12], header[13]]),
            priority: header[14],
        };
        if header[15] != MARK || !(1..=PAGE_SIZE).contains(&usize::from(object.len)) {
            return None;
        }
        let own = rest.get(..usize::from(object.len))?;
        (object.crc(generation, own) == word(4)).then_some((object, own))
    }
}

#[cfg(all(test, not(loom)))]
pub(super) mod tests {
    use super::*;
    use crate::base::random::Random;

    pub(in crate::store::writeback) fn random_object(random: &mut Random) -> (Object, Vec<u8>) {
        let mut bytes = vec![0; 1 + random.below(PAGE_SIZE)];
        random.fill(&mut bytes);
        let object = Object {
            page: PageNo(random.next() as u32),
            checksum: random.next() as u32,
            len: bytes.len() as u16,
            priority: random.below(4) as u8,
        };
        (object, bytes)
    }

    #[test]
    fn an_object_is_found_as_it_was_written_or_not_at_all() {
        let mut random = Random::new(7);
        for round in 0..200 {
            let (object, bytes) = random_object(&mut random);
            let generation = random.next() as u32;
            let mut written = object.header(object.crc(generation, &bytes)).to_vec();
            written.extend(&bytes);
            written.extend([7; 9]);
            assert_eq!(Object::parse(&written, generation), Some((object, &bytes[..])), "round {round}");
            assert_eq!(Object::parse(&written, generation.wrapping_add(1)), None);
            assert_eq!(Object::parse(&written[..HEADER_BYTES + bytes.len() - 1], generation), None);
            let at = random.below(HEADER_BYTES + bytes.len());
            written[at] ^= 1 << random.below(8);
            assert_eq!(Object::parse(&written, generation), None, "round {round}, byte {at}");
        }
        assert_eq!(Object::parse(&[0; 64], 0), None);
    }
}
