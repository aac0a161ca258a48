//! The fuzz targets: for each parser of outside bytes, and for the device, a function that takes any bytes
//! and panics if a promise is broken. The engine's own tests compare its pool and its LRU with naive models.
//!
//! The same functions run in two ways: in this crate's tests, on the seeds and random mutations of them, with
//! the stable toolchain and in seconds; and under libFuzzer with coverage and AddressSanitizer, for any
//! length of time (`fuzz/run`).
//!
//! Rules for every target:
//! - the input decides everything: state kept from one input to the next, because making it takes most of the
//!   time, is emptied first, so that an input that fails once always fails;
//! - an input is consumed as choices, not parsed and rejected: any bytes are valid, and a small change of
//!   them is a small change of the operations;
//! - wherever a naive model can predict the result, the two are compared.

mod attach;
mod attributes;
mod codec_decode;
mod codec_round_trip;
mod control_http;
mod device_ops;
mod formats;
mod fuse_requests;
mod input;
mod model;
#[allow(dead_code, clippy::unwrap_used)]
#[path = "../../crates/uzram-serve/tests/it/common/client.rs"]
mod nbd_client;
mod nbd_handshake;
mod nbd_transmission;
#[allow(dead_code, clippy::unwrap_used)]
#[path = "../../crates/uzram-serve/tests/it/common/pki.rs"]
mod pki;
mod remote;
mod start;
mod wire;

/// One fuzz target.
pub struct Target {
    /// Its name, for `fuzz/run` and the corpus directory.
    pub name: &'static str,
    /// Runs one input.
    ///
    /// # Panics
    /// A promise is broken; that is its purpose.
    pub run: fn(&[u8]),
    /// Returns small initial inputs, each of which reaches some code of interest.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

const fn target_of(name: &'static str, run: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) -> Target {
    Target { name, run, seeds }
}

/// All targets.
pub static TARGETS: &[Target] = &[
    target_of("nbd_handshake", nbd_handshake::run, nbd_handshake::seeds),
    target_of("nbd_transmission", nbd_transmission::run, nbd_transmission::seeds),
    target_of("fuse_requests", fuse_requests::run, fuse_requests::seeds),
    target_of("control_http", control_http::run, control_http::seeds),
    target_of("codec_decode", codec_decode::run, codec_decode::seeds),
    target_of("codec_round_trip", codec_round_trip::run, codec_round_trip::seeds),
    target_of("device_ops", device_ops::run, device_ops::seeds),
    target_of("attach", attach::run, attach::seeds),
    target_of("attributes", attributes::run, attributes::seeds),
    target_of("backing_mark", formats::run_mark, formats::seeds_of_mark),
    target_of("remote", remote::run, remote::seeds),
    target_of("run_figures", formats::run_figures, formats::seeds_of_figures),
    target_of("start", start::run, start::seeds),
];

/// Returns the target of that name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
