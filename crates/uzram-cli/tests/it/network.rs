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
    let daemon = place.up_sized("64M", &format!("--listen tcp:127.0.0.1:0 --listen unix:{extra} {tls}"));
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

/// Returns the size of the disk that a client sees.
fn size(place: &Place, uri: &str) -> u64 {
    succeed(place, "nbdinfo", &["--size", uri]).trim().parse().unwrap()
}

#[test]
fn libnbd_and_qemu_come_over_tls() {
    let Some(place) = Place::needing("nbdinfo nbdcopy qemu-img qemu-io") else { return };
    let daemon = secure_daemon(&place);
    let (uri, port) = (uri(&daemon, place.root()), tls_port(&daemon));
    let info = succeed(&place, "nbdinfo", &[&uri]);
    assert!(info.contains("with TLS") && info.contains("67108864"), "{info}");

    let source = random_file(&place, "source", 64 << 20);
    succeed(&place, "nbdcopy", &["--flush", arg(&source), &uri]);
    assert!(fs::read(place.copy_out(&uri, "copy")).unwrap() == fs::read(&source).unwrap());
    // The same bytes without TLS.
    place.assert_holds(&source);

    let credentials = format!("tls-creds-x509,id=tls,endpoint=client,dir={}", place.root().display());
    let image = format!("driver=nbd,host=127.0.0.1,port={port},export=zram0,tls-creds=tls");
    let options = ["--object", &credentials, "--image-opts", &image];
    let said = succeed(&place, "qemu-img", &[&["info"], &options[..]].concat());
    assert!(said.contains("virtual size: 64 MiB"), "{said}");
    let commands = ["-c", "write -P 0xab 1000 3M", "-c", "read -P 0xab 1000 3M", "-c", "write -z 8M 8M"];
    let said = succeed(&place, "qemu-io", &[&commands[..], &options].concat());
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn who_does_not_fit_is_kept_out() {
    let Some(place) = Place::needing("nbdinfo qemu-img") else { return };
    let daemon = secure_daemon(&place);
    let stranger = place.root().join("stranger");
    fs::create_dir(&stranger).unwrap();
    Authority::new("stranger").write_all(&stranger);
    complain(&place, "nbdinfo", &[uri(&daemon, &stranger)]);
    complain(&place, "nbdinfo", &[uri(&daemon, &bare(&place))]);
    let plain = format!("nbd://127.0.0.1:{}/zram0", tls_port(&daemon));
    let said = complain(&place, "nbdinfo", &[&plain]);
    assert!(said.contains("TLS"), "{said}");
    complain(&place, "qemu-img", &["info", &plain]);
    // Meanwhile, a valid client is served.
    for good in [uri(&daemon, place.root()), place.uri()] {
        assert_eq!(size(&place, &good), 64 << 20);
    }
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
fn a_command_knows_all_the_ways_to_the_disk() {
    let place = Place::new();
    let command = "echo $uri; for each in $uris; do echo $each; done";
    let said = place.run(&["up", "--size", "1M", "--listen", "tcp:127.0.0.1:0", "--exec", command]).ok();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[..2], [place.uri(), place.uri()]);
    assert!(lines.len() == 3 && lines[2].starts_with("nbd://127.0.0.1:"), "{said}");
}

#[test]
fn what_cannot_be_served_is_refused_in_one_line() {
    let place = Place::new();
    let authority = Authority::new("authority");
    authority.write_all(place.root());
    write(place.root(), "expired.pem", &authority.issue(Validity::Past).0);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("--listen tcp:{}", listener.local_addr().unwrap());
    for (options, code, said) in [
        ("--listen tcp:0.0.0.0:0", 2, "tls-client-ca"),
        ("--listen tcp:192.0.2.1:10809", 2, "tls-client-ca"),
        ("--listen tcp:[::ffff:10.0.0.1]:1", 2, "tls-client-ca"),
        ("--listen tcp:[::]:0", 2, "tls-client-ca"),
        // Every client would be admitted, with TLS or without.
        ("--listen tcp:0.0.0.0:0 --tls-cert CERT --tls-key KEY", 2, "tls-client-ca"),
        ("--listen tcp:0.0.0.0:0 --tls-anyone", 2, "tls-cert"),
        ("--tls-anyone --tls-cert CERT --tls-key KEY --tls-client-ca DIR/ca-cert.pem", 2, "tls-anyone"),
        ("--listen tcp:localhost:0", 2, "127.0.0.1"),
        ("--listen 10809", 2, "tcp:ADDRESS:PORT"),
        ("--listen unix:CERT", 1, "not a socket"),
        (&taken, 1, "another server"),
        ("--tls-cert CERT", 2, "--tls-key"),
        ("--tls-key KEY", 2, "--tls-cert"),
        ("--tls-client-ca CERT", 2, "--tls-cert"),
        ("--tls-cert CERT --tls-key DIR/client-key.pem", 1, "does not belong"),
        ("--tls-cert DIR/expired.pem --tls-key KEY", 1, "expired"),
        ("--tls-cert DIR/none.pem --tls-key KEY", 1, "tls-cert"),
        ("--max-connections 0", 2, "--max-connections"),
    ] {
        let options = options.replace("CERT", "DIR/server-cert.pem").replace("KEY", "DIR/server-key.pem");
        let options = options.replace("DIR", arg(place.root()));
        place.run(&format!("up --size 1M {options}")).says(code, said);
        assert!(!place.socket("nbd.sock").exists());
    }
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
fn a_key_that_everybody_can_read_is_refused() {
    let place = Place::new();
    let up = format!("up --size 1M --exec true {}", tls(&place, false));
    let ended = place.run(&up);
    assert!(ended.status.success() && !ended.stderr.contains("WARN"), "{ended}");
    set_mode(&place.path("server-key.pem"), 0o644);
    place.run(&up).says(1, "every user of this machine may read this key");
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
    let big = "x".repeat(100_000);
    for (args, status) in [
        (&["-X", "PUT", "-d", &big, &limit][..], 413),
        (&["-H", &format!("X: {}", &big[..20_000]), base], 431),
        (&["-X", "DELETE", base], 405),
        (&["-X", "POST", &format!("{base}/zram0/reset")], 204),
        (&["-X", "POST", "http://localhost/v1/shutdown"], 202),
    ] {
        assert_eq!(curl(args).0, status, "{:?}", &args[..2]);
    }
}

#[test]
fn hostile_clients_disturb_nobody() {
    let place = Place::new();
    let daemon = place.up("--log debug");
    let socket = place.socket("control.sock");
    // These never finish their request, and stay connected.
    let slow = (0..20).map(|_| {
        let mut stream = connect(&socket);
        stream.write_all(b"GET /v1/devices HTTP/1.1\r\nX: ").unwrap();
        stream
    });
    let _slow: Vec<_> = slow.collect();
    let headers = [&b"GET / HTTP/1.1\r\n"[..], &b"a: b\r\n".repeat(100)].concat();
    for (bytes, status) in [
        (&b"\0\x01\x02\xff\r\n\r\n"[..], 400),
        (b"NBDMAGIC\0\0\0\x03", 400),
        (b"GET /v1/devices HTTP/9.9\r\n\r\n", 400),
        (b"GET /v1/devices HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
        (b"PUT /v1/devices HTTP/1.1\r\nContent-Length: 70000\r\n\r\n", 413),
        (&[b'A'; 1 << 20], 431),
        (&headers, 431),
    ] {
        let answer = ask(&socket, bytes);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{status}: {answer}");
        place.run("list").shows(&["zram0"]);
    }
    // Some disconnect before the response, or within their request; with the slow ones there are fewer than
    // the 64 that the server accepts at once.
    for end in ["\r\n\r\n", ""].repeat(20) {
        connect(&socket).write_all(format!("GET /v1/devices HTTP/1.1{end}").as_bytes()).unwrap();
    }
    place.run("stat zram0").shows(&["stored"]);
    assert_eq!(place.run("down").ok(), "");
    let said = daemon.succeeds();
    assert!(!said.contains("panicked"), "{said}");
}

/// Returns a configuration with TLS from the files in `dir`.
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

/// Replaces the files in `dir` by those in `new`.
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
    let Some(place) = Place::needing("nbdinfo qemu-io") else { return };
    let [live, first, second] = ["live", "first", "second"].map(|name| certificates(&place, name));
    replace(&live, &first);
    let daemon = place.up_config(&config(&live), "");
    let [old, new] = [&first, &second].map(|dir| uri(&daemon, dir));
    assert!(is_let_in(&place, &old) && !is_let_in(&place, &new));
    let mut client = Connected::new(&place, &place.uri());
    client.command("write -P 0x5a 0 64k", "wrote");

    replace(&live, &second);
    assert!(is_let_in(&place, &old), "nobody said that they were to be read");
    assert_eq!(place.run("reload").ok(), "");
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
        let ended = place.run("reload");
        ended.begins(1, "cannot reload: ");
        ended.says(1, setting);
        assert!(is_let_in(&place, &new) && !is_let_in(&place, &old));
        write(&live, name, &good);
    }
    if !not_root() {
        chown(live.join("ca-cert.pem"), Some(NOBODY), None).unwrap();
        place.run("reload").says(1, "belongs to user 65534");
        assert!(is_let_in(&place, &new));
    }
    client.command("read -P 0x5a 0 64k", "read");
    drop(client);
    let log = place.end(daemon);
    assert!(log.contains("ERROR") && log.contains("stays in force"), "{log}");
}

#[test]
fn a_hang_up_reloads_a_daemon_with_a_configuration_file() {
    let Some(place) = Place::needing("nbdinfo") else { return };
    let [live, first, second] = ["live", "first", "second"].map(|name| certificates(&place, name));
    replace(&live, &first);
    let daemon = place.up_config(&config(&live), "");
    let [old, new] = [&first, &second].map(|dir| uri(&daemon, dir));
    assert!(is_let_in(&place, &old));
    replace(&live, &second);
    daemon.signal(Signal::HUP);
    wait_until("new certificates are in force", || is_let_in(&place, &new));
    write(&live, "server-key.pem", "nothing");
    for _ in 0..20 {
        daemon.signal(Signal::HUP);
    }
    assert!(is_let_in(&place, &new) && !is_let_in(&place, &old));
    let log = daemon.terminate();
    assert!(log.contains("stays in force"), "{log}");
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
    place.run("reload").says(3, "no daemon is running");
}

#[test]
fn a_setting_is_given_once_and_completely() {
    let place = Place::new();
    let dir = certificates(&place, "live");
    let [cert, key] = ["server-cert.pem", "server-key.pem"].map(|name| arg(&dir.join(name)).to_owned());
    let up = |text: &str, options: &str| {
        place.run(&format!("up --config {} {options}", place.write("uzram.toml", text)))
    };
    for (option, value) in
        [("--tls-cert", &*cert), ("--tls-key", &cert), ("--tls-client-ca", &cert), ("--max-connections", "3")]
    {
        let ended = up(&config(&dir), &format!("{option} {value}"));
        ended.begins(2, option);
        ended.says(2, "give it in one of them");
    }
    let without = |key: &str| {
        let text = config(&dir).replace("127.0.0.1", "0.0.0.0");
        let kept = text.lines().filter(|line| !line.starts_with(key)).map(|line| format!("{line}\n"));
        kept.collect::<String>()
    };
    up(&without("tls-key"), "").says(2, "tls-cert is given without tls-key");
    up(&without("tls-client-ca"), "").says(2, "tls-client-ca");
    up(&without("nothing"), "--tls-anyone").says(2, "tls-anyone lets everyone in");
    let text = without("tls-client-ca").replace("max-connections", "tls-anyone = true\nmax-connections");
    up(&text, "--tls-anyone").begins(2, "--tls-anyone: ");
    if missing("nbdinfo") {
        return;
    }
    // One half may be in the file, and the other on the command line.
    let daemon = place.up_config(&without("tls-key"), &["--tls-key", &key]);
    assert_eq!(size(&place, &uri(&daemon, &dir)), 1 << 20);
    complain(&place, "nbdinfo", &[format!("nbd://127.0.0.1:{}", tls_port(&daemon))]);
}
