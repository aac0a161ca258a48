//! The caches that live in this process, for whoever wants to look at them.

use super::CacheInfo;
#[cfg(not(loom))]
use crate::base::sync::{Mutex, classes};
#[cfg(not(loom))]
use std::sync::{LazyLock, Weak};

/// A cache whose policy does not matter.
pub(super) trait Described: Send + Sync {
    fn info(&self) -> CacheInfo;
}

#[cfg(not(loom))]
static CACHES: LazyLock<Mutex<Vec<Weak<dyn Described>>>> =
    LazyLock::new(|| Mutex::new(&classes::SLAB_CACHES, Vec::new()));

/// Adds a cache; it leaves by ending.
#[cfg(not(loom))]
pub(super) fn add(cache: Weak<impl Described + 'static>) {
    let mut caches = CACHES.lock();
    caches.retain(|cache| cache.strong_count() > 0);
    caches.push(cache);
}

/// What there is to say of every cache of this process, by name.
#[cfg(not(loom))]
pub fn caches() -> Vec<CacheInfo> {
    // Not under the lock: a cache may end here.
    let live: Vec<_> = CACHES.lock().iter().filter_map(Weak::upgrade).collect();
    let mut infos: Vec<_> = live.iter().map(|cache| cache.info()).collect();
    infos.sort_by(|a, b| a.name.cmp(&b.name));
    infos
}
