//! TLS in a configuration file, and reloading of TLS files: `uzram reload`, and SIGHUP.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use crate::common::clients::{Connected, complain, missing, run, succeed};
use crate::common::{Daemon, Place, wait_until};
use crate::nbd::pki::{Authority, write};
use rustix::process::Signal;

/// Returns a configuration with TLS from the files in `dir`.
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
        let ended = place.run(&["reload"]);
        assert!(ended.complaint(1).contains("belongs to user 65534"), "{}", ended.stderr);
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
fn a_hang_up_ends_any_other_daemon() {
    let place = Place::new();
    let daemon = place.up(&[]);
    daemon.signal(Signal::HUP);
    let (status, log) = daemon.ended();
    assert!(status.success() && log.contains("ending"), "{log}");
}

#[test]
fn without_tls_there_is_nothing_to_reload() {
    let place = Place::new();
    let daemon = place.up_config("[zram0]\nsize = '1M'\n", &[]);
    let ended = place.run(&["reload"]);
    assert!(ended.complaint(1).contains("this server speaks no TLS"), "{}", ended.stderr);
    daemon.signal(Signal::HUP);
    assert_eq!(place.number("disksize"), 1 << 20);
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.ended();
    assert!(status.success() && log.contains("speaks no TLS"), "{log}");
    let ended = place.run(&["reload"]);
    assert!(ended.complaint(3).contains("no daemon is running"), "{}", ended.stderr);
}

#[test]
fn a_setting_is_given_once_and_completely() {
    let place = Place::new();
    let dir = certificates(&place, "live");
    let path = place.root().join("uzram.toml");
    let up = |text: &str, args: &[&str]| {
        fs::write(&path, text).unwrap();
        place.run(&[&["up", "--config", path.to_str().unwrap()], args].concat())
    };
    let cert = dir.join("server-cert.pem");
    let cert = cert.to_str().unwrap();
    for args in [
        &["--tls-cert", cert][..],
        &["--tls-key", cert],
        &["--tls-client-ca", cert],
        &["--max-connections", "3"],
    ] {
        let ended = up(&config(&dir), args);
        let line = ended.complaint(2);
        assert!(line.starts_with(args[0]) && line.contains("give it in one of them"), "{line}");
    }
    let lines: Vec<String> = config(&dir).lines().map(str::to_owned).collect();
    let without = |key: &str| {
        let kept = lines.iter().filter(|line| !line.starts_with(key)).map(String::as_str);
        kept.collect::<Vec<_>>().join("\n").replace("127.0.0.1", "0.0.0.0")
    };
    assert!(up(&without("tls-key"), &[]).complaint(2).contains("tls-cert is given without tls-key"));
    assert!(up(&without("tls-client-ca"), &[]).complaint(2).contains("tls-client-ca"));
    assert!(up(&without("nothing"), &["--tls-anyone"]).complaint(2).contains("tls-anyone lets everyone in"));
    let text = without("tls-client-ca").replace("max-connections", "tls-anyone = true\nmax-connections");
    assert!(up(&text, &["--tls-anyone"]).complaint(2).starts_with("--tls-anyone: "));
    if missing(&["nbdinfo"]) {
        return;
    }
    // One half may be in the file, and the other on the command line.
    let key = dir.join("server-key.pem");
    let daemon = place.up_config(&without("tls-key"), &["--tls-key", key.to_str().unwrap()]);
    // The URI has the machine's name, which the machine may not be able to resolve.
    let line = daemon.facts.lines().find(|line| line.contains("nbds://")).unwrap();
    let port = line.rsplit_once(':').unwrap().1.split('/').next().unwrap();
    let known = format!("nbds://127.0.0.1:{port}?tls-certificates={}", dir.display());
    assert_eq!(succeed(&place, "nbdinfo", &["--size", &known]).trim(), "1048576");
    complain(&place, "nbdinfo", &[&format!("nbd://127.0.0.1:{port}")]);
}
