//! The kernel's own zram: a device hot-added for the run, read and written with O_DIRECT.
//!
//! A device that was added is reset and removed when this is dropped, on errors too; no device
//! that was there before is touched. The comparison is of what programs get, in process against a
//! block device: each of the kernel's operations has a system call and the block layer in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use uzram::base::units::{PAGE_SIZE, Page, page_of, pages_to_bytes};
use uzram::codec::Algorithm;
use uzram::{Error, ErrorKind, Result};

use super::report::KernelMemory;
use super::{Target, Worker, fill_in_order};
use crate::corpus::{AlignedPage, Corpus};

const CONTROL: &str = "/sys/class/zram-control";

pub(super) struct KernelDevice {
    disk: OwnedFd,
    page_count: usize,
    /// After `disk`: the device can only be removed when it is closed.
    added: Added,
}

/// A device that we added; dropping it removes it.
struct Added {
    id: u32,
}

impl KernelDevice {
    /// Adds a device of `size_bytes`.
    pub(super) fn add(algorithm: &Algorithm, size_bytes: u64) -> Result<KernelDevice> {
        let control = Path::new(CONTROL);
        if !control.exists() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "this kernel has no zram (no /sys/class/zram-control)",
            ));
        }
        let id = read(&control.join("hot_add"))?;
        let added = Added {
            id: id
                .parse()
                .map_err(|_| Error::new(ErrorKind::Io, format!("hot_add answered '{id}', not a number")))?,
        };
        added.set_algorithm(algorithm)?;
        added.write("disksize", &size_bytes.to_string())?;
        let path = format!("/dev/zram{}", added.id);
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
        let disk = rustix::fs::open(&path, flags, Mode::empty())
            .map_err(|errno| io_error(Path::new(&path), errno.into()))?;
        Ok(KernelDevice { disk, page_count: page_of(size_bytes) as usize, added })
    }

    /// Packs its pool's objects together.
    pub(super) fn compact(&self) -> Result<()> {
        self.added.write("compact", "1")
    }

    /// What `mm_stat` says.
    pub(super) fn memory(&self) -> Result<KernelMemory> {
        let text = read(&self.added.attribute("mm_stat"))?;
        let fields: Vec<u64> = text.split_ascii_whitespace().filter_map(|field| field.parse().ok()).collect();
        match fields[..] {
            [stored_bytes, compressed_bytes, used_bytes, _, _, same_pages, _, huge_pages, ..] => {
                Ok(KernelMemory::new(stored_bytes, compressed_bytes, used_bytes, same_pages, huge_pages))
            }
            _ => Err(Error::new(ErrorKind::Io, format!("mm_stat has an unknown form: '{text}'"))),
        }
    }
}

impl Added {
    fn attribute(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/sys/block/zram{}/{name}", self.id))
    }

    fn write(&self, name: &str, value: &str) -> Result<()> {
        let path = self.attribute(name);
        fs::write(&path, value).map_err(|error| io_error(&path, error))
    }

    fn set_algorithm(&self, algorithm: &Algorithm) -> Result<()> {
        let name = algorithm.kind().name();
        let known = read(&self.attribute("comp_algorithm"))?;
        if !known.split_ascii_whitespace().any(|known| known.trim_matches(['[', ']']) == name) {
            let what = format!("this kernel's zram has no {name}, only: {known}");
            return Err(Error::new(ErrorKind::Unsupported, what).with_setting("--algorithm"));
        }
        self.write("comp_algorithm", name)?;
        // Kernels before 6.12 have no parameters; but for lz4, ours are not their defaults.
        if *algorithm == Algorithm::default() {
            return Ok(());
        }
        let dictionary = algorithm.dictionary().map(|dictionary| format!(" dict={}", dictionary.path()));
        let params = format!("algo={name} level={}{}", algorithm.level(), dictionary.unwrap_or_default());
        self.write("algorithm_params", &params)
    }
}

impl Drop for Added {
    fn drop(&mut self) {
        let id = self.id.to_string();
        let hot_remove = Path::new(CONTROL).join("hot_remove");
        // A device manager may have the new device open for a moment.
        for _ in 0..50 {
            if self.write("reset", "1").is_ok() && fs::write(&hot_remove, &id).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        eprintln!("zram{id} is busy and stays: remove it with `echo {id} > {}`", hot_remove.display());
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).map_err(|error| io_error(path, error))
}

fn io_error(path: &Path, error: std::io::Error) -> Error {
    let kind = match error.kind() {
        std::io::ErrorKind::PermissionDenied => ErrorKind::Permission,
        std::io::ErrorKind::NotFound => ErrorKind::NotFound,
        _ => ErrorKind::Io,
    };
    Error::new(kind, format!("{}: {error}", path.display()))
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
