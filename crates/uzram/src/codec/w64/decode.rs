//! The decoder, the same for all kernels.
//!
//! It first finds where each stream begins, from the planes and the numbers of bits in them. From then on it
//! cannot fail: every stream has exactly what the planes take, and a distance that reaches before the first
//! lane yields zero. What a group of eight lanes reads beyond the end of a stream lies in the planes, and
//! decides nothing.

use std::mem::MaybeUninit;
use std::ops::BitXor;

use super::lanes::{Lanes, Mask};
use super::{FORMAT, HALF_GROUPS, WORD_GROUPS, bytes_of_words, halves_of, words_of_halves};
use crate::base::units::Page;

/// The planes of a level, and where its streams begin.
struct Level<'a> {
    nonzero: &'a [u8],
    classes: [&'a [u8]; 2],
    distances: usize,
    shorts: usize,
}

/// The numbers of bits of two planes of classes.
#[derive(Default)]
struct Counts {
    first: usize,
    second: usize,
    both: usize,
}

impl Counts {
    fn either(&self) -> usize {
        self.first + self.second - self.both
    }
}

/// Takes the last `len` bits, rounded up to bytes, from the end of `bytes`, and returns what is before them.
/// The bits beyond must be zero.
#[inline(always)]
fn split_plane(bytes: &[u8], len: usize) -> Option<(&[u8], &[u8])> {
    let (rest, plane) = bytes.split_at_checked(bytes.len().checked_sub(len.div_ceil(8))?)?;
    (len.is_multiple_of(8) || plane[len / 8] >> (len % 8) == 0).then_some((rest, plane))
}

#[inline(always)]
fn count(first: &[u8], second: &[u8]) -> Counts {
    let mut counts = Counts::default();
    let mut add = |first: u64, second: u64| {
        counts.first += first.count_ones() as usize;
        counts.second += second.count_ones() as usize;
        counts.both += (first & second).count_ones() as usize;
    };
    let ((firsts, first), (seconds, second)) = (first.as_chunks(), second.as_chunks());
    for (first, second) in firsts.iter().zip(seconds) {
        add(u64::from_le_bytes(*first), u64::from_le_bytes(*second));
    }
    let rest = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    add(rest(first), rest(second));
    counts
}

/// Finds the planes and streams: both levels, and where the literals begin; `None` if lengths are wrong.
#[inline(always)]
fn parse(bytes: &[u8]) -> Option<(Level<'_>, Level<'_>, usize)> {
    let (rest, nonzero_words) = split_plane(bytes, 8 * WORD_GROUPS)?;
    let words = count(nonzero_words, nonzero_words).first;
    let (rest, second) = split_plane(rest, words)?;
    let (rest, first) = split_plane(rest, words)?;
    let (word_classes, of_words) = ([first, second], count(first, second));

    let others = words - of_words.either();
    let (rest, nonzero_halves) = split_plane(rest, 2 * others)?;
    let halves = count(nonzero_halves, nonzero_halves).first;
    let (rest, second) = split_plane(rest, halves)?;
    let (rest, first) = split_plane(rest, halves)?;
    let (half_classes, of_halves) = ([first, second], count(first, second));

    // From here on, the streams are found from the front.
    let mut end = 0;
    let mut section = |len: usize| {
        let start = end;
        end += len;
        start
    };
    section(FORMAT.len());
    let words = Level {
        nonzero: nonzero_words,
        classes: word_classes,
        distances: section(of_words.second),
        shorts: section(2 * of_words.both),
    };
    let literals = halves - of_halves.either();
    let halves = Level {
        nonzero: nonzero_halves,
        classes: half_classes,
        distances: section(of_halves.second),
        shorts: section(2 * of_halves.first),
    };
    let literals = section(4 * literals);
    (rest.len() == end && rest.starts_with(&FORMAT)).then_some((words, halves, literals))
}

#[inline(always)]
fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    bytes[at..].first_chunk().expect("the last plane follows every stream")
}

/// Room for `N` lanes. Slot 0 is a zero: what has no earlier lane repeats that one.
struct Slots<T, const N: usize> {
    slots: MaybeUninit<[T; N]>,
    /// How many slots are initialised: all before this one.
    len: usize,
}

impl<T: Copy + Default + BitXor<Output = T>, const N: usize> Slots<T, N> {
    #[inline(always)]
    fn new() -> Self {
        let mut slots = Slots { slots: MaybeUninit::uninit(), len: 0 };
        slots.push([T::default()]);
        slots
    }

    #[inline(always)]
    fn push<const COUNT: usize>(&mut self, lanes: [T; COUNT]) {
        assert!(self.len + COUNT <= N);
        // SAFETY: the slots are within the memory, as just checked.
        unsafe { self.start().add(self.len).cast::<[T; COUNT]>().write(lanes) };
        self.len += COUNT;
    }

