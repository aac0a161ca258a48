//! A kernel zram device, hot-added for a run.
//!
//! Dropping it resets and removes the device, on errors too; devices that existed before are never touched.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use uzram::codec::{Algorithm, Kind};
use uzram::{Error, ErrorKind, Result};

use super::report::{KernelMemory, quotient};

const CONTROL: &str = "/sys/class/zram-control";

/// A device that this program added; dropping it removes it, which fails if another process has it open.
pub struct KernelZram {
    id: u32,
}

impl KernelZram {
    /// Adds a device of `size_bytes`, with lz4 in place of `memory`, which kernels do not have.
    pub fn add(algorithm: &Algorithm, size_bytes: u64) -> Result<KernelZram> {
        let added = KernelZram::hot_add()?;
        match algorithm.kind() {
            Kind::Memory => added.set_algorithm(&Kind::Lz4.into())?,
            _ => added.set_algorithm(algorithm)?,
        }
        added.write("disksize", &size_bytes.to_string())?;
        Ok(added)
    }

    /// Adds a device with an algorithm by the kernel's name, which uzram need not have.
    pub(crate) fn add_named(algorithm: &str, size_bytes: u64) -> Result<KernelZram> {
        let added = KernelZram::hot_add()?;
        added.choose(algorithm)?;
        added.write("disksize", &size_bytes.to_string())?;
        Ok(added)
    }

    /// Adds a device without a size.
    fn hot_add() -> Result<KernelZram> {
        let control = Path::new(CONTROL);
        if !control.exists() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "this kernel has no zram (no /sys/class/zram-control)",
            ));
        }
        let id = read(&control.join("hot_add"))?;
        Ok(KernelZram {
            id: id
                .parse()
                .map_err(|_| Error::new(ErrorKind::Io, format!("hot_add answered '{id}', not a number")))?,
        })
    }

    /// Returns the path of the block device.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/zram{}", self.id))
    }

    /// Compacts its pool.
    pub fn compact(&self) -> Result<()> {
        self.write("compact", "1")
    }

    /// Returns the figures of `mm_stat`.
    pub fn memory(&self) -> Result<KernelMemory> {
        let text = read(&self.attribute("mm_stat"))?;
        let fields: Vec<u64> = text.split_ascii_whitespace().filter_map(|field| field.parse().ok()).collect();
        match fields[..] {
            [stored_bytes, compressed_bytes, used_bytes, _, _, same_pages, _, huge_pages, ..] => {
                let used_per_compressed = quotient(used_bytes, compressed_bytes);
                Ok(KernelMemory {
                    stored_bytes,
                    compressed_bytes,
                    used_bytes,
                    same_pages,
                    huge_pages,
                    used_per_compressed,
                })
            }
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

    fn choose(&self, name: &str) -> Result<()> {
        let known = read(&self.attribute("comp_algorithm"))?;
        if !known.split_ascii_whitespace().any(|known| known.trim_matches(['[', ']']) == name) {
            let what = format!("this kernel's zram has no {name}, only: {known}");
            return Err(Error::new(ErrorKind::Unsupported, what).with_setting("--algorithm"));
        }
        self.write("comp_algorithm", name)
    }

    fn set_algorithm(&self, algorithm: &Algorithm) -> Result<()> {
        let name = algorithm.kind().name();
        self.choose(name)?;
        // Kernels before 6.12 have no parameters; except for lz4, our defaults are not theirs.
        if *algorithm == Algorithm::default() {
            return Ok(());
        }
        let dictionary = algorithm.dictionary().map(|dictionary| format!(" dict={}", dictionary.path()));
        let params = format!("algo={name} level={}{}", algorithm.level(), dictionary.unwrap_or_default());
        self.write("algorithm_params", &params)
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

pub(super) fn io_error(path: &Path, error: std::io::Error) -> Error {
    let kind = match error.kind() {
        std::io::ErrorKind::PermissionDenied => ErrorKind::Permission,
        std::io::ErrorKind::NotFound => ErrorKind::NotFound,
        _ => ErrorKind::Io,
    };
    Error::new(kind, format!("{}: {error}", path.display()))
}
