//! Slab caches: objects of one size, cut from runs of the arena, for the metadata of the engine.
//!
//! A [`Cache`] names its objects by number (u32), so that a reference takes four bytes and the memory could
//! be mapped at another address; [`TypedCache`] stores values of one type. A [`Policy`] type decides what
//! each CPU keeps for itself: [`Sheaves`], as in Linux 7.0; with the feature `designs` also the slabs of SLUB
//! before, in the steps of "slub: Delay freezing of CPU partial slabs" (Chengming Zhou, 2023).
//!
//! A hardened cache (all but [`Plain`]) encodes the links between free objects with a secret and treats
//! any other value as corruption. At each free it checks whether such an object ever existed, and whether
//! it was the last one freed; caches without hardening check that only on slow paths. Debug builds keep a
//! bit for each object and fill free ones with poison, and so find every double free, foreign object, and
//! write to a free object. A [`Corrupt`](crate::ErrorKind::Corrupt) error names the cache, the object and
//! how the corruption was found.

#[cfg(test)]
#[macro_use]
mod every_policy;

mod cache;
mod checked;
mod core;
#[cfg(feature = "designs")]
mod cpu_list;
#[cfg(feature = "designs")]
mod cpu_slabs;
mod cpu_word;
#[cfg(all(test, loom))]
mod loom_tests;
mod node;
mod config;
mod policy;
mod sheaves;
mod slabs;
mod stats;
#[cfg(all(test, not(loom), feature = "designs"))]
mod freeze_tests;
#[cfg(all(test, not(loom)))]
mod tests;
mod word;

pub use cache::{Cache, TypedCache};
pub use config::CacheConfig;
#[cfg(feature = "designs")]
pub use cpu_slabs::{DelayedFreeze, EagerFreeze, OnPartial, UnfreezeFirst};
pub use policy::{Plain, Policy};
pub use sheaves::Sheaves;
pub use stats::{Stat, set_counting};

/// A cache's state and statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct CacheInfo {
    /// The cache's name.
    pub name: String,
    /// The policy's name.
    pub policy: &'static str,
    /// Objects in use.
    pub active_objs: u64,
    /// Objects of all slabs, used or free.
    pub num_objs: u64,
    /// Bytes from one object to the next.
    pub objsize_bytes: u32,
    /// Objects of a slab.
    pub objperslab: u32,
    /// Pages of a slab.
    pub pagesperslab: u32,
    /// Slabs with objects that are in use, or free on a CPU's list or sheaf.
    pub active_slabs: u64,
    /// Slabs.
    pub num_slabs: u64,
    /// Times corruption was found.
    pub corrupted: u64,
    /// The counters of each CPU, by `Stat as usize`.
    #[cfg_attr(feature = "serde", serde(serialize_with = "by_name"))]
    pub stats: Vec<[u64; Stat::COUNT]>,
}

#[cfg(feature = "serde")]
fn by_name<S: serde::Serializer>(stats: &[[u64; Stat::COUNT]], serializer: S) -> Result<S::Ok, S::Error> {
    let named = |cpu: &[u64; Stat::COUNT]| {
        let pairs = Stat::ALL.into_iter().zip(cpu);
        pairs.map(|(stat, count)| (stat.name(), *count)).collect::<std::collections::BTreeMap<_, _>>()
    };
    serializer.collect_seq(stats.iter().map(named))
}
