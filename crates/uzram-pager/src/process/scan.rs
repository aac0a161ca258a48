//! Which memory of a program can be managed: what its memory map says.
//!
//! Private and anonymous memory that the program may read and write, and not execute, from a size on:
//! mappings next to each other count as one, also what it may only read now, and all of them or none are
//! taken, as mremap(2) refuses more than one. Not what grows downwards, is locked, is emptied in a child, or
//! belongs to another userfaultfd; nor stacks of threads, which the kernel may touch when a thread ends, and
//! cannot wait for then: a small range without access lies below each.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::ops::Range;
use std::os::fd::AsRawFd;

use crate::map::meet;

/// Smaller mappings are left alone. Heaps grow: they are taken as they are.
const LEAST_BYTES: usize = 128 << 10;
/// The most that lies below a stack without access. Reserves of allocators are larger.
const MOST_GUARD_BYTES: usize = 64 << 10;

/// A mapping.
#[derive(Clone, Debug)]
pub(super) struct Mapping {
    pub range: Range<usize>,
    /// 1 to read, 2 to write, 4 to execute, 8 if it is shared.
    access: u64,
    is_anonymous: bool,
    is_heap: bool,
}

impl Mapping {
    /// Reads a line of /proc/PID/maps (proc_pid_maps(5)).
    fn of_line(line: &str) -> Option<Mapping> {
        let mut fields = line.splitn(6, ' ');
        let (from, to) = fields.next()?.split_once('-')?;
        let range = usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?;
        let (access, _, _, inode) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        let given = (0..).zip(access.bytes()).filter(|(_, letter)| !b"-p".contains(letter));
        let name = fields.next().unwrap_or_default().trim_start();
        let is_heap = name == "[heap]";
        // `[anon:NAME]` is memory that the program has given a name (PR_SET_VMA).
        let is_anonymous = inode == "0" && (name.is_empty() || is_heap || name.starts_with("[anon:"));
        Some(Mapping { range, access: given.map(|(nth, _)| 1 << nth).sum(), is_anonymous, is_heap })
    }
}

/// Reads a file of /proc anew.
pub(super) fn read(mut file: &File) -> io::Result<String> {
    let mut text = String::with_capacity(64 << 10);
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text)
}

/// Returns the ranges of addresses that may be managed, outside `own`, by the text of /proc/PID/maps.
pub(super) fn candidates_of(text: &str, own: &Range<usize>) -> Vec<Range<usize>> {
    let maps = Maps::Read(text.lines().filter_map(Mapping::of_line).collect());
    let (mut found, mut end) = (Vec::new(), 0);
    while let Some(next) = maps.from(end) {
        let run = maps.run_at(own, next.range.start);
        let start = run.first().map_or(next.range.start, |first| first.range.start);
        end = run.last().map_or(next.range.end, |last| last.range.end);
        if run.iter().any(|mapping| mapping.is_heap || end - start >= LEAST_BYTES) {
            found.push(start..end);
        }
    }
    found
}

/// `PROCMAP_QUERY` of <linux/fs.h>, Linux 6.11.
pub(super) const QUERY: u64 = 0xc068_6611;

/// Returns the mapping at an address, or the next one; `None` if there is none, or the kernel is older.
fn query(maps: &File, address: usize) -> Option<Mapping> {
    const COVERING_OR_NEXT: u64 = 0x10;
    // `struct procmap_query`, all of whose fields are words, or pairs of halves.
    let mut query = [0u64; 13];
    (query[0], query[1], query[2]) = (size_of_val(&query) as u64, COVERING_OR_NEXT, address as u64);
    // SAFETY: the kernel writes to the query, whose size it is told.
    let asked = unsafe { libc::ioctl(maps.as_raw_fd(), QUERY as libc::Ioctl, &raw mut query) };
    let [_, _, _, start, end, access, _, _, inode, ..] = query;
    let range = start as usize..end as usize;
    (asked == 0).then_some(Mapping { range, access, is_anonymous: inode == 0, is_heap: false })
}

/// The memory map of a program: asked for piece by piece, or, by an older kernel, read as a whole.
pub(super) enum Maps<'a> {
    Asked(&'a File),
    Read(Vec<Mapping>),
}

