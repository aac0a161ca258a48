//! NBD clients and control clients that users have: TLS and its reloading, `--listen`, libnbd, qemu, curl.

use crate::common::*;
use crate::nbd::pki::{Authority, Validity, write};

fn uris(daemon: &Daemon) -> Vec<String> {
    let lines = daemon.facts.lines().filter_map(|line| line.strip_prefix("export"));
    lines.map(|uri| uri.trim().to_owned()).collect()
}

/// Makes certificates in this place's directory; returns the options for TLS.
fn tls(place: &Place, client_ca: bool) -> String {
    Authority::new("authority").write_all(place.root());
    place.tls_options(client_ca)
}

/// Starts a daemon with a TCP port, one more Unix socket, and TLS with client certificates.
fn secure_daemon(place: &Place) -> Daemon {
    let (tls, extra) = (tls(place, true), place.path("extra.sock"));
    let daemon = place.up(&format!("--listen tcp:127.0.0.1:0 --listen unix:{extra} {tls}"));
    let announced = format!("nbds://127.0.0.1:{}/zram0", tls_port(&daemon));
    assert!(uris(&daemon).contains(&announced), "{}", daemon.facts);
    daemon
}

/// Returns the TCP port of a daemon with TLS. The URI has the machine's name, which the machine may not be
/// able to resolve.
fn tls_port(daemon: &Daemon) -> String {
    let uri = uris(daemon).into_iter().find(|uri| uri.starts_with("nbds://")).unwrap();
    uri.rsplit_once(':').unwrap().1.split('/').next().unwrap().to_owned()
}

/// Returns the URI of that port, for a client with these certificates.
fn uri(daemon: &Daemon, certificates: &Path) -> String {
    format!("nbds://127.0.0.1:{}/zram0?tls-certificates={}", tls_port(daemon), certificates.display())
}

/// Makes a directory of a client that trusts the server, but has no certificate.
fn bare(place: &Place) -> PathBuf {
    let bare = place.root().join("bare");
    fs::create_dir(&bare).unwrap();
    fs::copy(place.root().join("ca-cert.pem"), bare.join("ca-cert.pem")).unwrap();
    bare
}

fn size(place: &Place, uri: &str) -> u64 {
    succeed(place, "nbdinfo", &["--size", uri]).trim().parse().unwrap()
}

#[test]
fn libnbd_and_qemu_come_over_tls() {
    let Some(place) = Place::needing("nbdinfo nbdcopy qemu-img qemu-io") else { return };
    let daemon = secure_daemon(&place);
    let (uri, port) = (uri(&daemon, place.root()), tls_port(&daemon));
    let info = succeed(&place, "nbdinfo", &[&uri]);
    assert!(info.contains("with TLS") && info.contains("16777216"), "{info}");
    // Without a certificate, or without TLS, nobody comes.
    complain(&place, "nbdinfo", &[self::uri(&daemon, &bare(&place))]);
    let said = complain(&place, "nbdinfo", &[format!("nbd://127.0.0.1:{port}/zram0")]);
    assert!(said.contains("TLS"), "{said}");

    let source = random_file(&place, "source", 16 << 20);
    succeed(&place, "nbdcopy", &["--flush", arg(&source), &uri]);
    assert!(fs::read(place.copy_out(&uri, "copy")).unwrap() == fs::read(&source).unwrap());
    // The same bytes without TLS.
    place.assert_holds(&source);

    let credentials = format!("tls-creds-x509,id=tls,endpoint=client,dir={}", place.root().display());
    let image = format!("driver=nbd,host=127.0.0.1,port={port},export=zram0,tls-creds=tls");
    let options = ["--object", &credentials, "--image-opts", &image];
    let said = succeed(&place, "qemu-img", &[&["info"], &options[..]].concat());
    assert!(said.contains("virtual size: 16 MiB"), "{said}");
    let commands = ["-c", "write -P 0xab 1000 3M", "-c", "read -P 0xab 1000 3M", "-c", "write -z 8M 8M"];
    let said = succeed(&place, "qemu-io", &[&commands[..], &options].concat());
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

    let device = &place.json("list")["devices"][0];
    assert_eq!((&device["uri"], &device["uris"]), (&announced[0].as_str().into(), &announced.clone().into()));
    for command in ["list", "stat zram0"] {
        place.run(command).shows(&announced);
    }
    daemon.terminate();
    assert!(!extra.exists() && !place.socket("nbd.sock").exists());
}

