//! A codec for pages that are words: what programs keep in memory, pointers, numbers and zeros.
//!
//! A page is 512 words of 64 bits. Most of those that are not zero repeat an earlier word of the page, or its
//! upper 48 bits. Two bits a word say how, and what goes with them is kept in a stream of its own for each
//! kind. So neither encoder nor decoder branches on what a page holds, and both work on eight words at once.
//!
//! # The format, version 0
//!
//! Numbers are little-endian, lane `i` of a plane is bit `i % 8` of byte `i / 8`, and unused bits are zero. A
//! compressed page is, without gaps:
//!
//! | bytes | what |
//! |---|---|
//! | 1 | the version, 0 |
//! | `D` | distances of words |
//! | 2 `L` | low 16 bits of words |
//! | `d` | distances of halves |
//! | 2 `s` | low 16 bits of halves |
//! | 4 `t` | literals |
//! | 2 × ⌈`h` / 8⌉ | the planes *short* and *has distance* of the halves |
//! | ⌈2 `o` / 8⌉ | which halves are not zero |
//! | 2 × ⌈`w` / 8⌉ | the first and the second plane of classes of the words |
//! | 64 | which words are not zero |
//!
//! It is read from its end, and no length is written: the last plane gives `w`, its number of bits. The words
//! that are not zero are taken together and have one class each, by their bits in the two planes:
//!
//! | first | second | class |
//! |---|---|---|
//! | 0 | 0 | *other*: the next two halves, lower half first |
//! | 1 | 0 | an earlier word, at the last distance that was read (at first 0) |
//! | 0 | 1 | an earlier word, at the next distance |
//! | 1 | 1 | an earlier word, at the next distance, its low 16 bits xored with the next of `L` |
//!
//! So `D` is the number of bits of the second plane, `L` that of both at once, and `o` that of neither. A
//! distance is a byte, that many words and one more back among those that are not zero; before the first word
//! there are zeros.
//!
//! The 2 `o` halves of the others go through the same scheme. The `h` that are not zero have these classes:
//!
//! | short | has distance | class |
//! |---|---|---|
//! | 0 | 0 | a literal |
//! | 1 | 0 | the next short |
//! | 0 | 1 | an earlier half, at the next distance |
//! | 1 | 1 | an earlier half, at the next distance, xored with the next short |
//!
//! Bytes are a page's if all lengths are as the planes say. There is no checksum: other damage gives another
//! page.

mod lanes;
mod decode;
mod encode;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::units::Page;

const _: () =
    assert!(cfg!(target_endian = "little"), "w64's streams are the memory of little-endian numbers");

/// The first byte of a compressed page: the version of the format. It is also where the decoder finds the
/// last distance before the first, and so must be 0.
pub(super) const FORMAT: [u8; 1] = [0];
/// Groups of eight words, and of eight halves, in a page.
const WORD_GROUPS: usize = 64;
const HALF_GROUPS: usize = 128;

/// The instructions that pages are coded with. All kernels write and read the same bytes.
#[derive(Clone, Copy)]
pub(super) enum Kernel {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
}

impl Kernel {
    /// Returns the kernels that this CPU has, the fastest last.
    pub(super) fn all() -> impl Iterator<Item = Kernel> {
        let mut all = [Some(Kernel::Portable), None, None];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("bmi1") && has!("bmi2") && has!("popcnt") && has_fast_pext();
            // SAFETY: the CPU has what `Avx2` proves.
            all[1] = avx2.then(|| Kernel::Avx2(unsafe { avx2::Avx2::new() }));
            let avx512 =
                avx2 && has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512vbmi2");
            // SAFETY: the CPU has what `Avx512` proves.
            all[2] = avx512.then(|| Kernel::Avx512(unsafe { avx512::Avx512::new() }));
        }
        all.into_iter().flatten()
    }

    /// Returns whether the kernel uses no instructions of its own: it is slower than lz4 then.
    pub(super) fn is_portable(self) -> bool {
        matches!(self, Kernel::Portable)
    }

    /// Calls `f`, for which the compiler may use the kernel's instructions as far as it is inlined.
    #[inline(always)]
    pub(super) fn call<T>(self, f: impl FnOnce() -> T) -> T {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
        fn on_avx2<T>(f: impl FnOnce() -> T) -> T {
            f()
        }
        match self {
            Kernel::Portable => f(),
            // SAFETY: the kernel proves that the CPU has these instructions.
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2(_) | Kernel::Avx512(_) => unsafe { on_avx2(f) },
        }
    }

    pub(super) fn fastest() -> Kernel {
        Kernel::all().last().unwrap_or(Kernel::Portable)
    }
}

