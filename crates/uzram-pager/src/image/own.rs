//! The image's memory: in place of libc.a's mmap, munmap, mremap and sbrk, so that all that the image maps
//! lies in its reservation, and the program's break stays the program's.
//!
//! This runs before thread-local storage and `main`: nothing of std here, and no `errno` unless there is a
//! place for it. Freed ranges keep a mapping without access, so that the program's own mappings never come
//! between. A child of a fork has a copy of all this; the pager rests at a fork, and no thread is in here.
//!
//! Large tables of the pager, of which little is ever used, get memory piece by piece, by a handler of
//! SIGSEGV ([`lazy`]): mlockall(2) of the program would fill them otherwise, and a limit on data would count
//! them.
//!
//! Locks: `LOCK` alone. Its holder calls nothing but the kernel.

use core::ops::Range;

/// Free ranges by address, none next to another: first fit. Of more than `MOST`, what is freed stays unused.
struct FreeRanges<const MOST: usize> {
    ranges: [Range<usize>; MOST],
    len: usize,
}

impl<const MOST: usize> FreeRanges<MOST> {
    const fn new() -> Self {
        Self { ranges: [const { 0..0 }; MOST], len: 0 }
    }

    fn delete(&mut self, at: usize) {
        self.ranges[at..self.len].rotate_left(1);
        self.len -= 1;
    }

    /// Takes the first bytes of the first range that has so many.
    fn take(&mut self, bytes: usize) -> Option<usize> {
        let at = self.ranges[..self.len].iter().position(|range| range.len() >= bytes)?;
        let start = self.ranges[at].start;
        self.ranges[at].start += bytes;
        if self.ranges[at].is_empty() {
            self.delete(at);
        }
        Some(start)
    }

    /// Frees a range, of which parts may be free already.
    fn give(&mut self, mut range: Range<usize>) {
        let at = self.ranges[..self.len].partition_point(|other| other.end < range.start);
        while let Some(other) = self.ranges[..self.len].get(at)
            && other.start <= range.end
        {
            range = range.start.min(other.start)..range.end.max(other.end);
            self.delete(at);
        }
        if self.len < MOST {
            self.len += 1;
            self.ranges[at..self.len].rotate_right(1);
            self.ranges[at] = range;
        }
    }
}

/// Mappings that get memory when they are touched, in pieces.
#[cfg(not(test))]
pub mod lazy {
    use core::sync::atomic::{AtomicUsize, Ordering::*};
    use uzram_run::sys::{self, Action, flags::*, nr};

    /// The size from which on a mapping is one of these, and that of a piece.
    pub const LEAST_BYTES: usize = 32 << 20;
    const PIECE_BYTES: usize = 2 << 20;
    const MOST: usize = 64;
    const SIGSEGV: usize = 11;

    /// Where each begins, and ends; 0 for none.
    static RANGES: [[AtomicUsize; 2]; MOST] = [const { [const { AtomicUsize::new(0) }; 2] }; MOST];

    /// Notes a mapping, which is about to be made. Returns false if there is no room for it.
    pub fn add(start: usize, bytes: usize) -> bool {
        RANGES.iter().any(|[first, end]| {
            let taken = first.compare_exchange(0, start, AcqRel, Relaxed);
            taken.map(|_| end.store(start + bytes, Release)).is_ok()
        })
    }

    /// Forgets a mapping that is a part of a range.
    pub fn remove(start: usize, bytes: usize) {
        for [first, end] in &RANGES {
            if (start..start + bytes).contains(&first.load(Acquire)) {
                end.store(0, Release);
                first.store(0, Release);
            }
        }
    }

