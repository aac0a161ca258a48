//! [`Tiers`]: several backings one after another, of which the first ones are used first.
//!
//! If one of them keeps extents as objects ([`Backing::object_bytes`]), all do: in a file, an object is the extent's bytes, with
//! zeros behind what was written, which end it. If one has its objects sealed, all are, with the same key.
//!
//! ```text
//! offset  0             end of the first        end of the second
//!         | first tier  | second tier           |
//! ```

use std::ops::Range;
use std::time::Duration;

use super::{Backing, Buffer, Claim, Direction, Filling, Health, SETTING, Seal, Transfer};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Arc;
use crate::base::units::PAGE_SIZE;

/// The most tiers.
pub const MAX_TIERS: usize = 4;
/// Tiers begin at multiples of this, or of the length of objects: no extent lies in two of them.
const UNIT_BYTES: u64 = 8 << 20;

/// Backings that are used as one.
pub struct Tiers {
    tiers: Vec<Tier>,
    object_bytes: Option<usize>,
    block_bytes: usize,
    seal: Option<Arc<dyn Seal>>,
    /// Of the store whose objects are sealed: nonces begin anew in each.
    claim: Claim,
}

struct Tier {
    backing: Arc<dyn Backing>,
    /// Where it begins.
    start: u64,
    /// Whether it keeps extents as objects itself.
    has_objects: bool,
}

impl Tiers {
    /// Makes one of `backings`, 1 to [`MAX_TIERS`]; each but the last has a size. With `seal`, all objects are sealed by it.
    ///
    /// # Errors
    /// `Invalid` for other numbers of tiers, a tier without a size or one that is too small, and for tiers whose objects
    /// have different lengths.
    pub fn new(backings: Vec<Arc<dyn Backing>>, seal: Option<Arc<dyn Seal>>) -> Result<Self> {
        let refused = |what: String| Err(Error::invalid(what).with_setting(SETTING));
        Self::check_number(backings.len())?;
        let seal = seal.or_else(|| backings.iter().find_map(|backing| backing.seal()));
        let mut lengths: Vec<_> = backings.iter().filter_map(|backing| backing.object_bytes()).collect();
        lengths.dedup();
        if let [one, other, ..] = lengths[..] {
            return refused(format!(
                "stores whose objects have {one} and {other} bytes cannot be used together"
            ));
        }
        // What is sealed must not be overwritten.
        let object_bytes = lengths.first().copied().or(seal.is_some().then_some(DEFAULT_OBJECT_BYTES));
        let (mut tiers, mut start) = (Vec::new(), 0);
        let count = backings.len();
        for (number, backing) in backings.into_iter().enumerate() {
            let has_objects = backing.object_bytes().is_some();
            let block_bytes = backing.block_bytes();
            if object_bytes.is_some() && block_bytes > PAGE_SIZE {
                let what = format!(
                    "tier {} has blocks of {block_bytes} bytes; at most {PAGE_SIZE} are possible",
                    number + 1
                );
                return Err(Error::new(ErrorKind::Unsupported, what).with_setting(SETTING));
            }
            let len_bytes = backing.len_bytes() / UNIT_BYTES * UNIT_BYTES;
            if len_bytes == 0 && number + 1 < count {
                let what = format!(
                    "tier {} needs a size, of at least {} MiB: append it, as in PATH:2G",
                    number + 1,
                    UNIT_BYTES >> 20
                );
                return refused(what);
            }
            backing.become_part(
                (start / object_bytes.unwrap_or(DEFAULT_OBJECT_BYTES) as u64) as u32,
                seal.as_ref(),
            );
            tiers.push(Tier { backing, start, has_objects });
            let too_large = || Error::invalid("the tiers are too large together").with_setting(SETTING);
            start = u64::checked_add(start, len_bytes).ok_or_else(too_large)?;
        }
        let blocks = tiers.iter().map(|tier| tier.backing.block_bytes());
        // Parts of objects are read by `carry_out` only.
        let block_bytes = if object_bytes.is_some() { 1 } else { blocks.max().unwrap_or(1) };
        Ok(Tiers { tiers, object_bytes, block_bytes, seal, claim: Claim::default() })
    }

    /// Checks that there can be so many.
    ///
    /// # Errors
    /// `Invalid` if not.
    pub(crate) fn check_number(tiers: usize) -> Result<()> {
        match tiers {
            1..=MAX_TIERS => Ok(()),
            _ => {
                let what = format!("{tiers} backing devices: 1 to {MAX_TIERS} are possible");
                Err(Error::invalid(what).with_setting(SETTING))
            }
        }
    }

    /// Returns the number of the tier at an offset.
    fn at(&self, offset: u64) -> usize {
        self.tiers.partition_point(|tier| tier.start <= offset).saturating_sub(1)
    }

    /// Returns the tier that has an object, and the object's number there.
    fn locate(&self, extent: u32) -> (&Tier, u32) {
        let object_bytes = self.object_bytes.unwrap_or(DEFAULT_OBJECT_BYTES) as u64;
        let offset = u64::from(extent) * object_bytes;
        let tier = &self.tiers[self.at(offset)];
        (tier, ((offset - tier.start) / object_bytes) as u32)
    }

    /// Returns the tier of a transfer, its offset there, and its length: in a file, an object ends with zeros.
    fn translate(
        &self,
        direction: Direction,
        offset: u64,
        len_bytes: usize,
        buffer: &mut Buffer,
    ) -> (&Tier, u64, usize) {
        let tier = &self.tiers[self.at(offset)];
        let whole_bytes = match direction {
            Direction::Read => len_bytes,
            Direction::Write => self.padded_bytes(offset, len_bytes).min(buffer.len()),
        };
        buffer[len_bytes..whole_bytes].fill(0);
        (tier, offset - tier.start, whole_bytes)
    }
}

