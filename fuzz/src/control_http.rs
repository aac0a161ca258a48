//! Fuzzes the control socket with any bytes as connections. The input is cut at bytes 0xff, which no valid
//! request has: each part is what one client sends.
//!
//! Promises: every connection gets one whole response of the right length; all failures have the same form;
//! no request causes an internal server error.

use serde_json::Value;
use uzram::device::Device;
use uzram_serve::{
    Exports,
    control::{About, Api, exchange},
};

use crate::wire::Wire;

const MAX_CONNECTIONS: usize = 8;
/// The largest disk: a device may become as large as the system allows, and then operations on all pages take
/// long. The input ends there.
const MAX_DISK_BYTES: u64 = 16 << 20;

/// Returns whether clients may ask for a backing device, in any spelling: no input may reach the files of the
/// user who runs this.
fn names_backing(bytes: &[u8]) -> bool {
    let hex = |digits: &[u8]| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok();
    let (mut plain, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while let Some(byte) = bytes.get(at) {
        let escaped = match bytes[at..] {
            [b'%', high, low, ..] => hex(&[high, low]).map(|byte| (byte, 3)),
            [b'\\', b'u', b'0', b'0', high, low, ..] => hex(&[high, low]).map(|byte| (byte, 6)),
            _ => None,
        };
        let (byte, len) = escaped.unwrap_or((*byte, 1));
        plain.push(byte);
        at += len;
    }
    plain.windows(11).any(|name| name == b"backing_dev")
}

pub(crate) fn run(bytes: &[u8]) {
    if names_backing(bytes) {
        return;
    }
    let devices = ["zram0", "zram1"].map(|name| Device::new(name).expect("a good name"));
    devices[0].set("disksize", "64K").expect("memory");
    let exports = Exports::new(devices);
    let api = Api::new(exports.clone(), Box::new(|name| vec![format!("nbd:///{name}")]), About::default());
    for said in bytes.split(|byte| *byte == 0xff).take(MAX_CONNECTIONS) {
        // The first byte of a connection determines the pieces into which it is torn.
        let Some((tear, said)) = said.split_first() else { continue };
        let (mut input, mut output) = (Wire::new(said, tear & 0x1f), Wire::new(&[], 0));
        let outcome = exchange(&api, &mut input, &mut output, &|| true);
        assert!(outcome.sent.is_ok());
        assert!(input.heard.is_empty() || input.heard == b"HTTP/1.1 100 Continue\r\n\r\n");
        let status = check(&output.heard);
        assert!(status == 202 || outcome.shutdown.is_none(), "{status} and the daemon ends");
        if exports.devices().iter().any(|device| device.size_bytes() > MAX_DISK_BYTES) {
            return;
        }
    }
}

fn check(response: &[u8]) -> u16 {
    let text = str::from_utf8(response).expect("a response is text");
    let (head, body) = text.split_once("\r\n\r\n").expect("a response has a head");
    let mut lines = head.split("\r\n");
    let status_line = lines.next().unwrap_or_default();
    let status = status_line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
    let status: u16 = status.expect("a response begins with its status");
    assert!(status_line.len() > "HTTP/1.1 200 ".len(), "{status_line}: a status has its reason");
    // 500 would be an internal error; 503 is the system's refusal, which too large a size may get.
    let expected = [200, 201, 202, 204, 400, 403, 404, 405, 409, 413, 431, 501, 503];
    assert!(expected.contains(&status), "{text}");
    let length = lines.find_map(|line| line.strip_prefix("Content-Length: "));
    // A long text ends with the connection.
    let is_long = length.is_none() && body.starts_with(r#"{"name":"block_state""#);
    let has_length = status != 204 && !is_long;
    assert_eq!(length, has_length.then(|| body.len().to_string()).as_deref(), "{text}");
    if !body.is_empty() {
        let json: Value = serde_json::from_str(body).expect("a body is JSON");
        let is_failure = json["error"].is_string() && json["errno"].is_i64();
        assert_eq!(is_failure, status >= 400, "{text}");
    }
    status
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let request = |tear: u8, line: &str, body: &str| {
        let tear = char::from(tear);
        let length = body.len();
        format!("{tear}{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{body}")
            .into_bytes()
    };
    let get = |path: &str| request(0, &format!("GET {path}"), "");
    let set =
        |path: &str, value: &str| request(0, &format!("PUT {path}"), &format!("{{\"value\":\"{value}\"}}"));
    let connections = |each: &[Vec<u8>]| each.join(&0xff);
    let expecting = b"\x07PUT /v1/devices/zram1/attributes/checksum HTTP/1.1\r\nexpect: 100-Continue\r\ncontent-length: 13\r\n\r\n{\"value\":\"1\"}";
    vec![
        connections(&[
            get("/v1/devices"),
            get("/v1/devices/zram0?x=1"),
            get("/v1/devices/zram1/attributes/classes"),
        ]),
        connections(&[
            set("/v1/devices/zram1/attributes/comp_algorithm", "zstd:3"),
            set("/v1/devices/zram1/attributes/disksize", "1M"),
            get("/v1/devices/zram1/attributes/mm_stat"),
            request(3, "POST /v1/devices/zram1/reset", ""),
        ]),
        connections(&[
            set("/v1/devices/zram0/attributes/mem%5Flimit", "64\\u004b"),
            request(1, "POST /v1/reload", ""),
            request(1, "POST /v1/shutdown", ""),
        ]),
        connections(&[
            request(0, "DELETE /v1/devices/%zz", ""),
            get("/v2"),
            get("*"),
            request(31, "PUT /v1/devices/zram0/attributes/reset", "[]"),
        ]),
        connections(&[
            expecting.to_vec(),
            b"\0GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec(),
            b"\0POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n".to_vec(),
        ]),
        connections(&[
            request(
                0,
                "POST /v1/devices",
                r#"{"name":"a","attributes":{"disksize":"64K","mem_limit":"1M"}}"#,
            ),
            get("/v1/devices/a"),
            request(0, "POST /v1/devices", r#"{"name":"a"}"#),
            request(2, "DELETE /v1/devices/zram0", ""),
            request(0, "DELETE /v1/devices/a", ""),
        ]),
        connections(&[
            get("/v1/clients"),
            get("/v1/devices/zram0/clients"),
            request(0, "DELETE /v1/clients/1", ""),
            request(5, "DELETE /v1/clients/-1", ""),
            request(0, "DELETE /v1/clients/99999999999999999999", ""),
            request(0, "PUT /v1/clients", ""),
        ]),
        connections(&[get("/v1/devices/nonesuch"), get("/v1/devices/zram0/attributes/nonesuch")]),
    ]
}

#[cfg(test)]
mod tests {
    use super::names_backing;

    #[test]
    fn a_backing_device_is_seen_however_it_is_written() {
        for named in [
            "backing_dev",
            "x/backing%5fdev?",
            "%62acking_dev",
            "{\"b\\u0061cking\\u005Fdev\":1}",
            "%%62acking_dev",
        ] {
            assert!(names_backing(named.as_bytes()), "{named}");
        }
        for other in ["", "backing", "backing_de", "%", "\\u00", "backing dev"] {
            assert!(!names_backing(other.as_bytes()), "{other}");
        }
    }
}
