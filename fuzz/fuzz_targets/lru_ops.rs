//! See [`uzram_fuzz::lru_ops`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uzram_fuzz::lru_ops::run(data));
