//! The image: a static-pie ELF program, mapped from its file into the reservation.

use crate::control::PAGE_BYTES;
use crate::sys::{self, flags::*, nr};

const HEADER_BYTES: usize = 64;
const ENTRY_BYTES: usize = 56;
const MAX_SEGMENTS: usize = 16;
/// The most address space that an image may take.
const MAX_BYTES: usize = 1 << 30;
const MAX_ALIGNMENT: usize = 2 << 20;

const CUT: &str = "the pager's image is cut short";
const FOREIGN: &str = "the pager's image is no static-pie program for this machine";
const BAD: &str = "the pager's image has headers that contradict each other";

/// A part of the file that lies in memory; addresses are relative to the image's start.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
struct Segment {
    address: usize,
    bytes: usize,
    file_at: usize,
    file_bytes: usize,
    protection: usize,
}

/// What the headers of an image say, checked.
#[derive(Debug, PartialEq)]
pub struct Image {
    segments: [Segment; MAX_SEGMENTS],
    len: usize,
    alignment: usize,
    /// Its first instruction.
    pub entry: usize,
    pub program_headers: usize,
    pub program_headers_len: usize,
}

fn round_up(address: usize, to: usize) -> usize {
    (address + to - 1) & !(to - 1)
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> usize {
    bytes[at..at + N].iter().rev().fold(0, |value, byte| value << 8 | *byte as usize)
}

impl Image {
    /// Reads the headers: `page` is the begin of a file of `file_bytes`.
    fn parse(page: &[u8], file_bytes: usize) -> Result<Self, &'static str> {
        if page.len() < HEADER_BYTES {
            return Err(CUT);
        }
        // ELF of 64 bits, little-endian, version 1; a position-independent file for x86_64.
        let is_ours = page.starts_with(b"\x7fELF\x02\x01\x01")
            && field::<2>(page, 16) == 3
            && field::<2>(page, 18) == 62
            && field::<4>(page, 20) == 1;
        if !is_ours || field::<2>(page, 52) != HEADER_BYTES || field::<2>(page, 54) != ENTRY_BYTES {
            return Err(FOREIGN);
        }
        let (table, count) = (field::<8>(page, 32), field::<2>(page, 56));
        if count == 0 || count > MAX_SEGMENTS || table < HEADER_BYTES || table % 8 != 0 || table > PAGE_BYTES
        {
            return Err(BAD);
        }
        let headers = page.get(table..table + count * ENTRY_BYTES).ok_or(CUT)?;
        let mut image = Self {
            segments: [Segment::default(); MAX_SEGMENTS],
            len: 0,
            alignment: PAGE_BYTES,
            entry: field::<8>(page, 24),
            program_headers: table,
            program_headers_len: count,
        };
        for header in headers.chunks_exact(ENTRY_BYTES) {
            match field::<4>(header, 0) {
                1 => image.add(header, file_bytes)?,
                // It asks for a dynamic linker.
                3 => return Err(FOREIGN),
                _ => {}
            }
        }
        let has = |address: usize, bytes: usize, protection: usize| {
            image.segments[..image.len].iter().any(|segment| {
                let at = address.wrapping_sub(segment.address);
                segment.protection & protection != 0
                    && at < segment.file_bytes
                    && bytes <= segment.file_bytes - at
            })
        };
        let first = image.segments[0];
        let is_right = first.file_at == 0
            && first.address == 0
            && has(image.entry, 1, PROT_EXEC)
            && has(table, headers.len(), PROT_READ);
        if is_right { Ok(image) } else { Err(BAD) }
    }

    /// Adds the segment of a header.
    fn add(&mut self, header: &[u8], file_bytes: usize) -> Result<(), &'static str> {
        let flags = field::<4>(header, 4);
        let alignment = field::<8>(header, 48).max(1);
        let segment = Segment {
            address: field::<8>(header, 16),
            bytes: field::<8>(header, 40),
            file_at: field::<8>(header, 8),
            file_bytes: field::<8>(header, 32),
            // ELF numbers them the other way round.
            protection: (flags & 4) >> 2 | flags & PROT_WRITE | (flags & 1) << 2,
        };
        let is_right = segment.bytes > 0
            && segment.file_bytes <= segment.bytes
            && segment.address.checked_add(segment.bytes).is_some_and(|end| end <= MAX_BYTES)
            && alignment.is_power_of_two()
            && alignment <= MAX_ALIGNMENT
            && segment.address % PAGE_BYTES == segment.file_at % PAGE_BYTES
            && segment.address & !(PAGE_BYTES - 1) >= self.end()
            && segment.protection & PROT_READ != 0
            && segment.protection & (PROT_WRITE | PROT_EXEC) != PROT_WRITE | PROT_EXEC
            // Zeros are written behind what comes from the file.
            && (segment.bytes == segment.file_bytes || segment.protection & PROT_WRITE != 0);
        if !is_right {
            return Err(BAD);
        }
        if segment.file_at.checked_add(segment.file_bytes).is_none_or(|end| end > file_bytes) {
            return Err(CUT);
        }
        self.alignment = self.alignment.max(alignment);
        self.segments[self.len] = segment;
        self.len += 1;
        Ok(())
    }

    /// Where the last segment's last page ends.
    fn end(&self) -> usize {
        let last = self.segments[..self.len].last();
        last.map_or(0, |last| round_up(last.address + last.bytes, PAGE_BYTES))
    }

    /// Reads the headers of the file.
    pub fn read(file: usize) -> Result<Self, &'static str> {
        const SEEK_END: usize = 2;
        let mut page = [0u8; PAGE_BYTES];
        // SAFETY: the page outlives the call.
        let len = unsafe { sys::call(nr::PREAD64, [file, page.as_mut_ptr() as usize, page.len(), 0]) };
        // SAFETY: it takes no pointer.
        let file_bytes = unsafe { sys::call(nr::LSEEK, [file, 0, SEEK_END]) };
        match (len, file_bytes) {
            (Ok(len), Ok(file_bytes)) => Self::parse(&page[..len], file_bytes),
            _ => Err("the pager's image cannot be read"),
        }
    }

    /// Maps the image at the first fitting address from `start` on. Where it begins, and the first page
    /// behind it.
    ///
    /// # Safety
    /// `start` is a page's, and nothing uses the memory from there to `end`.
    pub unsafe fn map(&self, file: usize, start: usize, end: usize) -> Result<(usize, usize), &'static str> {
        let base = round_up(start, self.alignment);
        if base + self.end() > end {
            return Err("the pager's image is larger than the reservation");
        }
        for segment in &self.segments[..self.len] {
            let head = segment.address % PAGE_BYTES;
            let at = base + segment.address - head;
            let file_end = base + segment.address + segment.file_bytes;
            let bytes_end = round_up(base + segment.address + segment.bytes, PAGE_BYTES);
            let mut fresh = at;
            if segment.file_bytes > 0 {
                let kind = MAP_PRIVATE | MAP_FIXED;
                let bytes = segment.file_bytes + head;
                // SAFETY: the caller gave the range away, and the segment lies in it.
                unsafe {
                    sys::call(nr::MMAP, [at, bytes, segment.protection, kind, file, segment.file_at - head])
                }
                .map_err(|_| "the pager's image cannot be mapped (is its directory mounted noexec?)")?;
                fresh = round_up(file_end, PAGE_BYTES);
                if segment.protection & PROT_WRITE != 0 {
                    // SAFETY: the last page of the file's part, mapped above.
                    unsafe { core::ptr::write_bytes(file_end as *mut u8, 0, fresh - file_end) };
                }
            }
            if bytes_end > fresh {
                // SAFETY: as above.
                unsafe { sys::map_fixed(fresh, bytes_end - fresh, segment.protection) }
                    .map_err(|_| "the pager's image cannot be mapped: no memory")?;
            }
        }
        Ok((base, base + self.end()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE_BYTES: usize = 0x3000;

    /// Where the fields of the file's header and of a segment's are, and their bytes.
    const HEADER: &[(usize, usize)] =
        &[(16, 2), (18, 2), (20, 4), (24, 8), (32, 8), (52, 2), (54, 2), (56, 2)];
    const SEGMENT: &[(usize, usize)] = &[(0, 4), (4, 4), (8, 8), (16, 8), (32, 8), (40, 8), (48, 8)];

    /// An image of two segments: text, and data with a page of zeros behind.
    fn file() -> Vec<u8> {
        let mut file = vec![0; PAGE_BYTES];
        file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        set_all(&mut file, 0, HEADER, &[3, 62, 1, 0x1800, 64, 64, 56, 2]);
        // Kind, flags, place in the file, address, bytes in the file and in memory, alignment.
        set_all(&mut file, 64, SEGMENT, &[1, 5, 0, 0, 0x2000, 0x2000, 0x1000]);
        set_all(&mut file, 120, SEGMENT, &[1, 6, 0x2010, 0x3010, 0x10, 0x1000, 0x1000]);
        file
    }

    fn set_all(file: &mut [u8], start: usize, fields: &[(usize, usize)], values: &[u64]) {
        fields.iter().zip(values).for_each(|((at, bytes), value)| set(file, start + at, *bytes, *value));
    }

    fn set(file: &mut [u8], at: usize, bytes: usize, value: u64) {
        file[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
    }

    #[test]
    fn a_right_image_is_taken() {
        let image = Image::parse(&file(), FILE_BYTES).unwrap();
        assert_eq!((image.entry, image.program_headers, image.program_headers_len), (0x1800, 64, 2));
        let text = Segment { address: 0, bytes: 0x2000, file_at: 0, file_bytes: 0x2000, protection: 5 };
        let data =
            Segment { address: 0x3010, bytes: 0x1000, file_at: 0x2010, file_bytes: 0x10, protection: 3 };
        assert_eq!(image.segments[..image.len], [text, data]);
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        // Of the header, and of the second segment.
        let changes: [(usize, usize, &[u64]); 18] = [
            (0, 1, &[0]),
            (4, 1, &[1]),
            (16, 2, &[2]),
            (18, 2, &[3]),
            (20, 4, &[2]),
            (24, 8, &[0x2000, u64::MAX]),
            (32, 8, &[0, 65, 4096, u64::MAX]),
            (52, 2, &[1]),
            (54, 2, &[57]),
            (56, 2, &[0, 17]),
            (96, 8, &[0x10]),     // the first segment has not even the headers
            (120, 4, &[3]),       // it asks for a dynamic linker
            (124, 4, &[7, 4, 2]), // written and executed; zeros that cannot be written; not read
            // Another place in its page than the address; no end in the file; behind that.
            (128, 8, &[0x2011, u64::MAX - 15, 0x3010]),
            (136, 8, &[0x1010, u64::MAX - 0xfef, 1 << 30 | 0x10]), // within the first; too far away
            (152, 8, &[0x1001, u64::MAX]),                         // more in the file than in memory
            (160, 8, &[0, u64::MAX]),
            (168, 8, &[3, 4 << 20]),
        ];
        for (at, bytes, values) in changes {
            for value in values {
                let mut file = file();
                set(&mut file, at, bytes, *value);
                assert!(Image::parse(&file, FILE_BYTES).is_err(), "{at}: {value:#x}");
            }
        }
        for len in 0..64 + 2 * 56 {
            assert!(Image::parse(&file()[..len], len).is_err(), "{len}");
        }
        assert!(Image::parse(&file(), 0x201f).is_err() && Image::parse(&file(), 0x2020).is_ok());
    }

    #[test]
    fn no_headers_make_it_panic() {
        let mut random = 1u64;
        for _ in 0..100_000 {
            let mut file = file();
            for _ in 0..3 {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let values = [0, 1, 0x7f, 0xff, random as u8];
                file[16 + (random >> 40) as usize % 160] = values[(random >> 20) as usize % values.len()];
            }
            if let Ok(image) = Image::parse(&file, FILE_BYTES) {
                let ends = image.segments[..image.len].iter().map(|segment| segment.address + segment.bytes);
                assert!(ends.max().is_some_and(|end| end <= MAX_BYTES));
            }
        }
    }
}
