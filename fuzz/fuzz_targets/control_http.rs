//! See [`uzram_fuzz::control_http`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uzram_fuzz::control_http::run(data));
