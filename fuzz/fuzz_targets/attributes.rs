//! See [`uzram_fuzz::attributes`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uzram_fuzz::attributes::run(data));
