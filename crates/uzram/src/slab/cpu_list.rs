//! A CPU's free list: the free objects of its active slab that only this CPU uses.
//!
//! The CPU's word, including the bit that closes it:
//!
//! ```text
//! 63         32 31      17 16       15        0
//! [ operations | length    | closed | free list ]
//! ```
//!
//! `free list` is the place of the list's first object in the active slab, `length` its number of objects.
//! `operations` corresponds to the kernel's transaction id. An allocation makes the head's successor the
//! head; a free into the active slab makes the object the head. Each is one change of the word.

use crate::base::cpu::{PerCpu, Restartable};
use crate::base::sync::{AtomicU32, AtomicU64, Ordering};

use super::cpu_word;
use super::slabs::{NO_SLAB, Slabs};
use super::word::{FreeList, NONE};

const CLOSED: u64 = 1 << 16;
const LEN_ONE: u64 = 1 << 17;
const LEN_MASK: u64 = (1 << 15) - 1;
const OPERATION: u64 = 1 << 32;

type CpuWord = cpu_word::CpuWord<{ u64::MAX }, CLOSED>;

#[derive(Clone, Copy, Debug)]
pub(super) struct Word {
    pub(super) list: FreeList,
    /// Operations since the cache was made, modulo 2^32.
    pub(super) operations: u32,
}

impl Word {
    fn decode(word: u64) -> Self {
        let list = FreeList { first: word as u16, len: ((word / LEN_ONE) & LEN_MASK) as u16 };
        Word { list, operations: (word / OPERATION) as u32 }
    }
}

#[repr(C)]
pub(super) struct CpuList {
    word: CpuWord,
    /// The active slab; [`NO_SLAB`] if there is none. Changes only while the word is closed.
    slab: AtomicU32,
    _pad: u32,
    /// The address of the link of the object at place 0 of the active slab.
    links: AtomicU64,
}

pub(super) struct CpuLists {
    lists: PerCpu<CpuList>,
    rseq: Option<Restartable>,
}

impl CpuLists {
    pub(super) fn new(rseq: Option<Restartable>) -> Self {
        let list = |_| CpuList {
            word: CpuWord::new(u64::from(NONE)),
            slab: AtomicU32::new(NO_SLAB),
            _pad: 0,
            links: AtomicU64::new(0),
        };
        CpuLists { lists: PerCpu::new(list), rseq }
    }

    #[inline]
    pub(super) fn pop(&self, slabs: &Slabs) -> Option<u32> {
        #[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
        if let Some(rseq) = self.rseq {
            return self.pop_restartable(slabs, rseq);
        }
        self.pop_by_exchange(slabs)
    }

    /// Puts an object on this CPU's list, if it is of the active slab and is not the one freed last.
    #[inline]
    pub(super) fn push(&self, slabs: &Slabs, object: u32) -> bool {
        #[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
        if let Some(rseq) = self.rseq {
            return self.push_restartable(slabs, rseq, object);
        }
        self.push_by_exchange(slabs, object)
    }

    pub(super) fn close(&self, cpu: usize) -> Word {
        Word::decode(self.lists.of(cpu).word.close(cpu, self.rseq))
    }

    pub(super) fn close_local(&self, cpu: usize) -> Option<Word> {
        self.lists.of(cpu).word.close_local(cpu, self.rseq).map(Word::decode)
    }

    /// Opens a closed word with a list of `slab`, the new active one; returns its number of operations.
    pub(super) fn open(&self, cpu: usize, slabs: &Slabs, slab: u32, list: FreeList) -> u32 {
        let own = self.lists.of(cpu);
        own.slab.store(slab, Ordering::Relaxed);
        if slab != NO_SLAB {
            let links = slabs.start(slab).wrapping_add(slabs.layout.link_offset_bytes);
            own.links.store(links.expose_provenance() as u64, Ordering::Relaxed);
        }
        // An operation, so that the word never has the value again that a thread read before it was closed.
        let operations = Word::decode(own.word.load()).operations.wrapping_add(1);
        own.word
            .open(u64::from(list.first) + u64::from(list.len) * LEN_ONE + u64::from(operations) * OPERATION);
        operations
    }

    pub(super) fn head(&self, slabs: &Slabs) -> Option<u32> {
        let own = self.lists.local();
        let word = own.word.load();
        let slab = own.slab.load(Ordering::Relaxed);
        // Accept only a consistent pair: `slab` changes while the word is closed, and the word never has
        // the same value after that.
        let is_open = !CpuWord::is_closed(word) && own.word.load() == word;
        let first = Word::decode(word).list.first;
        (is_open && first != NONE).then(|| slabs.name(slab, first))
    }

    pub(super) fn peek(&self, cpu: usize) -> Word {
        Word::decode(self.lists.of(cpu).word.load())
    }

    #[cfg_attr(all(target_arch = "x86_64", target_env = "gnu"), cold)]
    fn pop_by_exchange(&self, slabs: &Slabs) -> Option<u32> {
        let own = self.lists.local();
        loop {
            let word = own.word.load();
            let at = word as u16;
            if CpuWord::is_closed(word) || at == NONE {
                return None;
            }
            let slab = own.slab.load(Ordering::Relaxed);
            // If the list changes meanwhile, this may be any value, and the exchange fails.
            let next = slabs.next_if_there(slab, at);
            let rest = (word - u64::from(at) - LEN_ONE).wrapping_add(OPERATION);
            match next {
                Some(next) if own.word.exchange(word, rest + u64::from(next)) => {
                    return Some(slabs.name(slab, at));
                }
                None if own.word.load() == word => return None,
                _ => {}
            }
        }
    }

