//! The devices' numbers, by their names.
//!
//! An entry is a number, 0 for none, and the name, with zeros up to its longest length. The number is stored last.

use super::{DEVICES_AT, LAST_NUMBER_AT, Ledger, MAX_DEVICES};

/// The longest name, `Device::check_name`.
const NAME_BYTES: usize = 64;
const NAME_WORDS: usize = NAME_BYTES / size_of::<u64>();
/// Words of an entry.
pub(super) const WORDS: usize = 1 + NAME_WORDS;
const NUMBER: usize = 0;
const NAME: usize = 1;

fn entries() -> impl Iterator<Item = usize> {
    (0..MAX_DEVICES).map(|index| DEVICES_AT + index * WORDS)
}

impl Ledger {
    /// Returns the last number that was given to a device.
    pub(in crate::fuse) fn last_number(&self) -> u64 {
        self.load(LAST_NUMBER_AT)
    }

    /// Returns the devices' names and numbers. Only names that a device can have are UTF-8.
    pub(in crate::fuse) fn device_numbers(&self) -> Vec<(u64, Vec<u8>)> {
        let entry = |at| {
            let number = self.load(at + NUMBER);
            let words = (0..NAME_WORDS).map(|word| self.load(at + NAME + word));
            let mut name: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
            name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES));
            (number, name)
        };
        entries().map(entry).filter(|(number, _)| *number != 0).collect()
    }

    /// Enters a device's number, which is larger than all before; returns whether there was room for it.
    pub(in crate::fuse) fn enter_device(&self, number: u64, name: &str) -> bool {
        // Never given again, even if this process dies now.
        self.store(LAST_NUMBER_AT, number);
        let free = entries().find(|at| self.load(at + NUMBER) == 0);
        let Some(at) = free.filter(|_| name.len() <= NAME_BYTES) else { return false };
        let mut bytes = [0; NAME_BYTES];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        for (word, bytes) in bytes.as_chunks().0.iter().enumerate() {
            self.store(at + NAME + word, u64::from_ne_bytes(*bytes));
        }
        self.store(at + NUMBER, number);
        true
    }

    /// Clears the entries that `is_kept` does not keep, by their numbers.
    pub(in crate::fuse) fn retain_devices(&self, is_kept: impl Fn(u64) -> bool) {
        for at in entries() {
            let number = self.load(at + NUMBER);
            if number != 0 && !is_kept(number) {
                self.store(at + NUMBER, 0);
            }
        }
    }
}
