//! The handshake: greeting, option negotiation, and the choice of an export.
//!
//! It reads exactly the bytes of each message, so that none of the transmission phase are consumed. A client
//! gets [`MAX_OPTIONS`] options of at most [`MAX_OPTION_BYTES`] each; the socket's deadline limits the time.

use std::error::Error;
use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;

use uzram::ErrorKind;
use uzram::device::Device;
use uzram::units::format_size;

use super::meta_context::{Context, Contexts};
use super::proto::{
    self, handshake_flags, info, option, parse_contexts, parse_info, parse_option_header, reply,
    transmission_flags, violation,
};
use super::request::Headers;
use crate::{Access, ExportedDevice, Exports};

/// The most options in one handshake; real clients send a handful.
const MAX_OPTIONS: usize = 256;
/// The most data bytes of one option; the longest name the protocol allows has 4096.
const MAX_OPTION_BYTES: u32 = 64 << 10;

const NO_DATA: &str = "this option has no data";
const WRONG_LENGTHS: &str = "the lengths in this option do not add up";

pub(super) struct Chosen {
    /// The export, held open until the session ends.
    pub export: ExportedDevice,
    pub headers: Headers,
    pub contexts: Contexts,
}

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

pub(super) enum NextPhase {
    Chosen(Chosen),
    /// The client starts TLS, then negotiates anew. The acknowledgement has been sent, and no byte after the
    /// option has been read.
    StartTls,
    Left,
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

/// Sends the greeting and returns the client's flags. Errors: the stream's; `InvalidData` when the client
/// broke the protocol.
pub(super) fn greet<S: Read + Write>(stream: &mut S) -> io::Result<u32> {
    let flags = handshake_flags::FIXED_NEWSTYLE | handshake_flags::NO_ZEROES;
    let magics = [proto::NBDMAGIC, proto::IHAVEOPT].map(u64::to_be_bytes).concat();
    stream.write_all(&[&magics[..], &flags.to_be_bytes()].concat())?;
    let mut client_flags = [0; 4];
    stream.read_exact(&mut client_flags)?;
    let client_flags = u32::from_be_bytes(client_flags);
    if client_flags & !u32::from(flags) != 0 {
        return Err(violation("a client flag that was not offered"));
    }
    Ok(client_flags)
}

/// Negotiates until the client has chosen an export, starts TLS, or leaves. The state lives only in this
/// call, so that nothing of it is left when TLS starts. Errors: the stream's; `InvalidData` when the client
/// broke the protocol; [`NoTls`].
pub(super) fn haggle<S: Read + Write>(
    stream: &mut S,
    exports: &Exports,
    client_flags: u32,
    tls: TlsMode,
) -> io::Result<NextPhase> {
    let no_zeroes = client_flags & u32::from(handshake_flags::NO_ZEROES) != 0;
    let (headers, contexts) = (Headers::Simple, None);
    let mut negotiation =
        Negotiation { stream, exports, no_zeroes, tls, lacked_tls: false, option: 0, headers, contexts };
    match negotiation.run() {
        Ok(NextPhase::Left) | Err(_) if negotiation.lacked_tls => {
            Err(io::Error::new(io::ErrorKind::InvalidData, NoTls))
        }
        ended => ended,
    }
}

struct Negotiation<'a, S> {
    stream: &'a mut S,
    exports: &'a Exports,
    no_zeroes: bool,
    tls: TlsMode,
    lacked_tls: bool,
    option: u32,
    headers: Headers,
    /// The metadata contexts that were set last, and for which device.
    contexts: Option<(Arc<Device>, Contexts)>,
}