impl Backing for Tiers {
    /// Returns the size of all; of the last one as much as it has now.
    fn len_bytes(&self) -> u64 {
        self.tiers.last().map_or(0, |last| last.start.saturating_add(last.backing.len_bytes()))
    }

    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn object_bytes(&self) -> Option<usize> {
        self.object_bytes
    }

    fn seal(&self) -> Option<Arc<dyn Seal>> {
        self.seal.clone()
    }

    fn tiers(&self) -> Vec<Range<u64>> {
        let starts = self.tiers.iter().map(|tier| tier.start);
        let ends = self.tiers.iter().skip(1).map(|tier| tier.start).chain([self.len_bytes()]);
        starts.zip(ends).map(|(start, end)| start..end).collect()
    }

    fn home(&self, extent: u32) -> u32 {
        let (tier, extent) = self.locate(extent);
        tier.backing.home(extent)
    }

    fn placement_generation(&self) -> u64 {
        self.tiers.iter().map(|tier| tier.backing.placement_generation()).sum()
    }

    fn is_at_risk(&self, extent: u32, filling: Filling) -> bool {
        let (tier, extent) = self.locate(extent);
        tier.backing.is_at_risk(extent, filling)
    }

    fn start(&self, mut transfer: Transfer) {
        let Transfer { direction, offset, len_bytes, .. } = transfer;
        let (tier, offset, len_bytes) = self.translate(direction, offset, len_bytes, &mut transfer.buffer);
        tier.backing.start(Transfer { offset, len_bytes, ..transfer });
    }

    fn carry_out(
        &self,
        direction: Direction,
        offset: u64,
        len_bytes: usize,
        filling: Filling,
        mut buffer: Buffer,
    ) -> (Buffer, Result<()>) {
        let (tier, offset, len_bytes) = self.translate(direction, offset, len_bytes, &mut buffer);
        let block_bytes = tier.backing.block_bytes();
        let before = (offset % block_bytes as u64) as usize;
        // A part of an object, in a file that has blocks.
        let whole_bytes = (before + len_bytes).next_multiple_of(block_bytes);
        let start = offset - before as u64;
        let (mut buffer, result) = tier.backing.carry_out(direction, start, whole_bytes, filling, buffer);
        if before > 0 {
            buffer.copy_within(before..before + len_bytes, 0);
        }
        (buffer, result)
    }

    /// Fails the second time if objects are sealed, and if a tier does; then none is in use that was not before.
    fn begin(&self) -> Result<()> {
        if self.seal.is_some() {
            self.claim.take()?;
        }
        for (number, tier) in self.tiers.iter().enumerate() {
            tier.backing.begin().inspect_err(|_| {
                self.tiers[..number].iter().for_each(|tier| tier.backing.give_back());
                self.claim.give_back();
            })?;
        }
        Ok(())
    }

    fn give_back(&self) {
        self.tiers.iter().for_each(|tier| tier.backing.give_back());
        self.claim.give_back();
    }

    fn padded_bytes(&self, offset: u64, len_bytes: usize) -> usize {
        match self.object_bytes {
            Some(object_bytes) if !self.tiers[self.at(offset)].has_objects => {
                (len_bytes.next_multiple_of(PAGE_SIZE) + PAGE_SIZE).min(object_bytes)
            }
            _ => len_bytes,
        }
    }

    fn is_down(&self, tier: usize) -> bool {
        self.tiers.get(tier).is_some_and(|tier| tier.backing.is_down(0))
    }

    /// Returns that of the tier which is waited for the longest.
    fn gone_after(&self) -> Duration {
        self.tiers.iter().map(|tier| tier.backing.gone_after()).max().unwrap_or_default()
    }

    /// Tells the last tier: all that the disk has may lie there, if the others are used by what was there before.
    fn set_disk_bytes(&self, bytes: u64) {
        self.tiers.last().iter().for_each(|last| last.backing.set_disk_bytes(bytes));
    }

    /// Returns what is known about all that need words together. It is stopped if all are: pages go to another tier than one that
    /// is. A file is neither checked nor stopped.
    fn health(&self) -> Option<Health> {
        let all: Vec<_> = self.tiers.iter().map(|tier| tier.backing.health()).collect();
        let are_checked = all.iter().all(Option::is_some);
        let are_stopped = all.iter().all(|health| health.as_ref().is_some_and(|of| of.stopped.is_some()));
        let Health { expired, left_behind, stopped, degraded, checked } =
            all.into_iter().flatten().reduce(|one, other| Health {
                expired: one.expired + other.expired,
                left_behind: one.left_behind + other.left_behind,
                stopped: one.stopped.or(other.stopped),
                degraded: one.degraded.or(other.degraded),
                checked: one.checked.min(other.checked),
            })?;
        let (stopped, degraded) =
            if are_stopped { (stopped, degraded) } else { (None, stopped.or(degraded)) };
        Some(Health { expired, left_behind, stopped, degraded, checked: checked.filter(|_| are_checked) })
    }

    fn end(&self) {
        self.tiers.iter().for_each(|tier| tier.backing.end());
    }

    fn discard(&self, offset: u64, len_bytes: u64, filling: Filling) {
        let tier = &self.tiers[self.at(offset)];
        tier.backing.discard(offset - tier.start, len_bytes, filling);
    }
}

/// The length of objects in files.
const DEFAULT_OBJECT_BYTES: usize = 1 << 20;

const _: () = assert!(UNIT_BYTES.is_multiple_of(DEFAULT_OBJECT_BYTES as u64));
