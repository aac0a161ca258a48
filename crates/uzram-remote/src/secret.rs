//! What a device's objects are sealed with: AES-256-GCM (NIST SP 800-38D). Each filling of an extent has a
//! salt, and a key of its own, which is derived from the device's key and the salt: what the device's key
//! encrypts 32 zero bytes to, with the salt as the nonce. It encrypts nothing else. A virtual machine that
//! goes on twice from one snapshot has the same device's key and uses the same nonces, but draws other salts
//! (see [`new_salt`] for when), and so has other keys. Deriving a key takes half as long as sealing 2 KiB,
//! and is done once for each filling, and for each read. AES-GCM-SIV, which would need no salt, takes three
//! times as long as AES-GCM.
//!
//! The device's key is in memory that is locked, so that it is not swapped out, and left out of core files.
//! So is the file in which it is handed on. A derived key is on the stack while it is used. Both are erased
//! then; what the calls that make them leave on the stack is not.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::ptr;
use std::sync::OnceLock;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use uzram::backing::{Salt, Seal, SealOne};
use uzram::{Error, ErrorKind, Result};
use zeroize::{Zeroize, Zeroizing};

use crate::error;
use crate::objects::DeviceId;

const KEY_BYTES: usize = 32;
const TAG_BYTES: usize = 16;
/// The most bytes of what is said about an object.
const MAX_ABOUT_BYTES: usize = 16;
/// The device, and what is said, with its length.
const ASSOCIATED_BYTES: usize = 16 + 1 + MAX_ABOUT_BYTES;

/// A device's key, as it is handed on to the next process. Without `Debug`, so that it is shown nowhere.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Key([u8; KEY_BYTES]);

impl Key {
    /// Draws a new one. Errors: `Io` if the system gives no random bytes.
    pub(crate) fn new() -> Result<Key> {
        let mut key = Key([0; KEY_BYTES]);
        let filled = SystemRandom::new().fill(&mut key.0);
        filled.map(|()| key).map_err(|_| Error::new(ErrorKind::Io, "the system gave no random bytes"))
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// Seals the objects of one device.
pub(crate) struct Sealer {
    device: DeviceId,
    key: LockedKey,
    /// The file in which it is handed on.
    pinned: OnceLock<LockedPages>,
}

/// A key that is ready for use, and erased when it is dropped.
struct Erased(ManuallyDrop<LessSafeKey>);

impl Erased {
    fn new(key: &[u8; KEY_BYTES]) -> Result<Erased> {
        let unusable = |_| error(ErrorKind::Invalid, "a key of another length");
        let key = UnboundKey::new(&AES_256_GCM, key).map_err(unusable)?;
        Ok(Erased(ManuallyDrop::new(LessSafeKey::new(key))))
    }
}

impl Drop for Erased {
    fn drop(&mut self) {
        let bytes = (&raw mut self.0).cast::<[u8; size_of::<LessSafeKey>()]>();
        // SAFETY: the bytes are this value's own. Nothing reads the key after this, and it has no destructor
        // that is run.
        unsafe { bytes.write_volatile([0; _]) };
    }
}

/// Pages of a mapping of its own, which stay in memory and are left out of core files; unmapped when it is
/// dropped.
struct LockedPages {
    start: *mut c_void,
    len: usize,
}

// SAFETY: nothing here reads or writes through the pointer, and the pages are unmapped once. Whether the
// contents may be sent and shared is up to [`LockedKey`].
unsafe impl Send for LockedPages {}
// SAFETY: as for `Send`.
unsafe impl Sync for LockedPages {}

impl LockedPages {
    /// Locks a mapping. Errors: the system locks no memory.
    ///
    /// # Safety
    /// `start` begins a mapping of `len` bytes, which the caller gives away: nothing refers to it once this
    /// is dropped.
    unsafe fn new(start: *mut c_void, len: usize) -> rustix::io::Result<Self> {
        let pages = LockedPages { start, len };
        // SAFETY: the pages are the mapping's. Neither call changes what they hold.
        unsafe {
            rustix::mm::madvise(pages.start, len, Advice::LinuxDontDump)?;
            rustix::mm::mlock(pages.start, len)?;
        }
        Ok(pages)
    }

    /// Locks the pages of a file of `len` bytes. Errors: the system maps or locks no memory.
    fn of_file(file: impl AsFd, len: usize) -> rustix::io::Result<Self> {
        let len = len.max(1);
        // A private mapping that is only read has the file's own pages. Older kernels refuse a shared one of
        // a file that nobody can change. SAFETY: a mapping at an address that the system chooses replaces no
        // other one, and is this one's.
        unsafe {
            let start = rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE, file, 0)?;
            LockedPages::new(start, len)
        }
    }

    /// Maps and locks `len` bytes of zeros. Errors: the system maps or locks no memory.
    fn anonymous(len: usize) -> rustix::io::Result<Self> {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a mapping at an address that the system chooses replaces no other one, and is this one's.
        unsafe {
            let start = rustix::mm::mmap_anonymous(ptr::null_mut(), len, flags, MapFlags::PRIVATE)?;
            LockedPages::new(start, len)
        }
    }
}

impl Drop for LockedPages {
    fn drop(&mut self) {
        // A failure leaves them.
        // SAFETY: the mapping is this one's, and nothing refers to it.
        let _ = unsafe { rustix::mm::munmap(self.start, self.len) };
    }
}

/// A key in locked memory, on pages of its own: nothing else is locked or left out of core files with it.
struct LockedKey {
    pages: LockedPages,
    /// What is there: this may be sent and shared as far as that may.
    _key: PhantomData<Erased>,
}

impl LockedKey {
    fn new(key: &Key) -> Result<LockedKey> {
        let pages = LockedPages::anonymous(size_of::<Erased>()).map_err(|why| {
            let what = format!(
                "no memory can be locked for the key of a backing device ({why}): raise RLIMIT_MEMLOCK (LimitMEMLOCK= of the \
                 service)"
            );
            error(ErrorKind::NoMemory, what)
        })?;
        let key = Erased::new(&key.0)?;
        // SAFETY: the pages have room for it, begin where it may, and nothing refers to them.
        unsafe { pages.start.cast::<Erased>().write(key) };
        Ok(LockedKey { pages, _key: PhantomData })
    }

