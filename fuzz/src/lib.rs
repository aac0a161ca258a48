//! The fuzz targets: for each parser of outside bytes, for the device, for its pool and for its LRU, a
//! function that takes any bytes and panics if a promise is broken.
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

pub mod attach;
pub mod attributes;
pub mod backing_mark;
pub mod codec_decode;
pub mod codec_round_trip;
pub mod control_http;
pub mod device_ops;
pub mod fuse_requests;
mod input;
pub mod lru_ops;
pub mod memory_codec;
mod model;
pub mod nbd_handshake;
pub mod nbd_tls;
pub mod nbd_transmission;
pub mod pool_ops;
pub mod remote;
pub mod run_figures;
pub mod size_expr;
pub mod start;
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

/// All targets.
pub static TARGETS: &[Target] = &[
    Target { name: "nbd_handshake", run: nbd_handshake::run, seeds: nbd_handshake::seeds },
    Target { name: "nbd_tls", run: nbd_tls::run, seeds: nbd_tls::seeds },
    Target { name: "nbd_transmission", run: nbd_transmission::run, seeds: nbd_transmission::seeds },
    Target { name: "fuse_requests", run: fuse_requests::run, seeds: fuse_requests::seeds },
    Target { name: "control_http", run: control_http::run, seeds: control_http::seeds },
    Target { name: "codec_decode", run: codec_decode::run, seeds: codec_decode::seeds },
    Target { name: "codec_round_trip", run: codec_round_trip::run, seeds: codec_round_trip::seeds },
    Target { name: "memory_codec", run: memory_codec::run, seeds: memory_codec::seeds },
    Target { name: "device_ops", run: device_ops::run, seeds: device_ops::seeds },
    Target { name: "pool_ops", run: pool_ops::run, seeds: pool_ops::seeds },
    Target { name: "lru_ops", run: lru_ops::run, seeds: lru_ops::seeds },
    Target { name: "attach", run: attach::run, seeds: attach::seeds },
    Target { name: "attributes", run: attributes::run, seeds: attributes::seeds },
    Target { name: "backing_mark", run: backing_mark::run, seeds: backing_mark::seeds },
    Target { name: "remote", run: remote::run, seeds: remote::seeds },
    Target { name: "run_figures", run: run_figures::run, seeds: run_figures::seeds },
    Target { name: "size_expr", run: size_expr::run, seeds: size_expr::seeds },
    Target { name: "start", run: start::run, seeds: start::seeds },
];

/// Returns the target of that name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
