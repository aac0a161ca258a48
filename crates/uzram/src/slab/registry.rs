//! The list of all live caches of this process, for statistics.

use super::CacheInfo;
#[cfg(not(loom))]
use crate::base::sync::{Mutex, classes};
#[cfg(not(loom))]
use std::sync::{LazyLock, Weak};

/// A cache of any policy.
pub(super) trait Described: Send + Sync {
    fn info(&self) -> CacheInfo;
}

#[cfg(not(loom))]
static CACHES: LazyLock<Mutex<Vec<Weak<dyn Described>>>> =
    LazyLock::new(|| Mutex::new(&classes::SLAB_CACHES, Vec::new()));

/// Adds a cache to the list. A closed cache drops out.
#[cfg(not(loom))]
pub(super) fn add(cache: Weak<impl Described + 'static>) {
    let mut caches = CACHES.lock();
    caches.retain(|cache| cache.strong_count() > 0);
    caches.push(cache);
}

/// Returns the state of every cache of this process, sorted by name.
#[cfg(not(loom))]
pub fn caches() -> Vec<CacheInfo> {
    // Outside the lock, as this may drop the last reference to a cache.
    let live: Vec<_> = CACHES.lock().iter().filter_map(Weak::upgrade).collect();
    let mut infos: Vec<_> = live.iter().map(|cache| cache.info()).collect();
    infos.sort_by(|a, b| a.name.cmp(&b.name));
    infos
}
