//! One session from greeting to end, over any stream, with TLS or without.

use std::borrow::BorrowMut;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::clients::TrafficCounters;
use super::handshake::{self, NextPhase, Session, TlsMode};
use super::tls::Tls;
use super::tls_stream::TlsStream;
use super::transmission::OffloadTarget;
use super::{Buffers, transmission, violation};
use crate::Exports;

/// What a session uses of its server.
#[derive(Clone, Copy)]
pub(super) struct SessionConfig<'a> {
    /// The devices that the client can choose from.
    pub exports: &'a Exports,
    /// The certificate and key, if there is TLS.
    pub tls: Option<&'a Tls>,
    /// The client must start TLS before anything else.
    pub tls_required: bool,
    /// Set when the server stops.
    pub stopping: &'a Arc<AtomicBool>,
    /// The target for requests that would wait for a device; `None` if they are not offloaded.
    pub offload: Option<OffloadTarget<'a>>,
    /// Publishes the client's traffic to other threads.
    pub traffic: &'a TrafficCounters,
}

/// The choice of a client.
#[derive(Clone, Copy)]
pub(super) struct ChosenExport<'a> {
    /// The export's name.
    pub export: &'a str,
    /// Whether the session runs over TLS.
    pub tls: bool,
}

impl<'a> ChosenExport<'a> {
    fn new(session: &'a Session, tls: bool) -> Self {
        ChosenExport { export: session.export.device.device().name(), tls }
    }
}

impl SessionConfig<'_> {
    fn tls_mode(&self) -> TlsMode {
        match self.tls {
            None => TlsMode::Off,
            Some(_) if self.tls_required => TlsMode::Required,
            Some(_) => TlsMode::Offered,
        }
    }
}

/// Runs a session. Calls `chosen` once, when the client has chosen an export; it returns the buffers for requests and
/// replies, or ends the session with an error.
///
/// # Errors
/// The stream's and `chosen`'s; `InvalidData` when the client broke the protocol, NBD's or TLS's;
/// `UnexpectedEof` when it disconnected within a message.
pub(super) fn run<S: Read + Write, B: BorrowMut<Buffers>>(
    stream: &mut S,
    config: SessionConfig<'_>,
    chosen: impl FnOnce(&mut S, ChosenExport<'_>) -> io::Result<B>,
) -> io::Result<()> {
    let client_flags = handshake::greet(stream)?;
    let tls = match handshake::haggle(stream, config.exports, client_flags, config.tls_mode())? {
        NextPhase::Left => return Ok(()),
        NextPhase::Chosen(session) => {
            let mut buffers = chosen(stream, ChosenExport::new(&session, false))?;
            return transmission::run(stream, session, config, buffers.borrow_mut());
        }
        NextPhase::StartTls => {
            config.tls.ok_or_else(|| violation("TLS was started without a certificate"))?
        }
    };
    let mut stream = TlsStream::accept(stream, tls)?;
    let result = run_tls(&mut stream, config, client_flags, chosen);
    stream.close();
    result
}

fn run_tls<S: Read + Write, B: BorrowMut<Buffers>>(
    stream: &mut TlsStream<'_, S>,
    config: SessionConfig<'_>,
    client_flags: u32,
    chosen: impl FnOnce(&mut S, ChosenExport<'_>) -> io::Result<B>,
) -> io::Result<()> {
    match handshake::haggle(stream, config.exports, client_flags, TlsMode::Started)? {
        NextPhase::Chosen(session) => {
            let mut buffers = chosen(stream.stream(), ChosenExport::new(&session, true))?;
            stream.enlarge(buffers.borrow().len_bytes())?;
            transmission::run(stream, session, config, buffers.borrow_mut())
        }
        NextPhase::Left | NextPhase::StartTls => Ok(()),
    }
}