impl Maps<'_> {
    /// Returns what `maps`, a program's /proc/PID/maps, tells now.
    pub fn of(maps: &File) -> Maps<'_> {
        match query(maps, 0) {
            Some(_) => Maps::Asked(maps),
            None => Maps::Read(read(maps).unwrap_or_default().lines().filter_map(Mapping::of_line).collect()),
        }
    }

    /// Returns the mapping at an address, or the next one.
    pub fn from(&self, address: usize) -> Option<Mapping> {
        match self {
            Maps::Asked(maps) => query(maps, address),
            Maps::Read(all) => all.get(all.partition_point(|mapping| mapping.range.end <= address)).cloned(),
        }
    }

    fn at(&self, address: usize) -> Option<Mapping> {
        self.from(address).filter(|mapping| mapping.range.contains(&address))
    }

    /// Returns the mapping at an address outside `own`, if it is private memory, which it stays when the
    /// program changes its access.
    pub fn private_at(&self, own: &Range<usize>, address: usize) -> Option<Mapping> {
        let is_private = |mapping: &Mapping| mapping.access & 8 == 0 && mapping.is_anonymous;
        self.at(address).filter(|mapping| is_private(mapping) && !own.contains(&mapping.range.start))
    }

    /// Returns the mapping at an address outside `own`, if it may be managed.
    pub fn plain_at(&self, own: &Range<usize>, address: usize) -> Option<Mapping> {
        let mapping = self.private_at(own, address).filter(|mapping| matches!(mapping.access, 1 | 3))?;
        let is_stack = self.at(mapping.range.start.checked_sub(1)?).is_some_and(|below| {
            below.access == 0 && below.is_anonymous && below.range.len() <= MOST_GUARD_BYTES
        });
        (!is_stack).then_some(mapping)
    }

    /// Returns all mappings that may be managed next to each other, of which one that may be written is at an
    /// address, in order. None if there is none there.
    pub fn run_at(&self, own: &Range<usize>, address: usize) -> Vec<Mapping> {
        let mut run = Vec::from_iter(self.plain_at(own, address).filter(|mapping| mapping.access == 3));
        while let Some(below) =
            run.first().and_then(|first| self.plain_at(own, first.range.start.checked_sub(1)?))
        {
            run.insert(0, below);
        }
        while let Some(above) = run.last().and_then(|last| self.plain_at(own, last.range.end)) {
            run.push(above);
        }
        run
    }
}

/// Returns those of some ranges whose flags forbid nothing, by the text of /proc/PID/smaps.
pub(super) fn allowed_of(text: &str, ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    /// Locked, emptied in a child, growing downwards, of huge pages, of a device, of a raw page number, and
    /// of some userfaultfd.
    const FORBIDDEN: [&str; 8] = ["lo", "wf", "gd", "ht", "io", "pf", "um", "uw"];
    let (mut forbidden, mut current) = (Vec::new(), None);
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let is_forbidden = flags.split_ascii_whitespace().any(|flag| FORBIDDEN.contains(&flag));
            forbidden.extend(current.take().filter(|_| is_forbidden));
        } else if let Some(mapping) = Mapping::of_line(line) {
            current = Some(mapping.range);
        }
    }
    ranges.into_iter().filter(|range| !forbidden.iter().any(|other| meet(range, other))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
55d000000000-55d000100000 r-xp 00000000 fe:00 77   /usr/bin/program
55d000200000-55d000201000 rw-p 00100000 fe:00 77   /usr/bin/program
55d001000000-55d001001000 rw-p 00000000 00:00 0    [heap]
7f0000000000-7f0000021000 rw-p 00000000 00:00 0 \n\
7f0000021000-7f0004000000 ---p 00000000 00:00 0 \n\
7f0004000000-7f0004100000 rw-p 00000000 00:00 0    [anon: a name]
7f0004100000-7f0004101000 r--p 00000000 00:00 0 \n\
7f0005000000-7f0005001000 ---p 00000000 00:00 0 \n\
7f0005001000-7f0005801000 rw-p 00000000 00:00 0 \n\
7f0006000000-7f0006010000 rw-p 00000000 00:00 0 \n\
7f0007000000-7f0007100000 rw-s 00000000 00:01 9    /dev/zero (deleted)
7f0008000000-7f0008100000 rwxp 00000000 00:00 0 \n\
7f0009000000-7f0009100000 rw-p 00000000 00:00 0 \n\
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0    [stack]
";

    #[test]
    fn memory_that_can_be_managed_is_found() {
        let found = candidates_of(MAPS, &(0x7f00_0900_0000..0x7f00_0a00_0000));
        let [heap, free, locked] = [
            0x55d0_0100_0000..0x55d0_0100_1000,
            0x7f00_0000_0000..0x7f00_0002_1000,
            0x7f00_0400_0000..0x7f00_0410_1000,
        ];
        assert_eq!(found, [heap.clone(), free.clone(), locked]);
        assert!(candidates_of("", &(0..0)).is_empty() && candidates_of("x-y rw-p\n1-\n", &(0..0)).is_empty());
        let smaps = "\
7f0000000000-7f0000021000 rw-p 00000000 00:00 0 \n\
Rss:                 132 kB
VmFlags: rd wr mr mw me ac \n\
7f0004000000-7f0004100000 rw-p 00000000 00:00 0 \n\
VmFlags: rd wr mr mw me lo ac \n";
        assert_eq!(allowed_of(smaps, found), [heap, free]);
    }
}
