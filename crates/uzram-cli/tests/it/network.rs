//! NBD clients and control clients that users have: TLS and its reloading, `--listen`, libnbd, qemu, curl.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::clients::{Connected, arg, complain, random_file, run, same, succeed};
use crate::common::{Daemon, Place, finish, has_program, wait_until};
use crate::nbd::pki::{Authority, write};
use rustix::process::Signal;
use serde_json::Value;

fn uris(daemon: &Daemon) -> Vec<String> {
    daemon
        .facts
        .lines()
        .filter_map(|line| line.strip_prefix("export"))
        .map(|uri| uri.trim().to_owned())
        .collect()
}

/// Returns the options for TLS with the files in the place's root.
fn tls_options(place: &Place, client_ca: bool) -> Vec<String> {
    let file = |name: &str| place.root().join(name).to_str().unwrap().to_owned();
    let mut options = vec!["--tls-cert".to_owned(), file("server-cert.pem")];
    options.extend(["--tls-key".to_owned(), file("server-key.pem")]);
    if client_ca {
        options.extend(["--tls-client-ca".to_owned(), file("ca-cert.pem")]);
    }
    options
}

/// Starts a daemon with a TCP port, one more Unix socket, and TLS with client certificates.
fn secure_daemon(place: &Place) -> Daemon {
    Authority::new("authority").write_all(place.root());
    let extra = format!("unix:{}", place.root().join("extra.sock").display());
    let options = tls_options(place, true);
    let mut args = vec!["--listen", "tcp:127.0.0.1:0", "--listen", &extra];
    args.extend(options.iter().map(String::as_str));
    place.up_sized("64M", &args)
}

/// Returns the URI of the TCP port, without parameters, and its port.
fn tcp(daemon: &Daemon) -> (String, String) {
    let uri = uris(daemon).into_iter().find(|uri| uri.starts_with("nbds://")).unwrap();
    let port = uri.strip_prefix("nbds://127.0.0.1:").unwrap().strip_suffix("/zram0").unwrap().to_owned();
    (uri, port)
}

