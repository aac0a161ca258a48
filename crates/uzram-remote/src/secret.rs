//! What a device's objects are sealed with: AES-256-GCM (NIST SP 800-38D), by a key that is drawn for the device.
//!
//! The key is in memory that is locked, so that it is not swapped out, and left out of core files. So is the file in which it
//! is handed on ([`Pinned`]).

use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::sync::OnceLock;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use uzram::backing::Seal;
use uzram::{Error, ErrorKind, Result};

use crate::SETTING;
use crate::objects::DeviceId;

const KEY_BYTES: usize = 32;
const TAG_BYTES: usize = 16;
/// The most bytes of what is said about an object.
const MAX_ABOUT_BYTES: usize = 16;
/// The device, and what is said, with its length.
const ASSOCIATED_BYTES: usize = 16 + 1 + MAX_ABOUT_BYTES;

/// The size of a page, to which locking applies, on machines with the largest pages, too.
const MAX_HOST_PAGE_BYTES: usize = 64 << 10;

/// A device's key, as it is handed on to the next process. Not shown by `Debug`.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Key([u8; KEY_BYTES]);

impl Key {
    /// Draws a new one.
    ///
    /// # Errors
    /// `Io` if the system gives no random bytes.
    pub(crate) fn new() -> Result<Key> {
        let mut key = [0; KEY_BYTES];
        let filled = SystemRandom::new().fill(&mut key);
        filled.map(|()| Key(key)).map_err(|_| Error::new(ErrorKind::Io, "the system gave no random bytes"))
    }
}

/// Overwrites what was secret.
pub(crate) fn erase(bytes: &mut [u8]) {
    bytes.fill(0);
    // So that the compiler keeps the stores.
    std::hint::black_box(bytes);
}

impl Drop for Key {
    fn drop(&mut self) {
        erase(&mut self.0);
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// Seals the objects of one device.
pub(crate) struct Sealer {
    device: DeviceId,
    /// In memory that is locked.
    key: Box<Locked>,
    /// The file in which it is handed on.
    pinned: OnceLock<Pinned>,
}

/// A key, ready for use, and its own pages: nothing else is locked or left out of core files with it.
#[repr(C, align(65536))]
struct Locked {
    key: ManuallyDrop<LessSafeKey>,
}

const _: () = assert!(align_of::<Locked>() == MAX_HOST_PAGE_BYTES);

impl Sealer {
    /// Seals with a key.
    ///
    /// # Errors
    /// `NoMemory` if no memory can be locked.
    pub(crate) fn new(device: DeviceId, key: &Key) -> Result<Sealer> {
        let unusable = |_| Error::invalid("a key of another length").with_setting(SETTING);
        let bound = UnboundKey::new(&AES_256_GCM, &key.0).map_err(unusable)?;
        let mut key = Box::new(Locked { key: ManuallyDrop::new(LessSafeKey::new(bound)) });
        let (start, len) = ((&raw mut *key).cast(), size_of::<Locked>());
        // SAFETY: the pages are the box's own, from its start to its end: its alignment is that of pages. Neither call
        // changes what they hold.
        let locked = unsafe {
            rustix::mm::madvise(start, len, Advice::LinuxDontDump)
                .and_then(|()| rustix::mm::mlock(start, len))
        };
        locked.map_err(|error| {
            let what = format!(
                "no memory can be locked for the key of a backing device ({error}): raise RLIMIT_MEMLOCK (LimitMEMLOCK= of the \
                 service)"
            );
            Error::new(ErrorKind::NoMemory, what).with_setting(SETTING)
        })?;
        Ok(Sealer { device, key, pinned: OnceLock::new() })
    }

    /// Keeps the file in which the key is handed on locked, for as long as this is there. Where that is refused, the file
    /// may be swapped out.
    pub(crate) fn pin(&self, file: Option<impl AsFd>) {
        let pinned = file.and_then(|file| {
            let len = rustix::fs::fstat(&file).ok()?.st_size;
            Pinned::new(file, len as usize).ok()
        });
        // The first one stays.
        pinned.into_iter().for_each(|pinned| _ = self.pinned.set(pinned));
    }

    /// Returns what is sealed together with the bytes: the device, and what is said about the object.
    ///
    /// # Panics
    /// If that is longer than [`MAX_ABOUT_BYTES`].
    fn associated(&self, about: &[u8]) -> Aad<[u8; ASSOCIATED_BYTES]> {
        let mut all = [0; ASSOCIATED_BYTES];
        let (device, rest) = all.split_at_mut(self.device.bytes().len());
        device.copy_from_slice(self.device.bytes());
        rest[0] = about.len() as u8;
        rest[1..][..about.len()].copy_from_slice(about);
        Aad::from(all)
    }
}

/// A mapping of a memory file with a key, which keeps the file's pages locked.
struct Pinned {
    start: *mut c_void,
    len: usize,
}

// SAFETY: nobody reads or writes through the pointer, and its pages are unmapped once.
unsafe impl Send for Pinned {}
// SAFETY: as for `Send`.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Locks the pages of a file of `len` bytes.
    ///
    /// # Errors
    /// The system maps or locks no memory.
    fn new(file: impl AsFd, len: usize) -> rustix::io::Result<Pinned> {
        let len = len.max(1);
        // A private mapping that is only read has the file's own pages. Older kernels refuse a shared one of a file that
        // nobody can change.
        // SAFETY: a mapping at an address that the system chooses replaces no other one.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE, file, 0)
        };
        let pinned = Pinned { start: start?, len };
        // SAFETY: the pages are the mapping's, which nobody reads or writes.
        unsafe {
            rustix::mm::madvise(pinned.start, len, Advice::LinuxDontDump)?;
            rustix::mm::mlock(pinned.start, len)?;
        }
        Ok(pinned)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A failure leaves them.
        // SAFETY: the mapping is this one's, and nothing refers to it.
        let _ = unsafe { rustix::mm::munmap(self.start, self.len) };
    }
}

