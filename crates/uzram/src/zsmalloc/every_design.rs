//! Runs one test body for every lock design.

/// Makes a test per lock design of each generic function.
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
            fn consolidated() {
                $test::<Consolidated>();
            }
        }
    )+ };
}