#[test]
fn libnbd_and_qemu_come_over_tls() {
    let Some(place) = Place::needing(&["nbdinfo", "nbdcopy", "qemu-img", "qemu-io"]) else { return };
    let daemon = secure_daemon(&place);
    let (uri, port) = tcp(&daemon);
    let uri = format!("{uri}?tls-certificates={}", place.root().display());
    let info = succeed(&place, "nbdinfo", &[&uri]);
    assert!(info.contains("with TLS") && info.contains("67108864"), "{info}");

    let (source, copy) = (random_file(&place, "source", 64 << 20), place.root().join("copy"));
    succeed(&place, "nbdcopy", &["--flush", arg(&source), &uri]);
    succeed(&place, "nbdcopy", &[&uri, arg(&copy)]);
    assert!(same(&source, &copy));
    // The same bytes without TLS.
    succeed(&place, "nbdcopy", &[&place.uri(), arg(&copy)]);
    assert!(same(&source, &copy));

    let credentials = format!("tls-creds-x509,id=tls,endpoint=client,dir={}", place.root().display());
    let image = format!("driver=nbd,host=127.0.0.1,port={port},export=zram0,tls-creds=tls");
    let said = succeed(&place, "qemu-img", &["info", "--object", &credentials, "--image-opts", &image]);
    assert!(said.contains("virtual size: 64 MiB"), "{said}");
    let commands = ["-c", "write -P 0xab 1000 3M", "-c", "read -P 0xab 1000 3M", "-c", "write -z 8M 8M"];
    let mut args = vec!["--object", &credentials, "--image-opts"];
    args.extend(commands);
    args.push(&image);
    let said = succeed(&place, "qemu-io", &args);
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn every_place_is_announced_listed_and_cleared_away() {
    let place = Place::new();
    let daemon = secure_daemon(&place);
    let announced = uris(&daemon);
    let extra = place.root().join("extra.sock");
    assert_eq!(announced[0], place.uri());
    let schemes: Vec<&str> = announced.iter().map(|uri| uri.split_once("://").unwrap().0).collect();
    assert_eq!(schemes, ["nbd+unix", "nbds+unix", "nbds", "nbd+unix", "nbds+unix"]);
    assert!(announced[3].ends_with(&format!("?socket={}", extra.display())), "{announced:?}");
    assert_eq!(extra.symlink_metadata().unwrap().permissions().mode() & 0o777, 0o600);

    let json = place.json(&["list"]);
    assert_eq!(json["devices"][0]["uri"], announced[0].as_str());
    let listed: Vec<&str> =
        json["devices"][0]["uris"].as_array().unwrap().iter().map(|uri| uri.as_str().unwrap()).collect();
    assert_eq!(listed, announced);
    for said in [place.run(&["list"]).ok(), place.run(&["stat", "zram0"]).ok()] {
        assert!(announced.iter().all(|uri| said.contains(uri.as_str())), "{said}");
    }

    daemon.terminate();
    assert!(!extra.exists() && !place.socket("nbd.sock").exists());
}

#[test]
fn what_cannot_be_served_is_refused_in_one_line() {
    let place = Place::new();
    Authority::new("authority").write_all(place.root());
    let file = |name: &str| place.root().join(name).to_str().unwrap().to_owned();
    let (cert, key, ca) = (file("server-cert.pem"), file("server-key.pem"), file("ca-cert.pem"));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp:{}", listener.local_addr().unwrap());
    let everywhere = ["up", "--listen", "tcp:0.0.0.0:0"];
    let tls = ["--tls-cert", &cert, "--tls-key", &key];
    place.refuses(&[
        (&everywhere, 2, &["tls-client-ca"]),
        // Every client would be admitted, with TLS or without.
        (&[&everywhere[..], &tls].concat(), 2, &["tls-client-ca"]),
        (&[&everywhere[..], &["--tls-anyone"]].concat(), 2, &["tls-cert"]),
        (&[&["up", "--tls-anyone", "--tls-client-ca", &ca], &tls[..]].concat(), 2, &["tls-anyone"]),
        (&["up", "--listen", "10809"], 2, &["tcp:ADDRESS:PORT"]),
        (&["up", "--listen", &format!("unix:{cert}")], 1, &["not a socket"]),
        (&["up", "--listen", &taken], 1, &["another server"]),
        (&["up", "--tls-cert", &cert], 2, &["--tls-key"]),
        (&["up", "--tls-key", &key], 2, &["--tls-cert"]),
        (&["up", "--tls-client-ca", &cert], 2, &["--tls-cert"]),
        (&["up", "--tls-cert", &cert, "--tls-key", &file("client-key.pem")], 1, &["does not belong"]),
        (&["up", "--max-connections", "0"], 2, &["--max-connections"]),
    ]);
    assert!(!place.socket("nbd.sock").exists());
}

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
fn a_file_system_comes_back_whole() {
    let Some(place) = Place::needing(&["mkfs.ext4", "e2fsck", "nbdcopy", "nbdinfo"]) else { return };
    let _daemon = place.up_sized("64M", &[]);
    let (image, copy) = (place.root().join("image"), place.root().join("copy"));
    // The sources of all crates: a real tree.
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    succeed(&place, "mkfs.ext4", &["-q", "-d", arg(tree), arg(&image), "64M"]);
    assert_eq!(succeed(&place, "nbdinfo", &["--size", &place.uri()]).trim(), "67108864");

    succeed(&place, "nbdcopy", &["--flush", arg(&image), &place.uri()]);
    succeed(&place, "nbdcopy", &[&place.uri(), arg(&copy)]);
    assert!(same(&image, &copy));
    succeed(&place, "e2fsck", &["-f", "-n", arg(&copy)]);
    let (stored, charged) = (place.statistic("orig_data_bytes"), place.statistic("mem_charged_bytes"));
    assert!(stored > 0 && charged < stored, "{charged} bytes for {stored}");
}

#[test]
fn devices_are_added_used_and_removed() {
    let Some(place) = Place::needing(&["nbdcopy", "nbdinfo", "qemu-io"]) else { return };
    let _daemon = place.up(&[]);
    let added =
        place.run(&["add", "logs", "--size", "8M", "--algorithm", "zstd:3", "--mem-limit", "4M"]).ok();
    let uri = added.trim();
    assert!(uri.starts_with("nbd+unix:///logs?socket="), "{added}");
    assert_eq!(succeed(&place, "nbdinfo", &["--size", uri]).trim(), "8388608");
    assert_eq!(place.run(&["stat", "logs", "mem_limit"]).ok(), "4194304\n");
    place.run(&["stat", "logs", "comp_algorithm"]).shows(&["[zstd:3]"]);
    assert!(succeed(&place, "nbdinfo", &["--list", &place.uri()]).contains("\"logs\""));

    // Each device has its own contents for every client.
    let (first, second) = (random_file(&place, "first", 2 << 20), random_file(&place, "second", 3 << 20));
    succeed(&place, "nbdcopy", &[arg(&first), &place.uri()]);
    succeed(&place, "nbdcopy", &[arg(&second), uri]);
    for (uri, file) in [(place.uri().as_str(), &first), (uri, &second)] {
        let copy = place.root().join("copy");
        succeed(&place, "nbdcopy", &[uri, arg(&copy)]);
        assert!(std::fs::read(&copy).unwrap().starts_with(&std::fs::read(file).unwrap()));
    }

    place.run(&["add", "logs"]).says(1, "there is a device 'logs' already");
    let user = Connected::new(&place, uri);
    place.run(&["remove", "logs"]).says(1, "in use (users: 1)");
    drop(user);
    wait_until("it can be removed", || place.run(&["remove", "logs"]).status.success());
    assert!(!place.run(&["list"]).ok().contains("logs"));
    complain(&place, "nbdinfo", &[uri]);
    assert_eq!(succeed(&place, "nbdinfo", &["--size", &place.uri()]).trim(), "16777216");
}

fn config(dir: &Path) -> String {
    let file = |name: &str| dir.join(name).display().to_string();
    format!(
        "listen = 'tcp:127.0.0.1:0'\ntls-cert = '{}'\ntls-key = '{}'\ntls-client-ca = '{}'\nmax-connections = 20\n\
         [zram0]\nsize = '1M'\n",
        file("server-cert.pem"),
        file("server-key.pem"),
        file("ca-cert.pem"),
    )
}

/// Creates a directory with new certificates of a new authority.
fn certificates(place: &Place, name: &str) -> PathBuf {
    let dir = place.root().join(name);
    fs::create_dir(&dir).unwrap();
    Authority::new(name).write_all(&dir);
    dir
}

/// Replaces the files in `dir` by those in `new`.
fn replace(dir: &Path, new: &Path) {
    for entry in fs::read_dir(new).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        write(dir, &name, &fs::read_to_string(new.join(&name)).unwrap());
    }
}

