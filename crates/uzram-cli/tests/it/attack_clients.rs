//! Hostile clients of a daemon, and the memory, places and time that they can use up. TCP clients run as
//! another user if this one is root.

use std::collections::BTreeSet;
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::nbd::{Client, cmd, port, tcp, tcp_if_admitted, works};
use crate::common::{Daemon, PATIENCE, Place, not_root, wait_until};
use crate::nbd::too_few_descriptors;
use rustix::process::Signal;

const LISTEN: [&str; 2] = ["--listen", "tcp:127.0.0.1:0"];
const MIB: u64 = 1 << 20;
const NOBODY: libc::uid_t = 65534;

/// Runs `act` in a thread as another user, if this user is root; its argument says whether that worked.
fn as_nobody<T: Send>(act: impl FnOnce(bool) -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let keep = libc::uid_t::MAX;
            // SAFETY: the call takes only numbers. Unlike glibc's function, the system call applies only to
            // this thread, which ends with `act`.
            let answer = unsafe { libc::syscall(libc::SYS_setresuid, keep, NOBODY, keep) };
            act(answer == 0)
        });
        thread.join().unwrap()
    })
}

fn clients(place: &Place) -> Vec<serde_json::Value> {
    let json = place.json(&["clients"]);
    json["clients"].as_array().unwrap().clone()
}

/// 100 clients that request 32 MiB each and read nothing use up the shared memory, but no more.
#[test]
fn unread_replies_take_no_more_memory_than_there_is_for_all() {
    let place = Place::new();
    let daemon = place.up_sized("64M", &[&["--mem-limit", "8M"], &LISTEN[..]].concat());
    let before_bytes = daemon.anonymous_bytes();
    let port = port(&daemon);
    let _deaf: Vec<Client<TcpStream>> = as_nobody(|_| {
        let deaf = (0..100).map(|_| {
            let mut client = tcp(&port);
            client.enter();
            client.request(0, cmd::READ, 0, 32 << 20, &[]);
            client
        });
        deaf.collect()
    });
    let (began, mut most_bytes) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs(4) {
        most_bytes = most_bytes.max(daemon.anonymous_bytes());
        thread::sleep(Duration::from_millis(10));
    }
    let grown = (most_bytes - before_bytes) / MIB;
    // 80 MiB of shared memory, 64 KiB for each of 256 places, and the threads.
    assert!(grown < 80 + 16 + 16, "{grown} MiB more than before");
    assert!(works(&mut place.nbd(), 3), "root is served meanwhile");
}

#[test]
fn idle_clients_of_a_port_leave_roots_own_socket_alone() {
    if too_few_descriptors(2000) {
        return;
    }
    let place = Place::new();
    let daemon = place.up(&LISTEN);
    let port = port(&daemon);
    let mut idle = as_nobody(|_| {
        // One at a time, until no place is left.
        let served = || {
            let mut client = tcp_if_admitted(&port)?;
            client.enter();
            works(&mut client, 1).then_some(client)
        };
        std::iter::from_fn(served).take(300).collect::<Vec<_>>()
    });
    assert!(idle.len() < 256, "{} clients are served", idle.len());
    for _ in 0..10 {
        assert!(works(&mut place.nbd(), 2));
    }
    // Root lists them, and makes room.
    let listed = clients(&place);
    wait_until("only they are connected", || clients(&place).len() == idle.len());
    assert!(place.run(&["clients"]).ok().lines().count() >= listed.len());
    let first = &clients(&place)[0];
    assert_eq!((first["export"].as_str(), first["written_bytes"].as_u64()), (Some("zram0"), Some(4096)));
    assert!(first["peer"].as_str().unwrap().starts_with("127.0.0.1:"));
    let ids: Vec<String> = clients(&place).iter().take(3).map(|client| client["id"].to_string()).collect();
    let mut args = vec!["kick"];
    args.extend(ids.iter().map(String::as_str));
    place.run(&args).ok();
    assert!(idle[..3].iter_mut().all(Client::at_end));
    assert!(idle[3..].iter_mut().all(|client| works(client, 1)));
    place.run(&["kick", &ids[0]]).says(1, "no client");
    tcp(&port).enter();
    daemon.signal(Signal::TERM);
    let (_, log) = daemon.ended();
    assert!(log.contains("clients were refused") && log.contains("max-connections is 256"), "{log}");
}

