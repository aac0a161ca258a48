//! See [`uzram_fuzz::nbd_tls`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uzram_fuzz::nbd_tls::run(data));
