//! [`Claim`]: whether a store uses a backing that no second one may use.

use super::SETTING;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::{AtomicU32, Ordering};

/// Taken by the first store, and kept when that store is gone: another one would give its objects the same numbers and
/// nonces.
#[derive(Default)]
pub struct Claim {
    is_taken: AtomicU32,
}

impl Claim {
    /// Takes it.
    ///
    /// # Errors
    /// `Busy` if it is taken.
    pub fn take(&self) -> Result<()> {
        match self.is_taken.swap(1, Ordering::Relaxed) {
            0 => Ok(()),
            _ => {
                Err(Error::new(ErrorKind::Busy, "another device has used this backing").with_setting(SETTING))
            }
        }
    }

    /// Gives it back, for a store that has not written anything.
    pub fn give_back(&self) {
        self.is_taken.store(0, Ordering::Relaxed);
    }

    /// Returns whether it is taken.
    pub fn is_taken(&self) -> bool {
        self.is_taken.load(Ordering::Relaxed) > 0
    }
}
