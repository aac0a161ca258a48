//! The memory of a store that outlives its process, changed anywhere: superblock, settings, slots, handles,
//! objects. The input is a list of changes; its first byte says whether the checksums of superblock and
//! settings are made right again, so that what they protect is read.
//!
//! Promises: attaching ends, with an error or a store; each page of that store reads as it was written, or as
//! one word, or not at all; it can be written to, and all of it freed.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};
use uzram::random::Random;
use uzram::store::{PageNo, Store, StoreBuilder};
use uzram::units::PAGE_SIZE;

use crate::input::Input;

const PAGES: u32 = 48;
const MAX_CHANGES: usize = 32;
const WORD_BYTES: usize = 8;
const SUPERBLOCK_BYTES: usize = 12 * WORD_BYTES;
const SETTINGS_AT: u64 = 12288;

/// A store's memory: its length, and the bytes of its parts that are not holes.
struct Image {
    len_bytes: u64,
    parts: Vec<(u64, Vec<u8>)>,
}

pub(crate) fn run(bytes: &[u8]) {
    let image = image();
    let mut input = Input::new(bytes);
    let rights_checksums = input.byte() % 2 == 1;
    let memory = memory_of(image);
    input.each(MAX_CHANGES, |input| {
        let (part, at, change) = (input.byte(), input.u16(), input.byte());
        let (start, bytes) = &image.parts[usize::from(part) % image.parts.len()];
        let at = usize::from(at) % bytes.len();
        write_at(&memory, start + at as u64, &[bytes[at] ^ change]);
    });
    if rights_checksums {
        right_checksums(&memory);
    }
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&memory, seals).expect("a memfd can be sealed");
    // SAFETY: the memory is used here only.
    let Ok((store, attached)) = (unsafe { Store::attach(memory, None, |_| ()) }) else { return };
    assert!(attached.pages_lost <= attached.pages && attached.pages <= store.pages());
    check(&store);
}

fn check(store: &Store) {
    let mut out = [0; PAGE_SIZE];
    for page in 0..store.pages().min(PAGES.into()) as u32 {
        if store.read(PageNo(page), &mut out).is_ok() {
            let is_word = out.chunks_exact(WORD_BYTES).all(|word| word == &out[..WORD_BYTES]);
            assert!(is_word || out == contents(page), "page {page} has other bytes than were written");
        }
    }
    for page in 0..store.pages().min(PAGES.into()) as u32 {
        // Settings that were changed may be a limit.
        if store.write(PageNo(page), &contents(page + 1000)).is_ok() {
            store.read(PageNo(page), &mut out).expect("what was just written");
            assert!(out == contents(page + 1000), "page {page} was just written");
        }
    }
    store.discard_pages(0..store.pages());
    let stats = store.stats();
    assert_eq!((stats.pages_stored, stats.compr_data_bytes, stats.pool_pages), (0, 0, 0), "{stats:?}");
}

/// One word, noise, or some noise and then zeros.
fn contents(page: u32) -> [u8; PAGE_SIZE] {
    let mut contents = [0; PAGE_SIZE];
    let noise = match page % 4 {
        0 => 0,
        1 => PAGE_SIZE,
        _ => 50 * (1 + page as usize % 40),
    };
    Random::new(page.into()).fill(&mut contents[..noise]);
    contents
}

fn image() -> &'static Image {
    static IMAGE: OnceLock<Image> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let builder = StoreBuilder::new("fuzz", PAGES.into()).checksum(true);
        let store = Store::create_in(&builder).expect("memory");
        (0..PAGES).for_each(|page| store.write(PageNo(page), &contents(page)).expect("memory"));
        (0..PAGES).step_by(5).for_each(|page| store.discard(PageNo(page)));
        let memory = store.memory().expect("it outlives the process").as_fd();
        let mut image = Image { len_bytes: 0, parts: Vec::new() };
        image.len_bytes = rustix::fs::fstat(memory).expect("a memfd").st_size.unsigned_abs();
        let mut at = 0;
        while let Ok(start) = rustix::fs::seek(memory, SeekFrom::Data(at)) {
            at = rustix::fs::seek(memory, SeekFrom::Hole(start)).expect("a hole");
            // Small parts, so that those of a few bytes are changed as often as others.
            for start in (start..at).step_by(PAGE_SIZE) {
                let mut bytes = vec![0; PAGE_SIZE];
                rustix::io::pread(memory, &mut bytes, start).expect("a memfd");
                image.parts.push((start, bytes));
            }
        }
        image
    })
}

fn memory_of(image: &Image) -> OwnedFd {
    let memory = rustix::fs::memfd_create("uzram-fuzz", MemfdFlags::ALLOW_SEALING).expect("a memfd");
    rustix::fs::ftruncate(&memory, image.len_bytes).expect("a memfd");
    image.parts.iter().for_each(|(start, bytes)| write_at(&memory, *start, bytes));
    memory
}

fn write_at(memory: &OwnedFd, at: u64, bytes: &[u8]) {
    assert_eq!(rustix::io::pwrite(memory, bytes, at), Ok(bytes.len()));
}

/// Makes the checksums of the settings and of the superblock what the bytes have, of a length that can be.
fn right_checksums(memory: &OwnedFd) {
    let mut superblock = [0; SUPERBLOCK_BYTES];
    rustix::io::pread(memory, &mut superblock, 0).expect("a memfd");
    let len_bytes = superblock[3 * WORD_BYTES..].first_chunk().copied().map_or(0, u64::from_le_bytes);
    let mut settings = vec![0; len_bytes.min(PAGE_SIZE as u64) as usize];
    rustix::io::pread(memory, &mut settings, SETTINGS_AT).expect("a memfd");
    let set = |bytes: &mut [u8], at: usize, number: u32| {
        bytes[at * WORD_BYTES..][..WORD_BYTES].copy_from_slice(&u64::from(number).to_le_bytes());
    };
    set(&mut superblock, 4, crc32fast::hash(&settings));
    set(&mut superblock, 2, 0);
    let checksum = crc32fast::hash(&superblock);
    set(&mut superblock, 2, checksum);
    write_at(memory, 0, &superblock);
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    type Damage = &'static [(u8, u16, u8)];
    let seeds: [(u8, Damage); 9] = [
        (0, &[]),
        (1, &[]),
        // The superblock, the settings that change, those that do not.
        (0, &[(0, 8, 1)]),
        (1, &[(0, 40, 1)]),
        (1, &[(1, 64, 0xff), (1, 0, 1)]),
        (1, &[(2, 12, 1)]),
        // Slots, and what follows.
        (0, &[(3, 16, 0x80), (3, 24, 1), (3, 19, 0x20)]),
        (0, &[(4, 0, 1), (5, 12, 2)]),
        (0, &[(6, 4, 1), (7, 0, 0xff), (8, 2048, 4)]),
    ];
    let bytes = |(part, at, change): &(u8, u16, u8)| {
        let [low, high] = at.to_le_bytes();
        [*part, low, high, *change]
    };
    seeds.map(|(rights, changes)| [rights].into_iter().chain(changes.iter().flat_map(bytes)).collect()).into()
}
