//! See [`uzram_fuzz::pool_ops`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uzram_fuzz::pool_ops::run(data));
