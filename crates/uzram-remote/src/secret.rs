//! What a device's objects are sealed with: AES-256-GCM (NIST SP 800-38D), by keys that are derived from one that is drawn for
//! the device, and a salt: the first 32 bytes of the device's key's own stream for a nonce of the salt. Nothing else is encrypted
//! by the device's key. A nonce that is used again after a snapshot of the machine, which has the same device's key, is so used
//! with another key. AES-GCM-SIV, which would need no salt, takes three times as long.
//!
//! The key is in memory that is locked, so that it is not swapped out, and left out of core files. So is the file in which it
//! is handed on ([`Pinned`]).

use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::sync::{Mutex, OnceLock, PoisonError};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use uzram::backing::{Salt, Seal};
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
    keys: Box<Locked>,
    /// The file in which it is handed on.
    pinned: OnceLock<Pinned>,
}

/// The keys, ready for use, and their own pages: nothing else is locked or left out of core files with them.
#[repr(C, align(65536))]
struct Locked {
    of_device: ManuallyDrop<LessSafeKey>,
    /// That of the last salt by which something was sealed.
    last: Mutex<Option<(Salt, Erased)>>,
}

/// A key that is overwritten when it is dropped.
struct Erased(ManuallyDrop<LessSafeKey>);

impl Drop for Erased {
    fn drop(&mut self) {
        // SAFETY: the bytes are this value's own. Nothing reads the key after this, and it has no destructor that is run.
        unsafe { std::ptr::write_bytes(&raw mut self.0, 0, 1) };
        std::hint::black_box(&self.0);
    }
}

impl Locked {
    /// Derives the key of a salt; `None` never, as all lengths are right.
    fn derived(&self, salt: Salt) -> Option<Erased> {
        let (mut nonce, mut key) = ([0; 12], [0; KEY_BYTES]);
        nonce[..salt.len()].copy_from_slice(&salt);
        let nonce = Nonce::assume_unique_for_key(nonce);
        // Of zeros, what comes out is the stream. Nobody sees the tag.
        let _ = self.of_device.seal_in_place_separate_tag(nonce, Aad::empty(), &mut key).ok()?;
        let derived = UnboundKey::new(&AES_256_GCM, &key).ok().map(LessSafeKey::new);
        erase(&mut key);
        Some(Erased(ManuallyDrop::new(derived?)))
    }
}

