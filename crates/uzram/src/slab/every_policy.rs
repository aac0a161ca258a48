//! Runs one test body for every policy, hardened and plain, and one loom model for every policy.

/// Makes a test per policy of each generic function.
macro_rules! for_every_policy {
    ($($test:ident),+ $(,)?) => { $(
        mod $test {
            use super::$test;
            type Of<P> = P;
            for_every_policy!(@tests $test);

            // Not under loom: the synchronization is the same.
            #[cfg(not(loom))]
            mod plain {
                use super::$test;
                type Of<P> = crate::slab::Plain<P>;
                for_every_policy!(@tests $test);
            }
        }
    )+ };
    (@tests $test:ident) => {
        use crate::slab::{
            BareSheaves, DelayedFreeze, EagerFreeze, ElasticSheaves, OnPartial, Sheaves, UnfreezeFirst,
        };

        #[test]
        fn eager_freeze() {
            $test::<Of<EagerFreeze>>();
        }
        #[test]
        fn on_partial() {
            $test::<Of<OnPartial>>();
        }
        #[test]
        fn unfreeze_first() {
            $test::<Of<UnfreezeFirst>>();
        }
        #[test]
        fn delayed_freeze() {
            $test::<Of<DelayedFreeze>>();
        }
        #[test]
        fn sheaves() {
            $test::<Of<Sheaves>>();
        }
        #[test]
        fn elastic_sheaves() {
            $test::<Of<ElasticSheaves>>();
        }
        #[test]
        fn bare_sheaves() {
            $test::<Of<BareSheaves>>();
        }
    };
}
