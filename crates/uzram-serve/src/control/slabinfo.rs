//! [`CacheInfo`] as JSON, for `GET /v1/slabinfo`.
//!
//! As in [`super::stats`], the fields are repeated here, exhaustively.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use uzram::slab::{CacheInfo, Stat};

/// One counter of a cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterJson {
    /// The sum over all CPUs.
    pub total: u64,
    /// The counts of the CPUs with a nonzero count, by CPU number.
    pub cpus: BTreeMap<usize, u64>,
}

impl CounterJson {
    /// Creates it from the count of each CPU, CPU 0 first.
    fn new(counts: impl Iterator<Item = u64>) -> Self {
        let cpus: BTreeMap<_, _> = counts.enumerate().filter(|(_, count)| *count > 0).collect();
        CounterJson { total: cpus.values().fold(0, |sum, count| sum.saturating_add(*count)), cpus }
    }
}

/// The caches of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CachesJson {
    /// The caches.
    pub caches: Vec<CacheJson>,
}

macro_rules! mirror {
    ($($field:ident: $type:ty),* $(,)?) => {
        /// The fields of [`CacheInfo`], with the same names, units and meanings, and its counters by name.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub struct CacheJson {
            $(#[doc = concat!("See [`CacheInfo::", stringify!($field), "`].")] pub $field: $type,)*
            /// The counters, by [`Stat::name`].
            pub stats: BTreeMap<String, CounterJson>,
        }

        impl From<CacheInfo> for CacheJson {
            fn from(info: CacheInfo) -> Self {
                let CacheInfo { $($field,)* stats } = info;
                let counter = |stat: Stat| CounterJson::new(stats.iter().map(|cpu| cpu[stat as usize]));
                let stats = Stat::ALL.map(|stat| (stat.name().to_owned(), counter(stat))).into();
                CacheJson { $($field: $field.into(),)* stats }
            }
        }
    };
}

mirror! {
    name: String,
    policy: String,
    active_objs: u64,
    num_objs: u64,
    objsize_bytes: u32,
    objperslab: u32,
    pagesperslab: u32,
    cpu_partial_objs: u32,
    sheaf_objs: u32,
    active_slabs: u64,
    num_slabs: u64,
    corrupted: u64,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn counters_go_by_name_and_cpu_and_come_back_the_same() {
        let mut stats = vec![[0; Stat::COUNT]; 12];
        stats[0][Stat::AllocFastpath as usize] = 5;
        stats[11][Stat::AllocFastpath as usize] = 7;
        stats[3][Stat::ListLockHoldNs as usize] = u64::MAX;
        stats[4][Stat::ListLockHoldNs as usize] = 1;
        let json = CacheJson::from(CacheInfo {
            name: "requests".to_owned(),
            policy: "sheaves",
            active_objs: 1,
            num_objs: 2,
            objsize_bytes: 3,
            objperslab: 4,
            pagesperslab: 5,
            cpu_partial_objs: 6,
            sheaf_objs: 7,
            active_slabs: 8,
            num_slabs: 9,
            corrupted: 10,
            stats,
        });
        assert_eq!(json.stats.len(), Stat::COUNT);
        let fast = CounterJson { total: 12, cpus: [(0, 5), (11, 7)].into() };
        assert_eq!(json.stats["alloc_fastpath"], fast);
        assert_eq!(json.stats["alloc_slowpath"], CounterJson::default());
        assert_eq!(json.stats["list_lock_hold_ns"].total, u64::MAX, "no sum wraps");

        let value = serde_json::to_value(&json).unwrap();
        assert_eq!((&value["name"], &value["num_slabs"]), (&"requests".into(), &9.into()));
        assert_eq!(value["stats"]["alloc_fastpath"]["cpus"]["11"], 7);
        assert_eq!(serde_json::from_value::<CacheJson>(value).unwrap(), json);
    }
}