    /// Gives the piece in which an address lies memory. Returns false if it is in none.
    fn commit(address: usize) -> bool {
        let ends = |[first, end]: &[AtomicUsize; 2]| (first.load(Acquire), end.load(Acquire));
        let found = RANGES.iter().map(ends).find(|(first, end)| *first <= address && address < *end);
        found.is_some_and(|(first, end)| {
            let from = (address & !(PIECE_BYTES - 1)).max(first);
            let to = ((address & !(PIECE_BYTES - 1)) + PIECE_BYTES).min(end);
            // SAFETY: the range is a part of a mapping that may be written.
            unsafe { sys::call(nr::MPROTECT, [from, to - from, PROT_READ | PROT_WRITE]) }.is_ok()
        })
    }

    /// Has a process that begins handle the signal.
    pub fn begin() {
        const SA_ONSTACK: usize = 0x0800_0000;
        let _ = Action::new(on_fault as *const () as usize, SA_ONSTACK, 0).set(SIGSEGV);
        sys::signal_mask(SIG_UNBLOCK, 1 << (SIGSEGV - 1));
    }

    extern "C" fn on_fault(_: i32, info: *const usize, _: *const u8) {
        // SAFETY: the address is the third word of `siginfo_t`.
        if !commit(unsafe { *info.add(2) }) {
            // The thread makes the same touch again, which ends the process.
            let _ = Action::DEFAULT.set(SIGSEGV);
        }
    }
}

#[cfg(not(test))]
pub use symbols::control;