/// With a usual, low descriptor limit, clients cannot use up all descriptors; the limit is not raised without
/// need.
#[test]
fn there_are_descriptors_for_all_clients() {
    if too_few_descriptors(4000) {
        return;
    }
    let place = Place::new();
    let allowed = |max_connections: &str| {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "ulimit -S -n 1024 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_uzram")]);
        command.args(["up", "--size", "1M", "--exec", "ulimit -S -n", "--max-connections", max_connections]);
        command.env("UZRAM_RUNTIME_DIR", place.dir());
        crate::common::finish(command).ok().trim().parse::<u64>().unwrap()
    };
    assert_eq!(allowed("256"), 1024);
    assert!(allowed("1100") >= 2200 + 137);
}

/// Only the daemon's user can use the sockets of the runtime directory.
#[test]
fn another_user_reaches_no_socket_of_the_runtime_directory() {
    let place = Place::new();
    let _daemon = place.up(&[]);
    // So that only the sockets and their directory deny access.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(place.root(), open).unwrap();
    as_nobody(|is_nobody| {
        if !is_nobody {
            println!("skipped: only root can be another user");
            return;
        }
        for name in ["nbd.sock", "control.sock"] {
            let error = UnixStream::connect(place.socket(name)).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{name}");
        }
    });
}

type Access = (u32, u32, u32);

fn access(path: &Path) -> Option<Access> {
    let file = std::fs::symlink_metadata(path).ok()?;
    Some((file.mode() & 0o7777, file.uid(), file.gid()))
}

#[test]
fn a_socket_is_for_whom_it_is_said_to_be_and_for_nobody_else_before() {
    if not_root() {
        return;
    }
    let place = Place::new();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(place.root(), open).unwrap();
    let path = place.root().join("disk.sock");
    let listen = format!("unix:{}", path.display());
    let config =
        format!("listen = '{listen}'\nsocket-group = 65534\nsocket-mode = '0640'\n[zram0]\nsize = '1M'\n");
    for (options, expected, lets_nobody_in) in [
        (&[][..], (0o600, 0, 0), false),
        (&["--socket-owner", "65534"], (0o600, NOBODY, 0), true),
        // The client is in root's group, unless it has its user's.
        (&["--socket-group", "65534", "--socket-mode", "660"], (0o660, 0, 65534), false),
        (&["--socket-owner", "root", "--socket-group", "root", "--socket-mode", "0666"], (0o666, 0, 0), true),
        (&["--socket-mode", "0"], (0, 0, 0), false),
        (&["--config"], (0o640, 0, 65534), false),
    ] {
        let (serving, deadline) = (AtomicBool::new(false), Instant::now() + PATIENCE);
        let seen = thread::scope(|scope| {
            let seen = scope.spawn(|| {
                let mut seen = BTreeSet::new();
                // Do not wait forever if the daemon does not start.
                while !serving.load(Ordering::Relaxed) && Instant::now() < deadline {
                    seen.extend(access(&path));
                }
                seen
            });
            // With any umask of the daemon.
            let mut command = Command::new("sh");
            command.args(["-c", "umask 0; exec \"$0\" up \"$@\"", env!("CARGO_BIN_EXE_uzram")]);
            command.env("UZRAM_RUNTIME_DIR", place.dir());
            if options == ["--config"] {
                let file = place.root().join("uzram.toml");
                std::fs::write(&file, &config).unwrap();
                command.arg("--config").arg(file);
            } else {
                command.args(["--size", "1M", "--listen", &listen]).args(options);
            }
            let daemon = Daemon::start(command);
            serving.store(true, Ordering::Relaxed);
            assert_eq!(access(&path), Some(expected), "{options:?}");
            let connected = as_nobody(|_| UnixStream::connect(&path).is_ok());
            assert_eq!(connected, lets_nobody_in, "{options:?}");
            assert_eq!(access(&place.socket("nbd.sock")), Some((0o600, 0, 0)));
            assert_eq!(access(&place.socket("control.sock")), Some((0o600, 0, 0)));
            place.end(daemon);
            assert_eq!(access(&path), None);
            seen.join().unwrap()
        });
        // Before that, it has mode 0.
        let may_be = |seen: &&Access| **seen == expected || seen.0 == 0;
        assert!(seen.iter().all(|seen| may_be(&seen)), "{options:?}: {seen:?}");
    }
    place.run(&["up", "--socket-mode", "0660"]).says(2, "give listen a unix:PATH");
}
