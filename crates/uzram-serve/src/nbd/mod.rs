//! An NBD server over [`uzram::device::Device`].
//!
//! NBD (Network Block Device) is how a disk is served from user space to qemu, libnbd, fio and the
//! Linux kernel's own client. This is the protocol in its fixed newstyle form, with structured
//! replies, metadata contexts and block status, and extended headers; all commands but the
//! experimental `RESIZE`.
//! The specification: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>, and the
//! branch `extension-ext-header` of it.
//!
//! **Contents are memory.** `FLUSH` and `FUA` keep their meaning between connections (a write is
//! visible to every reader once it is answered), but nothing persists: the contents are lost when
//! the server ends.
//!
//! Code map, from pure functions to the system:
//! - [`proto`], `request`, `reply`: parsing of options and requests, checks of requests, and headers of
//!   replies; no I/O; `meta_context`: the contexts of block status;
//! - `handshake`, `transmission`, `session`: one session over any `Read + Write` ([`serve_stream`]);
//! - `tls`, `tls_stream`: TLS between a session and its stream;
//! - `buffer`: the two bounded buffers of a connection, with which a batch costs two system calls, and the memory that
//!   all connections share;
//! - `wake`: wakes a connection when a request that it offloaded is done;
//! - `address`, `listener`, `socket`: addresses and their URIs, listening sockets, and connected
//!   sockets with a deadline;
//! - `pace`: the minimum speed of clients;
//! - `registry`, `server`: accepting, limits, stopping; `clients`: the list of connections; `time_slice`: how
//!   connections' threads share the CPUs.
//!
//! One thread serves one connection and answers its requests in order. Requests that would wait for the device are
//! offloaded to a pool of threads and answered when they are done; without memory for that, the connection's own thread
//! waits. A client can harm only its own connection: every length is bounded before it is used, and so are
//! the memory that connections hold (`buffer`), their number (`registry`) and the time for which they may delay others
//! (`socket`). A connection that ends, even by a panic, does not affect the others.

mod address;
mod buffer;
mod clients;
mod handshake;
mod listener;
mod meta_context;
mod pace;
pub mod proto;
mod registry;
mod reply;
mod request;
mod server;
mod session;
mod socket;
mod time_slice;
mod tls;
mod tls_stream;
mod transmission;
mod wake;

use std::io::{self, Read, Write};
use std::sync::Arc;

use crate::Exports;
use clients::TrafficCounters;
use session::SessionConfig;

pub use address::{Endpoint, Listen, ListenAddress, SocketAccess};
pub use buffer::{BUFFER_BYTES, Buffers, MIN_BUFFER_BYTES, SHARED_BYTES};
pub use clients::{Client, Clients, Kicked, Peer, Traffic, TurnedAway};
pub use listener::Sockets;
pub use server::{Server, ServerConfig, ServerThread, StopHandle};
pub use tls::{Tls, TlsFiles, reload_tls};

/// Serves one whole session, handshake to disconnect, over `stream`.
///
/// This is what a connection's thread runs, without the handshake's time limit; tests and fuzz
/// targets drive it over memory, one session after another with the same buffers. Nothing is offloaded: requests that
/// wait for the device are answered in order.
///
/// # Errors
/// Those of `stream`; `InvalidData` when the peer broke the protocol in a way that allows no
/// reply; `UnexpectedEof` when it disconnected within a message.
pub fn serve_stream<S: Read + Write>(
    stream: &mut S,
    exports: &Exports,
    buffers: &mut Buffers,
) -> io::Result<()> {
    serve(stream, exports, buffers, None)
}

/// As [`serve_stream`], by a server that has a certificate and requires or offers TLS.
///
/// # Errors
/// As [`serve_stream`]; `InvalidData` also when the TLS handshake fails.
pub fn serve_stream_with_tls<S: Read + Write>(
    stream: &mut S,
    exports: &Exports,
    buffers: &mut Buffers,
    tls: &Tls,
    tls_required: bool,
) -> io::Result<()> {
    serve(stream, exports, buffers, Some((tls, tls_required)))
}

fn serve<S: Read + Write>(
    stream: &mut S,
    exports: &Exports,
    buffers: &mut Buffers,
    tls: Option<(&Tls, bool)>,
) -> io::Result<()> {
    let config = SessionConfig {
        exports,
        tls: tls.map(|(tls, _)| tls),
        tls_required: tls.is_some_and(|(_, required)| required),
        stopping: &Arc::default(),
        offload: None,
        traffic: &TrafficCounters::default(),
    };
    session::run(stream, config, |_, _| Ok(buffers))
}

/// Returns the error for a protocol violation, which ends the connection.
fn violation(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
