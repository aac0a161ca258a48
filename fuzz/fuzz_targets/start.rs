//! See [`uzram_fuzz::start`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uzram_fuzz::start::run(data));
