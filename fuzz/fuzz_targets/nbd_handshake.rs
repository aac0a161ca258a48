//! See [`uzram_fuzz::nbd_handshake`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uzram_fuzz::nbd_handshake::run(data));
