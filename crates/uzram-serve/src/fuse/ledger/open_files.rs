//! The open files, by their handles.
//!
//! ```text
//!           32 bits       29 bits   3 bits
//! state   | generation  |         | access |   access: the mode of open(2) plus 1; 0 for no file
//! file    | inode number                   |
//! unique  | of the request that opened it  |
//! ```
//!
//! A store to `state` opens or closes. A closed file leaves the next generation behind, which is part of the next
//! file's handle: a request to close that is carried out twice closes no other file.

use super::{HANDLES_AT, Ledger, MAX_OPEN};
use crate::fuse::proto::FUSE_UNIQUE_RESEND;

/// Words of an entry.
pub(super) const WORDS: usize = 4;
const STATE: usize = 0;
const FILE: usize = 1;
const UNIQUE: usize = 2;

/// The largest access: of `O_RDWR`.
const MAX_ACCESS: u32 = libc::O_RDWR as u32 + 1;

/// The entry of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fuse) struct OpenFileRecord {
    pub ino: u64,
    /// `O_RDONLY`, `O_WRONLY` or `O_RDWR`.
    pub mode: i32,
    /// The request that opened it.
    pub unique: u64,
}

fn entry_at(index: usize) -> usize {
    HANDLES_AT + index % MAX_OPEN * WORDS
}

impl Ledger {
    /// Returns the generation of handle `index`, and its file, if one is open.
    pub(in crate::fuse) fn open_file(&self, index: usize) -> (u32, Option<OpenFileRecord>) {
        let at = entry_at(index);
        let state = self.load(at + STATE);
        let (generation, access) = ((state >> 32) as u32, state as u32);
        let file = (1..=MAX_ACCESS).contains(&access).then(|| OpenFileRecord {
            ino: self.load(at + FILE),
            mode: access as i32 - 1,
            unique: self.load(at + UNIQUE),
        });
        (generation, file)
    }

    /// Enters an open file as handle `index`.
    pub(in crate::fuse) fn enter_file(&self, index: usize, generation: u32, file: OpenFileRecord) {
        let at = entry_at(index);
        self.store(at + FILE, file.ino);
        self.store(at + UNIQUE, file.unique & !FUSE_UNIQUE_RESEND);
        let access = file.mode as u32 + 1;
        self.store(at + STATE, u64::from(generation) << 32 | u64::from(access));
    }

    /// Clears the entry of handle `index`, and leaves `generation` behind for the next.
    pub(in crate::fuse) fn clear_file(&self, index: usize, generation: u32) {
        self.store(entry_at(index) + STATE, u64::from(generation) << 32);
    }

    /// Returns the handle that a request opened, if it did: its index and generation.
    pub(in crate::fuse) fn opened_by(&self, unique: u64) -> Option<(usize, u32)> {
        (0..MAX_OPEN).find_map(|index| {
            let (generation, file) = self.open_file(index);
            (file?.unique == unique & !FUSE_UNIQUE_RESEND).then_some((index, generation))
        })
    }
}
