//! See [`uzram_fuzz::codec_decode`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uzram_fuzz::codec_decode::run(data));
