//! The layout of the file of a store that outlives the process, which docs/internals/survival.md draws. The
//! superblock is written once, its magic last.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use crate::backing::Tiers;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{Arena, MemoryFile, Region};
use crate::base::sync::Arc;
use crate::base::units::PAGE_SIZE;
use crate::zsmalloc::PoolRegions;

use super::super::slot::Slots;
use super::super::writeback::extents::ExtentTable;
use super::super::{Regions, StoreBuilder, address_bytes, pool_config};
use super::attach::Progress;
use super::settings;

const MAGIC: u64 = u64::from_le_bytes(*b"uzram\0M\x01");
/// The version of the layout of the memory of a store that outlives the process, and of what it has on a
/// backing device. A store attaches only memory of its own version.
pub const LAYOUT_VERSION: u64 = 4;
/// The number of words of the superblock, the checksum of the others included.
const WORDS: usize = 12;
const CHECKSUM: usize = 2;
const SUPERBLOCK_BYTES: usize = WORDS * size_of::<u64>();
const LIVE_SETTINGS_AT: u64 = 4096;
const ALLOWANCE_AT: u64 = 8192;
const SETTINGS_AT: u64 = 12288;
const REGIONS_AT: u64 = 16 << 20;
const ALIGN_BYTES: u64 = 2 << 20;

pub(in crate::store) struct Memory {
    pub(in crate::store) file: Arc<MemoryFile>,
    live_settings: Region,
    pub(in crate::store) holds_store: bool,
    pub(in crate::store) progress: Box<Progress>,
    slots: Region,
    pool: PoolRegions,
    extents: Option<Region>,
    allowance: Region,
    arena: Region,
    superblock: [u64; WORDS],
}

/// Returns the lengths of the regions, in their order.
fn lengths(builder: &StoreBuilder) -> Result<[u64; 5]> {
    let arena_bytes = Arena::region_bytes(address_bytes(builder.pages));
    let [handles, page_table] = pool_config(builder, None).region_bytes(arena_bytes / PAGE_SIZE as u64)?;
    let extents = match &builder.backing {
        Some(options) => ExtentTable::bytes_of(options)?,
        None => 0,
    };
    Ok([Slots::region_bytes(builder.pages), handles, page_table, extents, arena_bytes])
}

impl Memory {
    /// Creates the file of a new store. It is incomplete until [`Memory::complete`].
    pub(in crate::store) fn create(builder: &StoreBuilder) -> Result<Self> {
        let lengths = lengths(builder)?;
        let settings = settings::encode(builder)?;
        if SETTINGS_AT + settings.len() as u64 > REGIONS_AT {
            return Err(Error::invalid("the settings and dictionaries of a store take too many bytes"));
        }
        let end = lengths.iter().fold(REGIONS_AT, |at, len| at + len.next_multiple_of(ALIGN_BYTES));
        let file = MemoryFile::create(&format!("uzram-{}", builder.name), end)?;
        file.write_at(SETTINGS_AT, &settings)?;
        let mut superblock = [0; WORDS];
        superblock[..2].copy_from_slice(&[MAGIC, LAYOUT_VERSION]);
        superblock[3] = settings.len() as u64;
        superblock[4] = u64::from(crc32fast::hash(&settings));
        superblock[5..10].copy_from_slice(&lengths);
        superblock[CHECKSUM] = settings::checksum_but(CHECKSUM, &superblock);
        Memory::of(file, lengths, superblock, false)
    }

    pub(in crate::store) fn live_settings(&self) -> Result<settings::LiveSettings> {
        settings::LiveSettings::new(&self.file, &self.live_settings)
    }

    pub(in crate::store) fn regions(&self) -> Regions<'_> {
        Regions {
            arena: Some(&self.arena),
            slots: Some(&self.slots),
            extents: self.extents.as_ref(),
            allowance: Some(&self.allowance),
            pool: Some(&self.pool),
        }
    }

    /// Writes the superblock, which makes the file complete: an incomplete file cannot be opened.
    pub(in crate::store) fn complete(&self) -> Result<()> {
        let bytes = self.superblock.map(u64::to_le_bytes).concat();
        self.file.write_at(8, &bytes[8..])?;
        self.file.write_at(0, &bytes[..8])
    }

    /// Opens a file; returns it with the builder of its store. Fails with `Invalid` for a file that holds no
    /// complete store, or one of another version; `Corrupt` for a damaged one.
    pub(in crate::store) fn open(
        file: Arc<MemoryFile>,
        backing: Option<Arc<Tiers>>,
    ) -> Result<(Self, StoreBuilder)> {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        file.read_at(0, &mut bytes)?;
        let words = bytes.as_chunks().0;
        let superblock: [u64; WORDS] = std::array::from_fn(|at| u64::from_le_bytes(words[at]));
        if superblock[0] != MAGIC {
            return Err(Error::invalid("the memory holds no complete store"));
        }
        if superblock[1] != LAYOUT_VERSION {
            let found = superblock[1];
            let what =
                format!("the memory is laid out by version {found}, and this program reads {LAYOUT_VERSION}");
            return Err(Error::invalid(what));
        }
        let damaged = |what| Error::new(ErrorKind::Corrupt, format!("the store's {what} is damaged"));
        let settings_bytes = superblock[3];
        if superblock[CHECKSUM] != settings::checksum_but(CHECKSUM, &superblock)
            || settings_bytes > REGIONS_AT - SETTINGS_AT
        {
            return Err(damaged("superblock"));
        }
        let mut settings = vec![0; settings_bytes as usize];
        file.read_at(SETTINGS_AT, &mut settings)?;
        if u64::from(crc32fast::hash(&settings)) != superblock[4] {
            return Err(damaged("record of settings"));
        }
        let mut builder = settings::decode(&settings, backing)?;
        let lengths = lengths(&builder)?;
        if lengths != superblock[5..10] {
            return Err(Error::invalid(
                "the memory is laid out for another machine, or another backing device",
            ));
        }
        let memory = Memory::of(file, lengths, superblock, true)?;
        memory.live_settings()?.read_into(&mut builder);
        Ok((memory, builder))
    }

    fn of(
        file: Arc<MemoryFile>,
        [slots, handles, page_table, extents, arena]: [u64; 5],
        superblock: [u64; WORDS],
        holds_store: bool,
    ) -> Result<Self> {
        let mut at = REGIONS_AT;
        let mut next = |len_bytes: u64| {
            let len_bytes = len_bytes.next_multiple_of(ALIGN_BYTES);
            let region = file.region(at, len_bytes);
            at += len_bytes;
            region
        };
        Ok(Memory {
            slots: next(slots)?,
            pool: PoolRegions { handles: next(handles)?, page_table: next(page_table)? },
            extents: if extents > 0 { Some(next(extents)?) } else { None },
            arena: next(arena)?,
            allowance: file.region(ALLOWANCE_AT, 4096)?,
            live_settings: file.region(LIVE_SETTINGS_AT, 4096)?,
            holds_store,
            progress: Box::new(|_| ()),
            superblock,
            file,
        })
    }
}

impl MemoryFile {
    fn with(&self, what: &str, act: impl FnOnce(&File) -> std::io::Result<()>) -> Result<()> {
        let done = self.as_fd().try_clone_to_owned().and_then(|fd| act(&File::from(fd)));
        done.map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => Error::invalid("the memory holds no complete store"),
            _ => Error::new(ErrorKind::Io, format!("a memory file cannot be {what}: {error}")),
        })
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> Result<()> {
        self.with("written", |file| file.write_all_at(bytes, at))
    }

    fn read_at(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        self.with("read", |file| file.read_exact_at(bytes, at))
    }
}