    fn key(&self) -> &LessSafeKey {
        // SAFETY: `new` has put it there, and nobody changes it.
        unsafe { &(*self.pages.start.cast::<Erased>()).0 }
    }
}

impl Drop for LockedKey {
    fn drop(&mut self) {
        // SAFETY: `new` has put it there, and its memory is unmapped after this.
        unsafe { self.pages.start.cast::<Erased>().drop_in_place() };
    }
}

/// Returns random bits of the CPU, which are not the same in two runs from a snapshot; 0 if it has none.
fn random_of_cpu() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "rdrand")]
        fn rdrand() -> u64 {
            let mut word = 0;
            // It may have none at the moment, but hardly ten times in a row.
            for _ in 0..10 {
                if core::arch::x86_64::_rdrand64_step(&mut word) == 1 {
                    break;
                }
            }
            word
        }
        if std::arch::is_x86_feature_detected!("rdrand") {
            // SAFETY: the CPU has the instruction.
            return unsafe { rdrand() };
        }
    }
    0
}

/// Draws a salt. Two runs from one snapshot draw the same one once in 2^64 times if the CPU has RDRAND or the
/// kernel learns of the snapshot (Linux 5.18, and a hypervisor with a VM generation ID), and otherwise may
/// always.
fn new_salt() -> Salt {
    let mut salt = [0; size_of::<Salt>()];
    // It has given the key, so it does not fail.
    let _ = SystemRandom::new().fill(&mut salt);
    (u64::from_ne_bytes(salt) ^ random_of_cpu()).to_ne_bytes()
}

impl Sealer {
    /// Seals with a key. Errors: `NoMemory` if no memory can be locked.
    pub(crate) fn new(device: DeviceId, key: &Key) -> Result<Sealer> {
        Ok(Sealer { device, key: LockedKey::new(key)?, pinned: OnceLock::new() })
    }

    /// Derives the key of a salt; `None` never, as all lengths are right.
    fn derive(&self, salt: Salt) -> Option<Erased> {
        let (mut nonce, mut key) = ([0; NONCE_LEN], Zeroizing::new([0; KEY_BYTES]));
        nonce[..salt.len()].copy_from_slice(&salt);
        let nonce = Nonce::assume_unique_for_key(nonce);
        // Of zeros, what comes out is the cipher's stream. Nobody sees the tag.
        let _ = self.key.key().seal_in_place_separate_tag(nonce, Aad::empty(), &mut *key).ok()?;
        Erased::new(&key).ok()
    }

    fn seal(&self, key: Option<&Erased>, nonce: [u8; 12], about: &[u8], bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        let nonce = Nonce::assume_unique_for_key(nonce);
        let seal = |key: &Erased| key.0.seal_in_place_separate_tag(nonce, self.associated(about), bytes).ok();
        let tag = key.and_then(seal).and_then(|tag| tag.as_ref().try_into().ok());
        // A page is far below the cipher's limit, and nothing else can fail; a tag of zeros does not open.
        tag.unwrap_or_else(|| {
            bytes.fill(0);
            [0; TAG_BYTES]
        })
    }

