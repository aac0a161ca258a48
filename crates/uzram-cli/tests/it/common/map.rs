//! Files in memory.

use rustix::io::Errno;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};

use super::*;

/// A file mapped shared, unmapped when dropped.
pub struct Map {
    start: *mut u8,
    len: usize,
}

impl Map {
    pub fn new(file: &File, len: usize) -> Result<Map, Errno> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }?;
        Ok(Map { start: start.cast(), len })
    }

    /// The same; `None` where the kernel cannot map a device's file, and says so.
    pub fn if_able(file: &File, len: usize) -> Option<Map> {
        match Map::new(file, len) {
            Err(Errno::NODEV) if !since_linux(6, 6) => {
                println!("skipped: files without page cache can be mapped shared since Linux 6.6");
                None
            }
            mapped => Some(mapped.unwrap()),
        }
    }

    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.len);
        // SAFETY: the offset is within the mapping.
        unsafe { self.start.add(offset) }
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        // SAFETY: the range lies in the mapping, and no reference to it exists.
        unsafe { self.at(offset).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: as above.
        unsafe { self.at(offset).copy_to(bytes.as_mut_ptr(), len) };
        bytes
    }

    pub fn sync(&self) {
        // SAFETY: the range is the mapping.
        unsafe { rustix::mm::msync(self.start.cast(), self.len, MsyncFlags::SYNC) }.unwrap();
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        unsafe { rustix::mm::munmap(self.start.cast(), self.len) }.unwrap();
    }
}

fn since_linux(major: u32, minor: u32) -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    let here: (u32, u32) = (numbers.next().unwrap(), numbers.next().unwrap());
    here >= (major, minor)
}