    /// Pushes eight lanes: those of the slots `from`, xored with `xor`.
    #[inline(always)]
    fn push_repeats(&mut self, from: &[u16; 8], xor: &[T; 8]) {
        assert!(self.len + 8 <= N);
        let (start, first) = (self.start(), self.len);
        for lane in 0..8 {
            // Volatile, because a lane is loaded faster than it is taken out of a vector register, where the
            // compiler would keep all eight. SAFETY: both are elements of arrays. `Lanes::slots` returns
            // slots before the lane's own, which are initialised. The lane's own is within the memory, as
            // just checked.
            unsafe {
                let slot = usize::from((&raw const from[lane]).read_volatile());
                debug_assert!(slot < first + lane);
                let xor = (&raw const xor[lane]).read_volatile();
                start.add(first + lane).write(start.add(slot).read() ^ xor);
            }
        }
        self.len = first + 8;
    }

    #[inline(always)]
    fn eight(&self, at: usize) -> &[T; 8] {
        assert!(at + 8 <= self.len);
        // SAFETY: these slots are initialised, as just checked.
        unsafe { &*self.slots.as_ptr().cast::<T>().add(at).cast() }
    }

    fn start(&mut self) -> *mut T {
        self.slots.as_mut_ptr().cast()
    }
}

/// Slots for the most words and halves that a page has, for the zero before them, and for eight after them.
type Words = Slots<u64, { 8 * WORD_GROUPS + 16 }>;
type Halves = Slots<u32, { 8 * HALF_GROUPS + 16 }>;

/// Decodes a page. Returns `None` if the bytes are not those of exactly one page; the page is then unchanged.
#[inline(always)]
pub(super) fn decode<L: Lanes>(l: L, bytes: &[u8], page: &mut Page) -> Option<()> {
    let (words, halves, literals) = parse(bytes)?;
    let mut others = Words::new();
    decode_halves(l, bytes, &halves, literals, &mut others);

    let mut slots = Words::new();
    let (mut distances, mut shorts, mut other) = (words.distances, words.shorts, 1);
    for (first, second) in words.classes[0].iter().zip(words.classes[1]) {
        let (first, second) = (Mask::from(*first), Mask::from(*second));
        let (has, partial) = (first | second, first & second);
        // The byte before the first distance is FORMAT, 0.
        let last = l.last_bytes(bytes_at(bytes, distances - 1), second);
        distances += second.count_ones() as usize;
        let low = l.spread_shorts_to_words(bytes_at(bytes, shorts), partial);
        shorts += 2 * partial.count_ones() as usize;
        let whole = l.spread_words(others.eight(other), has ^ 255);
        other += (has ^ 255).count_ones() as usize;

        let (mut from, mut xor) = ([0; 8], [0; 8]);
        l.store_shorts(l.slots(slots.len, last, has), &mut from);
        l.store_words(l.xor_words(low, whole), &mut xor);
        slots.push_repeats(&from, &xor);
    }
    slots.push([0; 8]);

    let mut at = 1;
    for (nonzero, to) in words.nonzero.iter().zip(page.as_chunks_mut::<64>().0) {
        let mut group = [0; 8];
        l.store_words(l.spread_words(slots.eight(at), (*nonzero).into()), &mut group);
        at += nonzero.count_ones() as usize;
        *to = bytes_of_words(group);
    }
    Some(())
}

/// Decodes the second level: the words that the first has no earlier word for.
#[inline(always)]
fn decode_halves<L: Lanes>(l: L, bytes: &[u8], halves: &Level<'_>, literals: usize, others: &mut Words) {
    let mut slots = Halves::new();
    let (mut distances, mut shorts, mut literal) = (halves.distances, halves.shorts, literals);
    for (short, has) in halves.classes[0].iter().zip(halves.classes[1]) {
        let (short, has) = (Mask::from(*short), Mask::from(*has));
        let next = l.spread_bytes(bytes_at(bytes, distances), has);
        distances += has.count_ones() as usize;
        let low = l.spread_shorts_to_halves(bytes_at(bytes, shorts), short);
        shorts += 2 * short.count_ones() as usize;
        let lone = (short | has) ^ 255;
        let whole = l.spread_halves(&halves_of(bytes_at(bytes, literal)), lone);
        literal += 4 * lone.count_ones() as usize;

        let (mut from, mut xor) = ([0; 8], [0; 8]);
        l.store_shorts(l.slots(slots.len, next, has), &mut from);
        l.store_halves(l.xor_halves(low, whole), &mut xor);
        slots.push_repeats(&from, &xor);
    }
    slots.push([0; 8]);

    let mut at = 1;
    for nonzero in halves.nonzero {
        let mut group = [0; 8];
        l.store_halves(l.spread_halves(slots.eight(at), (*nonzero).into()), &mut group);
        at += nonzero.count_ones() as usize;
        others.push(words_of_halves(&group));
    }
    others.push([0; 8]);
}
