//! [`Tiers`]: the backings of a store, one after another, of which the first ones are used first.
//!
//! If one of them keeps [`Objects`](super::Objects), or what is written is sealed, each extent is an object
//! in all of them, of one length: in a file, an object is the extent's bytes, with zeros behind what was
//! written, which end it. All are sealed with the same key.
//!
//! ```text
//! offset  0             end of the first        end of the second
//!         | first tier  | second tier           |
//! ```

use std::time::Duration;

use super::{
    Backing, Buffer, DISK_GONE_AFTER, Direction, Done, Filling, Health, Objects, SETTING, Seal, Transfer,
    wait_for,
};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::{Arc, AtomicU32, Counter, Ordering};
use crate::base::units::PAGE_SIZE;

/// The most tiers.
pub const MAX_TIERS: usize = 4;
/// Tiers begin at multiples of this, or of the length of objects: no extent lies in two of them.
const UNIT_BYTES: u64 = 8 << 20;
const DEFAULT_OBJECT_BYTES: usize = 1 << 20;
const _: () = assert!(UNIT_BYTES.is_multiple_of(DEFAULT_OBJECT_BYTES as u64));
/// What objects without a size of their own have at least, for extents that are being filled and cleaned.
const SPARE_BYTES: u64 = 16 << 20;

/// Backings that are used as one.
pub struct Tiers {
    tiers: Vec<Tier>,
    object_bytes: Option<usize>,
    seal: Option<Arc<dyn Seal>>,
    /// The size of the disk, for objects that may be as many as the device needs; 0 until it is known.
    disk_bytes: Counter,
    /// Not 0 from when the first store begins to use objects: those of another one would have the same
    /// numbers and nonces.
    is_claimed: AtomicU32,
}

struct Tier {
    backing: Backing,
    start: u64,
}

impl From<Backing> for Arc<Tiers> {
    /// Uses one backing, without a seal.
    fn from(backing: Backing) -> Self {
        let backings = std::iter::once(backing).collect();
        Arc::new(Tiers::new(backings, None).expect("one without a seal fits"))
    }
}

impl Tiers {
    /// Makes one of `backings`, 1 to [`MAX_TIERS`]; each but the last has a size. With `seal`, all objects
    /// are sealed by it.
    /// Fails with `Invalid` for other numbers of tiers, a tier without a size or one that is too small, and
    /// for tiers whose objects have different lengths; `Unsupported` for blocks that are too large.
    pub fn new(backings: Vec<Backing>, seal: Option<Arc<dyn Seal>>) -> Result<Self> {
        let refused = |kind, what: String| Error::new(kind, what).with_setting(SETTING);
        Self::check_number(backings.len())?;
        let (mut tiers, mut start, count) = (Vec::new(), 0u64, backings.len());
        for (number, backing) in (1..).zip(backings) {
            let tier = Tier { backing, start };
            let len_bytes = tier.len_bytes(0) / UNIT_BYTES * UNIT_BYTES;
            tiers.push(tier);
            if len_bytes == 0 && number < count {
                let least_mib = UNIT_BYTES >> 20;
                let what = "needs a size, of at least";
                let what = format!("tier {number} {what} {least_mib} MiB: append it, as in PATH:2G");
                return Err(refused(ErrorKind::Invalid, what));
            }
            let too_large = || refused(ErrorKind::Invalid, "the tiers are too large together".to_owned());
            start = start.checked_add(len_bytes).ok_or_else(too_large)?;
        }
        let mut lengths: Vec<_> = tiers.iter().filter_map(Tier::object_bytes).collect();
        lengths.dedup();
        if let [one, other, ..] = lengths[..] {
            let what = format!("stores whose objects have {one} and {other} bytes cannot be used together");
            return Err(refused(ErrorKind::Invalid, what));
        }
        // What is sealed must not be overwritten.
        let object_bytes = lengths.first().copied().or(seal.is_some().then_some(DEFAULT_OBJECT_BYTES));
        let mut sizes = (1..).zip(tiers.iter().map(Tier::block_bytes));
        let too_large = sizes.find(|(_, bytes)| *bytes > PAGE_SIZE && object_bytes.is_some());
        if let Some((number, bytes)) = too_large {
            let what = format!("tier {number} has blocks of {bytes} bytes; at most {PAGE_SIZE} are possible");
            return Err(refused(ErrorKind::Unsupported, what));
        }
        for (objects, start) in tiers.iter().filter_map(|tier| Some((tier.objects()?, tier.start))) {
            objects.join((start / objects.object_bytes() as u64) as u32, seal.as_ref());
        }
        let (disk_bytes, is_claimed) = (Counter::new(0), AtomicU32::default());
        Ok(Tiers { tiers, object_bytes, seal, disk_bytes, is_claimed })
    }

