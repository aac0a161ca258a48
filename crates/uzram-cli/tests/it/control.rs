//! The control socket of a real daemon: other clients, and hostile ones.

use std::process::Command;

use crate::common::{Place, finish, has_program};
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
