//! The encoder, the same for all kernels.
//!
//! Each level is three loops over groups of eight lanes: collect those that are not zero, look up where each
//! was before, sort them into classes. Only the loop in the middle goes lane by lane. No branch depends on
//! the page.

use std::alloc::{Layout, alloc};

use super::lanes::{Lanes, Mask};
use super::{FORMAT, HALF_GROUPS, WORD_GROUPS, halves_of_words, words_of};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::units::Page;

/// Packing writes eight lanes, of which fewer may count.
const SPARE: usize = 8;
const WORDS: usize = BEFORE + 8 * WORD_GROUPS + SPARE;
const HALVES: usize = BEFORE + 8 * HALF_GROUPS + SPARE;
/// Zeros before the lanes, as many as the longest distance.
const BEFORE: usize = 256;
const ONES: u64 = 0x0101_0101_0101_0101;

/// Positions by hash.
type Table = [u16; 512];

/// The encoder's memory. What it holds of earlier pages decides nothing.
pub(super) struct Work {
    words: Level<u64, WORD_GROUPS, WORDS>,
    halves: Level<u32, HALF_GROUPS, HALVES>,
    others: [u64; WORDS],
    literals: [u32; HALVES],
}

struct Level<T, const GROUPS: usize, const LANES: usize> {
    /// `BEFORE` zeros, and the lanes that are not zero.
    lanes: [T; LANES],
    len: usize,
    /// The hashes of the whole lanes and of their upper bits, in the order that the level's lookup knows.
    hashes: [[u32; 16]; GROUPS],
    /// The last position of each hash before the lane's own, and the lane there.
    positions: [[[u16; 8]; 2]; GROUPS],
    earlier: [[[T; 8]; 2]; GROUPS],
    /// Which lanes of the level are not zero, and the two planes of their classes.
    nonzero: [u8; GROUPS],
    classes: [[u8; GROUPS]; 2],
    distances: [u8; LANES],
    distances_len: usize,
    shorts: [u16; LANES],
    shorts_len: usize,
}

impl<T: Copy + Default, const GROUPS: usize, const LANES: usize> Level<T, GROUPS, LANES> {
    fn groups(&self) -> usize {
        self.len.div_ceil(8)
    }

    /// Looks up each lane by both its hashes, which `pair` finds among those of its group. An empty entry of
    /// a table is position 0, as good as any: what is found there is compared like all else.
    #[inline(always)]
    fn look_up(&mut self, pair: impl Fn(&[u32; 16], usize) -> [u32; 2]) {
        let (mut whole, mut upper): (Table, Table) = ([0; 512], [0; 512]);
        let groups = self.groups();
        let found = self.positions.iter_mut().zip(&mut self.earlier);
        for (group, (hashes, (positions, earlier))) in self.hashes.iter().zip(found).take(groups).enumerate()
        {
            for lane in 0..8 {
                let (at, hashes) = ((8 * group + lane) as u16, pair(hashes, lane));
                for (which, table) in [&mut whole, &mut upper].into_iter().enumerate() {
                    // Hashes have 9 bits.
                    let entry = &mut table[hashes[which] as usize & 511];
                    positions[which][lane] = *entry;
                    earlier[which][lane] = self.lanes[BEFORE + usize::from(*entry)];
                    *entry = at;
                }
            }
        }
    }

    #[inline(always)]
    fn put(&mut self, group: usize, classes: [Mask; 2], distances: u64, count: Mask) {
        self.classes[0][group] = classes[0] as u8;
        self.classes[1][group] = classes[1] as u8;
        *room(&mut self.distances, self.distances_len) = distances.to_le_bytes();
        self.distances_len += count.count_ones() as usize;
    }

    #[inline(always)]
    fn live(&self, group: usize) -> Mask {
        let left = self.len - 8 * group;
        if left >= 8 { 255 } else { (1 << left) - 1 }
    }
}

#[inline(always)]
fn room<T>(all: &mut [T], at: usize) -> &mut [T; 8] {
    all[at..].first_chunk_mut().expect("spare lanes follow")
}

#[inline(always)]
fn eight<T>(lanes: &[T], at: usize) -> &[T; 8] {
    lanes[at..].first_chunk().expect("spare lanes follow")
}

