//! The control socket of a real daemon: other clients, and hostile ones.

use std::io::Write;
use std::process::Command;

use crate::common::{Place, ask, connect, finish, has_program};
use serde_json::Value;

#[test]
fn curl_is_enough() {
    if !has_program("curl") {
        println!("skipped: no curl");
        return;
    }
    let place = Place::new();
    let _daemon = place.up(&[]);
    let curl = |args: &[&str]| {
        let mut command = Command::new("curl");
        command.args(["-sS", "--max-time", "10", "-w", "%{http_code}", "--unix-socket"]);
        command.arg(place.socket("control.sock")).args(args);
        let text = finish(command).ok();
        let (body, status) = text.split_at(text.len() - 3);
        (status.to_owned(), serde_json::from_str(body).unwrap_or(Value::Null))
    };
    let base = "http://localhost/v1/devices";
    let (status, body) = curl(&[base]);
    assert_eq!((status.as_str(), &body["devices"][0]["name"]), ("200", &"zram0".into()));
    let limit = format!("{base}/zram0/attributes/mem_limit");
    assert_eq!(curl(&["-X", "PUT", "-d", r#"{"value": "4M"}"#, &limit]).0, "204");
    assert_eq!(curl(&[&limit]).1["value"], 4 << 20);
    let (status, body) = curl(&["-X", "PUT", "-d", "4M", &limit]);
    assert!(status == "400" && body["errno"] == 22 && body["setting"].is_null(), "{body}");
    let big = "x".repeat(100_000);
    assert_eq!(curl(&["-X", "PUT", "-d", &big, &limit]).0, "413");
    assert_eq!(curl(&["-H", &format!("X: {}", &big[..20_000]), base]).0, "431");
    assert_eq!(curl(&["-X", "DELETE", base]).0, "405");
    assert_eq!(curl(&["-X", "POST", &format!("{base}/zram0/reset")]).0, "204");
    assert_eq!(curl(&["-X", "POST", "http://localhost/v1/shutdown"]).0, "202");
}

#[test]
fn hostile_clients_disturb_nobody() {
    let place = Place::new();
    let daemon = place.up(&["--log", "debug"]);
    let socket = place.socket("control.sock");
    // These never finish their request, and stay connected.
    let slow: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = connect(&socket);
            stream.write_all(b"GET /v1/devices HTTP/1.1\r\nX: ").unwrap();
            stream
        })
        .collect();
    for (bytes, status) in [
        (b"\0\x01\x02\xff\r\n\r\n".to_vec(), "400"),
        (b"NBDMAGIC\0\0\0\x03".to_vec(), "400"),
        (b"GET /v1/devices HTTP/9.9\r\n\r\n".to_vec(), "400"),
        (b"GET /v1/devices HTTP/1.1\r\nContent-Length: -5\r\n\r\n".to_vec(), "400"),
        (b"PUT /v1/devices HTTP/1.1\r\nContent-Length: 70000\r\n\r\n".to_vec(), "413"),
        (vec![b'A'; 1 << 20], "431"),
        (b"GET / HTTP/1.1\r\n".iter().chain(b"a: b\r\n".repeat(100).iter()).copied().collect(), "431"),
    ] {
        let answer = ask(&socket, &bytes);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{status}: {answer}");
        assert!(place.run(&["list"]).ok().contains("zram0"));
    }
    // Some disconnect before the response, or within their request; with the slow ones there are fewer than
    // the 64 that the server accepts at once.
    for _ in 0..40 {
        connect(&socket).write_all(b"GET /v1/devices HTTP/1.1\r\n\r\n").unwrap();
    }
    assert!(place.run(&["stat", "zram0"]).ok().contains("stored"));
    assert_eq!(place.run(&["down"]).ok(), "");
    let (status, stderr) = daemon.ended();
    assert!(status.success() && !stderr.contains("panicked"), "{stderr}");
    drop(slow);
}
