//! Runs one test body for every lock design.

/// Makes a test per lock design of each generic function; without the feature `designs`, for the product's.
macro_rules! for_every_design {
    ($($test:ident),+ $(,)?) => { $(
        mod $test {
            use super::$test;

            for_every_design!(@design $test, pinned, Pinned);
            #[cfg(feature = "designs")]
            mod others {
                use super::$test;

                for_every_design!(@design $test, split, Split);
                for_every_design!(@design $test, class_in_word, ClassLocks<1>);
                for_every_design!(@design $test, no_pool_lock, ClassLocks<3>);
                for_every_design!(@design $test, pages_after_lock, ClassLocks<4>);
                for_every_design!(@design $test, class_indexed, ClassIndexed);
                for_every_design!(@design $test, consolidated, Consolidated);
            }
        }
    )+ };
    (@design $test:ident, $name:ident, $design:ident $(<$steps:literal>)?) => {
        #[test]
        fn $name() {
            $test::<crate::zsmalloc::design::$design $(<$steps>)?>();
        }
    };
}