    /// Keeps the file in which the key is handed on locked, for as long as this is there. Where that is
    /// refused, the file may be swapped out.
    pub(crate) fn pin(&self, file: Option<impl AsFd>) {
        let pinned = file.and_then(|file| {
            let len = rustix::fs::fstat(&file).ok()?.st_size;
            LockedPages::of_file(file, len as usize).ok()
        });
        // The first one stays.
        pinned.into_iter().for_each(|pinned| _ = self.pinned.set(pinned));
    }

    /// Returns what is sealed together with the bytes: the device, and what is said about the object. Panics
    /// if that is longer than [`MAX_ABOUT_BYTES`].
    fn associated(&self, about: &[u8]) -> Aad<[u8; ASSOCIATED_BYTES]> {
        let mut all = [0; ASSOCIATED_BYTES];
        let (device, rest) = all.split_at_mut(self.device.bytes().len());
        device.copy_from_slice(self.device.bytes());
        rest[0] = about.len() as u8;
        rest[1..][..about.len()].copy_from_slice(about);
        Aad::from(all)
    }
}

impl Seal for Sealer {
    fn with_new_salt(&self, seal_all: &mut dyn FnMut(Salt, &SealOne<'_>)) {
        let salt = new_salt();
        let key = self.derive(salt);
        seal_all(salt, &|nonce, about, bytes| self.seal(key.as_ref(), nonce, about, bytes));
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
        let Some(key) = self.derive(salt) else { return false };
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
        let tag = sealer.seal(sealer.derive(salt).as_ref(), nonce, &about, &mut sealed);
        assert_ne!(sealed, plain);
        let mut flip = |bytes: &mut [u8]| bytes[random.below(bytes.len())] ^= 1 << random.below(8);
        for event in 0..1_000_000 {
            let (mut salt, mut nonce, mut about, mut bytes, mut tag) = (salt, nonce, about, sealed, tag);
            let mut with = &sealer;
            match event % 7 {
                0 => flip(&mut salt),
                1 => flip(&mut nonce),
                2 => flip(&mut about),
                3 | 4 => flip(&mut bytes),
                5 => flip(&mut tag),
                _ => with = &others[event / 7 % 2],
            }
            assert!(!with.open(salt, nonce, &about, &mut bytes, &tag), "event {event}");
        }
        assert!(sealer.open(salt, nonce, &about, &mut sealed, &tag));
        assert_eq!(sealed, plain);
    }

    /// After a snapshot a nonce is used again with the same key. The difference of two texts that are sealed
    /// by one key and nonce is that of the texts themselves.
    #[test]
    fn a_nonce_that_is_used_again_with_another_salt_says_nothing_of_the_contents() {
        let sealer = Sealer::new(DeviceId::new().unwrap(), &Key::new().unwrap()).unwrap();
        let difference = |salts: [Salt; 2]| {
            let [mut one, mut other] = [[0x11; 64], [0x77; 64]];
            let keys = salts.map(|salt| sealer.derive(salt));
            sealer.seal(keys[0].as_ref(), [7; 12], &[3; 8], &mut one);
            sealer.seal(keys[1].as_ref(), [7; 12], &[3; 8], &mut other);
            std::array::from_fn::<u8, 64, _>(|at| one[at] ^ other[at])
        };
        assert_eq!(difference([[5; 8]; 2]), [0x66; 64], "this is what must not happen");
        let salts: Vec<Salt> = (0..1000).map(|_| new_salt()).collect();
        assert_eq!(salts.iter().collect::<std::collections::HashSet<_>>().len(), salts.len());
        for pair in salts.windows(2) {
            let equal = difference([pair[0], pair[1]]).iter().filter(|byte| **byte == 0x66).count();
            assert!(equal < 16, "{pair:?}");
        }
    }

    /// The same device with another key is another one.
    #[test]
    fn a_key_can_be_handed_on() {
        let key = Key::new().unwrap();
        let device = DeviceId::new().unwrap();
        let handed_on: Key = serde_json::from_slice(&serde_json::to_vec(&key).unwrap()).unwrap();
        let mut bytes = *b"contents";
        let sealer = Sealer::new(device, &key).unwrap();
        let tag = sealer.seal(sealer.derive([2; 8]).as_ref(), [1; 12], b"about", &mut bytes);
        assert!(Sealer::new(device, &handed_on).unwrap().open([2; 8], [1; 12], b"about", &mut bytes, &tag));
        assert_eq!(&bytes, b"contents");
    }
}