#[cfg(not(test))]
mod symbols {
    use super::{FreeRanges, lazy};
    use core::ffi::{c_int, c_void};
    use core::ptr::null_mut;
    use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering::*};
    use uzram_run::control::{CONTROL_KEY, Control, PAGE_BYTES};
    use uzram_run::sys::{self, errno, flags::*, nr};

    /// The address space of the break.
    const BREAK_BYTES: usize = 64 << 30;
    /// Far more than there are at once: the pager makes few mappings.
    const MOST_FREE: usize = 1 << 14;

    unsafe extern "C" {
        static environ: *const usize;
        fn __errno_location() -> *mut c_int;
    }

    static PAGE: AtomicPtr<Control> = AtomicPtr::new(null_mut());
    static LOCK: AtomicU32 = AtomicU32::new(0);
    /// Protected by LOCK.
    static mut FREE: FreeRanges<MOST_FREE> = FreeRanges::new();

    /// The end of the image's break. Not null from the beginning: libc would call brk(2) itself then.
    #[unsafe(no_mangle)]
    #[allow(non_upper_case_globals)]
    pub static __curbrk: AtomicUsize = AtomicUsize::new(1);
    /// Where the break's range lies; 0 before the first call.
    static BREAK_START: AtomicUsize = AtomicUsize::new(0);

    /// The control page, which the auxiliary vector tells. Whoever starts the image as a program of its own
    /// learns that it is none.
    pub fn control() -> &'static Control {
        const NONE: &str = "uzram-pager: `uzram run` has this started in a program; it is none itself\n";
        if PAGE.load(Relaxed).is_null() {
            // SAFETY: libc sets it before all else, to a list that ends with null; behind that are pairs of a
            // key and a value, and 0.
            unsafe {
                let mut at = environ;
                while *at != 0 {
                    at = at.add(1);
                }
                at = at.add(1);
                while *at != CONTROL_KEY {
                    if *at == 0 {
                        sys::raw(nr::WRITE, [2, NONE.as_ptr() as usize, NONE.len()]);
                        sys::exit_group(2);
                    }
                    at = at.add(2);
                }
                PAGE.store(*at.add(1) as *mut Control, Relaxed);
            }
        }
        // SAFETY: the page lives as long as the process.
        unsafe { &*PAGE.load(Relaxed) }
    }

    fn is_within(start: usize, bytes: usize) -> bool {
        let (first, end) = (control().reservation().start, control().free.load(Relaxed));
        start.is_multiple_of(PAGE_BYTES) && start >= first && start <= end && bytes <= end - start
    }

    fn round_up(bytes: usize) -> Result<usize, i32> {
        Ok(bytes.checked_add(PAGE_BYTES - 1).ok_or(errno::ENOMEM)? & !(PAGE_BYTES - 1))
    }

    /// Changes the free ranges.
    fn change<T>(change: impl FnOnce(&mut FreeRanges<MOST_FREE>) -> T) -> T {
        sys::lock(&LOCK);
        let free = &raw mut FREE;
        // SAFETY: the lock is held.
        let changed = change(unsafe { &mut *free });
        sys::unlock(&LOCK);
        changed
    }

    /// Address space that was never used. The lock is held.
    fn take_fresh(bytes: usize) -> Result<usize, i32> {
        let start = control().free.load(Relaxed);
        if bytes > control().reservation().end - start {
            return Err(errno::ENOMEM);
        }
        control().free.store(start + bytes, Relaxed);
        Ok(start)
    }

    /// Maps anonymous memory in a range of the reservation's, not for core dumps.
    fn map_own(start: usize, bytes: usize, protection: usize) -> Result<usize, i32> {
        // SAFETY: the range is the caller's.
        unsafe {
            sys::map_fixed(start, bytes, protection)?;
            sys::raw(nr::MADVISE, [start, bytes, MADV_DONTDUMP]);
        }
        Ok(start)
    }

    /// mmap(2) of private memory: nothing here maps files.
    fn map(start: usize, bytes: usize, protection: usize, kind: usize) -> Result<usize, i32> {
        const PRIVATE: usize = MAP_PRIVATE | MAP_ANONYMOUS;
        let bytes = round_up(bytes)?;
        let is_fixed = kind & MAP_FIXED != 0;
        if bytes == 0 || kind & PRIVATE != PRIVATE || is_fixed && !is_within(start, bytes) {
            return Err(errno::EINVAL);
        }
        if is_fixed {
            return map_own(start, bytes, protection);
        }
        let start = change(|free| free.take(bytes).map_or_else(|| take_fresh(bytes), Ok))?;
        // It is there, of zeros and without access. No new mapping: of these the kernel may have no more than
        // the program may lock (mlockall(2)).
        let is_lazy = bytes >= lazy::LEAST_BYTES && lazy::add(start, bytes);
        let protection = if is_lazy { PROT_NONE } else { protection };
        // SAFETY: the range is the caller's, as it has been taken.
        unsafe { sys::call(nr::MPROTECT, [start, bytes, protection]) }
            .map(|_| start)
            .inspect_err(|_| change(|free| free.give(start..start + bytes)))
    }

    /// munmap(2): the range has zeros then, and no access.
    fn unmap(start: usize, bytes: usize) -> Result<usize, i32> {
        const MADV_DONTNEED: usize = 4;
        let bytes = round_up(bytes)?;
        if bytes == 0 || !is_within(start, bytes) {
            return Err(errno::EINVAL);
        }
        lazy::remove(start, bytes);
        // Under the lock, as parts of the range may be free already.
        change(|free| {
            // SAFETY: the range is the pager's, which does not use it any more. It may have been locked.
            let is_empty = unsafe {
                sys::raw(nr::MUNLOCK, [start, bytes]);
                sys::call(nr::MADVISE, [start, bytes, MADV_DONTNEED]).is_ok()
                    && sys::call(nr::MPROTECT, [start, bytes, PROT_NONE]).is_ok()
            };
            if !is_empty {
                map_own(start, bytes, PROT_NONE)?;
            }
            free.give(start..start + bytes);
            Ok(0)
        })
    }

    /// sbrk(2), under libc's own lock for that. Memory beyond the old end is of zeros.
    fn move_break(by: isize) -> Result<usize, i32> {
        if BREAK_START.load(Relaxed) == 0 {
            let start = change(|_| take_fresh(BREAK_BYTES))?;
            BREAK_START.store(start, Relaxed);
            __curbrk.store(start, Relaxed);
        }
        let (start, old) = (BREAK_START.load(Relaxed), __curbrk.load(Relaxed));
        let new = old.checked_add_signed(by).filter(|new| (start..=start + BREAK_BYTES).contains(new));
        let new = new.ok_or(errno::ENOMEM)?;
        let (mapped, wanted) = (round_up(old)?, round_up(new)?);
        if wanted > mapped {
            map_own(mapped, wanted - mapped, PROT_READ | PROT_WRITE)?;
        } else if wanted < mapped {
            map_own(wanted, mapped - wanted, PROT_NONE)?;
        }
        __curbrk.store(new, Relaxed);
        Ok(old)
    }

    /// What C returns: -1 for an error, which is noted where C looks for it.
    fn result(result: Result<usize, i32>) -> usize {
        const ARCH_GET_FS: usize = 0x1003;
        result.unwrap_or_else(|error| {
            let mut thread = 0usize;
            // SAFETY: the word outlives the call; the place is there once the thread has a pointer.
            unsafe {
                sys::raw(nr::ARCH_PRCTL, [ARCH_GET_FS, &raw mut thread as usize]);
                if thread != 0 {
                    *__errno_location() = error;
                }
            }
            usize::MAX
        })
    }

    macro_rules! in_place_of {
        ($($name:ident)+, $arguments:tt -> $result:ty = $body:expr) => {
            $(
                #[unsafe(no_mangle)]
                extern "C" fn $name $arguments -> $result {
                    result($body) as $result
                }
            )+
        };
    }

    in_place_of!(mmap mmap64 __mmap __mmap64,
        (start: *mut c_void, bytes: usize, protection: c_int, kind: c_int, _file: c_int, _at: i64)
        -> *mut c_void = map(start as usize, bytes, protection as usize, kind as usize));
    in_place_of!(munmap __munmap, (start: *mut c_void, bytes: usize) -> c_int = unmap(start as usize, bytes));
    // realloc(3) copies then.
    in_place_of!(mremap __mremap, (_at: *mut c_void, _old: usize, _new: usize, _flags: c_int) -> *mut c_void
        = Err(errno::ENOMEM));
    in_place_of!(sbrk __sbrk, (by: isize) -> *mut c_void = move_break(by));
}

