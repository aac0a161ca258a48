//! The subset of HTTP/1.1 that the control API needs: one request, one response, then close.
//!
//! Every length is bounded before it is used. An unacceptable request becomes a response with the
//! reason, which callers only have to send.

use std::io::{self, ErrorKind, Read, Write};

use serde::Serialize;
use serde_json::json;
use uzram::device::AttributeText;

/// The most bytes of request line and headers.
pub const MAX_HEAD_BYTES: usize = 16 << 10;
pub const MAX_BODY_BYTES: usize = 64 << 10;
/// The size of the pieces in which a long text is generated and sent.
const PIECE_BYTES: usize = 64 << 10;
pub const MAX_HEADERS: usize = 64;

/// The parts of a request that the control API uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    /// The path, still percent-encoded, without a query.
    pub path: String,
    /// The body; empty if none was announced.
    pub body: Vec<u8>,
}

pub struct Response {
    pub status: u16,
    pub body: Body,
    /// For 405: the methods that this path accepts.
    pub allow: Option<String>,
    /// How the daemon ends once this is sent, if it does.
    pub shutdown: Option<Ending>,
}

pub enum Body {
    /// JSON text, or empty. Sent as a whole.
    Text(String),
    /// `{"name", "text"}` of an attribute. The text is generated while it is sent, without a
    /// `Content-Length`; the connection ends with it.
    Attribute(&'static str, AttributeText),
}

/// How a daemon is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Once its devices are not in use.
    WhenFree,
    /// Even if its devices are in use, except by swap.
    Forced,
}

impl Response {
    pub const fn empty(status: u16) -> Self {
        Response { status, body: Body::Text(String::new()), allow: None, shutdown: None }
    }

    pub fn json(status: u16, body: &impl Serialize) -> Self {
        // Fails for no value of this API: its maps have strings as keys. The newline is for curl in a
        // terminal.
        let text = serde_json::to_string(body).unwrap_or_default() + "\n";
        Response { body: Body::Text(text), ..Response::empty(status) }
    }

    /// Creates the response for a failure.
    pub fn error(status: u16, text: &str, errno: i32, setting: Option<&str>) -> Self {
        Response::json(status, &json!({ "error": text, "errno": errno, "setting": setting }))
    }

    /// Sends the response. Flushes `output` after each piece of a long one. Errors: those of `output`.
    pub fn write_to(self, output: &mut impl Write) -> io::Result<()> {
        let mut text = format!("HTTP/1.1 {} {}\r\n", self.status, reason(self.status));
        if let Some(methods) = self.allow {
            text.push_str(&format!("Allow: {methods}\r\n"));
        }
        if self.status != 204 {
            text.push_str("Content-Type: application/json\r\n");
            if let Body::Text(body) = &self.body {
                text.push_str(&format!("Content-Length: {}\r\n", body.len()));
            }
        }
        text.push_str("Connection: close\r\n\r\n");
        match self.body {
            Body::Text(body) => {
                text.push_str(&body);
                output.write_all(text.as_bytes())?;
            }
            Body::Attribute(name, value) => {
                output.write_all(text.as_bytes())?;
                send_attribute_text(name, value, output)?;
            }
        }
        output.flush()
    }
}

/// Sends an attribute's text without its last newline, as [`Response::json`] would.
fn send_attribute_text(name: &str, mut value: AttributeText, output: &mut impl Write) -> io::Result<()> {
    let (mut piece, mut offset, mut ends_line) = (vec![0; PIECE_BYTES], 0, false);
    let mut text = format!("{{\"name\":{},\"text\":\"", json!(name));
    while let len @ 1.. = value.read_at(offset, &mut piece) {
        offset += len as u64;
        // The newline before this piece belongs to the text.
        let before = if ends_line { "\n" } else { "" };
        ends_line = piece[..len].ends_with(b"\n");
        let part = String::from_utf8_lossy(&piece[..len - usize::from(ends_line)]);
        let escaped = json!(format!("{before}{part}")).to_string();
        text.push_str(&escaped[1..escaped.len() - 1]);
        output.write_all(text.as_bytes())?;
        output.flush()?;
        text.clear();
    }
    text.push_str("\"}\n");
    output.write_all(text.as_bytes())
}

struct Head {
    /// Without its body.
    request: Request,
    head_bytes: usize,
    body_bytes: usize,
    expects_continue: bool,
}