#[test]
fn what_cannot_be_served_is_refused_in_one_line() {
    let place = Place::new();
    let authority = Authority::new("authority");
    let (cert, key) = authority.issue(Validity::Now);
    for (name, text) in [("cert", &cert), ("key", &key), ("ca", &authority.pem())] {
        write(place.root(), name, text);
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("up --size 1M --listen tcp:{}", listener.local_addr().unwrap());
    place.refuses(&[
        ("up --listen tcp:0.0.0.0:0", 2, &["tls-client-ca"]),
        ("up --listen tcp:192.0.2.1:10809", 2, &["tls-client-ca"]),
        ("up --listen tcp:[::ffff:10.0.0.1]:1", 2, &["tls-client-ca"]),
        ("up --listen tcp:[::]:0", 2, &["tls-client-ca"]),
        // Every client would be admitted, with TLS or without.
        ("up --listen tcp:0.0.0.0:0 --tls-cert DIR/cert --tls-key DIR/key", 2, &["tls-client-ca"]),
        ("up --listen tcp:0.0.0.0:0 --tls-anyone", 2, &["tls-cert"]),
        ("up --tls-anyone --tls-cert DIR/cert --tls-key DIR/key --tls-client-ca DIR/ca", 2, &["tls-anyone"]),
        ("up --listen tcp:localhost:0", 2, &["127.0.0.1"]),
        ("up --listen 10809", 2, &["tcp:ADDRESS:PORT"]),
        ("up --size 1M --listen unix:DIR/cert", 1, &["not a socket"]),
        (&taken, 1, &["another server"]),
        ("up --tls-cert DIR/cert", 2, &["--tls-key"]),
        ("up --tls-key DIR/key", 2, &["--tls-cert"]),
        ("up --tls-client-ca DIR/cert", 2, &["--tls-cert"]),
        ("up --tls-cert DIR/none --tls-key DIR/key", 1, &["tls-cert"]),
        ("up --max-connections 0", 2, &["--max-connections"]),
    ]);
    assert!(!place.socket("nbd.sock").exists());
}

#[test]
fn everyone_is_let_in_where_that_is_said() {
    let Some(place) = Place::needing("nbdinfo") else { return };
    let daemon = place.up(&format!("--tls-anyone --listen tcp:0.0.0.0:0 {}", tls(&place, false)));
    let uri = uri(&daemon, &bare(&place));
    assert_eq!(size(&place, &uri), 16 << 20);
    // No client is served without TLS.
    complain(&place, "nbdinfo", &[uri.replace("nbds://", "nbd://")]);
}

#[test]
fn curl_is_enough() {
    let Some(place) = Place::needing("curl") else { return };
    let _daemon = place.up("");
    let curl = |args: &[&str]| {
        let mut command = Command::new("curl");
        command.args(["-sS", "--max-time", "10", "-w", "%{http_code}", "--unix-socket"]);
        let text = finish(command.arg(place.socket("control.sock")).args(args)).ok();
        let (body, status) = text.split_at(text.len() - 3);
        (status.parse::<u32>().unwrap(), serde_json::from_str(body).unwrap_or(Value::Null))
    };
    let base = "http://localhost/v1/devices";
    let (status, body) = curl(&[base]);
    assert_eq!((status, &body["devices"][0]["name"]), (200, &"zram0".into()));
    let limit = format!("{base}/zram0/attributes/mem_limit");
    assert_eq!(curl(&["-X", "PUT", "-d", r#"{"value": "4M"}"#, &limit]).0, 204);
    assert_eq!(curl(&[&limit]).1["value"], 4 << 20);
    let (status, body) = curl(&["-X", "PUT", "-d", "4M", &limit]);
    assert!(status == 400 && body["errno"] == 22 && body["setting"].is_null(), "{body}");
    assert_eq!(curl(&["-X", "POST", &format!("{base}/zram0/reset")]).0, 204);
    assert_eq!(curl(&["-X", "POST", "http://localhost/v1/shutdown"]).0, 202);
}

fn config(dir: &Path) -> String {
    "listen = 'tcp:127.0.0.1:0'\ntls-cert = 'DIR/server-cert.pem'\ntls-key = 'DIR/server-key.pem'\n\
     tls-client-ca = 'DIR/ca-cert.pem'\nmax-connections = 20\n[zram0]\nsize = '1M'\n"
        .replace("DIR", arg(dir))
}

/// Creates a directory with new certificates of a new authority.
fn certificates(place: &Place, name: &str) -> PathBuf {
    let dir = place.root().join(name);
    fs::create_dir(&dir).unwrap();
    Authority::new(name).write_all(&dir);
    dir
}

fn replace(dir: &Path, new: &Path) {
    for entry in fs::read_dir(new).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        write(dir, &name, &fs::read_to_string(new.join(&name)).unwrap());
    }
}

fn is_let_in(place: &Place, uri: &str) -> bool {
    run(place, "nbdinfo", &["--size", uri]).status.success()
}

#[test]
fn certificates_are_read_again_and_contents_and_clients_stay() {
    let Some(place) = Place::needing("nbdinfo") else { return };
    let [live, first, second] = ["live", "first", "second"].map(|name| certificates(&place, name));
    replace(&live, &first);
    let daemon = place.up_config(&config(&live), "");
    let [old, new] = [&first, &second].map(|dir| uri(&daemon, dir));
    assert!(is_let_in(&place, &old) && !is_let_in(&place, &new));
    let (mut client, contents) = (place.nbd(), [0x5a; 4096]);
    assert_eq!(client.write(0, &contents).error, 0);

    replace(&live, &second);
    assert!(is_let_in(&place, &old), "nobody said that they were to be read");
    assert_eq!(place.run("reload").ok(), "");
    assert!(is_let_in(&place, &new) && !is_let_in(&place, &old));
    assert_eq!(client.read(0, 0, 4096).data(), contents);

    // An invalid file leaves everything unchanged.
    write(&live, "server-key.pem", "x");
    let ended = place.run("reload");
    ended.begins(1, "cannot reload: ");
    ended.says(1, "tls-key");
    for _ in 0..20 {
        daemon.signal(Signal::HUP);
    }
    assert!(is_let_in(&place, &new) && !is_let_in(&place, &old));
    // A hang-up has them read, too.
    replace(&live, &first);
    daemon.signal(Signal::HUP);
    wait_until("the first ones are in force", || is_let_in(&place, &old));
    assert!(!is_let_in(&place, &new));
    assert_eq!(client.read(0, 0, 4096).data(), contents);
    drop(client);
    let log = place.end(daemon);
    assert!(log.contains("ERROR") && log.contains("stays in force"), "{log}");
}

#[test]
fn without_tls_there_is_nothing_to_reload() {
    let place = Place::new();
    let daemon = place.up_config("[zram0]\nsize = '1M'\n", "");
    place.run("reload").says(1, "this server speaks no TLS");
    daemon.signal(Signal::HUP);
    assert_eq!(place.number("disksize"), 1 << 20);
    let log = daemon.terminate();
    assert!(log.contains("speaks no TLS"), "{log}");
}

#[test]
fn a_setting_is_in_the_file_or_on_the_command_line() {
    let Some(place) = Place::needing("nbdinfo") else { return };
    let dir = certificates(&place, "live");
    let key = arg(&dir.join("server-key.pem")).to_owned();
    let ended = place.run(&["up", "--config", &place.write("uzram.toml", config(&dir)), "--tls-key", &key]);
    ended.begins(2, "--tls-key");
    ended.says(2, "give it in one of them");
    let half: Vec<String> = config(&dir)
        .lines()
        .filter(|line| !line.starts_with("tls-key"))
        .map(|line| format!("{line}\n"))
        .collect();
    let daemon = place.up_config(&half.concat(), &["--tls-key", &key]);
    assert_eq!(size(&place, &uri(&daemon, &dir)), 1 << 20);
    complain(&place, "nbdinfo", &[format!("nbd://127.0.0.1:{}", tls_port(&daemon))]);
}