/// Returns random bits of the CPU, which are not the same in two runs from a snapshot; 0 if it has none.
fn random_of_cpu() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "rdrand")]
        fn rdrand() -> u64 {
            let mut word = 0;
            // If it has none at the moment, the word stays 0.
            core::arch::x86_64::_rdrand64_step(&mut word);
            word
        }
        if std::arch::is_x86_feature_detected!("rdrand") {
            // SAFETY: the CPU has the instruction.
            return unsafe { rdrand() };
        }
    }
    0
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
        let of_device = ManuallyDrop::new(LessSafeKey::new(bound));
        let mut keys = Box::new(Locked { of_device, last: Mutex::default() });
        let (start, len) = ((&raw mut *keys).cast(), size_of::<Locked>());
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
        Ok(Sealer { device, keys, pinned: OnceLock::new() })
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
        let (start, len) = ((&raw mut *self.keys).cast::<c_void>(), size_of::<Locked>());
        drop(self.keys.last.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        // SAFETY: the bytes are the key's own. Nothing reads it after this, and it has no destructor that is run.
        unsafe { std::ptr::write_bytes(&raw mut self.keys.of_device, 0, 1) };
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
    /// From the kernel, which draws anew when it learns that it runs on from a snapshot (Linux 5.18, and a hypervisor with a
    /// VM generation ID), and from the CPU, which no snapshot has.
    fn salt(&self) -> Salt {
        let mut salt = [0; size_of::<Salt>()];
        // It has given the key, so it does not fail.
        let _ = SystemRandom::new().fill(&mut salt);
        (u64::from_ne_bytes(salt) ^ random_of_cpu()).to_ne_bytes()
    }

    fn seal(&self, salt: Salt, nonce: [u8; 12], about: &[u8], bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        let nonce = Nonce::assume_unique_for_key(nonce);
        let mut last = self.keys.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_none_or(|(of, _)| *of != salt) {
            *last = self.keys.derived(salt).map(|key| (salt, key));
        }
        let key = last.as_ref().map(|(_, key)| &key.0);
        let sealed =
            key.and_then(|key| key.seal_in_place_separate_tag(nonce, self.associated(about), bytes).ok());
        let tag = sealed.and_then(|tag| tag.as_ref().try_into().ok());
        // A page is far below the cipher's limit, and nothing else can fail; a tag of zeros does not open.
        tag.unwrap_or_else(|| {
            bytes.fill(0);
            [0; TAG_BYTES]
        })
    }

    fn open(
        &self,
        salt: Salt,
        nonce: [u8; 12],
        about: &[u8],
        bytes: &mut [u8],
        tag: &[u8; TAG_BYTES],
    ) -> bool {
        let nonce = Nonce::assume_unique_for_key(nonce);
        let Some(key) = self.keys.derived(salt) else { return false };
        let opened =
            key.0.open_in_place_separate_tag(nonce, self.associated(about), Tag::from(*tag), bytes, 0..);
        opened.is_ok()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use uzram::random::Random;

    use super::*;

    /// A million changed bits, places, salts, devices and keys.
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
        let (salt, nonce, about) = ([9; 8], [7; 12], [3; 8]);
        let mut sealed = plain;
        let tag = sealer.seal(salt, nonce, &about, &mut sealed);
        assert_ne!(sealed, plain);
        let mut found = 0;
        for event in 0..1_000_000 {
            let (mut salt, mut nonce, mut about, mut bytes, mut tag) = (salt, nonce, about, sealed, tag);
            let with = match random.below(7) {
                6 => {
                    salt[random.below(8)] ^= 1 << random.below(8);
                    &sealer
                }
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
            found += u32::from(!with.open(salt, nonce, &about, &mut bytes, &tag));
            if event % 1000 == 0 {
                let mut bytes = sealed;
                assert!(sealer.open([9; 8], [7; 12], &[3; 8], &mut bytes, &sealer_tag(&sealer, &plain)));
                assert_eq!(bytes, plain);
            }
        }
        assert_eq!(found, 1_000_000);
    }

    fn sealer_tag(sealer: &Sealer, plain: &[u8; 64]) -> [u8; 16] {
        sealer.seal([9; 8], [7; 12], &[3; 8], &mut plain.clone())
    }

    /// After a snapshot a nonce is used again with the same key. The difference of two texts that are sealed by one key and
    /// nonce is that of the texts themselves.
    #[test]
    fn a_nonce_that_is_used_again_with_another_salt_says_nothing_of_the_contents() {
        let sealer = Sealer::new(DeviceId::new().unwrap(), &Key::new().unwrap()).unwrap();
        let difference = |salts: [Salt; 2]| {
            let [mut one, mut other] = [[0x11; 64], [0x77; 64]];
            sealer.seal(salts[0], [7; 12], &[3; 8], &mut one);
            sealer.seal(salts[1], [7; 12], &[3; 8], &mut other);
            std::array::from_fn::<u8, 64, _>(|at| one[at] ^ other[at])
        };
        assert_eq!(difference([[5; 8]; 2]), [0x66; 64], "this is what must not happen");
        let salts: Vec<Salt> = (0..1000).map(|_| sealer.salt()).collect();
        assert_eq!(salts.iter().collect::<std::collections::HashSet<_>>().len(), salts.len());
        for pair in salts.windows(2) {
            let equal = difference([pair[0], pair[1]]).iter().filter(|byte| **byte == 0x66).count();
            assert!(equal < 16, "{pair:?}");
        }
    }

    /// The same device with another key is another one.
    #[test]
    fn a_key_is_not_shown_and_can_be_handed_on() {
        let key = Key::new().unwrap();
        assert_eq!(format!("{key:?}"), "Key");
        let device = DeviceId::new().unwrap();
        let handed_on: Key = serde_json::from_slice(&serde_json::to_vec(&key).unwrap()).unwrap();
        let mut bytes = *b"contents";
        let tag = Sealer::new(device, &key).unwrap().seal([2; 8], [1; 12], b"about", &mut bytes);
        assert!(Sealer::new(device, &handed_on).unwrap().open([2; 8], [1; 12], b"about", &mut bytes, &tag));
        assert_eq!(&bytes, b"contents");
    }
}