    pub(crate) fn check_number(tiers: usize) -> Result<()> {
        match tiers {
            1..=MAX_TIERS => Ok(()),
            _ => {
                let what = format!("{tiers} backing devices: 1 to {MAX_TIERS} are possible");
                Err(Error::invalid(what).with_setting(SETTING))
            }
        }
    }

    /// Returns the size of all.
    pub fn len_bytes(&self) -> u64 {
        let last = self.tiers.last();
        last.map_or(0, |last| last.start.saturating_add(last.len_bytes(self.disk_bytes.get())))
    }

    pub(crate) fn tier_bytes(&self, tier: usize) -> u64 {
        self.tiers.get(tier).map_or(0, |tier| tier.len_bytes(self.disk_bytes.get()))
    }

    /// Tells the size of the disk, before a device uses the backings.
    pub(crate) fn set_disk_bytes(&self, bytes: u64) {
        self.disk_bytes.set(bytes);
    }

    pub(crate) fn block_bytes(&self) -> usize {
        match self.object_bytes {
            // Parts of objects are read by `Tiers::read` only.
            Some(_) => 1,
            None => self.tiers.iter().map(Tier::block_bytes).max().unwrap_or(1),
        }
    }

    /// Returns the length of the extents, if each is an object, a power of two.
    pub(crate) fn object_bytes(&self) -> Option<usize> {
        self.object_bytes
    }

    /// Returns what objects are sealed with; `None` if nobody else can read or change what is there.
    pub fn seal(&self) -> Option<&Arc<dyn Seal>> {
        self.seal.as_ref()
    }

    pub(crate) fn starts(&self) -> impl Iterator<Item = u64> {
        self.tiers.iter().map(|tier| tier.start)
    }

    /// Claims the objects for a new store, but not for one that goes on with another process's.
    pub(crate) fn begin(&self) -> Result<()> {
        match self.object_bytes {
            Some(_) if self.is_claimed.swap(1, Ordering::Relaxed) > 0 => {
                Err(Error::new(ErrorKind::Busy, "another device has used this backing").with_setting(SETTING))
            }
            _ => Ok(()),
        }
    }

    /// Gives the claim back, for a store that has not written anything.
    pub(crate) fn give_back(&self) {
        self.is_claimed.store(0, Ordering::Relaxed);
    }

    /// Returns the backing at an offset, the extent's number there if it has objects, and the offset in that.
    fn at(&self, offset: u64) -> (&Backing, u32, u64) {
        let tier = &self.tiers[self.tiers.partition_point(|tier| tier.start <= offset).saturating_sub(1)];
        let offset = offset - tier.start;
        let bytes = tier.object_bytes().map_or(u64::MAX, |bytes| bytes as u64);
        (&tier.backing, (offset / bytes) as u32, offset % bytes)
    }

    /// Returns what the store of an extent's next object wants to know again about it.
    pub(crate) fn home(&self, offset: u64) -> u32 {
        match self.at(offset) {
            (Backing::Blocks(_), ..) => 0,
            (Backing::Objects(objects), extent, _) => objects.home(extent),
        }
    }

    /// Returns how many bytes an object takes that is written: in a file, it ends with zeros.
    pub(crate) fn padded_bytes(&self, offset: u64, len_bytes: usize) -> usize {
        match (self.object_bytes, self.at(offset).0) {
            (Some(object_bytes), Backing::Blocks(_)) => {
                (len_bytes.next_multiple_of(PAGE_SIZE) + PAGE_SIZE).min(object_bytes)
            }
            _ => len_bytes,
        }
    }

    pub(crate) fn start(&self, transfer: Transfer) {
        match self.at(transfer.offset) {
            (Backing::Blocks(blocks), _, offset) => blocks.start(Transfer { offset, ..transfer }),
            (Backing::Objects(objects), extent, offset) => {
                objects.start(extent, Transfer { offset, ..transfer });
            }
        }
    }

    pub(crate) fn read(&self, offset: u64, len_bytes: usize, filling: Filling, mut buffer: Buffer) -> Done {
        let direction = Direction::Read;
        match self.at(offset) {
            (Backing::Blocks(blocks), _, offset) => {
                // A part of an object may begin and end within a block.
                let block_bytes = blocks.block_bytes();
                let before = (offset % block_bytes as u64) as usize;
                let whole_bytes = (before + len_bytes).next_multiple_of(block_bytes);
                let (mut buffer, result) =
                    blocks.carry_out(direction, offset - before as u64, whole_bytes, buffer);
                if before > 0 {
                    buffer.copy_within(before..before + len_bytes, 0);
                }
                (buffer, result)
            }
            (Backing::Objects(objects), extent, offset) => {
                if objects.get_here(extent, filling, offset as usize, &mut buffer[..len_bytes]) {
                    return (buffer, Ok(()));
                }
                wait_for(|completion| {
                    let token = 0;
                    let transfer =
                        Transfer { direction, offset, len_bytes, filling, buffer, token, completion };
                    objects.start(extent, transfer);
                })
            }
        }
    }

