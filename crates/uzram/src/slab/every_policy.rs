//! Runs one test body for every policy, hardened and plain, and one loom model for every policy.

/// Makes a test per policy of each generic function; without the feature `designs`, for the product's.
macro_rules! for_every_policy {
    ($($test:ident),+ $(,)?) => { $(
        mod $test {
            use super::$test;

            for_every_policy!(@policy $test, sheaves, Sheaves);
            #[cfg(feature = "designs")]
            mod freeze {
                use super::$test;

                for_every_policy!(@policy $test, eager, EagerFreeze);
                for_every_policy!(@policy $test, on_partial, OnPartial);
                for_every_policy!(@policy $test, unfreeze_first, UnfreezeFirst);
                for_every_policy!(@policy $test, delayed, DelayedFreeze);
            }
        }
    )+ };
    (@policy $test:ident, $name:ident, $policy:ident) => {
        #[test]
        fn $name() {
            $test::<crate::slab::$policy>();
            // Not under loom: the synchronization is the same.
            #[cfg(not(loom))]
            $test::<crate::slab::Plain<crate::slab::$policy>>();
        }
    };
}
