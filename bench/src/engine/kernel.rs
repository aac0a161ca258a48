//! The kernel's own zram: a device hot-added for the run ([`KernelZram`]), read and written with O_DIRECT.
//!
//! Compares what programs get, in process against a block device: each of the kernel's operations includes a
//! system call and the block layer.

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use uzram::codec::Algorithm;
use uzram::units::{PAGE_SIZE, Page, page_of, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use super::kernel_zram::{KernelZram, io_error};
use super::{Target, Worker, fill_in_order};
use crate::harness::corpus::{AlignedPage, Corpus};

pub(super) struct KernelDevice {
    disk: OwnedFd,
    page_count: usize,
    /// After `disk`: the device can only be removed when `disk` is closed.
    pub(super) zram: KernelZram,
}

impl KernelDevice {
    /// Adds a device of `size_bytes`.
    pub(super) fn add(algorithm: &Algorithm, size_bytes: u64) -> Result<KernelDevice> {
        let zram = KernelZram::add(algorithm, size_bytes)?;
        let path = zram.path();
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
        let disk =
            rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| io_error(&path, errno.into()))?;
        Ok(KernelDevice { disk, page_count: page_of(size_bytes) as usize, zram })
    }
}

impl Target for KernelDevice {
    fn name(&self) -> &'static str {
        "kernel"
    }

    fn fill(&self, corpus: &Corpus) -> Result<()> {
        fill_in_order(self, corpus, self.page_count)
    }

    fn worker(&self) -> Result<Box<dyn Worker + '_>> {
        Ok(Box::new(DiskWorker { disk: &self.disk, buffer: Box::new(AlignedPage([0; _])) }))
    }
}

struct DiskWorker<'a> {
    disk: &'a OwnedFd,
    buffer: Box<AlignedPage>,
}

impl Worker for DiskWorker<'_> {
    fn read(&mut self, page: usize) -> Result<&Page> {
        whole_page(rustix::io::pread(self.disk, &mut self.buffer.0, pages_to_bytes(page as u64)), "read")?;
        Ok(&self.buffer.0)
    }

    fn write(&mut self, page: usize, contents: &Page) -> Result<()> {
        whole_page(rustix::io::pwrite(self.disk, contents, pages_to_bytes(page as u64)), "write")
    }
}

fn whole_page(result: std::result::Result<usize, Errno>, what: &str) -> Result<()> {
    match result {
        Ok(PAGE_SIZE) => Ok(()),
        Ok(len) => Err(Error::new(ErrorKind::Io, format!("kernel zram: a short {what} of {len} bytes"))),
        Err(errno) => Err(Error::new(ErrorKind::Io, format!("kernel zram: {what}: {errno}"))),
    }
}
