//! The mark that identifies a file or device as a backing of uzram: its first 4096 bytes.
//!
//! ```text
//! 0     magic     "uzram backing\n", then zeros up to 16
//! 16    version   u32, 1
//! 20    id        16 random bytes: no two files or devices have the same mark, unless one was copied
//! 36    zeros
//! 4092  crc32     u32, of all the bytes before it
//! ```
//!
//! Numbers are little-endian. The checksum covers all bytes, so anything else written into them (a file
//! system's superblock, a partition table, a swap header) destroys the mark, and overwriting that needs
//! [`super::FileOptions::force`]. The mark is not secret: a user who may write to the file can forge it.

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

/// The contents of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Identifies the file or device.
    pub id: [u8; 16],
}

impl Mark {
    pub(super) fn random() -> Mark {
        let mut id = [0; 16];
        // The standard library keys each of these from the system's random numbers.
        id.chunks_exact_mut(8)
            .for_each(|half| half.copy_from_slice(&RandomState::new().hash_one(0).to_le_bytes()));
        Mark { id }
    }

    /// Returns the mark at the start of `bytes`, if there is one of this version.
    pub fn parse(bytes: &[u8]) -> Option<Mark> {
        let bytes = bytes.first_chunk::<MARK_BYTES>()?;
        let id = *bytes[ID_AT..].first_chunk()?;
        let mark = Mark { id };
        // All marks are equal but for the id and the checksum.
        (mark.to_bytes() == *bytes).then_some(mark)
    }

    /// Returns the bytes of the mark.
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
