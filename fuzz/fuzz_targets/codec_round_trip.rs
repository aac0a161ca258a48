//! See [`uzram_fuzz::codec_round_trip`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uzram_fuzz::codec_round_trip::run(data));
