//! Per-CPU statistics: CPUs share no cache line when they count.

/// Clamps a sum of the CPUs' shares at zero. The shares are read one after another: a CPU read late may have
/// subtracted what a CPU read early had not added yet, so that the sum is below zero.
pub fn at_least_zero(sum: u64) -> u64 {
    u64::try_from(sum.cast_signed()).unwrap_or(0)
}

/// Declares statistics from one list of fields: a public struct of sums, and a struct of counters, one per
/// CPU. The public struct may have further fields that the counters lack; the sum leaves them 0.
macro_rules! per_cpu_counters {
    (
        $(#[$sum_meta:meta])* $sum_vis:vis struct $sum:ident $({
            $($(#[$other_doc:meta])* $other:ident,)*
        })?;
        $(#[$share_meta:meta])* $share_vis:vis struct $share:ident;
        $($(#[$doc:meta])* $field:ident,)*
    ) => {
        $(#[$sum_meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        #[non_exhaustive]
        $sum_vis struct $sum {
            $($(#[$doc])* pub $field: u64,)*
            $($($(#[$other_doc])* pub $other: u64,)*)?
        }

        impl std::ops::AddAssign for $sum {
            fn add_assign(&mut self, other: Self) {
                $(self.$field = self.$field.wrapping_add(other.$field);)*
                $($(self.$other = self.$other.wrapping_add(other.$other);)*)?
            }
        }

        impl $sum {
            /// Returns the difference of each figure to `before`.
            #[must_use]
            pub fn since(&self, before: &Self) -> Self {
                $sum {
                    $($field: self.$field.wrapping_sub(before.$field),)*
                    $($($other: self.$other.wrapping_sub(before.$other),)*)?
                }
            }

            #[allow(dead_code)]
            pub(crate) fn named(&self) -> Vec<(&'static str, u64)> {
                vec![
                    $($((stringify!($other), self.$other),)*)?
                    $((stringify!($field), self.$field),)*
                ]
            }
        }

        $(#[$share_meta])*
        #[derive(Debug, Default)]
        $share_vis struct $share {
            $(pub(super) $field: $crate::base::sync::Counter,)*
        }

        impl $share {
            #[allow(dead_code)]
            pub(super) fn add_all(&self, other: &Self) {
                $(self.$field.add(other.$field.get());)*
            }

            pub(super) fn sum<'a>(shares: impl IntoIterator<Item = &'a Self>) -> $sum {
                let mut sum = $sum::default();
                for share in shares {
                    $(sum.$field = sum.$field.wrapping_add(share.$field.get());)*
                }
                $(sum.$field = $crate::base::counters::at_least_zero(sum.$field);)*
                sum
            }
        }
    };
}

pub(crate) use per_cpu_counters;
