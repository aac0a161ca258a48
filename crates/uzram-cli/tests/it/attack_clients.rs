//! Hostile clients of a daemon, and the memory, places and time that they can use up. TCP clients run as
//! another user if this one is root.

use std::collections::BTreeSet;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const LISTEN: &str = "--listen tcp:127.0.0.1:0";

/// Raises the limit of descriptors to the maximum; prints a note if that is less than `wanted`.
fn too_few_descriptors(wanted: u64) -> bool {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    let too_few = maximum.is_some_and(|maximum| maximum < wanted);
    if too_few {
        println!("skipped: fewer than {wanted} file descriptors are allowed");
    }
    too_few
}

fn clients(place: &Place) -> Vec<Value> {
    place.json("clients")["clients"].as_array().unwrap().clone()
}

/// 100 clients that request 32 MiB each and read nothing use up the shared memory, but no more.
#[test]
fn unread_replies_take_no_more_memory_than_there_is_for_all() {
    let place = Place::new();
    let daemon = place.up_sized("64M", &format!("--mem-limit 8M {LISTEN}"));
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
    let daemon = place.up(LISTEN);
    let port = port(&daemon);
    // One at a time, until no place is left.
    let mut idle: Vec<_> = as_nobody(|_| std::iter::from_fn(|| tcp_if_served(&port, 1)).take(300).collect());
    assert!(idle.len() < 256, "{} clients are served", idle.len());
    for _ in 0..10 {
        assert!(works(&mut place.nbd(), 2));
    }
    // Root lists them, and makes room.
    let listed = clients(&place);
    wait_until("only they are connected", || clients(&place).len() == idle.len());
    assert!(place.run("clients").ok().lines().count() >= listed.len());
    let first = &clients(&place)[0];
    assert_eq!((first["export"].as_str(), first["written_bytes"].as_u64()), (Some("zram0"), Some(4096)));
    assert!(first["peer"].as_str().unwrap().starts_with("127.0.0.1:"));
    let ids: Vec<String> = clients(&place).iter().take(3).map(|client| client["id"].to_string()).collect();
    place.run(&format!("kick {}", ids.join(" "))).ok();
    assert!(idle[..3].iter_mut().all(Client::at_end));
    assert!(idle[3..].iter_mut().all(|client| works(client, 1)));
    place.run(&["kick", &ids[0]]).says(1, "no client");
    assert!(tcp_if_served(&port, 1).is_some());
    let log = daemon.terminate();
    assert!(log.contains("clients were refused") && log.contains("max-connections is 256"), "{log}");
}

#[test]
fn a_flood_of_handshakes_leaves_roots_own_socket_alone() {
    if too_few_descriptors(2000) {
        return;
    }
    let place = Place::new();
    let daemon = place.up(LISTEN);
    let port = port(&daemon);
    let flood: Vec<_> = as_nobody(|_| (0..500).map(|_| TcpStream::connect(&port).unwrap()).collect());
    // A slow client of root's.
    let mut slow = Client::silent(&place.socket("nbd.sock"));
    let began = Instant::now();
    for _ in 0..20 {
        assert!(works(&mut place.nbd(), 1));
    }
    // Much less than their turns.
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    slow.greet();
    slow.enter();
    assert!(works(&mut slow, 2));
    wait_until("all places for handshakes are taken", || {
        clients(&place).iter().filter(|client| client["uid"].is_null()).count() >= 64
    });
    // The oldest handshakes give way to later ones.
    wait_until("the last of them is greeted", || {
        clients(&place).iter().any(|client| client["id"].as_u64().unwrap() > 300)
    });
    drop(flood);
    let log = daemon.terminate();
    assert!(log.contains("gave way to new connections"), "{log}");
}

#[test]
fn a_thousand_clients_that_come_at_once_are_served() {
    const CLIENTS: usize = 1000;
    if too_few_descriptors(3000) {
        return;
    }
    let place = Place::new();
    let daemon = place.up(&format!("--max-connections 1100 {LISTEN}"));
    let port = port(&daemon);
    for round in 0..3 {
        let began = Instant::now();
        let (ready, done) = (Barrier::new(CLIENTS), Barrier::new(CLIENTS));
        let (ready, done, place, port) = (&ready, &done, &place, &port);
        let serve = move |index: u64| {
            ready.wait();
            // A client that fails must not make the others wait, and none leaves before all are served.
            let (mut unix, mut tcp) = (None, None);
            let is_served = catch_unwind(AssertUnwindSafe(|| match round {
                1 => works(unix.insert(place.nbd()), index),
                _ => tcp_if_served(port, index).map(|client| tcp = Some(client)).is_some(),
            }));
            done.wait();
            is_served.unwrap_or(false)
        };
        let served: usize = thread::scope(|scope| {
            let spawn = |index| {
                let thread = thread::Builder::new().stack_size(256 << 10);
                thread.spawn_scoped(scope, move || serve(index)).unwrap()
            };
            let threads: Vec<_> = (0..CLIENTS as u64).map(spawn).collect();
            threads.into_iter().map(|thread| usize::from(thread.join().unwrap())).sum()
        });
        if served < CLIENTS {
            panic!("{served} are served in {:?}: {}", began.elapsed(), daemon.terminate());
        }
        let threads = || fs::read_dir(format!("/proc/{}/task", daemon.id())).unwrap().count();
        wait_until("their threads have gone", || threads() < 100);
    }
}

