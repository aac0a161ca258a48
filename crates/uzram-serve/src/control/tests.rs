//! The control API without a daemon: requests and garbage through [`exchange`], and the limits of
//! [`Server`] over real sockets.

#![allow(clippy::unwrap_used)]

use std::io::{self, Cursor, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use uzram::device::Device;

use super::http::{MAX_BODY_BYTES, MAX_HEAD_BYTES};
use super::server::MAX_CONNECTIONS;
use super::{About, Api, Ending, Server, api::ROUTES, exchange};
use crate::{Exports, nbd};

fn api() -> Api {
    let device = Device::new("zram0").unwrap();
    device.set("disksize", "1M").unwrap();
    let uris =
        |name: &str| vec![format!("nbd+unix:///{name}?socket=/run/nbd.sock"), format!("nbd://[::1]/{name}")];
    Api::new(Exports::new([device]), Box::new(uris), About::default())
}

/// A client's bytes, returned a few at a time, and the bytes sent to it.
struct Client {
    sends: Cursor<Vec<u8>>,
    at_most_bytes: usize,
    received: Vec<u8>,
}

impl Read for Client {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = buf.len().min(self.at_most_bytes);
        self.sends.read(&mut buf[..len])
    }
}

impl Write for Client {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.received.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Answer {
    status: u16,
    head: String,
    json: Value,
    shutdown: Option<Ending>,
}

fn ask_slowly(api: &Api, request: &[u8], at_most_bytes: usize) -> Answer {
    let mut client = Client { sends: Cursor::new(request.to_vec()), at_most_bytes, received: Vec::new() };
    let mut output = Vec::new();
    let outcome = exchange(api, &mut client, &mut output, &|| true);
    outcome.sent.unwrap();
    let text = String::from_utf8(output).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.strip_prefix("HTTP/1.1 ").unwrap()[..3].parse().unwrap();
    let json = if body.is_empty() { Value::Null } else { serde_json::from_str(body).unwrap() };
    if status >= 400 {
        assert!(json["error"].is_string() && json["errno"].is_i64(), "{text}");
        assert!(json.as_object().unwrap().contains_key("setting"), "{text}");
    }
    Answer { status, head: head.to_owned(), json, shutdown: outcome.shutdown }
}

fn ask(api: &Api, request: &[u8]) -> Answer {
    ask_slowly(api, request, usize::MAX)
}

fn request(method: &str, path: &str, body: &str) -> Vec<u8> {
    format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        .into_bytes()
}

#[test]
fn devices_are_listed_and_described() {
    let api = api();
    let list = ask(&api, &request("GET", "/v1/devices", ""));
    assert_eq!(list.status, 200);
    assert_eq!(list.json["devices"][0]["name"], "zram0");
    assert_eq!(list.json["devices"][0]["stats"]["disksize_bytes"], 1 << 20);

    let device = ask(&api, &request("GET", "/v1/devices/zram0?verbose", ""));
    assert_eq!(device.status, 200);
    assert_eq!(device.json["attributes"]["disksize"], 1 << 20);
    assert_eq!(device.json["uri"], "nbd+unix:///zram0?socket=/run/nbd.sock");
    for attribute in Device::attributes() {
        let shown = device.json["attributes"].get(attribute.name).is_some();
        assert_eq!(shown, attribute.readable() && !attribute.is_long(), "{}", attribute.name);
    }
}

#[test]
fn attributes_are_read_and_written() {
    let api = api();
    let path = "/v1/devices/zram0/attributes/mem_limit";
    let set = ask(&api, &request("PUT", path, r#"{"value": "64M"}"#));
    assert_eq!((set.status, set.json), (204, Value::Null));
    // Bytes that trickle in, and escapes in the path, change nothing.
    let get = request("GET", "/v1/devices/zram%30/attributes/mem%5flimit", "");
    for at_most_bytes in [1, 7, 4096] {
        let answer = ask_slowly(&api, &get, at_most_bytes);
        assert_eq!((answer.status, &answer.json["name"]), (200, &"mem_limit".into()));
        assert_eq!((&answer.json["value"], &answer.json["text"]), (&(64 << 20).into(), &"67108864".into()));
    }
    let reset = ask(&api, &request("POST", "/v1/devices/zram0/reset", ""));
    assert_eq!(reset.status, 204);
    let size = ask(&api, &request("GET", "/v1/devices/zram0/attributes/disksize", ""));
    assert_eq!(size.json["value"], 0);
}

#[test]
fn devices_are_added_and_removed() {
    let api = api();
    // The order in the text does not matter: disksize comes last.
    let new =
        r#"{"attributes": {"disksize": "64K", "mem_limit": "1M", "comp_algorithm": "zstd"}, "name": "a.b"}"#;
    let added = ask(&api, &request("POST", "/v1/devices", new));
    assert_eq!((added.status, &added.json["name"]), (201, &"a.b".into()));
    assert_eq!(added.json["uris"][1], "nbd://[::1]/a.b");
    assert_eq!(added.json["attributes"]["disksize"], 65536);
    assert_eq!(added.json["attributes"]["mem_limit"], 1 << 20);
    for (body, status) in [
        (new, 409),
        (r#"{"name": "c", "attributes": {"disksize": "0"}}"#, 400),
        (r#"{"name": "c", "attributes": {"nonesuch": "1", "disksize": "64K"}}"#, 404),
        (r#"{"name": "a/b"}"#, 400),
        (r#"{"attributes": {}}"#, 400),
        (r#"{"name": "c", "attributes": {"disksize": 1}}"#, 400),
        ("", 400),
    ] {
        assert_eq!(ask(&api, &request("POST", "/v1/devices", body)).status, status, "{body}");
    }
    let names = |api: &Api| {
        let list = ask(api, &request("GET", "/v1/devices", "")).json;
        let devices = list["devices"].as_array().unwrap().iter();
        devices.map(|device| device["name"].to_string()).collect::<String>()
    };
    assert_eq!(names(&api), r#""zram0""a.b""#, "what failed has left nothing");
    assert_eq!(ask(&api, &request("DELETE", "/v1/devices/a.b", "")).status, 204);
    assert_eq!(ask(&api, &request("DELETE", "/v1/devices/a.b", "")).status, 404);
    assert_eq!(ask(&api, &request("DELETE", "/v1/devices/zram0", "")).status, 204);
    assert_eq!(names(&api), "", "the last may go, too");
}

/// A backing file is created only after everything else was accepted.
#[test]
fn a_device_that_cannot_be_made_leaves_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("b.img");
    let add = |algorithm: &str| {
        let backing = format!("{}:1M", path.display());
        let attributes = serde_json::json!({
            "backing_dev": backing, "recomp_algorithm": algorithm, "disksize": "1M",
        });
        let body = serde_json::json!({ "name": "z", "attributes": attributes }).to_string();
        ask(&api(), &request("POST", "/v1/devices", &body))
    };
    assert_eq!(add("algo=nope").status, 400);
    assert!(!path.exists());
    assert_eq!(add("algo=zstd").status, 201);
    assert!(path.exists());
}

#[test]
fn failures_carry_the_engine_s_errno() {
    let api = api();
    let attribute = |name: &str| format!("/v1/devices/zram0/attributes/{name}");
    let value = r#"{"value": "1"}"#;
    for (method, path, body, status, errno) in [
        ("GET", attribute("nonesuch"), "", 404, 2),
        ("GET", attribute("reset"), "", 403, 13),
        ("PUT", attribute("initstate"), value, 403, 13),
        ("PUT", attribute("disksize"), value, 409, 16),
        ("PUT", attribute("mem_limit"), r#"{"value": "much"}"#, 400, 22),
        ("PUT", attribute("mem_limit"), r#"{"value": 5}"#, 400, 22),
        ("PUT", attribute("mem_limit"), "", 400, 22),
        ("GET", "/v1/devices/zram1".to_owned(), "", 404, 2),
        ("GET", "/v1/devices/".to_owned(), "", 404, 2),
        ("GET", "/".to_owned(), "", 404, 2),
        ("GET", "/v1/devices/%ff".to_owned(), "", 400, 22),
        ("GET", "*".to_owned(), "", 400, 22),
    ] {
        let answer = ask(&api, &request(method, &path, body));
        assert_eq!((answer.status, &answer.json["errno"]), (status, &errno.into()), "{method} {path}");
    }
}

#[test]
fn another_method_is_told_which_are_taken() {
    let api = api();
    for (path, methods) in [
        ("/v1/devices", "GET, POST"),
        ("/v1/devices/zram0", "GET, DELETE"),
        ("/v1/devices/zram0/attributes/disksize", "GET, PUT"),
        ("/v1/devices/zram0/reset", "POST"),
        ("/v1/reload", "POST"),
        ("/v1/shutdown", "POST"),
    ] {
        let answer = ask(&api, &request("PATCH", path, ""));
        assert_eq!(answer.status, 405, "{path}");
        assert!(answer.head.contains(&format!("\r\nAllow: {methods}\r\n")), "{}", answer.head);
    }
}

#[test]
fn a_device_for_which_there_is_no_room_is_not_added() {
    let room = |devices: &[Arc<Device>]| match devices.iter().map(|device| device.size_bytes()).sum::<u64>() {
        ..=0x30_0000 => Ok(()),
        _ => Err(uzram::Error::new(uzram::ErrorKind::NoMemory, "no room")),
    };
    let api = Api { admission: Box::new(room), ..api() };
    let add = |name: &str, size: &str| {
        let body = format!(r#"{{"name": "{name}", "attributes": {{"disksize": "{size}"}}}}"#);
        ask(&api, &request("POST", "/v1/devices", &body))
    };
    assert_eq!(add("small", "2M").status, 201);
    let refused = add("large", "1M");
    assert_eq!((refused.status, &refused.json["error"]), (503, &"no room".into()));
    assert_eq!(ask(&api, &request("GET", "/v1/devices/large", "")).status, 404);
    // The name is free again.
    assert_eq!(ask(&api, &request("DELETE", "/v1/devices/small", "")).status, 204);
    assert_eq!(add("large", "1M").status, 201);
}

#[test]
fn shutdown_is_passed_on() {
    let api = api();
    let answer = ask(&api, &request("POST", "/v1/shutdown", ""));
    assert_eq!((answer.shutdown, answer.status), (Some(Ending::WhenFree), 202));
    assert_eq!(ask(&api, &request("GET", "/v1/shutdown", "")).shutdown, None);
    // While a device is in use, `force` is needed.
    let file = api.exports.open_file(&api.exports.devices()[0], false).unwrap();
    for body in ["", r#"{"force": false}"#] {
        let answer = ask(&api, &request("POST", "/v1/shutdown", body));
        assert_eq!((answer.shutdown, answer.status), (None, 409));
        assert!(answer.json["error"].as_str().unwrap().contains("in use by 1 open file"), "{}", answer.json);
    }
    let answer = ask(&api, &request("POST", "/v1/shutdown", r#"{"force": true}"#));
    assert_eq!((answer.shutdown, answer.status), (Some(Ending::Forced), 202));
    assert_eq!(ask(&api, &request("POST", "/v1/shutdown", r#"{"force": 1}"#)).status, 400);
    drop(file);
    assert_eq!(ask(&api, &request("POST", "/v1/shutdown", "")).status, 202);
}

#[test]
fn what_is_too_long_or_unclear_is_refused() {
    let api = api();
    let path = "/v1/devices/zram0/attributes/mem_limit";
    let with_headers = |headers: &str| format!("PUT {path} HTTP/1.1\r\n{headers}\r\n{{}}").into_bytes();
    for (headers, status) in [
        (format!("Content-Length: {}\r\n", MAX_BODY_BYTES + 1), 413),
        ("Content-Length: 99999999999999999999999999\r\n".to_owned(), 413),
        ("Content-Length: -1\r\n".to_owned(), 400),
        ("Content-Length: +1\r\n".to_owned(), 400),
        ("Content-Length: \r\n".to_owned(), 400),
        ("Content-Length: 2\r\nContent-Length: 2\r\n".to_owned(), 400),
        ("Content-Length: 3\r\n".to_owned(), 400),
        ("Transfer-Encoding: chunked\r\n".to_owned(), 501),
        ("X: y\r\n".repeat(65), 431),
        (format!("X: {}\r\n", "y".repeat(MAX_HEAD_BYTES)), 431),
    ] {
        let answer = ask_slowly(&api, &with_headers(&headers), 4096);
        let headers = &headers[..headers.len().min(60)];
        assert_eq!(answer.status, status, "{headers}: {}", answer.json);
    }
    // The longest body allowed is read and then parsed.
    let body = " ".repeat(MAX_BODY_BYTES - 14) + r#"{"value": "0"}"#;
    assert_eq!(ask(&api, &request("PUT", path, &body)).status, 204);
}

#[test]
fn a_client_that_waits_for_permission_gets_it() {
    let api = api();
    let mut client = Client {
        sends: Cursor::new(
            b"PUT /v1/devices/zram0/attributes/mem_limit HTTP/1.1\r\nExpect: 100-continue\r\n\
              Content-Length: 14\r\n\r\n{\"value\": \"0\"}"
                .to_vec(),
        ),
        at_most_bytes: 1,
        received: Vec::new(),
    };
    let mut output = Vec::new();
    exchange(&api, &mut client, &mut output, &|| true).sent.unwrap();
    assert_eq!(client.received, b"HTTP/1.1 100 Continue\r\n\r\n");
    assert!(output.starts_with(b"HTTP/1.1 204 "));
}

/// Reads `stream` to its end; a reset after the response counts as the end.
fn answer(stream: &mut UnixStream) -> String {
    let mut bytes = Vec::new();
    let mut piece = [0; 1024];
    while let Ok(count @ 1..) = stream.read(&mut piece) {
        bytes.extend_from_slice(&piece[..count]);
    }
    String::from_utf8(bytes).unwrap()
}

#[test]
fn without_tls_there_is_nothing_to_reload() {
    let answer = ask(&api(), &request("POST", "/v1/reload", ""));
    assert_eq!((answer.status, &answer.json["setting"]), (409, &"tls-cert".into()));
}

/// A client that sends nothing, or single bytes, is cut off after the time limit of a request, which the
/// bytes do not extend, and its place is free again. A client for whom there is no place is told so.
#[test]
fn slow_requests_are_cut_off_and_one_connection_too_many_is_told_so() {
    const PATIENCE: Duration = Duration::from_secs(60);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let _server = Server::start(UnixListener::bind(&path).unwrap(), api(), |_| {}).unwrap();
    let connect = || {
        let stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    };
    let mut silent: Vec<_> = (1..MAX_CONNECTIONS).map(|_| connect()).collect();
    let mut trickling = connect();
    assert!(answer(&mut connect()).starts_with("HTTP/1.1 503 "));
    let start = Instant::now();
    while trickling.write_all(b"G").is_ok() {
        assert!(start.elapsed() < PATIENCE, "the trickling client was never cut off");
        std::thread::sleep(Duration::from_millis(20));
    }
    silent.iter_mut().for_each(|silent| assert!(answer(silent).starts_with("HTTP/1.1 408 ")));
    let is_served = || {
        let mut client = connect();
        // A server that refuses it may close before all is written.
        let _ = client.write_all(&request("GET", "/v1/devices", ""));
        answer(&mut client).starts_with("HTTP/1.1 200 ")
    };
    while !is_served() {
        assert!(start.elapsed() < PATIENCE, "the places were not given back");
    }
}

#[test]
fn clients_are_listed_and_kicked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nbd.sock");
    let device = Device::new("zram0").unwrap();
    device.set("disksize", "1M").unwrap();
    let exports = Exports::new([device]);
    let server = nbd::Server::bind(nbd::ServerConfig::new(&path), exports.clone()).unwrap();
    let clients = server.clients();
    let api = Api { clients, ..Api::new(exports, Box::new(|_| Vec::new()), About::default()) };
    let server = server.spawn().unwrap();
    let list = |path: &str| ask(&api, &request("GET", path, "")).json["clients"].as_array().unwrap().clone();
    assert!(list("/v1/clients").is_empty());

    let mut client = UnixStream::connect(&path).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    client.read_exact(&mut [0; 18]).unwrap();
    let clients = list("/v1/clients");
    assert_eq!(clients.len(), 1);
    assert_eq!(clients[0]["listener"], format!("unix:{}", path.display()));
    assert_eq!(clients[0]["pid"], std::process::id());
    assert_eq!((&clients[0]["export"], &clients[0]["requests"]), (&Value::Null, &Value::from(0)));
    assert!(list("/v1/devices/zram0/clients").is_empty(), "it has not chosen");
    assert_eq!(ask(&api, &request("GET", "/v1/devices/none/clients", "")).status, 404);

    let ask_for = |method, id: &str| ask(&api, &request(method, &format!("/v1/clients/{id}"), "")).status;
    let id = clients[0]["id"].to_string();
    for (kicked, status) in
        [("x", 400), ("-1", 400), ("+1", 400), ("", 400), ("99999999999999999999", 400), ("77", 404)]
    {
        assert_eq!(ask_for("DELETE", kicked), status, "{kicked}");
    }
    assert_eq!((ask_for("GET", &id), ask_for("DELETE", &id)), (405, 204));
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    assert!(list("/v1/clients").is_empty());
    drop(server);
    assert_eq!(ask_for("DELETE", &id), 404);
}

const PAGE: &str = include_str!("../../../../docs/control.md");

/// An example on the page: what the first line of its block says, and its JSON.
type Example = (String, Value);

/// Returns the routes of the page, each with its first line and its examples.
fn documented() -> Vec<(String, String, Vec<Example>)> {
    let (_, section) = PAGE.split_once("\n## The control API\n").unwrap();
    let section = section.split("\n## ").next().unwrap();
    let routes = section.split("\n### `").skip(1).map(|text| {
        let (route, text) = text.split_once("`\n\n").unwrap();
        let blocks = text.split("```json").skip(1).map(|block| {
            let (kind, json) = block.split_once('\n').unwrap();
            let json = json.split("```").next().unwrap();
            let json = serde_json::from_str(json).unwrap_or_else(|why| panic!("{route}: {why}: {json}"));
            (kind.trim().to_owned(), json)
        });
        (route.to_owned(), text.lines().next().unwrap().to_owned(), blocks.collect())
    });
    routes.collect()
}

#[test]
fn the_page_documents_the_table() {
    let pages: Vec<_> = documented().into_iter().map(|(route, ..)| route).collect();
    let table: Vec<_> = ROUTES.iter().map(|route| format!("{} {}", route.method, route.path)).collect();
    let missing: Vec<_> = table.iter().filter(|route| !pages.contains(route)).collect();
    let unknown: Vec<_> = pages.iter().filter(|route| !table.contains(route)).collect();
    assert!(
        missing.is_empty() && unknown.is_empty(),
        "not documented: {missing:?}; not in the table: {unknown:?}"
    );
    for (route, (_, line, _)) in ROUTES.iter().zip(documented()) {
        let (method, path, about) = (route.method, route.path, route.about.trim_end_matches('.'));
        assert!(line.starts_with(about), "{method} {path}: {line}");
    }
    let listed = ask(&api(), &request("GET", "/v1", ""));
    assert_eq!(listed.json["routes"].as_array().unwrap().len(), table.len());
    assert_eq!(listed.json["routes"][1]["path"], "/v1/devices");
}

/// Checks that `real` has all the names of `example`, with values of the same type where both have one.
fn check_example(route: &str, example: &Value, real: &Value) {
    match (example, real) {
        (Value::Object(fields), Value::Object(real)) => fields.iter().for_each(|(name, field)| {
            let real = real
                .get(name)
                .unwrap_or_else(|| panic!("{route}: {name} is documented, but missing in {real:?}"));
            check_example(route, field, real);
        }),
        (Value::Array(values), Value::Array(real)) => {
            values.iter().zip(real).for_each(|(value, real)| check_example(route, value, real));
        }
        (Value::Null, _) | (_, Value::Null) => {}
        _ => {
            let same = std::mem::discriminant(example) == std::mem::discriminant(real);
            assert!(same, "{route}: {example} is documented, but it is {real}");
        }
    }
}

#[test]
fn the_examples_of_the_page_are_right() {
    let api = api();
    let mut compared = 0;
    for (route, _, blocks) in documented() {
        let (method, path) = route.split_once(' ').unwrap();
        let attribute = blocks.first().and_then(|(_, json)| json["name"].as_str()).unwrap_or("mem_limit");
        let path = path.replace("{name}", "zram0").replace("{attribute}", attribute).replace("{id}", "1");
        for (kind, example) in &blocks {
            let answer = match kind.as_str() {
                "request" => ask(&api, &request(method, &path, &example.to_string())),
                _ if method == "GET" => ask(&api, &request(method, &path, "")),
                _ => continue,
            };
            // What the request takes is not there in this test, but the request is understood.
            assert!(![400, 404, 405].contains(&answer.status), "{route}: {}", answer.json);
            if kind.is_empty() {
                check_example(&route, example, &answer.json);
            }
            compared += 1;
        }
    }
    assert!(compared > 10, "{compared}");
}
