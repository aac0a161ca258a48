//! An object on a backing that others can read or change: encrypted, with a tag that tells whether it is as
//! it was written.
//!
//! ```text
//!  0   page       u32   the page's number
//!  4   len        u16   length of the object's bytes, 1..=4096
//!  6   priority   u8    of the algorithm that compressed it
//!  7   mark       u8    never 0, so that a header is not all zeros
//!  8   salt       [8]   of the extent's filling
//! 16   tag        [16]  of all else here, and of the extent, its generation, and the object's place in it
//! 32   checksum   u32   of the decompressed page, encrypted
//! 36   bytes            encrypted
//! ```
//!
//! The nonce is the extent, its generation and the object's place: an extent of a generation is filled once,
//! from its start to its end, so none is used twice with a key. But all of these are counters in memory: a
//! virtual machine that is cloned, or goes back to a snapshot, fills the same extent of the same generation
//! with something else. So each filling has a salt, from which its key is derived, and which is drawn when
//! all bytes are there that are sealed with it ([`seal_all`]): of a snapshot before, every run draws its own,
//! and of one after, every run seals the same bytes.
//!
//! Who can read the backing learns which pages are written when, and how well they compress.

use crate::backing::{Salt, Seal};
use crate::base::units::{PAGE_SIZE, PageNo};

use super::object::{ALIGN_BYTES, Object};

const HEADER_BYTES: usize = 32;
/// The part of it that says what the object is.
const ABOUT_BYTES: usize = 8;
const SALT_BYTES: usize = size_of::<Salt>();
const CHECKSUM_BYTES: usize = 4;
/// The bytes of a sealed object besides its own.
pub(super) const OVERHEAD_BYTES: usize = HEADER_BYTES + CHECKSUM_BYTES;
const MARK: u8 = 0xb6;

/// Room for what was sealed.
pub(super) type Scratch = [u8; CHECKSUM_BYTES + PAGE_SIZE];
pub(super) const SCRATCH: Scratch = [0; CHECKSUM_BYTES + PAGE_SIZE];

/// Where an object is, once and for all.
#[derive(Clone, Copy)]
pub(super) struct Position {
    pub(super) extent: u32,
    pub(super) generation: u32,
    /// The offset in the extent.
    pub(super) at: u32,
}

impl Position {
    fn nonce(self) -> [u8; 12] {
        let mut nonce = [0; 12];
        let words = [self.extent, self.generation, self.at];
        nonce.chunks_exact_mut(4).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        nonce
    }
}

/// Writes all but the bytes of an object that is still to be sealed to the start of `out`.
pub(super) fn put(out: &mut [u8], object: &Object) {
    let (header, rest) = out.split_at_mut(HEADER_BYTES);
    header[..4].copy_from_slice(&object.page.0.to_le_bytes());
    header[4..6].copy_from_slice(&object.len.to_le_bytes());
    header[6] = object.priority;
    header[7] = MARK;
    rest[..CHECKSUM_BYTES].copy_from_slice(&object.checksum.to_le_bytes());
}

pub(super) fn footprint(len_bytes: usize) -> usize {
    (OVERHEAD_BYTES + len_bytes).next_multiple_of(ALIGN_BYTES)
}

/// Seals all objects of an extent's filling, which were put there one after another, in place.
pub(super) fn seal_all(seal: &dyn Seal, filled: &mut [u8], extent: u32, generation: u32) {
    let mut at = 0;
    seal.with_new_salt(&mut |salt, seal_one| {
        while let Some(len) = put_at(filled, at) {
            let (header, rest) = filled[at..].split_at_mut(HEADER_BYTES);
            let position = Position { extent, generation, at: at as u32 };
            let (about, marks) = header.split_at_mut(ABOUT_BYTES);
            let tag = seal_one(position.nonce(), about, &mut rest[..CHECKSUM_BYTES + len]);
            marks[..SALT_BYTES].copy_from_slice(&salt);
            marks[SALT_BYTES..].copy_from_slice(&tag);
            at += footprint(len);
        }
    });
    // Nothing leaves unsealed.
    filled.get_mut(at..).unwrap_or_default().fill(0);
}

/// Returns the length of the object that was put at a place, if it is there as a whole.
fn put_at(filled: &[u8], at: usize) -> Option<usize> {
    let rest = filled.get(at..)?;
    let header = rest.first_chunk::<HEADER_BYTES>()?;
    let len = usize::from(u16::from_le_bytes([header[4], header[5]]));
    (header[7] == MARK && OVERHEAD_BYTES + len <= rest.len()).then_some(len)
}

