//! The handshake: greeting, option negotiation, and the choice of an export.
//!
//! It reads exactly the bytes of each message, so that none of the transmission phase are consumed. A
//! client gets [`MAX_OPTIONS`] options of at most [`MAX_OPTION_BYTES`] each; the socket's deadline
//! limits the time.

use std::error::Error;
use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;

use uzram::ErrorKind;
use uzram::device::Device;
use uzram::units::format_size;

use super::meta_context::{Context, Contexts};
use super::proto::{
    self, InfoRequest, MetaContextRequest, OptionHeader, handshake_flags, info, option, reply,
    transmission_flags,
};
use super::reply::option_reply;
use super::request::Headers;
use super::violation;
use crate::{Access, ExportedDevice, Exports};

/// The most options in one handshake; real clients send a handful.
const MAX_OPTIONS: usize = 256;
/// The most data bytes of one option; the longest name the protocol allows has 4096.
const MAX_OPTION_BYTES: u32 = 64 << 10;

/// The result of the handshake.
pub(super) struct Session {
    /// The export, held open until the session ends.
    pub export: ExportedDevice,
    /// The headers of requests and replies.
    pub headers: Headers,
    /// The metadata contexts that the client has set for this export.
    pub contexts: Contexts,
}

/// The state of TLS on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TlsMode {
    /// The server has no certificate ("NOTLS" in the specification).
    Off,
    /// The client may start it ("SELECTIVETLS", with no export that requires it).
    Offered,
    /// The client must start it before anything else ("FORCEDTLS").
    Required,
    /// The handshake runs over TLS.
    Started,
}

/// How the negotiation ended.
pub(super) enum NextPhase {
    /// The client chose an export.
    Chosen(Session),
    /// The client starts TLS, then negotiates anew. The acknowledgement has been sent, and no byte
    /// after the option has been read.
    StartTls,
    /// The client left.
    Left,
}

/// The state of a negotiation.
struct Negotiation<'a> {
    exports: &'a Exports,
    no_zeroes: bool,
    negotiated: Negotiated,
}

/// What has been negotiated; starting TLS discards all of it.
struct Negotiated {
    headers: Headers,
    /// The metadata contexts that were set last, and for which device.
    contexts: Option<(Arc<Device>, Contexts)>,
}

impl Default for Negotiated {
    fn default() -> Self {
        Negotiated { headers: Headers::Simple, contexts: None }
    }
}

/// Sends the greeting and returns the client's flags.
///
/// # Errors
/// The stream's; `InvalidData` when the client broke the protocol.
pub(super) fn greet<S: Read + Write>(stream: &mut S) -> io::Result<u32> {
    let mut greeting = [0; 18];
    greeting[..8].copy_from_slice(&proto::NBDMAGIC.to_be_bytes());
    greeting[8..16].copy_from_slice(&proto::IHAVEOPT.to_be_bytes());
    let flags = handshake_flags::FIXED_NEWSTYLE | handshake_flags::NO_ZEROES;
    greeting[16..].copy_from_slice(&flags.to_be_bytes());
    stream.write_all(&greeting)?;

    let mut client_flags = [0; 4];
    stream.read_exact(&mut client_flags)?;
    let client_flags = u32::from_be_bytes(client_flags);
    if client_flags & !u32::from(flags) != 0 {
        return Err(violation("a client flag that was not offered"));
    }
    Ok(client_flags)
}

/// The error of a client that asked for something without TLS, which is required here, and left.
#[derive(Debug)]
pub(super) struct NoTls;

impl fmt::Display for NoTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the client does not start TLS, which is required here")
    }
}

impl Error for NoTls {}

/// Negotiates until the client has chosen an export, starts TLS, or leaves. The state lives only in
/// this call, so that nothing of it is left when TLS starts.
///
/// # Errors
/// The stream's; `InvalidData` when the client broke the protocol; [`NoTls`].
pub(super) fn haggle<S: Read + Write>(
    stream: &mut S,
    exports: &Exports,
    client_flags: u32,
    tls: TlsMode,
) -> io::Result<NextPhase> {
    let mut lacked_tls = false;
    match negotiate(stream, exports, client_flags, tls, &mut lacked_tls) {
        Ok(NextPhase::Left) | Err(_) if lacked_tls => Err(io::Error::new(io::ErrorKind::InvalidData, NoTls)),
        result => result,
    }
}

