//! Swap areas: writing the header, switching areas on and off, and listing the active ones.
//!
//! The header is what mkswap(8) writes, by the kernel's `union swap_header` (include/linux/swap.h): at byte
//! 1024 the version 1, the last page, the number of bad pages, a UUID and a label; the magic `SWAPSPACE2`
//! ends the page.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Offset of the header's fields; the bytes before are for boot loaders.
const FIELDS_AT: usize = 1024;
const VERSION: u32 = 1;
const MAGIC: &[u8; 10] = b"SWAPSPACE2";
/// The fewest pages of a swap area, by mkswap(8).
const MIN_PAGES: u64 = 10;

/// `<linux/swap.h>`, swapon(2).
const SWAP_FLAG_PREFER: i32 = 0x8000;
const SWAP_FLAG_PRIO_MASK: i32 = 0x7fff;
const SWAP_FLAG_DISCARD: i32 = 0x10000;

/// The highest priority of an area.
pub const MAX_PRIORITY: u16 = SWAP_FLAG_PRIO_MASK as u16;

/// An active swap area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveArea {
    /// The device or file.
    pub path: PathBuf,
    /// The area's size.
    pub size_bytes: u64,
    /// Bytes swapped out to it.
    pub used_bytes: u64,
    /// The kernel uses areas of higher priority first.
    pub priority: i32,
}

/// Returns the first page of an area of `size_bytes`; `None` if that is too small.
fn header(size_bytes: u64, page_bytes: usize, uuid: [u8; 16], label: &str) -> Option<Vec<u8>> {
    let pages = (size_bytes / page_bytes as u64).min(u64::from(u32::MAX));
    if pages < MIN_PAGES {
        return None;
    }
    let mut page = vec![0; page_bytes];
    let fields = &mut page[FIELDS_AT..];
    fields[..4].copy_from_slice(&VERSION.to_ne_bytes());
    fields[4..8].copy_from_slice(&((pages - 1) as u32).to_ne_bytes());
    fields[12..28].copy_from_slice(&uuid);
    let label = &label.as_bytes()[..label.len().min(16)];
    fields[28..28 + label.len()].copy_from_slice(label);
    page[page_bytes - MAGIC.len()..].copy_from_slice(MAGIC);
    Some(page)
}

/// Returns a random UUID, version 4 of RFC 9562.
fn uuid() -> io::Result<[u8; 16]> {
    let mut uuid = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut uuid)?;
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Ok(uuid)
}

/// Writes a swap header, so that the whole device is a swap area. Errors: the device cannot be written;
/// `InvalidInput` when it is too small.
pub fn make(device: &Path, size_bytes: u64, label: &str) -> io::Result<()> {
    let page = header(size_bytes, rustix::param::page_size(), uuid()?, label)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "it is too small for swap"))?;
    let mut file = OpenOptions::new().write(true).open(device)?;
    file.write_all(&page)?;
    file.sync_all()
}

/// Switches a swap area on; it is active when this returns. With `discard`, the kernel discards freed slots.
/// Without a priority, the kernel chooses one that is lower than all others. Errors: swapon(2)'s.
pub fn switch_on(device: &Path, priority: Option<u16>, discard: bool) -> io::Result<()> {
    let prefer = priority.map_or(0, |priority| SWAP_FLAG_PREFER | i32::from(priority) & SWAP_FLAG_PRIO_MASK);
    let path = CString::new(device.as_os_str().as_bytes())?;
    let flags = prefer | if discard { SWAP_FLAG_DISCARD } else { 0 };
    // SAFETY: `path` ends with a zero and lives through the call.
    outcome(unsafe { libc::swapon(path.as_ptr(), flags) })
}

/// Switches a swap area off: its pages go back to memory, which may take long. Errors: swapoff(2)'s. It stays
/// active then.
pub fn switch_off(device: &Path) -> io::Result<()> {
    let path = CString::new(device.as_os_str().as_bytes())?;
    // SAFETY: `path` ends with a zero and lives through the call.
    outcome(unsafe { libc::swapoff(path.as_ptr()) })
}

/// Returns what a system call that returns 0 or sets `errno` did.
fn outcome(returned: i32) -> io::Result<()> {
    if returned == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the active swap areas; none on a kernel without swap. Errors: the kernel's list cannot be read.
pub fn active() -> io::Result<Vec<ActiveArea>> {
    match std::fs::read("/proc/swaps") {
        Ok(text) => Ok(parse(&text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Parses proc_swaps(5): a heading, and a line for each area: path, type, size and used in KiB, priority.
fn parse(text: &[u8]) -> Vec<ActiveArea> {
    let lines = text.split(|byte| *byte == b'\n').skip(1);
    lines.filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<ActiveArea> {
    let mut fields = line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
    let path = fields.next()?;
    let mut numbers = fields.skip(1).map(|field| str::from_utf8(field).ok()?.parse::<i64>().ok());
    let mut kib = || u64::try_from(numbers.next()??).ok()?.checked_mul(1024);
    let (size_bytes, used_bytes) = (kib()?, kib()?);
    let priority = i32::try_from(numbers.next()??).ok()?;
    let path = uzram::mountinfo::unescape(path);
    Some(ActiveArea { path, size_bytes, used_bytes, priority })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_header_is_as_mkswap_writes_it() {
        let page = header(1 << 20, 4096, [7; 16], "uzram").unwrap();
        assert_eq!(page.len(), 4096);
        assert_eq!(&page[4086..], MAGIC);
        assert_eq!(page[1024..1036], [1, 0, 0, 0, 255, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(page[1036..1052], [7; 16]);
        assert_eq!(&page[1052..1068], b"uzram\0\0\0\0\0\0\0\0\0\0\0");
        assert!(page[..1024].iter().chain(&page[1068..4086]).all(|byte| *byte == 0));
        assert!(
            header(9 * 4096, 4096, [0; 16], "").is_none() && header(10 * 4096, 4096, [0; 16], "").is_some()
        );
        assert_eq!(&header(1 << 20, 65536, [0; 16], "a label of too many letters").unwrap()[65526..], MAGIC);
    }

    #[test]
    fn the_kernels_list_is_understood() {
        let text = b"Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
            /dev/loop0                              partition\t1048572\t\t12\t\t100\n\
            /swap\\040file                          file\t\t4096\t\t0\t\t-2\n";
        let areas = parse(text);
        assert_eq!(areas.len(), 2);
        assert_eq!(areas[1].path, Path::new("/swap file"));
        assert_eq!(areas[0].path, Path::new("/dev/loop0"));
        assert_eq!((areas[0].size_bytes, areas[0].used_bytes), (1_048_572 << 10, 12 << 10));
        assert_eq!((areas[0].priority, areas[1].priority), (100, -2));
        assert_eq!(parse(b""), []);
        assert_eq!(parse(b"heading\n/dev/x partition 1"), []);
    }
}