#[inline(always)]
fn bytes_of<T: Number>(numbers: &[T]) -> &[u8] {
    // SAFETY: the numbers' own memory, in which every byte is initialised: `Number` is for integers only.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

trait Number {}
impl Number for u16 {}
impl Number for u32 {}

impl Work {
    /// Allocates the memory, and touches it. Fails with `NoMemory` when the system gives none.
    pub(super) fn new() -> Result<Box<Work>> {
        let layout = Layout::new::<Work>();
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc(layout) }.cast::<Work>();
        if start.is_null() {
            return Err(Error::new(ErrorKind::NoMemory, "no memory for the state of a w64 encoder"));
        }
        // SAFETY: allocated for this type by the allocator that a Box frees to. Its fields are integers, for
        // which zeros are values.
        unsafe {
            start.write_bytes(0, 1);
            Ok(Box::from_raw(start))
        }
    }

    #[inline(always)]
    pub(super) fn encode<L: Lanes>(&mut self, l: L, page: &Page, out: &mut [u8]) -> Option<usize> {
        self.take_words(l, page);
        self.words.look_up(|hashes, lane| [hashes[2 * lane], hashes[2 * lane + 1]]);
        let others = self.sort_words(l);
        self.take_halves(l, others);
        self.halves.look_up(|hashes, lane| [hashes[lane], hashes[8 + lane]]);
        let literals = self.sort_halves(l);
        self.emit(literals, others, out)
    }

    #[inline(always)]
    fn take_words<L: Lanes>(&mut self, l: L, page: &Page) {
        let words = &mut self.words;
        let mut len = 0;
        for (bytes, nonzero) in page.as_chunks::<64>().0.iter().zip(&mut words.nonzero) {
            let group = l.words(&words_of(bytes));
            let mask = l.nonzero_words(group);
            l.pack_words(group, mask, room(&mut words.lanes, BEFORE + len));
            len += mask.count_ones() as usize;
            *nonzero = mask as u8;
        }
        words.len = len;
        for group in 0..words.groups() {
            l.hash_words(l.words(eight(&words.lanes, BEFORE + 8 * group)), &mut words.hashes[group]);
        }
    }

    #[inline(always)]
    fn sort_words<L: Lanes>(&mut self, l: L) -> usize {
        let words = &mut self.words;
        (words.distances_len, words.shorts_len) = (0, 0);
        let (mut others, mut last) = (0, 0);
        for group in 0..words.groups() {
            let live = words.live(group);
            let lanes = l.words(eight(&words.lanes, BEFORE + 8 * group));
            let [earlier, upper_earlier] = &words.earlier[group];
            let [positions, upper_positions] = &words.positions[group];
            let (near, is_near) = l.distances(8 * group, positions);
            let (upper_near, is_upper_near) = l.distances(8 * group, upper_positions);
            // Where structures repeat, so does the distance: it is tried before the nearest word.
            let from_last =
                l.xor_words(lanes, l.words(eight(&words.lanes, BEFORE + 8 * group - 1 - last as usize)));
            let from_upper = l.xor_words(lanes, l.words(upper_earlier));
            let exact_at_last = live & !l.nonzero_words(from_last);
            let exact_near = live & !l.nonzero_words(l.xor_words(lanes, l.words(earlier))) & is_near;
            let exact = exact_at_last | exact_near;
            let partial_at_last = live & !exact & l.short_words(from_last);
            let partial = partial_at_last | live & !exact & l.short_words(from_upper) & is_upper_near;
            let low = l.choose_words(partial_at_last, from_upper, from_last);

            let has = exact | partial;
            let distances = l.choose_bytes(exact_near, upper_near, near);
            let distances = l.choose_bytes(exact_at_last | partial_at_last, distances, last * ONES);
            // An exact repeat at the distance of the repeat before needs none.
            let packed = l.pack_bytes(distances, has);
            let count = has.count_ones();
            let same = l.equal_bytes(packed, packed << 8 | last) & ((1 << count) - 1);
            last = if count == 8 { packed >> 56 } else { (packed << 8 | last) >> (8 * count) & 255 };
            let same = l.spread_bits(same, has) & exact;
            let sent = has & !same;

            words.put(group, [same | partial, sent], l.pack_bytes(distances, sent), sent);
            l.pack_shorts_of_words(low, partial, room(&mut words.shorts, words.shorts_len));
            words.shorts_len += partial.count_ones() as usize;
            l.pack_words(lanes, live & !has, room(&mut self.others, others));
            others += (live & !has).count_ones() as usize;
        }
        others
    }

    #[inline(always)]
    fn take_halves<L: Lanes>(&mut self, l: L, others: usize) {
        let halves = &mut self.halves;
        let mut len = 0;
        let pairs = self.others.as_chunks::<4>().0.iter().zip(&mut halves.nonzero).take(others.div_ceil(4));
        for (at, (four, nonzero)) in pairs.enumerate() {
            let group = l.halves(&halves_of_words(four));
            let live = if others - 4 * at >= 4 { 255 } else { (1 << (2 * (others - 4 * at))) - 1 };
            let mask = l.nonzero_halves(group) & live;
            l.pack_halves(group, mask, room(&mut halves.lanes, BEFORE + len));
            len += mask.count_ones() as usize;
            *nonzero = mask as u8;
        }
        halves.len = len;
        for group in 0..halves.groups() {
            let (whole, upper) = halves.hashes[group].split_first_chunk_mut().expect("16 hashes");
            let upper = upper.first_chunk_mut().expect("16 hashes");
            l.hash_halves(l.halves(eight(&halves.lanes, BEFORE + 8 * group)), whole, upper);
        }
    }

    #[inline(always)]
    fn sort_halves<L: Lanes>(&mut self, l: L) -> usize {
        let halves = &mut self.halves;
        (halves.distances_len, halves.shorts_len) = (0, 0);
        let mut literals = 0;
        for group in 0..halves.groups() {
            let live = halves.live(group);
            let lanes = l.halves(eight(&halves.lanes, BEFORE + 8 * group));
            let [earlier, upper_earlier] = &halves.earlier[group];
            let [positions, upper_positions] = &halves.positions[group];
            let (near, is_near) = l.distances(8 * group, positions);
            let (upper_near, is_upper_near) = l.distances(8 * group, upper_positions);
            let differ = l.nonzero_halves(l.xor_halves(lanes, l.halves(earlier)));
            let low = l.xor_halves(lanes, l.halves(upper_earlier));
            let exact = is_near & live & !differ;
            let small = l.short_halves(lanes) & live & !exact;
            let partial = is_upper_near & live & l.short_halves(low) & !(exact | small);

            let (has, short) = (exact | partial, small | partial);
            let distances = l.choose_bytes(exact, upper_near, near);
            halves.put(group, [short, has], l.pack_bytes(distances, has), has);
            let shorts = room(&mut halves.shorts, halves.shorts_len);
            l.pack_shorts_of_halves(l.choose_halves(partial, lanes, low), short, shorts);
            halves.shorts_len += short.count_ones() as usize;
            let literal = live & !(has | short);
            l.pack_halves(lanes, literal, room(&mut self.literals, literals));
            literals += literal.count_ones() as usize;
        }
        literals
    }

    /// Writes all streams and planes to `out`, if they fit.
    #[inline(always)]
    fn emit(&self, literals: usize, others: usize, out: &mut [u8]) -> Option<usize> {
        let (words, halves) = (&self.words, &self.halves);
        let sections = [
            &FORMAT[..],
            &words.distances[..words.distances_len],
            bytes_of(&words.shorts[..words.shorts_len]),
            &halves.distances[..halves.distances_len],
            bytes_of(&halves.shorts[..halves.shorts_len]),
            bytes_of(&self.literals[..literals]),
            &halves.classes[0][..halves.groups()],
            &halves.classes[1][..halves.groups()],
            &halves.nonzero[..others.div_ceil(4)],
            &words.classes[0][..words.groups()],
            &words.classes[1][..words.groups()],
            &words.nonzero,
        ];
        let mut rest = out.get_mut(..sections.iter().map(|section| section.len()).sum())?;
        let len = rest.len();
        for section in sections {
            let (to, after) = rest.split_at_mut(section.len());
            to.copy_from_slice(section);
            rest = after;
        }
        Some(len)
    }
}
