//! The machine's `vm.page-cluster` while a daemon's swap is on: how many pages the kernel reads at once, as a
//! power of 2 (sysctl, `Documentation/admin-guide/sysctl/vm.rst`).
//!
//! A file in the runtime directory says what the setting was before, what it was set to, and in which boot:
//! whoever switches swap off can restore it. A setting that was changed since is left alone.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::failure::{Context, Result};

/// The kernel's setting, and the number of this boot (random(4)).
const SETTING: &str = "/proc/sys/vm/page-cluster";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const FILE: &str = "page-cluster";
/// The highest value that Linux takes.
pub const MAX: u8 = 31;

struct Places {
    setting: PathBuf,
    note: PathBuf,
}

impl Places {
    fn of(dir: &Path) -> Places {
        Places { setting: SETTING.into(), note: dir.join(FILE) }
    }

    fn set(&self, value: u8) -> io::Result<()> {
        // What an earlier swap area of the daemon found counts, not what that set.
        let old = match self.noted()? {
            Some((old, set)) if self.value()? == set => old,
            _ => self.value()?,
        };
        let mut note = OpenOptions::new();
        note.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        write!(note.open(&self.note)?, "{old} {value} {}", boot_id()?)?;
        fs::write(&self.setting, value.to_string())
    }

    fn restore(&self) -> io::Result<()> {
        if let Some((old, set)) = self.noted()?
            && self.value()? == set
        {
            fs::write(&self.setting, old.to_string())?;
        }
        match fs::remove_file(&self.note) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn value(&self) -> io::Result<u8> {
        let text = fs::read_to_string(&self.setting)?;
        text.trim().parse().map_err(|_| io::Error::other(format!("'{}'", text.trim())))
    }

    /// Returns the setting of before, and what it was set to in this boot, if it was.
    fn noted(&self) -> io::Result<Option<(u8, u8)>> {
        let text = match fs::read_to_string(&self.note) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        let mut words = text.split_ascii_whitespace();
        let mut number = || words.next()?.parse::<u8>().ok();
        let numbers = number().zip(number());
        Ok(numbers.filter(|_| words.next() == boot_id().ok().as_deref()))
    }
}

fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

/// Sets it for a daemon's swap in the runtime directory `dir`.
pub fn set(dir: &Path, value: u8) -> Result<()> {
    Places::of(dir).set(value).context(|| "cannot set vm.page-cluster; leave out --page-cluster")
}

/// Restores it, if it was set for that daemon's swap, and nobody has changed it since.
pub fn restore(dir: &Path) -> Result<()> {
    Places::of(dir).restore().context(|| "cannot restore vm.page-cluster")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_set_and_notes_of_other_boots_count_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let places = Places { setting: dir.path().join("setting"), note: dir.path().join(FILE) };
        fs::write(&places.setting, "7\n").unwrap();
        places.set(5).unwrap();
        fs::write(&places.setting, "3\n").unwrap();
        places.restore().unwrap();
        assert_eq!((places.value().unwrap(), places.note.exists()), (3, false));
        for note in ["7 3 another-boot", "", "7", "x y z", "7 3", "999 3 z"] {
            fs::write(&places.note, note).unwrap();
            places.restore().unwrap();
            assert_eq!((places.value().unwrap(), places.note.exists()), (3, false), "{note}");
        }
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &places.note).unwrap();
        assert!(places.set(5).is_err() && !dir.path().join("elsewhere").exists());
        assert_eq!(places.value().unwrap(), 3);
    }
}
