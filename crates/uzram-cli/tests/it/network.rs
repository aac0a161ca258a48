//! `--listen` and TLS: common clients, and invalid command lines.

use std::os::unix::fs::PermissionsExt;

use crate::common::clients::{arg, complain, random_file, same, succeed};
use crate::common::{Daemon, Place};
use crate::nbd::pki::{Authority, Validity, write};

/// Returns the announced URIs.
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
fn who_does_not_fit_is_kept_out() {
    let Some(place) = Place::needing(&["nbdinfo", "qemu-img"]) else { return };
    let daemon = secure_daemon(&place);
    let (uri, port) = tcp(&daemon);
    let stranger = place.root().join("stranger");
    std::fs::create_dir(&stranger).unwrap();
    Authority::new("stranger").write_all(&stranger);
    complain(&place, "nbdinfo", &[&format!("{uri}?tls-certificates={}", stranger.display())]);
    // A client that trusts the server, but has no certificate.
    let bare = place.root().join("bare");
    std::fs::create_dir(&bare).unwrap();
    std::fs::copy(place.root().join("ca-cert.pem"), bare.join("ca-cert.pem")).unwrap();
    complain(&place, "nbdinfo", &[&format!("{uri}?tls-certificates={}", bare.display())]);
    let plain = uri.replace("nbds://", "nbd://");
    let said = complain(&place, "nbdinfo", &[&plain]);
    assert!(said.contains("TLS"), "{said}");
    complain(&place, "qemu-img", &["info", &format!("nbd://127.0.0.1:{port}/zram0")]);
    // Meanwhile, a valid client is served.
    let good = format!("{uri}?tls-certificates={}", place.root().display());
    assert_eq!(succeed(&place, "nbdinfo", &["--size", &good]).trim(), "67108864");
    assert_eq!(succeed(&place, "nbdinfo", &["--size", &place.uri()]).trim(), "67108864");
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
    let (cert, _) = authority.issue(Validity::Past);
    let expired = write(place.root(), "expired.pem", &cert);
    let file = |name: &str| place.root().join(name).to_str().unwrap().to_owned();
    let (cert, key, other) = (file("server-cert.pem"), file("server-key.pem"), file("client-key.pem"));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp:{}", listener.local_addr().unwrap());
    let in_the_way = format!("unix:{cert}");
    for (args, code, words) in [
        (&["--listen", "tcp:0.0.0.0:0"][..], 2, "tls-client-ca"),
        (&["--listen", "tcp:[::]:0"], 2, "tls-client-ca"),
        // Every client would be admitted, with TLS or without.
        (&["--listen", "tcp:0.0.0.0:0", "--tls-cert", &cert, "--tls-key", &key], 2, "tls-client-ca"),
        (&["--listen", "tcp:0.0.0.0:0", "--tls-anyone"], 2, "tls-cert"),
        (
            &[
                "--tls-anyone",
                "--tls-cert",
                &cert,
                "--tls-key",
                &key,
                "--tls-client-ca",
                &file("ca-cert.pem"),
            ],
            2,
            "tls-anyone",
        ),
        (&["--listen", "tcp:localhost:0"], 2, "127.0.0.1"),
        (&["--listen", "10809"], 2, "tcp:ADDRESS:PORT"),
        (&["--listen", &in_the_way], 1, "not a socket"),
        (&["--listen", &taken], 1, "another server"),
        (&["--tls-cert", &cert], 2, "--tls-key"),
        (&["--tls-key", &key], 2, "--tls-cert"),
        (&["--tls-client-ca", &cert], 2, "--tls-cert"),
        (&["--tls-cert", &cert, "--tls-key", &other], 1, "does not belong"),
        (&["--tls-cert", arg(&expired), "--tls-key", &key], 1, "expired"),
        (&["--tls-cert", &file("none.pem"), "--tls-key", &key], 1, "tls-cert"),
        (&["--max-connections", "0"], 2, "--max-connections"),
    ] {
        let ended = place.run(&[&["up", "--size", "1M"], args].concat());
        let complaint = ended.complaint(code);
        assert!(complaint.contains(words), "{args:?}: {complaint}");
        assert!(!place.socket("nbd.sock").exists());
    }
}

#[test]
fn everyone_is_let_in_where_that_is_said() {
    let Some(place) = Place::needing(&["nbdinfo"]) else { return };
    Authority::new("authority").write_all(place.root());
    let options = tls_options(&place, false);
    let mut args = vec!["--tls-anyone", "--listen", "tcp:0.0.0.0:0"];
    args.extend(options.iter().map(String::as_str));
    let daemon = place.up_sized("1M", &args);
    let uri = uris(&daemon).into_iter().find(|uri| uri.starts_with("nbds://")).unwrap();
    let port = uri.rsplit_once(':').unwrap().1;
    let bare = place.root().join("bare");
    std::fs::create_dir(&bare).unwrap();
    std::fs::copy(place.root().join("ca-cert.pem"), bare.join("ca-cert.pem")).unwrap();
    let uri = format!("nbds://127.0.0.1:{port}?tls-certificates={}", bare.display());
    assert_eq!(succeed(&place, "nbdinfo", &["--size", &uri]).trim(), "1048576");
    // No client is served without TLS.
    complain(&place, "nbdinfo", &[&uri.replace("nbds://", "nbd://")]);
}

#[test]
fn a_key_that_everybody_can_read_is_refused() {
    let place = Place::new();
    Authority::new("authority").write_all(place.root());
    let options = tls_options(&place, false);
    let mut args = vec!["up", "--size", "1M", "--exec", "true"];
    args.extend(options.iter().map(String::as_str));
    let ended = place.run(&args);
    assert!(ended.status.success() && !ended.stderr.contains("WARN"), "{}", ended.stderr);
    let key = place.root().join("server-key.pem");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    let ended = place.run(&args);
    assert!(ended.complaint(1).contains("every user of this machine may read this key"), "{}", ended.stderr);
}
