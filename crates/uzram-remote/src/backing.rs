//! [`RemoteBacking`]: carries out a device's transfers on a store of objects.
//!
//! A few threads of its own run the requests, many at a time. Each has a deadline. Writes wait while too many
//! bytes are under way, and fail at once while the store is down ([`Breaker`]). Removals wait in a queue, and
//! are tried again.

use std::collections::{HashSet, VecDeque};
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, Semaphore, SetOnce};
use tokio::time::Instant as Until;
use uzram::backing::{
    Backing, Direction, Filling, Health, MOST_WAIT, Objects, Seal, Started, Tiers, Transfer,
};
use uzram::store::are_whole;
use uzram::sync::Mutex;
use uzram::{Error, ErrorKind, Result};

use crate::breaker::Breaker;
use crate::objects::{DeviceId, Key as ObjectKey, ObjectStore, take};
use crate::retry::tried;
use crate::secret::{Key, Sealer};
use crate::{Failure, error};

/// Threads that run requests: what a request takes is mostly time of the network and of the store.
const THREADS: usize = 2;
const REMOVALS_AT_ONCE: usize = 256;
/// Objects that may wait for their removal; those of more stay behind. Takes 48 MiB at most: of a large
/// device, at its end.
const MAX_REMOVALS: usize = 1 << 20;
/// How often a store that is down is tried, and a removal that failed.
const RETRY_EVERY: Duration = Duration::from_millis(500);
/// How long a check that fails for a reason that may pass is tried again, before writes stop.
const CHECK_AGAIN_FOR: Duration = Duration::from_secs(1);
/// How long the end of a backing waits for removals…
const END_WITHIN: Duration = Duration::from_secs(5);
/// How long it waits until the device's lease has ended.
const LEASE_ENDS_WITHIN: Duration = Duration::from_secs(1);
/// How often it looks whether there are transfers and removals.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What a backing asks of a store at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of objects that are being written.
    pub in_flight_bytes: usize,
    /// The time that a read may take, with all that the client tries.
    pub read_deadline: Duration,
    /// The time that a write may take once it has begun, with all that is tried.
    pub write_deadline: Duration,
    /// How long writers at the memory limit wait while nothing can be written: [`Health::gone_after`].
    pub gone_after: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            in_flight_bytes: 8 << 20,
            read_deadline: Duration::from_secs(3),
            write_deadline: Duration::from_secs(5),
            gone_after: MOST_WAIT,
        }
    }
}

/// A device, and the key that its objects are sealed with. Whoever has it can read them.
#[derive(Clone, Serialize, Deserialize)]
pub struct Identity {
    pub(crate) device: DeviceId,
    key: Key,
}

impl Identity {
    /// Draws a new one. Errors: `Io` if the system gives no random bytes.
    pub fn new() -> Result<Identity> {
        Ok(Identity { device: DeviceId::new()?, key: Key::new()? })
    }

    /// Returns what seals its objects. Errors: `NoMemory` if no memory can be locked.
    pub(crate) fn sealer(&self) -> Result<Sealer> {
        Sealer::new(self.device, &self.key)
    }
}

/// [`Objects`] of a device in a store.
pub struct RemoteBacking<O: ObjectStore> {
    shared: Arc<Shared<O>>,
    /// The bytes to use; `None` for as many as the device needs.
    len_bytes: Option<u64>,
    /// Whether the device is new, so that nothing is there unless something was put there.
    is_new: bool,
    runtime: Option<Runtime>,
}

struct Shared<O> {
    objects: SetOnce<O>,
    device: DeviceId,
    seal: Arc<Sealer>,
    /// If it is a part of another backing: its first extent there, and what that one's objects are sealed
    /// with.
    part: OnceLock<(u32, Arc<dyn Seal>)>,
    limits: Limits,
    breaker: Breaker,
    /// A permit for each byte that may be written at a time.
    in_flight: Semaphore,
    removals: Removals,
    /// Objects whose write was refused before it was sent: there is nothing to remove.
    unsent: Mutex<HashSet<ObjectKey>>,
    /// Each transfer has a clone until it has ended, or was given up by a panic.
    under_way: Arc<()>,
    has_put: AtomicBool,
    /// Set by requests that fail: the store is checked soon.
    is_check_due: AtomicBool,
    /// Set at the end: nothing is written any more.
    has_ended: AtomicBool,
    expired: AtomicU64,
}