/// As [`haggle`]. Sets `lacked_tls` when the client asks for something without TLS that is required.
fn negotiate<S: Read + Write>(
    stream: &mut S,
    exports: &Exports,
    client_flags: u32,
    tls: TlsMode,
    lacked_tls: &mut bool,
) -> io::Result<NextPhase> {
    let no_zeroes = client_flags & u32::from(handshake_flags::NO_ZEROES) != 0;
    let mut negotiation = Negotiation { exports, no_zeroes, negotiated: Negotiated::default() };

    let mut data = Vec::new();
    for _ in 0..MAX_OPTIONS {
        let option = receive_option(stream, &mut data)?;
        match option {
            option::ABORT => {
                acknowledge(stream, option)?;
                return Ok(NextPhase::Left);
            }
            option::STARTTLS => match starttls_refusal(tls, &data) {
                None => {
                    acknowledge(stream, option)?;
                    return Ok(NextPhase::StartTls);
                }
                Some((error, why)) => refuse(stream, option, error, why)?,
            },
            // This option has no error reply.
            option::EXPORT_NAME if tls == TlsMode::Required => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, NoTls));
            }
            _ if tls == TlsMode::Required => {
                *lacked_tls = true;
                refuse(stream, option, reply::ERR_TLS_REQD, "this server requires TLS")?;
            }
            option::EXPORT_NAME => return negotiation.export_name(stream, &data).map(NextPhase::Chosen),
            option::LIST => negotiation.list(stream, &data)?,
            option::INFO => drop(negotiation.info(stream, option, &data)?),
            option::GO => {
                if let Some(export) = negotiation.info(stream, option, &data)? {
                    return Ok(NextPhase::Chosen(negotiation.session(export)));
                }
            }
            option::STRUCTURED_REPLY => {
                negotiation.raise_headers(stream, option, &data, Headers::Structured)?
            }
            option::EXTENDED_HEADERS => {
                negotiation.raise_headers(stream, option, &data, Headers::Extended)?
            }
            option::LIST_META_CONTEXT => drop(negotiation.meta_contexts(stream, option, &data)?),
            option::SET_META_CONTEXT => {
                // Contexts set before are discarded even if this fails.
                negotiation.negotiated.contexts = None;
                negotiation.negotiated.contexts = negotiation.meta_contexts(stream, option, &data)?;
            }
            _ => refuse(stream, option, reply::ERR_UNSUP, "this server does not have that option")?,
        }
    }
    Err(violation("too many options"))
}

/// Returns why TLS cannot be started now: the error and its text.
fn starttls_refusal(tls: TlsMode, data: &[u8]) -> Option<(u32, &'static str)> {
    match tls {
        TlsMode::Started => Some((reply::ERR_INVALID, "TLS has been started already")),
        TlsMode::Off => Some((reply::ERR_UNSUP, "this server has no TLS certificate")),
        TlsMode::Offered | TlsMode::Required if !data.is_empty() => Some((reply::ERR_INVALID, NO_DATA)),
        TlsMode::Offered | TlsMode::Required => None,
    }
}

const NO_DATA: &str = "this option has no data";

