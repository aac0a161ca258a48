//! See [`uzram_fuzz::backing_mark`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uzram_fuzz::backing_mark::run(data));
