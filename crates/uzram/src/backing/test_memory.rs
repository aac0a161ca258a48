//! Blocks in memory, for tests. Each transfer is completed at once.

use std::sync::Mutex;

use super::{Backing, Blocks, Direction, Transfer};
use crate::base::sync::Arc;
use crate::base::units::PAGE_SIZE;

pub(crate) struct Memory(Mutex<Vec<u8>>);

impl Memory {
    pub(crate) fn backing(len_bytes: u64) -> Backing {
        Backing::Blocks(Arc::new(Memory(Mutex::new(vec![0; len_bytes as usize]))))
    }
}

impl Blocks for Memory {
    fn len_bytes(&self) -> u64 {
        self.0.lock().expect("no panic").len() as u64
    }

    fn block_bytes(&self) -> usize {
        PAGE_SIZE
    }

    fn start(&self, transfer: Transfer) {
        let Transfer { direction, offset, len_bytes, mut buffer, token, completion, .. } = transfer;
        let mut bytes = self.0.lock().expect("no panic");
        let there = &mut bytes[offset as usize..][..len_bytes];
        match direction {
            Direction::Read => buffer[..len_bytes].copy_from_slice(there),
            Direction::Write => there.copy_from_slice(&buffer[..len_bytes]),
        }
        drop(bytes);
        completion.done(token, buffer, Ok(()));
    }

    fn discard(&self, _: u64, _: u64) {}
}
