//! One session from greeting to end, over any stream, with TLS or without.

use std::borrow::BorrowMut;
use std::io::{self, Read, Write};
use std::sync::Arc;

use super::buffer::Buffers;
use super::clients::TrafficCounters;
use super::connection::{self, Shared};
use super::handshake::{self, Chosen, NextPhase, TlsMode};
use super::proto::violation;
use super::tls::Tls;
use super::tls_stream::TlsStream;
use crate::Exports;

/// Serves one whole session, handshake to disconnect, over `stream`: by a server that has a certificate and
/// requires TLS or not, if there is one.
///
/// This is what a connection's thread runs, without the handshake's time limit; tests and fuzz targets drive
/// it over memory, one session after another with the same buffers. Nothing is offloaded: requests that wait
/// for the device are answered in order. Errors: those of `stream`; `InvalidData` when the peer broke the
/// protocol, or TLS's, in a way that allows no reply; `UnexpectedEof` when it disconnected within a message.
pub fn serve_stream<S: Read + Write>(
    stream: &mut S,
    exports: &Exports,
    buffers: &mut Buffers,
    tls: Option<(&Tls, bool)>,
) -> io::Result<()> {
    let (stopping, traffic) = (Arc::default(), TrafficCounters::default());
    let shared = Shared { stopping: &stopping, offload: None, traffic: &traffic };
    run(stream, exports, tls, shared, |_, _, _| Ok(buffers))
}

/// Runs a session of a server that has a certificate and requires TLS or not, if there is one. Calls `chosen`
/// once, when the client has chosen an export, with the export's name and whether the session runs over TLS;
/// it returns the buffers for requests and replies, or ends the session with an error. Errors: the stream's
/// and `chosen`'s; `InvalidData` when the client broke the protocol, NBD's or TLS's; `UnexpectedEof` when it
/// disconnected within a message.
pub(super) fn run<S: Read + Write, B: BorrowMut<Buffers>>(
    stream: &mut S,
    exports: &Exports,
    tls: Option<(&Tls, bool)>,
    shared: Shared<'_>,
    chosen: impl FnOnce(&mut S, &str, bool) -> io::Result<B>,
) -> io::Result<()> {
    let name = |session: &Chosen| session.export.device.device().name().to_owned();
    let client_flags = handshake::greet(stream)?;
    let mode = match tls {
        None => TlsMode::Off,
        Some((_, true)) => TlsMode::Required,
        Some((_, false)) => TlsMode::Offered,
    };
    let tls = match handshake::haggle(stream, exports, client_flags, mode)? {
        NextPhase::Left => return Ok(()),
        NextPhase::Chosen(session) => {
            let mut buffers = chosen(stream, &name(&session), false)?;
            return connection::serve(stream, session, shared, buffers.borrow_mut());
        }
        NextPhase::StartTls => tls.ok_or_else(|| violation("TLS was started without a certificate"))?.0,
    };
    let mut stream = TlsStream::accept(stream, tls)?;
    let serve = || match handshake::haggle(&mut stream, exports, client_flags, TlsMode::Started)? {
        NextPhase::Chosen(session) => {
            let mut buffers = chosen(stream.stream(), &name(&session), true)?;
            stream.enlarge(buffers.borrow().len_bytes())?;
            connection::serve(&mut stream, session, shared, buffers.borrow_mut())
        }
        NextPhase::Left | NextPhase::StartTls => Ok(()),
    };
    let served = serve();
    stream.close();
    served
}
