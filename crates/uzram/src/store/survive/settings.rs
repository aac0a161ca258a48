//! The settings of a store that outlives the process: the fixed ones, encoded as bytes, and those that change
//! while it is used, in two copies.
//!
//! Numbers are 8 bytes, little-endian; names and dictionaries are preceded by their length.

use std::str::FromStr;

use crate::backing::Tiers;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{MemoryFile, Region, Table};
use crate::base::sync::{Arc, AtomicU64, Mutex, Ordering, classes};
use crate::codec::{Algorithm, Dictionary, Kind};

use super::super::{BackingOptions, Designs, StoreBuilder};

/// The longest name, path or dictionary that is accepted.
const MAX_BYTES: u64 = 2 << 20;

/// Stands for the name of the LRU's design if there is no LRU.
const NO_LRU: &str = "none";

pub(super) fn encode(builder: &StoreBuilder) -> Result<Vec<u8>> {
    let mut record = Record { out: Some(Vec::new()), input: &[] };
    record.fixed(&mut builder.clone(), None)?;
    Ok(record.out.unwrap_or_default())
}

/// Decodes what [`encode`] returned. Fails with `Corrupt` for any other bytes; `Invalid` without the backing
/// device that the store had, or with one if it had none.
pub(super) fn decode(bytes: &[u8], backing: Option<Arc<Tiers>>) -> Result<StoreBuilder> {
    let (mut record, mut builder) = (Record { out: None, input: bytes }, StoreBuilder::new("", 0));
    record.fixed(&mut builder, backing)?;
    if record.input.is_empty() { Ok(builder) } else { Err(damaged()) }
}

fn damaged() -> Error {
    Error::new(ErrorKind::Corrupt, "the store's record of settings is damaged")
}

/// Settings that are written, or the rest of those that are read. Each method does that with a value.
struct Record<'a> {
    out: Option<Vec<u8>>,
    input: &'a [u8],
}

impl Record<'_> {
    fn number(&mut self, value: u64) -> Result<u64> {
        if let Some(out) = &mut self.out {
            out.extend(value.to_le_bytes());
            return Ok(value);
        }
        let (number, rest) = self.input.split_first_chunk().ok_or_else(damaged)?;
        self.input = rest;
        Ok(u64::from_le_bytes(*number))
    }

    fn flag(&mut self, value: bool) -> Result<bool> {
        match self.number(value.into())? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(damaged()),
        }
    }

    fn bytes(&mut self, value: &[u8]) -> Result<Vec<u8>> {
        let len = self.number(value.len() as u64)?;
        if let Some(out) = &mut self.out {
            out.extend(value);
            return Ok(value.to_vec());
        }
        let at = usize::try_from(len).ok().filter(|at| len <= MAX_BYTES && *at <= self.input.len());
        let (bytes, rest) = self.input.split_at(at.ok_or_else(damaged)?);
        self.input = rest;
        Ok(bytes.to_vec())
    }

    fn named<T: FromStr + ToString>(&mut self, value: &T) -> Result<T> {
        let bytes = self.bytes(value.to_string().as_bytes())?;
        std::str::from_utf8(&bytes).ok().and_then(|text| text.parse().ok()).ok_or_else(damaged)
    }

    fn algorithm(&mut self, value: &Algorithm) -> Result<Algorithm> {
        let kind: Kind = self.named(&value.kind())?;
        let level = self.number(i64::from(value.level()).cast_unsigned())?;
        let level = i32::try_from(level.cast_signed()).map_err(|_| damaged())?;
        let had = value.dictionary();
        let dictionary = if self.flag(had.is_some())? {
            let path = self.named(&had.map_or_else(String::new, |had| had.path().to_owned()))?;
            Some((path, self.bytes(had.map_or(&[], |had| had.bytes()))?))
        } else {
            None
        };
        if self.out.is_some() {
            return Ok(value.clone());
        }
        let dictionary = dictionary.map(|(path, bytes)| Dictionary::new(&path, bytes)).transpose()?;
        Algorithm::new(kind, Some(level), dictionary)
    }

    /// The fixed settings. `backing` is that of a store that is read.
    fn fixed(&mut self, builder: &mut StoreBuilder, backing: Option<Arc<Tiers>>) -> Result<()> {
        builder.name = self.named(&builder.name)?;
        builder.pages = self.number(builder.pages)?;
        builder.chain_size = self.number(builder.chain_size as u64)? as usize;
        let [pool, own_lru, streams] = builder.designs.names();
        let pool = self.named(&pool)?;
        let lru = self.named(&if builder.lru { own_lru.clone() } else { NO_LRU.to_owned() })?;
        builder.lru = lru != NO_LRU;
        builder.checksum = self.flag(builder.checksum)?;
        builder.reserve_pages = self.number(builder.reserve_pages)?;
        let streams = self.named(&streams)?;
        let lru = if builder.lru { lru } else { own_lru };
        builder.designs = Designs::named([&pool, &lru, &streams]).map_err(|_| damaged())?;
        // Whether writers release their streams while they wait for memory, as earlier versions could.
        self.flag(false)?;
        builder.policy.order = self.named(&builder.policy.order)?;
        builder.algorithm = self.algorithm(&builder.algorithm)?;
        for algorithm in &mut builder.recompression {
            let value = algorithm.clone().unwrap_or_default();
            *algorithm = if self.flag(algorithm.is_some())? { Some(self.algorithm(&value)?) } else { None };
        }
        let had = builder.backing.clone().or(backing.map(BackingOptions::packed));
        let has_backing = self.flag(had.is_some())?;
        let refused = |what: String| Err(Error::invalid(what).with_setting("backing_dev"));
        builder.backing = match (has_backing, had) {
            (false, None) => None,
            (true, Some(BackingOptions { backing, layout, compressed })) => {
                let has_bytes = backing.len_bytes();
                let had_bytes = self.number(has_bytes)?;
                if had_bytes != has_bytes {
                    let what = "the store's backing device had";
                    return refused(format!("{what} {had_bytes} bytes, and this one has {has_bytes}"));
                }
                Some(BackingOptions {
                    backing,
                    layout: self.named(&layout)?,
                    compressed: self.flag(compressed)?,
                })
            }
            (true, None) => return refused("the store had a backing device".to_owned()),
            (false, Some(_)) => return refused("the store had no backing device".to_owned()),
        };
        Ok(())
    }
}

