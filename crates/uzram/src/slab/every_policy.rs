//! Tests and models of one body for every policy.

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
        }
    )+ };
}
