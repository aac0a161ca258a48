//! The lock designs of a store: the product's, or with the feature `designs` any, which the builder names.

pub(crate) use chosen::Designs;
pub(super) use chosen::{StoreLru, StorePool, StoreStreams};

use crate::base::error::Result;
use crate::base::mem::Arena;
use crate::base::sync::Arc;
use crate::lru::LruConfig;
use crate::zsmalloc::PoolConfig;

#[cfg(not(feature = "designs"))]
mod chosen {
    use super::*;
    use crate::lru::{Batched, Lru, LruLocks};
    use crate::stream::PerCpu;
    use crate::zsmalloc::{Pinned, PoolLocks, RawPool};

    pub type StorePool = RawPool<Pinned>;
    pub type StoreLru = Lru<Batched>;
    pub type StoreStreams<S> = PerCpu<S>;

    #[derive(Clone, Copy, Debug, Default)]
    pub struct Designs;

    impl Designs {
        pub fn pool(self, arena: Arc<Arena>, config: &PoolConfig) -> Result<StorePool> {
            RawPool::new(arena, config)
        }

        pub fn lru(self, config: &LruConfig) -> Result<StoreLru> {
            Lru::new(config)
        }

        pub fn streams<S>(
            self,
            make: impl Fn() -> Result<S> + Send + Sync + 'static,
        ) -> Result<StoreStreams<S>> {
            PerCpu::new(make)
        }

        pub fn names(self) -> [String; 3] {
            [Pinned::NAME, Batched::NAME, "percpu"].map(str::to_owned)
        }

        /// Ignores the designs of a store that another program has built: all of them share its memory's
        /// format.
        pub fn named(_: [&str; 3]) -> Result<Self> {
            Ok(Designs)
        }
    }
}

#[cfg(feature = "designs")]
mod chosen {
    use super::*;
    use crate::lru::{AnyLru, LruDesign};
    use crate::stream::{AnyStreams, StreamDesign};
    use crate::zsmalloc::{AnyPool, PoolDesign};

    pub type StorePool = AnyPool;
    pub type StoreLru = AnyLru;
    pub type StoreStreams<S> = AnyStreams<S>;

    #[derive(Clone, Copy, Debug, Default)]
    pub struct Designs {
        pub pool: PoolDesign,
        pub lru: LruDesign,
        pub streams: StreamDesign,
    }

    impl Designs {
        pub fn pool(self, arena: Arc<Arena>, config: &PoolConfig) -> Result<StorePool> {
            AnyPool::new(self.pool, arena, config)
        }

        pub fn lru(self, config: &LruConfig) -> Result<StoreLru> {
            AnyLru::new(self.lru, config)
        }

        pub fn streams<S>(
            self,
            make: impl Fn() -> Result<S> + Send + Sync + 'static,
        ) -> Result<StoreStreams<S>> {
            AnyStreams::new(self.streams, make)
        }

        pub fn names(self) -> [String; 3] {
            [self.pool.to_string(), self.lru.to_string(), self.streams.to_string()]
        }

        pub fn named([pool, lru, streams]: [&str; 3]) -> Result<Self> {
            Ok(Designs { pool: pool.parse()?, lru: lru.parse()?, streams: streams.parse()? })
        }
    }
}

#[cfg(all(test, not(loom)))]
pub(super) fn each_pool_design(base: &super::StoreBuilder) -> Vec<super::StoreBuilder> {
    #[cfg(feature = "designs")]
    return crate::zsmalloc::PoolDesign::ALL
        .into_iter()
        .map(|design| base.clone().pool_design(design))
        .collect();
    #[cfg(not(feature = "designs"))]
    vec![base.clone()]
}