/// Reads one request. Errors: the response to an unacceptable request.
pub fn read_request(stream: &mut (impl Read + Write)) -> Result<Request, Response> {
    let mut bytes = Vec::with_capacity(1024);
    let head = loop {
        if read_more(stream, &mut bytes, MAX_HEAD_BYTES)? == 0 {
            return Err(refusal(431, "the request's headers are longer than 16 KiB"));
        }
        if let Some(head) = parse_head(&bytes)? {
            break head;
        }
    };
    let mut body = bytes.split_off(head.head_bytes);
    if head.expects_continue && body.len() < head.body_bytes {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").map_err(|error| broken(&error))?;
    }
    while body.len() < head.body_bytes {
        read_more(stream, &mut body, head.body_bytes)?;
    }
    body.truncate(head.body_bytes);
    Ok(Request { body, ..head.request })
}

/// Appends the bytes of one read, up to `limit` bytes in total; returns 0 only if `bytes` is that long
/// already.
fn read_more(stream: &mut impl Read, bytes: &mut Vec<u8>, limit: usize) -> Result<usize, Response> {
    let mut piece = [0; 4096];
    let room = piece.len().min(limit.saturating_sub(bytes.len()));
    if room == 0 {
        return Ok(0);
    }
    loop {
        match stream.read(&mut piece[..room]) {
            Ok(0) => return Err(refusal(400, "the request ended early")),
            Ok(count) => {
                bytes.extend_from_slice(&piece[..count]);
                return Ok(count);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(broken(&error)),
        }
    }
}

/// Parses the head at the start of `bytes`; `None` while it is incomplete.
fn parse_head(bytes: &[u8]) -> Result<Option<Head>, Response> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let head_bytes = match request.parse(bytes) {
        Ok(httparse::Status::Complete(head_bytes)) => head_bytes,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => {
            return Err(refusal(431, "the request has more than 64 headers"));
        }
        Err(error) => return Err(refusal(400, &format!("not an HTTP/1.1 request: {error}"))),
    };
    let (Some(method), Some(target)) = (request.method, request.path) else {
        return Err(refusal(400, "not an HTTP/1.1 request"));
    };
    let path = target.split('?').next().unwrap_or_default().to_owned();
    let request_line = Request { method: method.to_owned(), path, body: Vec::new() };
    let mut head = Head { request: request_line, head_bytes, body_bytes: 0, expects_continue: false };
    let mut announced = None;
    for header in request.headers.iter() {
        if header.name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(refusal(501, "Transfer-Encoding is not supported; send Content-Length"));
        } else if header.name.eq_ignore_ascii_case("expect") {
            head.expects_continue = header.value.eq_ignore_ascii_case(b"100-continue");
        } else if header.name.eq_ignore_ascii_case("content-length") {
            // Conflicting lengths allow request smuggling; equal ones are useless.
            if announced.replace(parse_length(header.value)?).is_some() {
                return Err(refusal(400, "more than one Content-Length"));
            }
        }
    }
    head.body_bytes = announced.unwrap_or(0);
    Ok(Some(head))
}

fn parse_length(value: &[u8]) -> Result<usize, Response> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(refusal(400, "Content-Length is not a number"));
    }
    // Only digits, so a parse error means too large.
    match str::from_utf8(value).unwrap_or_default().parse() {
        Ok(length) if length <= MAX_BODY_BYTES => Ok(length),
        _ => Err(refusal(413, "the request's body is longer than 64 KiB")),
    }
}

/// Creates the response to a request that is refused before it reaches a device.
pub fn refusal(status: u16, text: &str) -> Response {
    let errno = match status {
        404 => 2,        // ENOENT
        405 | 501 => 95, // EOPNOTSUPP
        408 => 110,      // ETIMEDOUT
        413 => 27,       // EFBIG
        431 => 7,        // E2BIG
        503 => 11,       // EAGAIN
        _ => 22,         // EINVAL
    };
    Response::error(status, text, errno, None)
}

fn broken(error: &io::Error) -> Response {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => refusal(408, "the request took too long to arrive"),
        // The client has disconnected; sending this fails harmlessly.
        _ => refusal(400, "the request ended early"),
    }
}

const fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        202 => "Accepted",
        204 => "No Content",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        507 => "Insufficient Storage",
        _ => "Internal Server Error",
    }
}
