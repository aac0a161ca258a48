//! What a pager has done.

use uzram::cpu::PerCpu;
use uzram::sync::Counter;

macro_rules! counts {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// Counts of one CPU.
        #[derive(Default)]
        pub(crate) struct Share {
            $(pub(crate) $field: Counter,)*
        }

        /// What a pager holds, and what it has done since it was made. Pages are of 4096 bytes.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct PagerStats {
            /// The limit.
            pub limit_pages: u64,
            /// Pages in memory as they are.
            pub resident_pages: u64,
            /// Pages of compressed memory, with its metadata.
            pub compressed_pages: u64,
            /// What counts against the limit: pages in memory, compressed memory, and tables.
            pub used_pages: u64,
            /// The most of that so far.
            pub used_pages_max: u64,
            /// Pages of all regions.
            pub mapped_pages: u64,
            $($(#[$doc])* pub $field: u64,)*
        }

        /// Returns the sums of all CPUs' counts; other figures are 0.
        pub(crate) fn sum(shares: &PerCpu<Share>) -> PagerStats {
            let mut sum = PagerStats::default();
            for share in shares.iter() {
                $(sum.$field = sum.$field.wrapping_add(share.$field.get());)*
            }
            sum
        }
    };
}

counts! {
    /// Touches of memory that was not there.
    faults,
    /// Microseconds that these took, from the moment that the pager knew of them.
    fault_us,
    /// Pages that came back from the store, with those that came along.
    pages_in,
    /// Pages that were touched for the first time, with those that came along.
    pages_new,
    /// Pages that left memory.
    pages_out,
    /// Those of them whose contents the store still had.
    pages_unchanged,
    /// Pages that were to leave, and were touched before they did.
    pages_kept,
    /// Times a page could not leave, because the kernel transferred data to it, or a child shares it.
    busy,
    /// Times a page stayed because the store had no room for it.
    no_room,
    /// Times a touch waited for other pages to leave.
    waits_for_room,
    /// Pages that could not be read. Touches of them fail.
    pages_lost,
}