/// Returns the URI of the daemon's TCP port, for a client with these certificates.
fn uri(daemon: &Daemon, certificates: &Path) -> String {
    let line = daemon.facts.lines().find(|line| line.contains("nbds://127.0.0.1:")).unwrap();
    format!("{}?tls-certificates={}", line.split_whitespace().nth(1).unwrap(), certificates.display())
}

fn is_let_in(place: &Place, uri: &str) -> bool {
    run(place, "nbdinfo", &["--size", uri]).status.success()
}

#[test]
fn certificates_are_read_again_and_contents_and_clients_stay() {
    let Some(place) = Place::needing(&["nbdinfo", "qemu-io"]) else { return };
    let [live, first, second] = ["live", "first", "second"].map(|name| certificates(&place, name));
    replace(&live, &first);
    let daemon = place.up_config(&config(&live), &[]);
    let (old, new) = (uri(&daemon, &first), uri(&daemon, &second));
    assert!(is_let_in(&place, &old) && !is_let_in(&place, &new));
    let mut client = Connected::new(&place, &place.uri());
    client.command("write -P 0x5a 0 64k", "wrote");

    replace(&live, &second);
    assert!(is_let_in(&place, &old), "nobody said that they were to be read");
    assert_eq!(place.run(&["reload"]).ok(), "");
    assert!(is_let_in(&place, &new) && !is_let_in(&place, &old));
    client.command("read -P 0x5a 0 64k", "read");

    // An invalid file leaves everything unchanged.
    for (name, text, setting) in [
        ("server-cert.pem", "", "tls-cert"),
        ("server-key.pem", "x", "tls-key"),
        ("ca-cert.pem", "", "tls-client-ca"),
    ] {
        let good = fs::read_to_string(live.join(name)).unwrap();
        write(&live, name, text);
        let ended = place.run(&["reload"]);
        let line = ended.complaint(1);
        assert!(line.starts_with("cannot reload: ") && line.contains(setting), "{line}");
        assert!(is_let_in(&place, &new) && !is_let_in(&place, &old));
        write(&live, name, &good);
    }
    if rustix::process::geteuid().is_root() {
        chown(live.join("ca-cert.pem"), Some(65534), None).unwrap();
        place.run(&["reload"]).says(1, "belongs to user 65534");
        assert!(is_let_in(&place, &new));
    } else {
        println!("skipped: this user is not root, and cannot give files away");
    }
    client.command("read -P 0x5a 0 64k", "read");
    drop(client);
    place.down();
    let (status, log) = daemon.ended();
    assert!(status.success() && log.contains("ERROR") && log.contains("stays in force"), "{log}");
}

#[test]
fn a_hang_up_reloads_a_daemon_with_a_configuration_file() {
    let Some(place) = Place::needing(&["nbdinfo"]) else { return };
    let [live, first, second] = ["live", "first", "second"].map(|name| certificates(&place, name));
    replace(&live, &first);
    let daemon = place.up_config(&config(&live), &[]);
    let (old, new) = (uri(&daemon, &first), uri(&daemon, &second));
    assert!(is_let_in(&place, &old));
    replace(&live, &second);
    daemon.signal(Signal::HUP);
    wait_until("new certificates are in force", || is_let_in(&place, &new));
    write(&live, "server-key.pem", "nothing");
    for _ in 0..20 {
        daemon.signal(Signal::HUP);
    }
    assert!(is_let_in(&place, &new) && !is_let_in(&place, &old));
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.ended();
    assert!(status.success() && log.contains("stays in force"), "{log}");
}

#[test]
fn without_tls_there_is_nothing_to_reload() {
    let place = Place::new();
    let daemon = place.up_config("[zram0]\nsize = '1M'\n", &[]);
    place.run(&["reload"]).says(1, "this server speaks no TLS");
    daemon.signal(Signal::HUP);
    assert_eq!(place.number("disksize"), 1 << 20);
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.ended();
    assert!(status.success() && log.contains("speaks no TLS"), "{log}");
    place.run(&["reload"]).says(3, "no daemon is running");
}
