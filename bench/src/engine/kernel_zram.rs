//! A kernel zram device, hot-added for a run ([`KernelZram`]), and one that is read and written with O_DIRECT
//! ([`KernelDevice`]).
//!
//! Dropping it resets and removes the device, on errors too; devices that existed before are never touched.
//! Each of its operations includes a system call and the block layer: it is what programs get.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use uzram::codec::{Algorithm, Kind};
use uzram::units::{PAGE_SIZE, Page, page_of, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use super::target::Disk;
use crate::harness::{io_error, unsupported};

const CONTROL: &str = "/sys/class/zram-control";

/// A device that this program added; dropping it removes it, which fails if another process has it open.
pub struct KernelZram {
    id: u32,
}

impl KernelZram {
    /// Adds a device with an algorithm by the kernel's name, which uzram need not have.
    pub fn add(algorithm: &str, size_bytes: u64) -> Result<KernelZram> {
        KernelZram::with_params(algorithm, None, size_bytes)
    }

    fn with_params(algorithm: &str, params: Option<&str>, size_bytes: u64) -> Result<KernelZram> {
        let control = Path::new(CONTROL);
        if !control.exists() {
            return Err(unsupported("this kernel has no zram (no /sys/class/zram-control)"));
        }
        let id = read(&control.join("hot_add"))?;
        let number = id.parse();
        let number = number
            .map_err(|_| Error::new(ErrorKind::Io, format!("hot_add answered '{id}', not a number")))?;
        let added = KernelZram { id: number };
        let known = read(&added.attribute("comp_algorithm"))?;
        if !known.split_ascii_whitespace().any(|known| known.trim_matches(['[', ']']) == algorithm) {
            let what = format!("this kernel's zram has no {algorithm}, only: {known}");
            return Err(unsupported(what).with_setting("--algorithm"));
        }
        added.write("comp_algorithm", algorithm)?;
        params.map_or(Ok(()), |params| added.write("algorithm_params", params))?;
        added.write("disksize", &size_bytes.to_string())?;
        Ok(added)
    }

    /// Returns the path of the block device.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/zram{}", self.id))
    }

    pub(crate) fn compact(&self) -> Result<()> {
        self.write("compact", "1")
    }

    /// Returns the bytes of compressed pages and of memory used, `compr_data_size` and `mem_used_total`.
    pub(crate) fn memory(&self) -> Result<[u64; 2]> {
        let text = read(&self.attribute("mm_stat"))?;
        let fields: Vec<u64> = text.split_ascii_whitespace().filter_map(|field| field.parse().ok()).collect();
        match fields[..] {
            [_, compressed_bytes, used_bytes, ..] => Ok([compressed_bytes, used_bytes]),
            _ => Err(Error::new(ErrorKind::Io, format!("mm_stat has an unknown form: '{text}'"))),
        }
    }

    fn attribute(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/sys/block/zram{}/{name}", self.id))
    }

    fn write(&self, name: &str, value: &str) -> Result<()> {
        let path = self.attribute(name);
        fs::write(&path, value).map_err(|error| io_error(&path, error))
    }
}

impl Drop for KernelZram {
    fn drop(&mut self) {
        let id = self.id.to_string();
        let hot_remove = Path::new(CONTROL).join("hot_remove");
        // A device manager may briefly have the new device open.
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

pub(crate) struct KernelDevice {
    disk: OwnedFd,
    page_count: usize,
    /// After `disk`: the device can only be removed when `disk` is closed.
    pub(crate) zram: KernelZram,
}

impl KernelDevice {
    /// Adds one with an algorithm, with lz4 in place of `memory`, which kernels do not have.
    pub(crate) fn add(algorithm: &Algorithm, size_bytes: u64) -> Result<KernelDevice> {
        let lz4 = Algorithm::from(Kind::Lz4);
        let algorithm = if algorithm.kind() == Kind::Memory { &lz4 } else { algorithm };
        let (name, level) = (algorithm.kind().name(), algorithm.level());
        let dictionary = algorithm.dictionary().map(|dictionary| format!(" dict={}", dictionary.path()));
        let params = format!("algo={name} level={level}{}", dictionary.unwrap_or_default());
        // Kernels before 6.12 have no parameters; except for lz4, our defaults are not theirs.
        let params = (*algorithm != Algorithm::default()).then_some(params.as_str());
        let zram = KernelZram::with_params(name, params, size_bytes)?;
        let path = zram.path();
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
        let disk = rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| io_error(&path, errno))?;
        Ok(KernelDevice { disk, page_count: page_of(size_bytes) as usize, zram })
    }
}

impl Disk for KernelDevice {
    fn name(&self) -> &'static str {
        "kernel"
    }

    fn page_count(&self) -> usize {
        self.page_count
    }

    fn read(&self, page: usize, buffer: &mut Page) -> Result<()> {
        whole_page(rustix::io::pread(&self.disk, buffer, pages_to_bytes(page as u64)), "read")
    }

    fn write(&self, page: usize, contents: &Page) -> Result<()> {
        whole_page(rustix::io::pwrite(&self.disk, contents, pages_to_bytes(page as u64)), "write")
    }
}

fn whole_page(result: std::result::Result<usize, Errno>, what: &str) -> Result<()> {
    match result {
        Ok(PAGE_SIZE) => Ok(()),
        Ok(len) => Err(Error::new(ErrorKind::Io, format!("kernel zram: a short {what} of {len} bytes"))),
        Err(errno) => Err(Error::new(ErrorKind::Io, format!("kernel zram: {what}: {errno}"))),
    }
}