/// Reads one option into `data` and returns its number.
fn receive_option(stream: &mut impl Read, data: &mut Vec<u8>) -> io::Result<u32> {
    let mut header = [0; proto::OPTION_HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let header = OptionHeader::parse(&header).ok_or_else(|| violation("an option without its magic"))?;
    if header.len_bytes > MAX_OPTION_BYTES {
        return Err(violation("an option of more than 64 KiB"));
    }
    data.clear();
    data.resize(header.len_bytes as usize, 0);
    stream.read_exact(data)?;
    Ok(header.option)
}

/// Sends one option reply whose data is `parts`, joined, in a single write.
fn send_reply(stream: &mut impl Write, option: u32, reply: u32, parts: &[&[u8]]) -> io::Result<()> {
    let len_bytes: usize = parts.iter().map(|part| part.len()).sum();
    let len_u32 = u32::try_from(len_bytes).map_err(|_| violation("a reply of more than 4 GiB"))?;
    let mut message = Vec::with_capacity(20 + len_bytes);
    message.extend_from_slice(&option_reply(option, reply, len_u32));
    for part in parts {
        message.extend_from_slice(part);
    }
    stream.write_all(&message)
}

fn acknowledge(stream: &mut impl Write, option: u32) -> io::Result<()> {
    send_reply(stream, option, reply::ACK, &[])
}

/// Replies to an option with an error and its text.
fn refuse(stream: &mut impl Write, option: u32, error: u32, why: &str) -> io::Result<()> {
    send_reply(stream, option, error, &[why.as_bytes()])
}

impl Negotiation<'_> {
    /// Returns the transmission flags of `export` for this client.
    fn transmission_flags(&self, export: &ExportedDevice) -> u16 {
        use transmission_flags::*;
        let headers = self.negotiated.headers;
        let df = if headers.has_chunks() { SEND_DF } else { 0 };
        let can_filter = headers == Headers::Extended && !self.contexts(export.device.device()).is_empty();
        let payload = if can_filter { BLOCK_STATUS_PAYLOAD } else { 0 };
        let changes = match export.access {
            Access::Read => READ_ONLY,
            Access::Write => SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO,
        };
        HAS_FLAGS | SEND_FLUSH | SEND_FUA | CAN_MULTI_CONN | SEND_CACHE | changes | df | payload
    }

    /// Returns the metadata contexts that are set for `device`: none, if they were set for another.
    fn contexts(&self, device: &Device) -> Contexts {
        match &self.negotiated.contexts {
            Some((set_for, contexts)) if std::ptr::eq(&raw const **set_for, device) => *contexts,
            _ => Contexts::default(),
        }
    }

    fn session(&self, export: ExportedDevice) -> Session {
        let contexts = self.contexts(export.device.device());
        Session { export, headers: self.negotiated.headers, contexts }
    }

    /// Sets the negotiated headers. Extended ones cannot be replaced.
    fn raise_headers(
        &mut self,
        stream: &mut impl Write,
        option: u32,
        data: &[u8],
        headers: Headers,
    ) -> io::Result<()> {
        if !data.is_empty() {
            return refuse(stream, option, reply::ERR_INVALID, NO_DATA);
        }
        if (self.negotiated.headers, headers) == (Headers::Extended, Headers::Structured) {
            let why = "extended headers are negotiated, and replace structured replies";
            return refuse(stream, option, reply::ERR_EXT_HEADER_REQD, why);
        }
        self.negotiated.headers = headers;
        acknowledge(stream, option)
    }

    /// Replies to `LIST_META_CONTEXT` and `SET_META_CONTEXT`; returns the selected contexts if the reply was a
    /// success.
    fn meta_contexts(
        &self,
        stream: &mut impl Write,
        option: u32,
        data: &[u8],
    ) -> io::Result<Option<(Arc<Device>, Contexts)>> {
        let lists = option == option::LIST_META_CONTEXT;
        let invalid = |stream, why| refuse(stream, option, reply::ERR_INVALID, why).map(|()| None);
        if !self.negotiated.headers.has_chunks() {
            return invalid(stream, "metadata contexts need structured replies or extended headers");
        }
        let Some(request) = MetaContextRequest::parse(data) else {
            return invalid(stream, "the lengths in this option do not add up");
        };
        let Some(device) = self.exports.find(request.name).map(|found| Arc::clone(found.device())) else {
            refuse(stream, option, reply::ERR_UNKNOWN, "no export of that name")?;
            return Ok(None);
        };
        let mut selected = Contexts::default();
        if !request.queries().all(|query| selected.select(query, lists)) {
            return invalid(stream, "a query begins with a namespace and a colon");
        }
        if lists && request.queries().next().is_none() {
            selected = Context::ALL.into_iter().collect();
        }
        for context in selected.iter() {
            // The id is reserved and 0 in a list.
            let id = if lists { 0 } else { context.id() };
            let parts = [&id.to_be_bytes()[..], context.name().as_bytes()];
            send_reply(stream, option, reply::META_CONTEXT, &parts)?;
        }
        acknowledge(stream, option)?;
        Ok(Some((device, selected)))
    }

    /// Replies to `EXPORT_NAME`, the old way to choose an export. It has no error reply, so an unknown name ends
    /// the connection, as do extended headers, with which it is not allowed.
    fn export_name(&self, stream: &mut impl Write, name: &[u8]) -> io::Result<Session> {
        if self.negotiated.headers == Headers::Extended {
            return Err(violation("extended headers, and then an export chosen in the old way"));
        }
        let found = self.exports.find(name).ok_or_else(|| violation("no export of that name"))?;
        let export = found.connect().map_err(io::Error::other)?;
        let mut answer = [0; 10 + 124];
        answer[..8].copy_from_slice(&export.device.size_bytes().to_be_bytes());
        answer[8..10].copy_from_slice(&self.transmission_flags(&export).to_be_bytes());
        let len_bytes = if self.no_zeroes { 10 } else { answer.len() };
        stream.write_all(&answer[..len_bytes])?;
        Ok(self.session(export))
    }

    fn list(&self, stream: &mut impl Write, data: &[u8]) -> io::Result<()> {
        if !data.is_empty() {
            return refuse(stream, option::LIST, reply::ERR_INVALID, NO_DATA);
        }
        for name in self.exports.exported() {
            let name_len = u32::try_from(name.len()).map_err(|_| violation("a name of more than 4 GiB"))?;
            send_reply(stream, option::LIST, reply::SERVER, &[&name_len.to_be_bytes(), name.as_bytes()])?;
        }
        acknowledge(stream, option::LIST)
    }

    /// Replies to `INFO` and `GO`; returns the export if the reply was a success.
    fn info(&self, stream: &mut impl Write, option: u32, data: &[u8]) -> io::Result<Option<ExportedDevice>> {
        let Some(request) = InfoRequest::parse(data) else {
            refuse(stream, option, reply::ERR_INVALID, "the lengths in this option do not add up")?;
            return Ok(None);
        };
        let Some(found) = self.exports.find(request.name) else {
            refuse(stream, option, reply::ERR_UNKNOWN, "no export of that name")?;
            return Ok(None);
        };
        let export = match found.connect() {
            Ok(export) => export,
            Err(error) => {
                let refusal = match error.kind() {
                    ErrorKind::Permission => reply::ERR_POLICY,
                    _ => reply::ERR_UNKNOWN,
                };
                refuse(stream, option, refusal, &error.to_string())?;
                return Ok(None);
            }
        };
        let (device, size_bytes) = (export.device.device(), export.device.size_bytes());
        let size_and_flags =
            [&size_bytes.to_be_bytes()[..], &self.transmission_flags(&export).to_be_bytes()].concat();
        send_info(stream, option, info::EXPORT, &size_and_flags)?;
        if request.wants(info::NAME) {
            send_info(stream, option, info::NAME, device.name().as_bytes())?;
        }
        if request.wants(info::DESCRIPTION) {
            send_info(stream, option, info::DESCRIPTION, description(device, size_bytes).as_bytes())?;
        }
        if request.wants(info::BLOCK_SIZE) {
            let sizes = [proto::MIN_BLOCK_BYTES, proto::PREFERRED_BLOCK_BYTES, proto::MAX_PAYLOAD_BYTES];
            send_info(stream, option, info::BLOCK_SIZE, &sizes.map(u32::to_be_bytes).concat())?;
        }
        acknowledge(stream, option)?;
        Ok(Some(export))
    }
}

fn send_info(stream: &mut impl Write, option: u32, kind: u16, data: &[u8]) -> io::Result<()> {
    send_reply(stream, option, reply::INFO, &[&kind.to_be_bytes(), data])
}

/// Returns a one-line description of an export.
fn description(device: &Device, size_bytes: u64) -> String {
    let size = format_size(size_bytes);
    format!("{}: {size} of compressed memory; contents do not outlive the server", device.name())
}
