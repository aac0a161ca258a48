//! Hostile clients of a daemon, and the memory, places and time that they can use up. TCP clients run as
//! another user if this one is root.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::nbd::{READ, Raw, a_moment, port};
use crate::common::{Daemon, PATIENCE, Place, ask, connect, not_root, wait_until};
use crate::nbd::too_few_descriptors;
use rustix::process::Signal;

const LISTEN: [&str; 2] = ["--listen", "tcp:127.0.0.1:0"];
const MIB: u64 = 1 << 20;
/// A user who owns no files.
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

fn threads(daemon: &Daemon) -> usize {
    std::fs::read_dir(format!("/proc/{}/task", daemon.id())).unwrap().count()
}

/// Returns a daemon's list of clients.
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
    let _deaf: Vec<Raw> = as_nobody(|_| {
        let deaf = (0..100).map(|_| {
            let mut client = Raw::tcp(&port).enter().unwrap();
            client.request(READ, 0, 32 << 20, &[]).unwrap();
            client
        });
        deaf.collect()
    });
    let (began, mut most_bytes) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs(4) {
        most_bytes = most_bytes.max(daemon.anonymous_bytes());
        a_moment();
    }
    let grown = (most_bytes - before_bytes) / MIB;
    // 80 MiB of shared memory, 64 KiB for each of 256 places, and the threads.
    assert!(grown < 80 + 16 + 16, "{grown} MiB more than before");
    assert!(Raw::unix(&place).enter().unwrap().works(3), "root is served meanwhile");
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
        let served = || Raw::tcp(&port).enter()?.if_served(1);
        std::iter::from_fn(served).take(300).collect::<Vec<_>>()
    });
    assert!(idle.len() < 256, "{} clients are served", idle.len());
    for _ in 0..10 {
        assert!(Raw::unix(&place).enter().unwrap().works(2));
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
    assert!(idle[..3].iter_mut().all(Raw::ends));
    assert!(idle[3..].iter_mut().all(|client| client.works(1)));
    assert!(place.run(&["kick", &ids[0]]).complaint(1).contains("no client"));
    assert!(Raw::tcp(&port).enter().unwrap().works(1));
    daemon.signal(Signal::TERM);
    let (_, log) = daemon.ended();
    assert!(log.contains("clients were refused") && log.contains("max-connections is 256"), "{log}");
}

#[test]
fn a_flood_of_handshakes_leaves_roots_own_socket_alone() {
    if too_few_descriptors(2000) {
        return;
    }
    let place = Place::new();
    let daemon = place.up(&LISTEN);
    let port = port(&daemon);
    let flood: Vec<Raw> = as_nobody(|_| (0..500).map(|_| Raw::tcp(&port)).collect());
    // A slow client of root's.
    let slow = Raw::unix(&place);
    let began = Instant::now();
    for _ in 0..20 {
        assert!(Raw::unix(&place).enter().unwrap().works(1));
    }
    // Much less than their turns.
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    assert!(slow.enter().unwrap().works(2));
    wait_until("all places for handshakes are taken", || {
        clients(&place).iter().filter(|client| client["uid"].is_null()).count() >= 64
    });
    // The oldest handshakes give way to later ones.
    wait_until("the last of them is greeted", || {
        clients(&place).iter().any(|client| client["id"].as_u64().unwrap() > 300)
    });
    drop(flood);
    daemon.signal(Signal::TERM);
    let (_, log) = daemon.ended();
    assert!(log.contains("gave way to new connections"), "{log}");
}

/// All clients connect at once, and all are served.
#[test]
fn a_thousand_clients_that_come_at_once_are_served() {
    const CLIENTS: usize = 1000;
    if too_few_descriptors(3000) {
        return;
    }
    let place = Place::new();
    let daemon = place.up(&[&["--max-connections", "1100"], &LISTEN[..]].concat());
    let port = port(&daemon);
    for round in 0..3 {
        let began = Instant::now();
        let (ready, done) = (Barrier::new(CLIENTS), Barrier::new(CLIENTS));
        let serve = |index: usize| {
            ready.wait();
            // A client that fails must not make the others wait.
            let client = catch_unwind(AssertUnwindSafe(|| {
                let client = if round == 1 { Raw::unix(&place) } else { Raw::tcp(&port) };
                client.enter()?.if_served(index as u64)
            }));
            // No client leaves before all are served.
            done.wait();
            matches!(client, Ok(Some(_)))
        };
        let served: usize = thread::scope(|scope| {
            let serve = &serve;
            let threads: Vec<_> = (0..CLIENTS)
                .map(|index| {
                    let thread = thread::Builder::new().stack_size(256 << 10);
                    thread.spawn_scoped(scope, move || serve(index)).unwrap()
                })
                .collect();
            threads.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum()
        });
        if served < CLIENTS {
            daemon.signal(Signal::TERM);
            panic!("{served} are served in {:?}: {}", began.elapsed(), daemon.ended().1);
        }
        wait_until("their threads have gone", || threads(&daemon) < 100);
    }
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

/// A socket file's permissions, owner and group.
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
    let refused = place.run(&["up", "--socket-mode", "0660"]);
    assert!(refused.complaint(2).contains("give listen a unix:PATH"), "{}", refused.stderr);
}

/// Silent, slow and lying control clients keep neither NBD clients nor each other out for long.
#[test]
fn control_clients_that_say_nothing_keep_nobody_out_for_long() {
    let place = Place::new();
    let _daemon = place.up(&[]);
    let control = place.socket("control.sock");
    let silent: Vec<UnixStream> = (0..100).map(|_| connect(&control)).collect();
    assert!(Raw::unix(&place).enter().unwrap().works(1));
    wait_until("somebody is listened to again", || place.run(&["clients"]).status.success());
    for lie in [
        "DELETE /v1/clients/18446744073709551616 HTTP/1.1\r\n\r\n",
        "DELETE /v1/clients/%2d1 HTTP/1.1\r\n\r\n",
        "DELETE /v1/clients/1/ HTTP/1.1\r\n\r\n",
        "POST /v1/clients HTTP/1.1\r\nContent-Length: 4294967296\r\n\r\n",
    ] {
        let answer = ask(&control, lie.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 4"), "{lie}: {answer}");
    }
    let long = format!("DELETE /v1/clients/{} HTTP/1.1\r\n\r\n", "9".repeat(1 << 20));
    assert!(ask(&control, long.as_bytes()).starts_with("HTTP/1.1 431"));
    assert!(place.run(&["kick", "0"]).complaint(1).contains("there is no client 0"));
    assert!(place.run(&["kick", "me"]).complaint(2).contains("'me'"));
    drop(silent);
}
