//! The settings of a store that outlives the process: the fixed ones, encoded as bytes, and those that change
//! while it is used, in two copies.
//!
//! Numbers are 8 bytes, little-endian; names and dictionaries are preceded by their length.

use std::str::FromStr;

use crate::backing::Tiers;
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::mem::{MemoryFile, Table};
use crate::base::sync::{Arc, AtomicU64, Mutex, Ordering, classes};
use crate::codec::{Algorithm, Dictionary, Kind};

use super::super::{BackingOptions, Designs, ReclaimPolicy, StoreBuilder, WritebackLimit};
use super::layout::{Memory, checksum_but};

/// The longest name, path or dictionary that is accepted.
const MAX_BYTES: u64 = 2 << 20;

/// Stands for the name of the LRU's design if there is no LRU.
const NO_LRU: &str = "none";

/// Encodes the fixed settings.
pub(super) fn encode(builder: &StoreBuilder) -> Vec<u8> {
    let mut out = Vec::new();
    put_bytes(&mut out, builder.name.as_bytes());
    put(&mut out, builder.pages);
    put(&mut out, builder.chain_size as u64);
    let [pool, lru, streams] = builder.designs.names();
    put_text(&mut out, &pool);
    put_text(&mut out, if builder.lru { lru.as_str() } else { NO_LRU });
    put(&mut out, u64::from(builder.checksum));
    put(&mut out, builder.reserve_pages);
    put_text(&mut out, &streams);
    // Whether writers release their streams while they wait for memory, as earlier versions could.
    put(&mut out, 0);
    put_text(&mut out, &builder.policy.order);
    put_algorithm(&mut out, &builder.algorithm);
    for algorithm in &builder.recompression {
        put(&mut out, u64::from(algorithm.is_some()));
        algorithm.iter().for_each(|algorithm| put_algorithm(&mut out, algorithm));
    }
    put(&mut out, u64::from(builder.backing.is_some()));
    if let Some(BackingOptions { backing, layout, compressed }) = &builder.backing {
        put(&mut out, backing.len_bytes());
        put_text(&mut out, layout);
        put(&mut out, u64::from(*compressed));
    }
    out
}

/// Decodes what [`encode`] returned.
///
/// # Errors
/// `Corrupt` for any other bytes; `Invalid` without the backing device that the store had, or with one if it
/// had none.
pub(super) fn decode(bytes: &[u8], backing: Option<Arc<Tiers>>) -> Result<StoreBuilder> {
    let mut input = Input(bytes);
    let name = input.text()?;
    let mut builder = StoreBuilder::new(name, input.number()?);
    builder.chain_size = input.number()? as usize;
    let (pool, lru) = (input.text()?, input.text()?);
    builder.lru = lru != NO_LRU;
    builder.checksum = input.flag()?;
    builder.reserve_pages = input.number()?;
    let (lru, streams) = (if builder.lru { lru } else { "batched" }, input.text()?);
    builder.designs = Designs::named([pool, lru, streams]).map_err(|_| damaged())?;
    input.flag()?;
    builder.policy.order = input.parse()?;
    builder.algorithm = input.algorithm()?;
    for algorithm in &mut builder.recompression {
        *algorithm = if input.flag()? { Some(input.algorithm()?) } else { None };
    }
    builder.backing = match (input.flag()?, backing) {
        (false, None) => None,
        (true, Some(backing)) => {
            let (had_bytes, has_bytes) = (input.number()?, backing.len_bytes());
            if had_bytes != has_bytes {
                let what =
                    format!("the store's backing device had {had_bytes} bytes, and this one has {has_bytes}");
                return Err(Error::invalid(what).with_setting("backing_dev"));
            }
            Some(BackingOptions { backing, layout: input.parse()?, compressed: input.flag()? })
        }
        (true, None) => {
            return Err(Error::invalid("the store had a backing device").with_setting("backing_dev"));
        }
        (false, Some(_)) => {
            return Err(Error::invalid("the store had no backing device").with_setting("backing_dev"));
        }
    };
    if !input.0.is_empty() {
        return Err(damaged());
    }
    Ok(builder)
}

