//! Runs under libFuzzer the target that `UZRAM_FUZZ_TARGET` names; `fuzz/run` sets it.
#![no_main]

use std::sync::LazyLock;

static RUN: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("UZRAM_FUZZ_TARGET").expect("UZRAM_FUZZ_TARGET is set");
    uzram_fuzz::target(&name).expect("UZRAM_FUZZ_TARGET names a target").run
});

libfuzzer_sys::fuzz_target!(
    init: {
        LazyLock::force(&RUN);
    },
    |data: &[u8]| RUN(data)
);
