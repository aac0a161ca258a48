//! Tests of one body for every policy, hardened and plain, and models for every policy.

/// A test for each policy out of each generic function.
macro_rules! for_every_policy {
    ($($test:ident),+ $(,)?) => { $(
        mod $test {
            use crate::slab::{DelayedFreeze, EagerFreeze, OnPartial, Sheaves, UnfreezeFirst};

            #[test]
            fn eager_freeze() {
                super::$test::<EagerFreeze>();
            }
            #[test]
            fn on_partial() {
                super::$test::<OnPartial>();
            }
            #[test]
            fn unfreeze_first() {
                super::$test::<UnfreezeFirst>();
            }
            #[test]
            fn delayed_freeze() {
                super::$test::<DelayedFreeze>();
            }
            #[test]
            fn sheaves() {
                super::$test::<Sheaves>();
            }

            // The protocols are the same.
            #[cfg(not(feature = "loom"))]
            mod plain {
                use crate::slab::{DelayedFreeze, EagerFreeze, OnPartial, Plain, Sheaves, UnfreezeFirst};

                #[test]
                fn eager_freeze() {
                    super::super::$test::<Plain<EagerFreeze>>();
                }
                #[test]
                fn on_partial() {
                    super::super::$test::<Plain<OnPartial>>();
                }
                #[test]
                fn unfreeze_first() {
                    super::super::$test::<Plain<UnfreezeFirst>>();
                }
                #[test]
                fn delayed_freeze() {
                    super::super::$test::<Plain<DelayedFreeze>>();
                }
                #[test]
                fn sheaves() {
                    super::super::$test::<Plain<Sheaves>>();
                }
            }
        }
    )+ };
}