fn put(out: &mut Vec<u8>, number: u64) {
    out.extend(number.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put(out, bytes.len() as u64);
    out.extend(bytes);
}

fn put_text(out: &mut Vec<u8>, text: &(impl ToString + ?Sized)) {
    put_bytes(out, text.to_string().as_bytes());
}

fn put_algorithm(out: &mut Vec<u8>, algorithm: &Algorithm) {
    put_text(out, &algorithm.kind());
    put(out, i64::from(algorithm.level()).cast_unsigned());
    put(out, u64::from(algorithm.dictionary().is_some()));
    if let Some(dictionary) = algorithm.dictionary() {
        put_bytes(out, dictionary.path().as_bytes());
        put_bytes(out, dictionary.bytes());
    }
}

fn damaged() -> Error {
    Error::new(ErrorKind::Corrupt, "the store's record of settings is damaged")
}

/// The bytes that are left to read.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn number(&mut self) -> Result<u64> {
        let (number, rest) = self.0.split_first_chunk().ok_or_else(damaged)?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*number))
    }

    fn flag(&mut self) -> Result<bool> {
        match self.number()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(damaged()),
        }
    }

    fn bytes(&mut self) -> Result<&'a [u8]> {
        let len = self.number()?;
        if len > MAX_BYTES || len > self.0.len() as u64 {
            return Err(damaged());
        }
        let (bytes, rest) = self.0.split_at(len as usize);
        self.0 = rest;
        Ok(bytes)
    }

    fn text(&mut self) -> Result<&'a str> {
        std::str::from_utf8(self.bytes()?).map_err(|_| damaged())
    }

    fn parse<T: FromStr>(&mut self) -> Result<T> {
        self.text()?.parse().map_err(|_| damaged())
    }

    fn algorithm(&mut self) -> Result<Algorithm> {
        let kind: Kind = self.parse()?;
        let level = i32::try_from(self.number()?.cast_signed()).map_err(|_| damaged())?;
        let dictionary = if self.flag()? {
            let path = self.text()?;
            Some(Dictionary::new(path, self.bytes()?.to_vec())?)
        } else {
            None
        };
        Algorithm::new(kind, Some(level), dictionary)
    }
}

/// The number of settings that change.
const LIVE: usize = 14;
/// The number of words of a copy: a count of the changes, the settings, and a checksum of both.
const COPY: usize = LIVE + 2;
const CHECKSUM: usize = COPY - 1;

/// The settings that change, in memory that outlives the process: two copies, of which the newer one with a
/// right checksum is valid. A change overwrites the other copy, so that a death in between leaves the valid
/// one.
pub(in crate::store) struct LiveSettings {
    words: Table<AtomicU64>,
    file: Arc<MemoryFile>,
    /// Held by the thread that changes the settings.
    writer: Mutex<()>,
}

impl LiveSettings {
    pub(in crate::store) fn new(memory: &Memory) -> Result<Self> {
        Ok(LiveSettings {
            words: Table::new_in(Some(&memory.live_settings), 2 * COPY)?,
            file: Arc::clone(&memory.file),
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
        copy[1..=LIVE].copy_from_slice(&numbers(&builder));
        copy[CHECKSUM] = checksum_but(CHECKSUM, &copy);
        let first = if at == 0 { COPY } else { 0 };
        for (place, word) in (first..).zip(copy) {
            self.words[place].store(word, Ordering::Relaxed);
        }
    }

    /// Sets the changeable settings of `builder`, if a copy is valid. Returns its count of changes and its
    /// first word.
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
        set_numbers(builder, std::array::from_fn(|at| copy[1 + at]));
        (copy[0], first)
    }
}

fn numbers(builder: &StoreBuilder) -> [u64; LIVE] {
    let policy = &builder.policy;
    [
        builder.limit_pages,
        builder.run_cache_batch_pages as u64,
        builder.lru_pagevec_pages as u64,
        builder.compact_threshold_percent,
        builder.compact_rate_bytes,
        policy.high_percent,
        policy.low_percent,
        u64::from(policy.recompress_after_s),
        policy.recompress_cpu_percent,
        u64::from(policy.writeback_after_s),
        policy.writeback_budget_bytes,
        u64::from(builder.writeback_limit.enabled),
        builder.writeback_limit.left,
        builder.writeback_batch.unwrap_or(0),
    ]
}

fn set_numbers(builder: &mut StoreBuilder, numbers: [u64; LIVE]) {
    let [limit, run_cache, pagevec, threshold, rate, rest @ ..] = numbers;
    let [high, low, recompress, recompress_cpu, writeback, budget, is_limited, left, batch] = rest;
    builder.limit_pages = limit;
    builder.run_cache_batch_pages = run_cache as usize;
    builder.lru_pagevec_pages = pagevec as usize;
    builder.compact_threshold_percent = threshold;
    builder.compact_rate_bytes = rate;
    builder.policy = ReclaimPolicy {
        high_percent: high,
        low_percent: low,
        recompress_after_s: recompress as u32,
        recompress_cpu_percent: recompress_cpu,
        writeback_after_s: writeback as u32,
        writeback_budget_bytes: budget,
        order: builder.policy.order,
    };
    builder.writeback_limit = WritebackLimit { enabled: is_limited != 0, left };
    builder.writeback_batch = (batch > 0).then_some(batch);
}
