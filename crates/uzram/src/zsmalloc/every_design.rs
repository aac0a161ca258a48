//! Tests of one body for every lock design and layout of the object word.

/// A test for each design out of each generic function.
macro_rules! for_every_design {
    ($($test:ident),+ $(,)?) => { $(
        mod $test {
            use super::$test;
            use crate::zsmalloc::design::{ClassIndexed, ClassLocks, Consolidated, Pinned, Split};

            #[test]
            fn pinned() {
                $test::<Pinned>();
            }
            #[test]
            fn split() {
                $test::<Split>();
            }
            #[test]
            fn split_u32() {
                $test::<Split<u32>>();
            }
            #[test]
            fn class_in_word() {
                $test::<ClassLocks<1>>();
            }
            #[test]
            fn no_pool_lock() {
                $test::<ClassLocks<3>>();
            }
            #[test]
            fn pages_after_lock() {
                $test::<ClassLocks<4>>();
            }
            #[test]
            fn class_indexed() {
                $test::<ClassIndexed>();
            }
            #[test]
            fn class_indexed_u32() {
                $test::<ClassIndexed<u32>>();
            }
            #[test]
            fn consolidated() {
                $test::<Consolidated>();
            }
            #[test]
            fn consolidated_u32() {
                $test::<Consolidated<u32>>();
            }
        }
    )+ };
}
