//! The transmission phase: requests in, replies out, until the client leaves.
//!
//! A request is a small value on the stack of its connection's thread. From its header to its reply in the send buffer
//! nothing is allocated, with two exceptions: a read that is longer than the send buffer and must be answered in one
//! piece (`Replies::read_whole`), and a request that would wait for the device, which is offloaded to the device's pool
//! of threads. Both take their memory from the server's budget.
//!
//! Invariants: a connection never waits for its client while it holds unsent replies, nor for the device while a pool
//! can do that instead. Only the connection's own thread touches the stream.
//!
//! Code map: `connection` receives requests and matches on their commands; `replies` executes requests that need
//! nothing more from the client and writes replies, `read` those with data and `status` those of `BLOCK_STATUS`;
//! `offload` has the requests that wait in a pool.

mod connection;
mod offload;
mod read;
mod replies;
mod status;

use std::io::{self, Read, Write};
use std::sync::Arc;

use super::buffer::Buffers;
use super::clients::Traffic;
use super::handshake::Session;
use super::proto::NbdError;
use super::request::Refusal;
use super::session::SessionConfig;
use connection::Connection;
use offload::Offloaded;
use replies::Replies;

pub(super) use offload::OffloadTarget;

/// The reply to requests once the server is stopping.
const STOPPING: Refusal = Refusal { error: NbdError::Shutdown, message: "the server is stopping" };

/// Serves requests until the client disconnects and all offloaded requests are done. Once `config.stopping` is set,
/// requests that have arrived are answered with `NBD_ESHUTDOWN`.
///
/// # Errors
/// The stream's; `InvalidData` for a malformed request; `UnexpectedEof` when the client disconnects within a request.
pub(super) fn run<S: Read + Write>(
    stream: &mut S,
    session: Session,
    config: SessionConfig<'_>,
    buffers: &mut Buffers,
) -> io::Result<()> {
    let (received, unsent, budget) = buffers.emptied();
    let Session { export, headers, contexts } = session;
    let access = export.access;
    // Counts the client until everything that uses the device is gone.
    let (device, _client) = export.into_parts();
    let device = Arc::new(device);
    let stopping = config.stopping;
    let mut connection = Connection {
        access,
        contexts,
        received,
        replies: Replies { device: &device, headers, stopping, budget: Some(budget), unsent, stream },
        offloaded: Offloaded::new(config.offload, &device, headers, stopping),
        traffic: Traffic::default(),
        published: config.traffic,
    };
    let served = connection.serve();
    match &served {
        // The requests before a malformed or incomplete one get their replies.
        Err(error) if !matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) => {}
        _ => connection.finish()?,
    }
    served
}