#[derive(Default)]
struct Removals {
    waiting: Mutex<Waiting>,
    more: Notify,
    left_behind: AtomicU64,
}

#[derive(Default)]
struct Waiting {
    new: VecDeque<ObjectKey>,
    /// Those whose removal has failed: they do not hold up the others.
    again: VecDeque<ObjectKey>,
}

impl<O: ObjectStore> RemoteBacking<O> {
    pub(crate) fn sealer(&self) -> &Sealer {
        &self.shared.seal
    }

    pub(crate) fn seal(&self) -> Arc<dyn Seal> {
        Arc::<Sealer>::clone(&self.shared.seal)
    }

    /// Returns it as the only tier of a device. Errors: as [`Tiers::new`].
    pub fn tiers(self: &Arc<Self>) -> Result<Arc<Tiers>> {
        let objects: Arc<dyn Objects> = Arc::<Self>::clone(self);
        Tiers::new(vec![Backing::Objects(objects)], Some(self.seal())).map(Arc::new)
    }

    /// Makes a store of objects the backing of a device: connects to it by `connect`, and waits until it is
    /// connected. Of the store, `len_bytes` are used at most; `None` for as many as the device has. Errors:
    /// those of `connect`; `NoMemory` when the system gives no threads, or locks no memory.
    pub fn open<F>(
        identity: &Identity,
        len_bytes: Option<u64>,
        limits: Limits,
        connect: impl FnOnce() -> F,
    ) -> Result<Self>
    where
        F: Future<Output = Result<O>>,
    {
        let mut backing = Self::begin(identity, len_bytes, limits)?;
        if let Some(runtime) = &backing.runtime {
            let objects = runtime.block_on(async {
                let objects = connect().await?;
                // Before there is any object.
                let until = Until::now() + limits.write_deadline;
                let leasing = tried(until, || objects.renew_lease(identity.device));
                backing.shared.end_at(until, leasing).await?;
                Ok::<O, Error>(objects)
            })?;
            // Connected once.
            let _ = backing.shared.objects.set(objects);
            backing.is_new = true;
        }
        Ok(backing)
    }

    /// Goes on with the objects that a device has there. It is connected later, if the store is away; what
    /// needs it waits, and fails in time. Errors: `NoMemory` when the system gives no threads, or locks no
    /// memory.
    pub fn resume<F>(
        identity: &Identity,
        len_bytes: u64,
        limits: Limits,
        connect: impl Fn() -> F + Send + 'static,
    ) -> Result<Self>
    where
        F: Future<Output = Result<O>> + Send,
    {
        let backing = Self::begin(identity, Some(len_bytes), limits)?;
        let shared = Arc::clone(&backing.shared);
        if let Some(runtime) = &backing.runtime {
            runtime.spawn(async move {
                loop {
                    match connect().await {
                        Ok(objects) => {
                            let began = Instant::now();
                            shared.breaker.note_check(began, shared.checked(&objects).await);
                            // Connected once.
                            let _ = shared.objects.set(objects);
                            return;
                        }
                        Err(error) => shared.breaker.open(error.into()),
                    }
                    tokio::time::sleep(RETRY_EVERY).await;
                }
            });
        }
        Ok(backing)
    }

    fn begin(identity: &Identity, len_bytes: Option<u64>, limits: Limits) -> Result<Self> {
        let mut runtime = Builder::new_multi_thread();
        runtime.worker_threads(THREADS).thread_name("uzram-remote").enable_all();
        let no_threads = |why| error(ErrorKind::NoMemory, format!("the system gave no threads: {why}"));
        let runtime = runtime.build().map_err(no_threads)?;
        let permits = limits.in_flight_bytes.clamp(O::OBJECT_BYTES, Semaphore::MAX_PERMITS);
        let shared = Arc::new(Shared {
            objects: SetOnce::new(),
            device: identity.device,
            seal: Arc::new(identity.sealer()?),
            part: OnceLock::new(),
            limits,
            breaker: Breaker::default(),
            in_flight: Semaphore::new(permits),
            removals: Removals::default(),
            unsent: Mutex::default(),
            under_way: Arc::default(),
            has_put: AtomicBool::new(false),
            is_check_due: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            expired: AtomicU64::new(0),
        });
        runtime.spawn(Arc::clone(&shared).keep_removing());
        runtime.spawn(Arc::clone(&shared).keep_checking());
        Ok(RemoteBacking { shared, len_bytes, is_new: false, runtime: Some(runtime) })
    }