/// Returns the object at the start of `bytes`, and its own bytes, which are in `scratch` then. Returns `None`
/// if there is no object, or it is not as it was written there.
pub(super) fn parse<'a>(
    seal: &dyn Seal,
    bytes: &[u8],
    position: Position,
    scratch: &'a mut Scratch,
) -> Option<(Object, &'a [u8])> {
    let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let (about, marks) = header.split_first_chunk::<ABOUT_BYTES>()?;
    let (salt, tag) = marks.split_first_chunk::<SALT_BYTES>()?;
    let len = u16::from_le_bytes([about[4], about[5]]);
    if about[7] != MARK || !(1..=PAGE_SIZE).contains(&usize::from(len)) {
        return None;
    }
    let scratch = &mut scratch[..CHECKSUM_BYTES + usize::from(len)];
    scratch.copy_from_slice(rest.get(..scratch.len())?);
    if !seal.open(*salt, position.nonce(), about, scratch, tag.try_into().ok()?) {
        return None;
    }
    let (checksum, own) = scratch.split_first_chunk::<CHECKSUM_BYTES>()?;
    let object = Object {
        page: PageNo(u32::from_le_bytes([about[0], about[1], about[2], about[3]])),
        checksum: u32::from_le_bytes(*checksum),
        len,
        priority: about[6],
    };
    Some((object, own))
}