#[test]
fn control_clients_that_say_nothing_keep_nobody_out_for_long() {
    let place = Place::new();
    let daemon = place.up("--log debug");
    let control = place.socket("control.sock");
    let silent: Vec<UnixStream> = (0..100).map(|_| connect(&control)).collect();
    assert!(works(&mut place.nbd(), 1));
    wait_until("somebody is listened to again", || place.run("clients").status.success());
    // All of their places are free, then.
    for silent in silent {
        let answer = std::io::read_to_string(silent).unwrap();
        assert!(answer.starts_with("HTTP/1.1 408") || answer.starts_with("HTTP/1.1 503"), "{answer}");
    }
    let long = format!("DELETE /v1/clients/{} HTTP/1.1", "9".repeat(1 << 20));
    for (lie, status) in [
        ("\0\x01\x02", "400"),
        ("NBDMAGIC\0\0\0\x03", "400"),
        ("GET /v1/devices HTTP/9.9", "400"),
        ("DELETE /v1/clients/18446744073709551616 HTTP/1.1", "4"),
        ("DELETE /v1/clients/%2d1 HTTP/1.1", "4"),
        ("DELETE /v1/clients/1/ HTTP/1.1", "4"),
        ("POST /v1/clients HTTP/1.1\r\nContent-Length: 4294967296", "4"),
        (&long, "431"),
    ] {
        let answer = ask(&control, format!("{lie}\r\n\r\n").as_bytes());
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{lie}: {answer}");
    }
    // Some leave before the response, or within their request.
    for end in ["\r\n\r\n", ""].repeat(20) {
        connect(&control).write_all(format!("GET /v1/devices HTTP/1.1{end}").as_bytes()).unwrap();
    }
    place.refuses(&[("kick 0", 1, &["there is no client 0"]), ("kick me", 2, &["'me'"])]);
    let said = place.end(daemon);
    assert!(!said.contains("panicked"), "{said}");
}

/// The limit of descriptors is a usual, low one, and not raised without need.
#[test]
fn there_are_descriptors_for_all_clients() {
    if too_few_descriptors(4000) {
        return;
    }
    let place = Place::new();
    let allowed = |max_connections: &str| {
        let up = ["up", "--size", "1M", "--exec", "ulimit -S -n", "--max-connections", max_connections];
        finish(place.command_after("ulimit -S -n 1024", &up)).ok().trim().parse::<u64>().unwrap()
    };
    assert_eq!(allowed("256"), 1024);
    assert!(allowed("1100") >= 2200 + 137);
}

#[test]
fn another_user_reaches_no_socket_of_the_runtime_directory() {
    let place = Place::new();
    let _daemon = place.up("");
    // So that only the sockets and their directory deny access.
    set_mode(place.root(), 0o777);
    as_nobody(|is_nobody| {
        if !is_nobody {
            return println!("skipped: only root can be another user");
        }
        for name in ["nbd.sock", "control.sock"] {
            let error = UnixStream::connect(place.socket(name)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{name}");
        }
    });
}

type Access = (u32, u32, u32);

fn access(path: &Path) -> Option<Access> {
    let file = fs::symlink_metadata(path).ok()?;
    Some((file.mode() & 0o7777, file.uid(), file.gid()))
}

#[test]
fn a_socket_is_for_whom_it_is_said_to_be_and_for_nobody_else_before() {
    let Some(place) = Place::if_root() else { return };
    set_mode(place.root(), 0o777);
    let path = place.root().join("disk.sock");
    let listen = format!("unix:{}", path.display());
    let keys = "socket-group = 65534\nsocket-mode = '0640'\n[zram0]\nsize = '1M'\n";
    let config = place.write("uzram.toml", format!("listen = '{listen}'\n{keys}"));
    let with = |options: &str| format!("--size 1M --listen {listen} {options}");
    for (options, expected, lets_nobody_in) in [
        (with(""), (0o600, 0, 0), false),
        (with("--socket-owner 65534"), (0o600, NOBODY, 0), true),
        // The client is in root's group, unless it has its user's.
        (with("--socket-group 65534 --socket-mode 660"), (0o660, 0, 65534), false),
        (with("--socket-owner root --socket-group root --socket-mode 0666"), (0o666, 0, 0), true),
        (with("--socket-mode 0"), (0, 0, 0), false),
        (format!("--config {config}"), (0o640, 0, 65534), false),
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
            let daemon = Daemon::start(place.command_after("umask 0", &format!("up {options}")));
            serving.store(true, Ordering::Relaxed);
            assert_eq!(access(&path), Some(expected), "{options}");
            let connected = as_nobody(|_| UnixStream::connect(&path).is_ok());
            assert_eq!(connected, lets_nobody_in, "{options}");
            assert_eq!(access(&place.socket("nbd.sock")), Some((0o600, 0, 0)));
            assert_eq!(access(&place.socket("control.sock")), Some((0o600, 0, 0)));
            place.end(daemon);
            assert_eq!(access(&path), None);
            seen.join().unwrap()
        });
        // Before that, it has mode 0.
        assert!(seen.iter().all(|seen| *seen == expected || seen.0 == 0), "{options}: {seen:?}");
    }
    place.run("up --socket-mode 0660").says(2, "give listen a unix:PATH");
}