impl<S: Read + Write> Negotiation<'_, S> {
    fn run(&mut self) -> io::Result<NextPhase> {
        let mut data = Vec::new();
        for _ in 0..MAX_OPTIONS {
            self.receive_option(&mut data)?;
            match self.option {
                option::ABORT => return self.acknowledge().map(|()| NextPhase::Left),
                option::STARTTLS => match self.tls {
                    TlsMode::Started => self.refuse(reply::ERR_INVALID, "TLS has been started already")?,
                    TlsMode::Off => self.refuse(reply::ERR_UNSUP, "this server has no TLS certificate")?,
                    _ if !data.is_empty() => self.refuse(reply::ERR_INVALID, NO_DATA)?,
                    _ => return self.acknowledge().map(|()| NextPhase::StartTls),
                },
                option if self.tls == TlsMode::Required => {
                    self.lacked_tls = true;
                    if option == option::EXPORT_NAME {
                        // This option has no error reply.
                        return Ok(NextPhase::Left);
                    }
                    self.refuse(reply::ERR_TLS_REQD, "this server requires TLS")?;
                }
                option::EXPORT_NAME => return self.export_name(&data).map(NextPhase::Chosen),
                option::LIST => self.list(&data)?,
                option::INFO => drop(self.info(&data)?),
                option::GO => {
                    if let Some(export) = self.info(&data)? {
                        return Ok(NextPhase::Chosen(self.chosen(export)));
                    }
                }
                option::STRUCTURED_REPLY => self.raise_headers(&data, Headers::Structured)?,
                option::EXTENDED_HEADERS => self.raise_headers(&data, Headers::Extended)?,
                option::LIST_META_CONTEXT => drop(self.meta_contexts(&data)?),
                option::SET_META_CONTEXT => {
                    // Contexts set before are discarded even if this fails.
                    self.contexts = None;
                    self.contexts = self.meta_contexts(&data)?;
                }
                _ => self.refuse(reply::ERR_UNSUP, "this server does not have that option")?,
            }
        }
        Err(violation("too many options"))
    }

    fn receive_option(&mut self, data: &mut Vec<u8>) -> io::Result<()> {
        let mut header = [0; proto::OPTION_HEADER_BYTES];
        self.stream.read_exact(&mut header)?;
        let parsed = parse_option_header(&header).ok_or_else(|| violation("an option without its magic"))?;
        let (option, len_bytes) = parsed;
        if len_bytes > MAX_OPTION_BYTES {
            return Err(violation("an option of more than 64 KiB"));
        }
        self.option = option;
        data.clear();
        data.resize(len_bytes as usize, 0);
        self.stream.read_exact(data)
    }

    /// Sends a reply to the option whose data is `parts`, joined, in a single write.
    fn reply(&mut self, kind: u32, parts: &[&[u8]]) -> io::Result<()> {
        let data = parts.concat();
        let len_bytes = u32::try_from(data.len()).map_err(|_| violation("a reply of more than 4 GiB"))?;
        let words = [self.option, kind, len_bytes].map(u32::to_be_bytes).concat();
        self.stream.write_all(&[&proto::NBD_REP_MAGIC.to_be_bytes()[..], &words, &data].concat())
    }

    fn acknowledge(&mut self) -> io::Result<()> {
        self.reply(reply::ACK, &[])
    }

    fn refuse(&mut self, error: u32, why: &str) -> io::Result<()> {
        self.reply(error, &[why.as_bytes()])
    }

    fn transmission_flags(&self, export: &ExportedDevice) -> u16 {
        use transmission_flags::*;
        let df = if self.headers.has_chunks() { SEND_DF } else { 0 };
        let can_filter =
            self.headers == Headers::Extended && !self.contexts(export.device.device()).is_empty();
        let payload = if can_filter { BLOCK_STATUS_PAYLOAD } else { 0 };
        let changes = match export.access {
            Access::Read => READ_ONLY,
            Access::Write => SEND_TRIM | SEND_WRITE_ZEROES | SEND_FAST_ZERO,
        };
        HAS_FLAGS | SEND_FLUSH | SEND_FUA | CAN_MULTI_CONN | SEND_CACHE | changes | df | payload
    }

    /// Returns the metadata contexts that are set for `device`: none, if they were set for another.
    fn contexts(&self, device: &Arc<Device>) -> Contexts {
        match &self.contexts {
            Some((set_for, contexts)) if Arc::ptr_eq(set_for, device) => *contexts,
            _ => Contexts::default(),
        }
    }

    fn chosen(&self, export: ExportedDevice) -> Chosen {
        let contexts = self.contexts(export.device.device());
        Chosen { export, headers: self.headers, contexts }
    }

    /// Sets the negotiated headers. Extended ones cannot be replaced.
    fn raise_headers(&mut self, data: &[u8], headers: Headers) -> io::Result<()> {
        if !data.is_empty() {
            return self.refuse(reply::ERR_INVALID, NO_DATA);
        }
        if (self.headers, headers) == (Headers::Extended, Headers::Structured) {
            let why = "extended headers are negotiated, and replace structured replies";
            return self.refuse(reply::ERR_EXT_HEADER_REQD, why);
        }
        self.headers = headers;
        self.acknowledge()
    }

    /// Replies to `LIST_META_CONTEXT` and `SET_META_CONTEXT`; returns the selected contexts if the reply was
    /// a success.
    fn meta_contexts(&mut self, data: &[u8]) -> io::Result<Option<(Arc<Device>, Contexts)>> {
        let lists = self.option == option::LIST_META_CONTEXT;
        let invalid =
            |negotiation: &mut Self, why| negotiation.refuse(reply::ERR_INVALID, why).map(|()| None);
        if !self.headers.has_chunks() {
            return invalid(self, "metadata contexts need structured replies or extended headers");
        }
        let Some((name, count, mut queries)) = parse_contexts(data) else {
            return invalid(self, WRONG_LENGTHS);
        };
        let Some(device) = self.exports.find(name).map(|found| Arc::clone(found.device())) else {
            return self.refuse(reply::ERR_UNKNOWN, "no export of that name").map(|()| None);
        };
        let mut selected = Contexts::default();
        if !queries.all(|query| selected.select(query, lists)) {
            return invalid(self, "a query begins with a namespace and a colon");
        }
        if lists && count == 0 {
            Context::ALL.into_iter().for_each(|context| _ = selected.insert(context));
        }
        for context in selected.iter() {
            // The id is reserved and 0 in a list.
            let id = if lists { 0 } else { context.id() };
            self.reply(reply::META_CONTEXT, &[&id.to_be_bytes(), context.name().as_bytes()])?;
        }
        self.acknowledge()?;
        Ok(Some((device, selected)))
    }

    /// Replies to `EXPORT_NAME`, the old way to choose an export. It has no error reply, so an unknown name
    /// ends the connection, as do extended headers, with which it is not allowed.
    fn export_name(&mut self, name: &[u8]) -> io::Result<Chosen> {
        if self.headers == Headers::Extended {
            return Err(violation("extended headers, and then an export chosen in the old way"));
        }
        let found = self.exports.find(name).ok_or_else(|| violation("no export of that name"))?;
        let export = found.connect().map_err(io::Error::other)?;
        let mut answer = [0; 10 + 124];
        answer[..8].copy_from_slice(&export.device.size_bytes().to_be_bytes());
        answer[8..10].copy_from_slice(&self.transmission_flags(&export).to_be_bytes());
        let len_bytes = if self.no_zeroes { 10 } else { answer.len() };
        self.stream.write_all(&answer[..len_bytes])?;
        Ok(self.chosen(export))
    }

    fn list(&mut self, data: &[u8]) -> io::Result<()> {
        if !data.is_empty() {
            return self.refuse(reply::ERR_INVALID, NO_DATA);
        }
        for name in self.exports.exported() {
            // `Device::check_name` allows no long ones.
            self.reply(reply::SERVER, &[&(name.len() as u32).to_be_bytes(), name.as_bytes()])?;
        }
        self.acknowledge()
    }

    /// Replies to `INFO` and `GO`; returns the export if the reply was a success.
    fn info(&mut self, data: &[u8]) -> io::Result<Option<ExportedDevice>> {
        let Some((name, kinds)) = parse_info(data) else {
            return self.refuse(reply::ERR_INVALID, WRONG_LENGTHS).map(|()| None);
        };
        let Some(found) = self.exports.find(name) else {
            return self.refuse(reply::ERR_UNKNOWN, "no export of that name").map(|()| None);
        };
        let export = match found.connect() {
            Ok(export) => export,
            Err(error) => {
                let refusal = match error.kind() {
                    ErrorKind::Permission => reply::ERR_POLICY,
                    _ => reply::ERR_UNKNOWN,
                };
                return self.refuse(refusal, &error.to_string()).map(|()| None);
            }
        };
        let (device, size_bytes) = (export.device.device(), export.device.size_bytes());
        let flags = self.transmission_flags(&export);
        let description = format!(
            "{}: {} of compressed memory; contents do not outlive the server",
            device.name(),
            format_size(size_bytes)
        );
        let sizes = [proto::MIN_BLOCK_BYTES, proto::PREFERRED_BLOCK_BYTES, proto::MAX_PAYLOAD_BYTES];
        for (kind, data) in [
            (info::EXPORT, [&size_bytes.to_be_bytes()[..], &flags.to_be_bytes()].concat()),
            (info::NAME, device.name().as_bytes().to_vec()),
            (info::DESCRIPTION, description.into_bytes()),
            (info::BLOCK_SIZE, sizes.map(u32::to_be_bytes).concat()),
        ] {
            if kind == info::EXPORT || kinds.contains(&kind.to_be_bytes()) {
                self.reply(reply::INFO, &[&kind.to_be_bytes(), &data])?;
            }
        }
        self.acknowledge()?;
        Ok(Some(export))
    }
}