    /// Waits for the transfers, each of which has a deadline, and some seconds for removals.
    fn finish(&self) {
        while Arc::strong_count(&self.shared.under_way) > 1 {
            std::thread::sleep(LOOK_EVERY);
        }
        // The count is read Relaxed: what transfers did is seen from here on.
        fence(Ordering::Acquire);
        let removals = &self.shared.removals;
        let ends = Instant::now() + END_WITHIN;
        while !removals.is_empty() && Instant::now() < ends {
            removals.more.notify_one();
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl<O: ObjectStore> Objects for RemoteBacking<O> {
    fn len_bytes(&self) -> Option<u64> {
        self.len_bytes
    }

    fn object_bytes(&self) -> usize {
        O::OBJECT_BYTES
    }

    fn join(&self, first_extent: u32, seal: Option<&Arc<dyn Seal>>) {
        // Once.
        let seal = seal.map_or_else(|| self.seal(), Arc::clone);
        let _ = self.shared.part.set((first_extent, seal));
    }

    /// Without a connection there is none, and the write fails.
    fn home(&self, extent: u32) -> u32 {
        self.shared.objects.get().map_or(0, |objects| objects.home(extent))
    }

    fn start(&self, extent: u32, transfer: Transfer) {
        if transfer.direction == Direction::Write {
            self.shared.has_put.store(true, Ordering::Relaxed);
        }
        let (shared, mut started) = (Arc::clone(&self.shared), Started::new(transfer));
        let Some(runtime) = &self.runtime else { return };
        let counted = Arc::clone(&shared.under_way);
        runtime.spawn(async move {
            let result = shared.carry_out(extent, &mut started).await;
            started.finish(result.map_err(Failure::into_io));
            drop(counted);
        });
    }

    fn get_here(&self, extent: u32, filling: Filling, at: usize, out: &mut [u8]) -> bool {
        let key = self.shared.key(extent, filling);
        let is_whole = |read: &[u8]| self.shared.is_whole(key, at, read);
        self.shared.objects.get().is_some_and(|objects| objects.get_here(key, at, out, &is_whole))
    }

    fn delete(&self, extent: u32, filling: Filling) {
        let key = self.shared.key(extent, filling);
        if !self.shared.unsent.lock().remove(&key) {
            self.shared.removals.add(key);
        }
    }

    fn health(&self) -> Health {
        let shared = &self.shared;
        Health {
            expired: shared.expired.load(Ordering::Relaxed),
            left_behind: shared.removals.left_behind.load(Ordering::Relaxed),
            placement: shared.objects.get().map_or(0, ObjectStore::placement_generation),
            gone_after: shared.limits.gone_after,
            ..shared.breaker.health()
        }
    }

    fn is_at_risk(&self, filling: Filling) -> bool {
        self.shared.objects.get().is_some_and(|objects| objects.is_at_risk(filling.home))
    }

    fn end(&self) {
        self.shared.has_ended.store(true, Ordering::Relaxed);
        self.finish();
        if let (Some(runtime), Some(objects)) = (&self.runtime, self.shared.objects.get()) {
            let ending = objects.end_lease(self.shared.device);
            let _ = runtime.block_on(async { tokio::time::timeout(LEASE_ENDS_WITHIN, ending).await });
        }
    }
}

impl<O: ObjectStore> Drop for RemoteBacking<O> {
    fn drop(&mut self) {
        if self.is_new && !self.shared.has_put.load(Ordering::Relaxed) {
            // Only a lease is there, which nobody else ends.
            self.end();
        }
        self.finish();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(END_WITHIN);
        }
    }
}

impl<O: ObjectStore> Shared<O> {
    fn key(&self, extent: u32, filling: Filling) -> ObjectKey {
        ObjectKey { device: self.device, extent, filling }
    }

    async fn carry_out(&self, extent: u32, transfer: &mut Transfer) -> Result<(), Failure> {
        let Transfer { direction, offset, len_bytes, filling, buffer, .. } = transfer;
        let (key, at) = (self.key(extent, *filling), *offset as usize);
        let inside = at.checked_add(*len_bytes).is_some_and(|end| end <= O::OBJECT_BYTES);
        if !inside || *len_bytes > buffer.len() {
            let error = Error::new(ErrorKind::OutOfRange, "a transfer beyond the end of an object");
            return Err(error.into());
        }
        let result = match direction {
            Direction::Read => self.read(key, at, &mut buffer[..*len_bytes]).await,
            Direction::Write if at > 0 => {
                return Err(Error::invalid("an object is written as a whole").into());
            }
            Direction::Write => self.write(key, &buffer[..*len_bytes]).await,
        };
        if result.as_ref().is_err_and(|failure| !failure.is_lost()) {
            self.is_check_due.store(true, Ordering::Relaxed);
        }
        result
    }

    async fn read(&self, key: ObjectKey, at: usize, out: &mut [u8]) -> Result<(), Failure> {
        self.check_used()?;
        let until = Until::now() + self.limits.read_deadline;
        let reading = async {
            let objects = self.objects.wait().await;
            let read = tried(until, || objects.get(key, at, out.len())).await?;
            take(&read, out)?;
            let is_whole = |read: &[u8]| self.is_whole(key, at, read);
            if !is_whole(out) {
                // The reader finds out whether another copy was better.
                objects.get_whole(key, at, out, &is_whole).await;
            }
            Ok(())
        };
        self.end_at(until, reading).await
    }

    /// Returns whether what was read from an object, beginning with a page's, is as it was sealed.
    fn is_whole(&self, key: ObjectKey, at: usize, read: &[u8]) -> bool {
        let generation = key.filling.generation;
        match self.part.get() {
            None => are_whole(&*self.seal, read, key.extent, generation, at),
            Some((first, seal)) => are_whole(&**seal, read, first + key.extent, generation, at),
        }
    }

    async fn write(&self, key: ObjectKey, bytes: &[u8]) -> Result<(), Failure> {
        let permits = self.in_flight.acquire_many(bytes.len() as u32).await;
        let _permits = permits.map_err(|_| Error::new(ErrorKind::Io, "the backing is being closed"))?;
        if let Err(refusal) = self.may_write() {
            self.unsent.lock().insert(key);
            return Err(refusal);
        }
        let until = Until::now() + self.limits.write_deadline;
        let writing = async {
            let objects = self.objects.wait().await;
            // Not again once it is known that nothing can be written.
            let put = || async {
                self.may_write()?;
                objects.put(key, bytes).await
            };
            tried(until, put).await
        };
        let result = self.end_at(until, writing).await;
        if result.is_err() {
            // It may be there, or come later.
            self.removals.add(key);
        }
        self.breaker.note(&result);
        result
    }

    fn may_write(&self) -> Result<(), Failure> {
        self.check_used()?;
        self.breaker.check()
    }

    fn check_used(&self) -> Result<()> {
        match self.has_ended.load(Ordering::Relaxed) {
            true => Err(error(ErrorKind::Io, "the backing is no longer used")),
            false => Ok(()),
        }
    }

    async fn end_at<T>(
        &self,
        until: Until,
        asking: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::time::timeout_at(until, asking).await.unwrap_or_else(|_| {
            self.expired.fetch_add(1, Ordering::Relaxed);
            Err(Failure::silent("the store"))
        })
    }

    async fn keep_removing(self: Arc<Self>) {
        let mut tried_again = Instant::now();
        loop {
            let has_ended = self.has_ended.load(Ordering::Relaxed);
            // A store that is down is left alone; one that is full becomes less so.
            let is_down = self.breaker.check().is_err_and(|failure| !failure.is_full());
            if is_down && !has_ended {
                tokio::time::sleep(RETRY_EVERY).await;
                continue;
            }
            // At the end, once there are no others.
            let is_due =
                if has_ended { !self.removals.has_new() } else { tried_again.elapsed() >= RETRY_EVERY };
            let (keys, are_again) = self.removals.take(is_due);
            if keys.is_empty() {
                let _ = tokio::time::timeout(RETRY_EVERY, self.removals.more.notified()).await;
                continue;
            }
            let asked = async { self.objects.wait().await.remove(keys.clone()).await };
            let mut failed = tokio::time::timeout(self.limits.write_deadline, asked)
                .await
                .unwrap_or_else(|_| keys.clone());
            if are_again && !failed.is_empty() {
                tried_again = Instant::now();
            }
            if self.has_ended.load(Ordering::Relaxed) {
                // Tried once.
                let left_behind = failed.drain(..).count() as u64;
                self.removals.left_behind.fetch_add(left_behind, Ordering::Relaxed);
            }
            self.removals.end(keys.len(), are_again, failed);
        }
    }

    /// Checks the store until the runtime ends: often while something fails.
    async fn keep_checking(self: Arc<Self>) {
        let mut checked: Option<Instant> = None;
        loop {
            tokio::time::sleep(RETRY_EVERY).await;
            let is_due = self.is_check_due.swap(false, Ordering::Relaxed) || self.breaker.is_open();
            if !is_due && checked.is_some_and(|at| at.elapsed() < O::CHECK_EVERY) {
                continue;
            }
            // Who connects checks, too.
            let Some(objects) = self.objects.get() else { continue };
            checked = Some(Instant::now());
            self.check(objects).await;
            if self.has_ended.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    async fn check(&self, objects: &O) {
        let began = Instant::now();
        let checked = self.checked(objects).await;
        if self.has_ended.load(Ordering::Relaxed) {
            return;
        }
        // The objects of a store that is full, or not well in another way, are in use as before.
        let leased = self.tried(|| objects.renew_lease(self.device)).await;
        // The end may have come meanwhile.
        if self.has_ended.load(Ordering::Relaxed) {
            let _ = tokio::time::timeout(LEASE_ENDS_WITHIN, objects.end_lease(self.device)).await;
        }
        self.breaker.note_check(began, leased.and(checked));
    }

    async fn checked(&self, objects: &O) -> Result<Option<String>, Failure> {
        self.tried(|| objects.check()).await
    }

    /// Asks the store for something, besides objects: before writes stop, again for a while.
    async fn tried<T, F>(&self, ask: impl Fn() -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let again_for = if self.breaker.is_open() { Duration::ZERO } else { CHECK_AGAIN_FOR };
        let (now, within) = (Until::now(), self.limits.read_deadline);
        self.end_at(now + within, tried(now + again_for.min(within), ask)).await
    }
}

impl Removals {
    fn add(&self, key: ObjectKey) {
        let mut waiting = self.waiting.lock();
        if waiting.new.len() + waiting.again.len() < MAX_REMOVALS {
            waiting.new.push_back(key);
            drop(waiting);
            self.more.notify_one();
        } else {
            self.left_behind.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the first ones, which stay in their queue until [`Removals::end`], and whether they are of
    /// those that have failed, which come first if `is_due`.
    fn take(&self, is_due: bool) -> (Vec<ObjectKey>, bool) {
        let waiting = self.waiting.lock();
        let are_again = is_due && !waiting.again.is_empty();
        let queue = if are_again { &waiting.again } else { &waiting.new };
        (queue.iter().take(REMOVALS_AT_ONCE).copied().collect(), are_again)
    }

    /// Ends the removal of the first `count` of a queue; those that failed are tried again later.
    fn end(&self, count: usize, are_again: bool, failed: Vec<ObjectKey>) {
        let mut waiting = self.waiting.lock();
        let Waiting { new, again } = &mut *waiting;
        (if are_again { &mut *again } else { new }).drain(..count);
        again.extend(failed);
    }

    fn has_new(&self) -> bool {
        !self.waiting.lock().new.is_empty()
    }

    fn is_empty(&self) -> bool {
        let waiting = self.waiting.lock();
        waiting.new.is_empty() && waiting.again.is_empty()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn removals_that_fail_hold_up_no_others() {
        let device = DeviceId::new().unwrap();
        let key = |extent| ObjectKey { device, extent, filling: Filling::default() };
        let keys = |extents: std::ops::Range<u32>| extents.map(key).collect::<Vec<_>>();
        let removals = Removals::default();
        keys(0..300).into_iter().for_each(|key| removals.add(key));
        assert_eq!(removals.take(true), (keys(0..256), false));
        removals.end(256, false, keys(0..256));
        assert_eq!(removals.take(false), (keys(256..300), false));
        assert_eq!(removals.take(true), (keys(0..256), true));
        removals.end(256, true, keys(7..8));
        removals.end(44, false, Vec::new());
        assert_eq!(removals.take(false), (Vec::new(), false));
        assert!(!removals.is_empty());
        removals.end(1, true, Vec::new());
        assert!(removals.is_empty());
    }
}