/// Returns whether what was read from byte `at` of an extent, where an object begins, is as it was written:
/// the first object, and those behind it that were read as a whole. A backing with copies can ask for another
/// one otherwise.
pub fn are_whole(seal: &dyn Seal, read: &[u8], extent: u32, generation: u32, at: usize) -> bool {
    let (mut done, mut scratch) = (0, SCRATCH);
    loop {
        let position = Position { extent, generation, at: (at + done) as u32 };
        let rest = read.get(done..).unwrap_or_default();
        match parse(seal, rest, position, &mut scratch) {
            Some((_, own)) => done += footprint(own.len()),
            None => {
                // Zeros, or the start of an object.
                let len =
                    rest.get(4..6).map_or(PAGE_SIZE, |len| usize::from(u16::from_le_bytes([len[0], len[1]])));
                let is_end = rest.get(7).is_none_or(|mark| *mark == 0) || OVERHEAD_BYTES + len > rest.len();
                return done > 0 && is_end;
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
pub(in crate::store) mod tests {
    use std::collections::HashSet;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::super::object::tests::random_object;
    use super::*;
    use crate::backing::SealOne;
    use crate::base::random::Random;

    /// Not a cipher: random bytes of salt and nonce, and a CRC. Each nonce may be used once with a salt.
    #[derive(Default)]
    pub(in crate::store) struct Plain {
        salts: AtomicU64,
        used: Mutex<HashSet<[u8; 20]>>,
    }

    fn salted(salt: Salt, nonce: [u8; 12]) -> [u8; 20] {
        let mut both = [0; 20];
        both[..8].copy_from_slice(&salt);
        both[8..].copy_from_slice(&nonce);
        both
    }

    impl Plain {
        fn change(nonce: [u8; 20], bytes: &mut [u8]) {
            let mut stream = vec![0; bytes.len()];
            Random::new(u64::from(crc32fast::hash(&nonce))).fill(&mut stream);
            bytes.iter_mut().zip(stream).for_each(|(byte, other)| *byte ^= other);
        }

        fn tag(nonce: [u8; 20], about: &[u8], bytes: &[u8]) -> [u8; 16] {
            let mut tag = [0; 16];
            tag[..4].copy_from_slice(&crc32fast::hash(&[&nonce, about, bytes].concat()).to_le_bytes());
            tag
        }
    }

    impl Seal for Plain {
        fn with_new_salt(&self, seal_all: &mut dyn FnMut(Salt, &SealOne<'_>)) {
            let salt = self.salts.fetch_add(1, Ordering::Relaxed).to_le_bytes();
            seal_all(salt, &|nonce, about, bytes| {
                let nonce = salted(salt, nonce);
                assert!(self.used.lock().expect("no panic").insert(nonce), "nonce {nonce:?} is used twice");
                Self::change(nonce, bytes);
                Self::tag(nonce, about, bytes)
            });
        }

        fn open(&self, salt: Salt, nonce: [u8; 12], about: &[u8], bytes: &mut [u8], tag: &[u8; 16]) -> bool {
            let nonce = salted(salt, nonce);
            let is_whole = Self::tag(nonce, about, bytes) == *tag;
            Self::change(nonce, bytes);
            is_whole
        }
    }

    fn sealed(seal: &Plain, object: &Object, bytes: &[u8], position: Position) -> Vec<u8> {
        let mut out = [&[0; OVERHEAD_BYTES], bytes].concat();
        put(&mut out, object);
        seal_all(seal, &mut out, position.extent, position.generation);
        out
    }

    #[test]
    fn a_sealed_object_is_found_as_it_was_written_there_or_not_at_all() {
        let (seal, mut random, mut scratch) = (Plain::default(), Random::new(7), SCRATCH);
        for round in 0..200 {
            let (object, bytes) = random_object(&mut random);
            let position = Position { extent: round, generation: random.next() as u32, at: 0 };
            let mut out = sealed(&seal, &object, &bytes, position);
            let is_readable = out.windows(16).any(|window| Some(window) == bytes.get(..16));
            assert!(!is_readable, "round {round}");
            let found = parse(&seal, &out, position, &mut scratch);
            assert_eq!(found, Some((object, &bytes[..])), "round {round}");
            for other in [
                Position { extent: round + 1, ..position },
                Position { generation: position.generation.wrapping_add(1), ..position },
                Position { at: position.at ^ 8, ..position },
            ] {
                assert_eq!(parse(&seal, &out, other, &mut scratch), None, "round {round}");
            }
            assert_eq!(parse(&seal, &out[..out.len() - 1], position, &mut scratch), None);
            let at = random.below(out.len());
            out[at] ^= 1 << random.below(8);
            assert_eq!(parse(&seal, &out, position, &mut scratch), None, "round {round}, byte {at}");
        }
        let first = Position { extent: 0, generation: 0, at: 0 };
        assert_eq!(parse(&seal, &[0; 64], first, &mut scratch), None);
    }

    /// As two clones of a virtual machine do, or one that goes back to a snapshot: key and counters are
    /// equal.
    #[test]
    fn a_filling_that_two_runs_of_a_machine_fill_is_sealed_by_different_salts() {
        let (seal, mut random, mut scratch) = (Plain::default(), Random::new(9), SCRATCH);
        let position = Position { extent: 3, generation: 4, at: 0 };
        let mut all: Vec<Vec<u8>> = Vec::new();
        for _ in 0..20 {
            let (object, bytes) = random_object(&mut random);
            // Fails if a nonce is used twice with a salt.
            let out = sealed(&seal, &object, &bytes, position);
            assert_eq!(parse(&seal, &out, position, &mut scratch), Some((object, &bytes[..])));
            all.push(out);
        }
        let salts: HashSet<&[u8]> = all.iter().map(|out| &out[ABOUT_BYTES..][..SALT_BYTES]).collect();
        assert_eq!(salts.len(), all.len());
    }

    #[test]
    fn damage_to_what_was_read_as_a_whole_is_found() {
        let (seal, mut random, mut scratch) = (Plain::default(), Random::new(8), SCRATCH);
        let (mut extent, mut ends, mut objects) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..5 {
            let (object, bytes) = random_object(&mut random);
            let mut out = [&[0; OVERHEAD_BYTES], &bytes[..]].concat();
            out.resize(footprint(bytes.len()), 0);
            put(&mut out, &object);
            ends.push(extent.len() + OVERHEAD_BYTES + bytes.len());
            extent.extend(out);
            objects.push((object, bytes));
        }
        // What nobody put there does not leave.
        extent.extend([7; 100]);
        seal_all(&seal, &mut extent, 3, 4);
        assert_eq!(extent.split_off(extent.len() - 100), [0; 100]);
        let mut at = 0;
        for (object, bytes) in &objects {
            let position = Position { extent: 3, generation: 4, at: at as u32 };
            assert_eq!(parse(&seal, &extent[at..], position, &mut scratch), Some((*object, &bytes[..])));
            at += footprint(bytes.len());
        }
        let are_whole = |read: &[u8]| are_whole(&seal, read, 3, 4, 0);
        for len in 0..=extent.len() {
            assert_eq!(are_whole(&extent[..len]), len >= ends[0], "{len} bytes");
        }
        extent.extend([0; 100]);
        assert!(are_whole(&extent));
        for _ in 0..500 {
            let (object, mut damaged) = (random.below(5), extent.clone());
            let start = if object == 0 { 0 } else { ends[object - 1].next_multiple_of(ALIGN_BYTES) };
            // A length that does not fit is taken for that of an object whose end was not read.
            let in_object = [0, 1, 2, 3, 6].into_iter().chain(8..ends[object] - start);
            let in_object: Vec<_> = in_object.collect();
            damaged[start + in_object[random.below(in_object.len())]] ^= 1 << random.below(8);
            assert!(!are_whole(&damaged), "object {object}");
        }
    }
}