/// Returns whether `pext` and `pdep` take a few cycles. On AMD before Zen 3 (family 0x19) and on Hygon they
/// are microcode of up to hundreds (Agner Fog, Instruction tables).
#[cfg(target_arch = "x86_64")]
fn has_fast_pext() -> bool {
    use std::arch::x86_64::__cpuid;
    let vendor = __cpuid(0);
    let is =
        |name: &[u8; 12]| [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == name;
    let signature = __cpuid(1).eax;
    let family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
    !is(b"HygonGenuine") && (!is(b"AuthenticAMD") || family >= 0x19)
}

/// Calls a generic function with the lanes of a kernel, from a function for which the compiler may use its
/// instructions.
macro_rules! with_lanes {
    ($kernel:expr, $l:ident => $call:expr, ($($name:ident: $type:ty),*) -> $result:ty) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
        fn on_avx2($l: avx2::Avx2, $($name: $type),*) -> $result {
            $call
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi2")]
        fn on_avx512($l: avx512::Avx512, $($name: $type),*) -> $result {
            $call
        }
        match $kernel {
            Kernel::Portable => {
                let $l = lanes::Portable;
                $call
            }
            // SAFETY: the kernel proves that the CPU has these instructions.
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2(l) => unsafe { on_avx2(l, $($name),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512(l) => unsafe { on_avx512(l, $($name),*) },
        }
    }};
}

pub(super) struct Encoder {
    pub(super) kernel: Kernel,
    work: Box<encode::Work>,
}

impl Encoder {
    /// Fails with `NoMemory` when the system gives none.
    pub(super) fn new(kernel: Kernel) -> Result<Encoder> {
        Ok(Encoder { kernel, work: encode::Work::new()? })
    }

    /// As [`super::Encoder::encode`], but leaves `out` unchanged if the page does not fit.
    pub(super) fn encode(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        let work = &mut *self.work;
        with_lanes!(self.kernel, l => work.encode(l, page, out),
            (work: &mut encode::Work, page: &Page, out: &mut [u8]) -> Option<usize>)
    }

    pub(super) fn state_bytes(&self) -> usize {
        size_of_val(&*self.work)
    }
}

/// Decompresses a page. Fails with `Corrupt`, and leaves it unchanged, if the bytes are not those of a page.
pub(super) fn decode(kernel: Kernel, bytes: &[u8], page: &mut Page) -> Result<()> {
    with_lanes!(kernel, l => decode::decode(l, bytes, page), (bytes: &[u8], page: &mut Page) -> Option<()>)
        .ok_or_else(|| Error::new(ErrorKind::Corrupt, "w64: the bytes are not those of one page"))
}

#[inline(always)]
pub(super) fn words_of(bytes: &[u8; 64]) -> [u64; 8] {
    let (words, _) = bytes.as_chunks();
    std::array::from_fn(|i| u64::from_le_bytes(words[i]))
}

#[inline(always)]
fn bytes_of_words(words: [u64; 8]) -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes.as_chunks_mut().0.copy_from_slice(&words.map(u64::to_le_bytes));
    bytes
}

#[inline(always)]
fn halves_of(bytes: &[u8; 32]) -> [u32; 8] {
    let (halves, _) = bytes.as_chunks();
    std::array::from_fn(|i| u32::from_le_bytes(halves[i]))
}

#[inline(always)]
fn halves_of_words(words: &[u64; 4]) -> [u32; 8] {
    std::array::from_fn(|i| (words[i / 2] >> (32 * (i % 2))) as u32)
}

#[inline(always)]
fn words_of_halves(halves: &[u32; 8]) -> [u64; 4] {
    std::array::from_fn(|i| u64::from(halves[2 * i]) | u64::from(halves[2 * i + 1]) << 32)
}
