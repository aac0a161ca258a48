//! See [`uzram_fuzz::size_expr`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| uzram_fuzz::size_expr::run(data));