    pub(crate) fn discard(&self, offset: u64, len_bytes: u64, filling: Filling) {
        match self.at(offset) {
            (Backing::Blocks(blocks), _, offset) => blocks.discard(offset, len_bytes),
            (Backing::Objects(objects), extent, _) => objects.delete(extent, filling),
        }
    }

    pub(crate) fn is_one_down(&self) -> bool {
        (0..self.tiers.len()).any(|tier| self.is_down(tier))
    }

    /// Returns whether nothing is written to one now, by its number.
    pub(crate) fn is_down(&self, tier: usize) -> bool {
        self.tiers.get(tier).and_then(Tier::health).is_some_and(|health| health.stopped.is_some())
    }

    /// Returns a number that changes when extents have to be looked at by [`Tiers::is_at_risk`].
    pub(crate) fn placement(&self) -> u64 {
        self.health().map_or(0, |health| health.placement)
    }

    /// Returns whether extents may ever have to be looked at by [`Tiers::is_at_risk`].
    pub(crate) fn has_objects(&self) -> bool {
        self.tiers.iter().any(|tier| tier.objects().is_some())
    }

    pub(crate) fn is_at_risk(&self, offset: u64, filling: Filling) -> bool {
        matches!(self.at(offset).0, Backing::Objects(objects) if objects.is_at_risk(filling))
    }

    /// Returns how long writers wait for tiers that fail: for the one that is waited for the longest.
    pub(crate) fn gone_after(&self) -> Duration {
        let each =
            self.tiers.iter().map(|tier| tier.health().map_or(DISK_GONE_AFTER, |health| health.gone_after));
        each.max().unwrap_or_default()
    }

    /// Returns what is known about all stores together; `None` if there are only blocks. They are stopped if
    /// all tiers are: pages go to another tier than one that is. Blocks are neither checked nor stopped.
    pub fn health(&self) -> Option<Health> {
        let all: Vec<_> = self.tiers.iter().map(Tier::health).collect();
        let are_checked = all.iter().all(Option::is_some);
        let are_stopped = all.iter().all(|health| health.as_ref().is_some_and(|of| of.stopped.is_some()));
        let health = all.into_iter().flatten().reduce(|one, other| Health {
            expired: one.expired + other.expired,
            left_behind: one.left_behind + other.left_behind,
            stopped: one.stopped.or(other.stopped),
            degraded: one.degraded.or(other.degraded),
            checked: one.checked.min(other.checked),
            placement: one.placement + other.placement,
            gone_after: one.gone_after.max(other.gone_after),
        })?;
        let checked = health.checked.filter(|_| are_checked);
        Some(match are_stopped {
            true => Health { checked, ..health },
            false => {
                Health { checked, degraded: health.stopped.or(health.degraded), stopped: None, ..health }
            }
        })
    }

    pub(crate) fn end(&self) {
        self.tiers.iter().filter_map(Tier::objects).for_each(|objects| objects.end());
    }
}

impl Tier {
    fn len_bytes(&self, disk_bytes: u64) -> u64 {
        let objects = match &self.backing {
            Backing::Blocks(blocks) => return blocks.len_bytes(),
            Backing::Objects(objects) => objects,
        };
        // As many as the disk has, and some for extents that are partly dead.
        let more_bytes = if disk_bytes > 0 { disk_bytes / 8 + SPARE_BYTES } else { 0 };
        let len_bytes = objects.len_bytes().unwrap_or(disk_bytes.saturating_add(more_bytes));
        len_bytes - len_bytes % objects.object_bytes() as u64
    }

    fn objects(&self) -> Option<&dyn Objects> {
        match &self.backing {
            Backing::Blocks(_) => None,
            Backing::Objects(objects) => Some(&**objects),
        }
    }

    fn object_bytes(&self) -> Option<usize> {
        self.objects().map(|objects| objects.object_bytes())
    }

    fn block_bytes(&self) -> usize {
        match &self.backing {
            Backing::Blocks(blocks) => blocks.block_bytes(),
            Backing::Objects(_) => 1,
        }
    }

    fn health(&self) -> Option<Health> {
        self.objects().map(|objects| objects.health())
    }
}