impl Drop for Sealer {
    fn drop(&mut self) {
        let (start, len) = ((&raw mut *self.key).cast::<c_void>(), size_of::<Locked>());
        // SAFETY: the bytes are the box's own. Nothing reads the key after this, and it has no destructor that is run.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, len) };
        std::hint::black_box(start);
        // The allocator gets ordinary memory back. A failure leaves it locked.
        // SAFETY: as in `new`.
        let _ = unsafe {
            rustix::mm::munlock(start, len)
                .and_then(|()| rustix::mm::madvise(start, len, Advice::LinuxDoDump))
        };
    }
}

impl Seal for Sealer {
    fn seal(&self, nonce: [u8; 12], about: &[u8], bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        let nonce = Nonce::assume_unique_for_key(nonce);
        let sealed = self.key.key.seal_in_place_separate_tag(nonce, self.associated(about), bytes);
        let tag = sealed.ok().and_then(|tag| tag.as_ref().try_into().ok());
        // A page is far below the cipher's limit, and nothing else can fail; a tag of zeros does not open.
        tag.unwrap_or_else(|| {
            bytes.fill(0);
            [0; TAG_BYTES]
        })
    }

    fn open(&self, nonce: [u8; 12], about: &[u8], bytes: &mut [u8], tag: &[u8; TAG_BYTES]) -> bool {
        let nonce = Nonce::assume_unique_for_key(nonce);
        let opened = self.key.key.open_in_place_separate_tag(
            nonce,
            self.associated(about),
            Tag::from(*tag),
            bytes,
            0..,
        );
        opened.is_ok()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use uzram::random::Random;

    use super::*;

    /// A million changed bits, places, devices and keys.
    #[test]
    fn whatever_is_changed_is_found_out() {
        let device = DeviceId::new().unwrap();
        let sealer = Sealer::new(device, &Key::new().unwrap()).unwrap();
        let others = [
            Sealer::new(device, &Key::new().unwrap()).unwrap(),
            Sealer::new(DeviceId::new().unwrap(), &Key::new().unwrap()).unwrap(),
        ];
        let mut random = Random::new(5);
        let mut plain = [0; 64];
        random.fill(&mut plain);
        let (nonce, about) = ([7; 12], [3; 8]);
        let mut sealed = plain;
        let tag = sealer.seal(nonce, &about, &mut sealed);
        assert_ne!(sealed, plain);
        let mut found = 0;
        for event in 0..1_000_000 {
            let (mut nonce, mut about, mut bytes, mut tag) = (nonce, about, sealed, tag);
            let with = match random.below(6) {
                0 => {
                    nonce[random.below(12)] ^= 1 << random.below(8);
                    &sealer
                }
                1 => {
                    about[random.below(8)] ^= 1 << random.below(8);
                    &sealer
                }
                2 | 3 => {
                    bytes[random.below(64)] ^= 1 << random.below(8);
                    &sealer
                }
                4 => {
                    tag[random.below(16)] ^= 1 << random.below(8);
                    &sealer
                }
                _ => &others[random.below(2)],
            };
            found += u32::from(!with.open(nonce, &about, &mut bytes, &tag));
            if event % 1000 == 0 {
                let mut bytes = sealed;
                assert!(sealer.open([7; 12], &[3; 8], &mut bytes, &sealer_tag(&sealer, &plain)));
                assert_eq!(bytes, plain);
            }
        }
        assert_eq!(found, 1_000_000);
    }

    fn sealer_tag(sealer: &Sealer, plain: &[u8; 64]) -> [u8; 16] {
        sealer.seal([7; 12], &[3; 8], &mut plain.clone())
    }

    /// The same device with another key is another one.
    #[test]
    fn a_key_is_not_shown_and_can_be_handed_on() {
        let key = Key::new().unwrap();
        assert_eq!(format!("{key:?}"), "Key");
        let device = DeviceId::new().unwrap();
        let handed_on: Key = serde_json::from_slice(&serde_json::to_vec(&key).unwrap()).unwrap();
        let mut bytes = *b"contents";
        let tag = Sealer::new(device, &key).unwrap().seal([1; 12], b"about", &mut bytes);
        assert!(Sealer::new(device, &handed_on).unwrap().open([1; 12], b"about", &mut bytes, &tag));
        assert_eq!(&bytes, b"contents");
    }
}
