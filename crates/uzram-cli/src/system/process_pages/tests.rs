//! The pages of this process, read as those of another.

use std::collections::BTreeSet;
use std::ptr;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use uzram::random::Random;
use uzram::units::PAGE_SHIFT;

use super::*;

/// Private memory of this process, which is unmapped when it is dropped.
struct Memory {
    start: *mut u8,
    pages: usize,
}

impl Memory {
    fn new(pages: usize) -> Memory {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping, wherever the kernel puts it.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), pages * PAGE_SIZE, protection, flags) }.unwrap();
        // SAFETY: the range is this mapping. In huge pages, more would be resident than is written to.
        unsafe { madvise(start, pages * PAGE_SIZE, Advice::LinuxNoHugepage) }.unwrap();
        Memory { start: start.cast(), pages }
    }

    /// Writes `word` to the beginning of a page, and another one after it.
    fn write(&self, page: usize, word: u64) {
        assert!(page < self.pages);
        // SAFETY: the page is in the mapping, which is this test's, and aligned.
        unsafe {
            let at = self.start.add(page * PAGE_SIZE).cast::<u64>();
            at.write_volatile(word);
            at.add(1).write_volatile(!word);
        }
    }

    fn range(&self) -> Range<u64> {
        let start = self.start.addr() as u64;
        start..start + (self.pages * PAGE_SIZE) as u64
    }

    /// Returns the pages of a range of addresses, as numbers in this mapping.
    fn numbers(&self, regions: &[Range<u64>]) -> Vec<usize> {
        let number = |address: u64| ((address - self.range().start) >> PAGE_SHIFT) as usize;
        regions.iter().flat_map(|region| number(region.start)..number(region.end)).collect()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this test's, and nothing refers to it any more.
        unsafe { munmap(self.start.cast(), self.pages * PAGE_SIZE) }.unwrap();
    }
}

fn this_process() -> Process {
    Process::open(std::process::id()).unwrap()
}

static GO_ON: AtomicBool = AtomicBool::new(false);

#[test]
fn both_ways_find_the_resident_pages_of_a_huge_mapping() {
    // 64 GiB; the entries of its pages alone would be 128 MiB.
    let memory = Memory::new(16 << 20);
    let seed = 5;
    let mut random = Random::new(seed);
    let mut written = BTreeSet::new();
    for _ in 0..3000 {
        // The first part is dense enough for regions of several pages, and for more regions than one call
        // returns.
        written.insert(random.below(9000));
    }
    written.insert(memory.pages - 1);
    written.iter().for_each(|page| memory.write(*page, *page as u64));
    let wanted: Vec<usize> = written.into_iter().collect();
    let process = this_process();
    let mut regions = Vec::new();
    match scan(&process.pagemap, memory.range(), &mut regions) {
        Err(Errno::NOTTY) => println!("skipped: PAGEMAP_SCAN needs Linux 6.7"),
        scanned => {
            scanned.unwrap();
            assert!(memory.numbers(&regions) == wanted, "seed {seed}");
        }
    }
    let mut regions = Vec::new();
    let dense = memory.range().start..memory.range().start + (9000 << PAGE_SHIFT);
    look_up(&process.pagemap, dense, &GO_ON, &mut regions).unwrap();
    assert!(memory.numbers(&regions) == wanted[..wanted.len() - 1], "seed {seed}");
}

#[test]
fn what_is_gone_or_forbidden_is_counted_and_the_rest_is_read() {
    let memory = Memory::new(8);
    (0..8).for_each(|page| memory.write(page, 7 + page as u64));
    // Page 1 is same-filled, page 3 is gone, page 5 may not be read any more; the kernel's file reads it all
    // the same. SAFETY: pages of this test's mapping.
    unsafe {
        memory.start.add(PAGE_SIZE).write_bytes(9, PAGE_SIZE);
        munmap(memory.start.add(3 * PAGE_SIZE).cast(), PAGE_SIZE).unwrap();
        mprotect(memory.start.add(5 * PAGE_SIZE).cast(), PAGE_SIZE, rustix::mm::MprotectFlags::empty())
            .unwrap();
    }
    let mut taken = Taken::default();
    let pages = this_process().read(memory.range(), 100, &mut taken);
    let firsts: Vec<u64> =
        pages.iter().map(|page| u64::from_ne_bytes(page[..8].try_into().unwrap())).collect();
    assert_eq!(firsts, [7, 9, 11, 12, 13, 14]);
    assert_eq!((taken.same_filled, taken.unreadable), (1, 1));
    let mut taken = Taken::default();
    assert_eq!(this_process().read(memory.range(), 2, &mut taken).len(), 2, "no more than wanted");
}

#[test]
fn a_process_that_ends_while_it_is_read_is_no_error() {
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let mut process = Process::open(child.id()).unwrap();
    let regions = process.resident(&GO_ON).unwrap();
    assert!(!regions.is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    let mut taken = Taken::default();
    for region in regions.iter().flat_map(|region| cut(region.clone())) {
        assert!(process.read(region, 100, &mut taken).is_empty());
    }
    let resident: u64 = regions.iter().map(|region| (region.end - region.start) / PAGE_SIZE as u64).sum();
    assert_eq!(taken.unreadable, resident);
    assert!(process.resident(&GO_ON).unwrap_or_default().is_empty());
    let error = take(&[child.id()], &[], 10, &GO_ON).err().unwrap();
    assert_eq!(
        (error.kind(), error.to_string()),
        (ErrorKind::NotFound, format!("there is no process {}", child.id()))
    );
}

#[test]
fn private_readable_mappings_are_looked_at() {
    let maps = "1000-3000 rw-p 00000000 00:00 0 [heap]\n\
                4000-5000 r--p 00000000 fe:00 12 /a name with spaces\n\
                6000-7000 rw-s 00000000 00:00 0 /dev/zero (deleted)\n\
                8000-9000 ---p 00000000 00:00 0 \n\
                a000-b000 r-xp 00000000 00:00 0\n\
                c000-d000 r--p 00000000 00:00 0 [vvar]\n\
                nonsense\n\
                e000 rw-p\n\
                ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\n";
    assert_eq!(private_ranges(maps), [0x1000..0x3000, 0x4000..0x5000, 0xa000..0xb000]);
}

#[test]
fn regions_are_cut_at_multiples_of_a_run() {
    let cuts: Vec<_> = cut(0xf000..0x22000).collect();
    assert_eq!(cuts, [0xf000..0x10000, 0x10000..0x20000, 0x20000..0x22000]);
    assert_eq!(cut(0x1000..0x1000).count(), 0);
}

#[test]
fn each_beginning_of_the_order_is_evenly_spread() {
    for count in [0, 1, 2, 3, 4, 5, 10, 97, 1000, 4096, 100_003] {
        let order: Vec<usize> = spread(count).collect();
        assert_eq!(order.iter().copied().collect::<BTreeSet<_>>(), (0..count).collect(), "{count}");
        // Of each eighth of all, about an eighth of the first half is taken.
        let half = &order[..count / 2];
        for eighth in (0..8).filter(|_| count >= 97) {
            let range = count * eighth / 8..count * (eighth + 1) / 8;
            let share = half.iter().filter(|at| range.contains(at)).count();
            assert!(share.abs_diff(count / 16) <= 3, "{share} of {count}");
        }
    }
}
