//! [`DeviceStats`] as JSON. It is also deserialized, so its fields are repeated here; a test finds a missing one.

use serde::{Deserialize, Serialize};
use uzram::device::DeviceStats;

macro_rules! mirror {
    ($($field:ident),* $(,)?) => {
        /// The fields of [`DeviceStats`], with the same names, units and meanings.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct StatsJson {
            $(#[doc = concat!("See [`DeviceStats::", stringify!($field), "`].")] pub $field: u64,)*
        }

        impl From<DeviceStats> for StatsJson {
            fn from(stats: DeviceStats) -> Self {
                let DeviceStats { $($field,)* .. } = stats;
                StatsJson { $($field),* }
            }
        }

        impl std::iter::Sum for StatsJson {
            /// Sums the statistics of several devices.
            fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
                all.fold(StatsJson::default(), |sum, one| StatsJson {
                    $($field: sum.$field.saturating_add(one.$field)),*
                })
            }
        }
    };
}

mirror! {
    disksize_bytes,
    orig_data_bytes,
    compr_data_bytes,
    mem_used_bytes,
    mem_used_max_bytes,
    mem_limit_bytes,
    mem_charged_bytes,
    mem_chunk_bytes,
    reserve_bytes,
    reserve_free_bytes,
    reserve_drained,
    limit_refused,
    mem_fixed_bytes,
    mem_tables_bytes,
    same_pages,
    pages_compacted,
    pages_recompressed,
    huge_pages,
    huge_pages_since,
    pages_read,
    pages_written,
    failed_reads,
    failed_writes,
    notify_free,
    corrupted_objects,
    stream_sleeps,
    backing_bytes,
    backing_held_bytes,
    pages_backed,
    pages_written_back,
    pages_returned,
    backing_failed_writes,
    backing_failed_reads,
    backing_corrupted,
}

impl StatsJson {
    /// Returns all memory that the device takes now: what `mem_limit` bounds, and the tables.
    pub const fn memory_bytes(&self) -> u64 {
        self.mem_charged_bytes.saturating_add(self.mem_tables_bytes)
    }

    /// Returns the memory of the device's contents, which is freed as they are discarded.
    pub const fn kept_bytes(&self) -> u64 {
        self.mem_charged_bytes.saturating_sub(self.reserve_free_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_listed() {
        let fields = |debug: String| debug.split_once(' ').map(|(_, fields)| fields.to_owned());
        let json = StatsJson::from(DeviceStats::default());
        assert_eq!(fields(format!("{json:?}")), fields(format!("{:?}", DeviceStats::default())));
    }
}