/// The number of settings that change.
const LIVE: usize = 14;
/// The number of words of a copy: a count of the changes, the settings, and a checksum of both.
const COPY: usize = LIVE + 2;
const CHECKSUM: usize = COPY - 1;

/// The settings that change, in two copies: the newer one with a right checksum is valid. A change overwrites
/// the other copy, so that a death in between leaves the valid one.
pub(in crate::store) struct LiveSettings {
    words: Table<AtomicU64>,
    file: Arc<MemoryFile>,
    writer: Mutex<()>,
}

impl LiveSettings {
    pub(super) fn new(file: &Arc<MemoryFile>, region: &Region) -> Result<Self> {
        Ok(LiveSettings {
            words: Table::new_in(Some(region), 2 * COPY)?,
            file: Arc::clone(file),
            writer: Mutex::new(&classes::LIVE_SETTINGS, ()),
        })
    }

    pub(super) fn file(&self) -> &Arc<MemoryFile> {
        &self.file
    }

    pub(in crate::store) fn change(&self, change: impl FnOnce(&mut StoreBuilder)) {
        let _writer = self.writer.lock();
        let mut builder = StoreBuilder::new("", 1);
        let (changes, at) = self.read_into(&mut builder);
        change(&mut builder);
        let mut copy = [0; COPY];
        copy[0] = changes + 1;
        let mut places = copy[1..=LIVE].iter_mut();
        for_each_live(&mut builder, |value| {
            places.next().into_iter().for_each(|place| *place = value);
            value
        });
        copy[CHECKSUM] = checksum_but(CHECKSUM, &copy);
        let first = if at == 0 { COPY } else { 0 };
        for (place, word) in (first..).zip(copy) {
            self.words[place].store(word, Ordering::Relaxed);
        }
    }

    /// Sets the changeable settings, if a copy is valid. Returns its count of changes and its first word.
    pub(super) fn read_into(&self, builder: &mut StoreBuilder) -> (u64, usize) {
        let copy = |first: usize| -> [u64; COPY] {
            std::array::from_fn(|at| self.words[first + at].load(Ordering::Relaxed))
        };
        let sound = [0, COPY].map(|first| (copy(first), first));
        let last = sound
            .into_iter()
            .filter(|(copy, _)| copy[0] != 0 && copy[CHECKSUM] == checksum_but(CHECKSUM, copy))
            .max_by_key(|(copy, _)| copy[0]);
        let Some((copy, first)) = last else { return (0, COPY) };
        let mut values = copy[1..=LIVE].iter();
        for_each_live(builder, |value| values.next().copied().unwrap_or(value));
        (copy[0], first)
    }
}

/// Calls `word` with each setting that changes, in the order of a copy, and sets it to what that returns.
fn for_each_live(builder: &mut StoreBuilder, mut word: impl FnMut(u64) -> u64) {
    builder.limit_pages = word(builder.limit_pages);
    builder.run_cache_batch_pages = word(builder.run_cache_batch_pages as u64) as usize;
    builder.lru_pagevec_pages = word(builder.lru_pagevec_pages as u64) as usize;
    builder.compact_threshold_percent = word(builder.compact_threshold_percent);
    builder.compact_rate_bytes = word(builder.compact_rate_bytes);
    let policy = &mut builder.policy;
    policy.high_percent = word(policy.high_percent);
    policy.low_percent = word(policy.low_percent);
    policy.recompress_after_s = word(policy.recompress_after_s.into()) as u32;
    policy.recompress_cpu_percent = word(policy.recompress_cpu_percent);
    policy.writeback_after_s = word(policy.writeback_after_s.into()) as u32;
    policy.writeback_budget_bytes = word(policy.writeback_budget_bytes);
    let limit = &mut builder.writeback_limit;
    limit.enabled = word(limit.enabled.into()) != 0;
    limit.left = word(limit.left);
    builder.writeback_batch = Some(word(builder.writeback_batch.unwrap_or(0))).filter(|batch| *batch > 0);
}

/// Returns the checksum of words, with the one at `at` as 0: that is where the checksum is kept.
pub(super) fn checksum_but<const N: usize>(at: usize, words: &[u64; N]) -> u64 {
    let mut words = *words;
    words[at] = 0;
    u64::from(crc32fast::hash(&words.map(u64::to_le_bytes).concat()))
}