#[cfg(test)]
mod tests {
    use uzram::random::Random;

    use super::*;

    const PLACES: usize = 200;

    /// The ranges of the free places of a naive map.
    fn ranges_of(places: &[bool]) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for start in (0..places.len()).filter(|place| places[*place]) {
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end += 1,
                _ => ranges.push(start..start + 1),
            }
        }
        ranges
    }

    #[test]
    fn free_ranges_are_those_of_a_naive_map() {
        for seed in 1..=200 {
            let mut random = Random::new(seed);
            let (mut free, mut places) = (FreeRanges::<PLACES>::new(), [false; PLACES]);
            for step in 0..400 {
                let (start, len) = (random.below(PLACES - 20), 1 + random.below(20));
                let at = format!("seed {seed}, step {step}: {start}, {len}");
                if random.below(2) == 0 {
                    let fits = ranges_of(&places).into_iter().find(|range| range.len() >= len);
                    let taken = free.take(len);
                    assert_eq!(taken, fits.map(|range| range.start), "{at}");
                    taken.into_iter().for_each(|start| places[start..start + len].fill(false));
                } else {
                    free.give(start..start + len);
                    places[start..start + len].fill(true);
                }
                assert_eq!(free.ranges[..free.len], ranges_of(&places), "{at}");
            }
        }
    }

    #[test]
    fn what_there_is_no_room_for_stays_unused() {
        let mut free = FreeRanges::<2>::new();
        [5..6, 1..2, 3..4, 2..3].into_iter().for_each(|range| free.give(range));
        assert_eq!(free.ranges[..free.len], [1..3, 5..6]);
    }
}