    #[cfg_attr(all(target_arch = "x86_64", target_env = "gnu"), cold)]
    fn push_by_exchange(&self, slabs: &Slabs, object: u32) -> bool {
        let own = self.lists.local();
        let (slab, at) = slabs.split(object);
        loop {
            let word = own.word.load();
            let head = word as u16;
            if CpuWord::is_closed(word) || own.slab.load(Ordering::Relaxed) != slab || head == at {
                return false;
            }
            slabs.set_next(slab, at, head);
            let new = (word - u64::from(head) + u64::from(at) + LEN_ONE).wrapping_add(OPERATION);
            if own.word.exchange(word, new) {
                return true;
            }
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_env = "gnu", not(loom)))]
mod sequences {
    use super::*;
    use crate::base::cpu::{Padded, restartable};
    use std::mem::offset_of;

    // The sequences below hard-code these values.
    const _: () = assert!(size_of::<Padded<CpuList>>() == 128);
    const _: () = assert!(offset_of!(CpuList, word) == 0);
    const _: () = assert!(offset_of!(CpuList, slab) == 8 && offset_of!(CpuList, links) == 16);
    const _: () = assert!(CLOSED == 0x10000 && NONE == 0xffff && super::super::config::UNIT_BYTES == 8);

    /// The start of each sequence: loads the address of this CPU's list into `{cpu}`, its word into `{word}`,
    /// and the place of its first object into `{result}`, and compares that with [`NONE`]; a closed word's is
    /// above.
    macro_rules! own_list {
        () => {
            "cmp {cpu}, {cpus}
            jae 43b
            shl {cpu}, 7
            add {cpu}, {lists}
            mov {word}, [{cpu}]
            mov {result:e}, {word:e}
            and {result:e}, 0x1ffff
            cmp {result:e}, 0xffff"
        };
    }

    impl CpuLists {
        #[inline(always)]
        pub(super) fn pop_restartable(&self, slabs: &Slabs, rseq: Restartable) -> Option<u32> {
            let at: u64;
            let slab: u64;
            // SAFETY: the CPU's number is below the array's length. While the word is open and its list is
            // not empty, `links` is the address of the active slab's links, whose memory stays mapped, and
            // the list's objects are free and belong to this CPU: no other thread touches their links.
            unsafe {
                restartable!(
                    own_list!(),
                    "jae 43b",
                    "mov {slab}, [{cpu} + 16]",
                    // The next object's place is encoded with this place and the secret.
                    "mov {next:e}, [{slab} + {result} * 8]",
                    "xor {next:e}, {secret:e}",
                    "mov {slab:e}, {result:e}",
                    "shl {slab:e}, 16",
                    "xor {next:e}, {slab:e}",
                    "cmp {next:e}, 0xffff",
                    "ja 43b",
                    "sub {word}, {result}",
                    "add {word}, {next}",
                    "add {word}, {change}",
                    "mov {slab:e}, [{cpu} + 8]",
                    "mov [{cpu}], {word}",
                    => cpu = out(reg) _,
                    cpus = in(reg) self.lists.len(),
                    rseq = in(reg) rseq.area_offset(),
                    lists = in(reg) self.lists.as_ptr(),
                    secret = in(reg) slabs.secret,
                    change = in(reg) OPERATION - LEN_ONE,
                    word = out(reg) _,
                    next = out(reg) _,
                    slab = out(reg) slab,
                    result = out(reg) at,
                    options(nostack)
                );
            }
            (at != u64::MAX).then(|| slabs.name(slab as u32, at as u16))
        }

        #[inline(always)]
        pub(super) fn push_restartable(&self, slabs: &Slabs, rseq: Restartable, object: u32) -> bool {
            let (slab, at) = slabs.split(object);
            let result: u64;
            // SAFETY: as in `pop_restartable`; the object is of the active slab and is being freed by this
            // thread, so no other thread writes its link.
            unsafe {
                restartable!(
                    own_list!(),
                    "ja 43b",
                    "cmp {slab:e}, [{cpu} + 8]",
                    "jne 43b",
                    "cmp {result:e}, {at:e}",
                    "je 43b",
                    "mov {links}, [{cpu} + 16]",
                    "sub {word}, {result}",
                    "add {word}, {at}",
                    "add {word}, {change}",
                    "xor {result:e}, {key:e}",
                    "mov [{links} + {at} * 8], {result:e}",
                    "mov [{cpu}], {word}",
                    => cpu = out(reg) _,
                    cpus = in(reg) self.lists.len(),
                    rseq = in(reg) rseq.area_offset(),
                    lists = in(reg) self.lists.as_ptr(),
                    slab = in(reg) slab,
                    at = in(reg) u64::from(at),
                    key = in(reg) slabs.key(at),
                    change = in(reg) OPERATION + LEN_ONE,
                    word = out(reg) _,
                    links = out(reg) _,
                    result = out(reg) result,
                    options(nostack)
                );
            }
            result != u64::MAX
        }
    }
}
