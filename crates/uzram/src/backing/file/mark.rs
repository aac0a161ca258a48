//! The mark by which uzram knows a backing file or device as its own: the first 4096 bytes of it.
//!
//! ```text
//! 0     magic     "uzram backing\n", then zeros up to 16
//! 16    version   u32, 1
//! 20    id        16 random bytes: no two files or devices bear the same mark, unless one was copied
//! 36    zeros
//! 4092  crc32     u32, of all the bytes before it
//! ```
//!
//! Numbers are little-endian. The checksum is of all bytes, so whatever else is written into these 4096 (a file
//! system's superblock, a partition table, a swap header) destroys the mark, and what then is there wants
//! [`super::FileOptions::force`]. The mark is no secret, and no proof against someone who may write to the file.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// The length of a mark.
pub const MARK_BYTES: usize = 4096;

const MAGIC: [u8; 16] = *b"uzram backing\n\0\0";
const VERSION: u32 = 1;
const VERSION_AT: usize = 16;
const ID_AT: usize = 20;
const ID_END: usize = ID_AT + 16;
const CRC_AT: usize = MARK_BYTES - 4;

/// What a mark says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Which file or device it is.
    pub id: [u8; 16],
}

impl Mark {
    /// A mark that nothing bears yet.
    pub(super) fn random() -> Mark {
        let mut id = [0; 16];
        // The standard library keys each of these from the system's random numbers.
        id.chunks_exact_mut(8)
            .for_each(|half| half.copy_from_slice(&RandomState::new().hash_one(0).to_le_bytes()));
        Mark { id }
    }

    /// The mark that these bytes begin with, if they begin with one of this version.
    pub fn parse(bytes: &[u8]) -> Option<Mark> {
        let bytes = bytes.first_chunk::<MARK_BYTES>()?;
        let id = *bytes[ID_AT..].first_chunk()?;
        let mark = Mark { id };
        // All but the id is the same in each.
        (mark.to_bytes() == *bytes).then_some(mark)
    }

    /// The bytes of it.
    pub fn to_bytes(self) -> [u8; MARK_BYTES] {
        let mut bytes = [0; MARK_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        bytes[VERSION_AT..ID_AT].copy_from_slice(&VERSION.to_le_bytes());
        bytes[ID_AT..ID_END].copy_from_slice(&self.id);
        let crc = crc32fast::hash(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written_and_not_if_any_bit_differs() {
        let mark = Mark::random();
        assert_ne!(mark, Mark::random());
        let mut bytes = mark.to_bytes().to_vec();
        assert_eq!(Mark::parse(&bytes), Some(mark));
        for at in 0..MARK_BYTES {
            for bit in [0, 7] {
                bytes[at] ^= 1 << bit;
                assert_eq!(Mark::parse(&bytes), None, "bit {bit} of byte {at}");
                bytes[at] ^= 1 << bit;
            }
        }
        assert_eq!(Mark::parse(&bytes[..MARK_BYTES - 1]), None);
        bytes.extend([1; 4096]);
        assert_eq!(Mark::parse(&bytes), Some(mark), "what follows is no part of it");
        assert_eq!(Mark::parse(&[0; MARK_BYTES]), None);
    }
}
