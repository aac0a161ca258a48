//! See [`uzram_fuzz::device_ops`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uzram_fuzz::device_ops::run(data));
