//! Backing devices in Redis servers, and in an S3 server, that are started here: with `redis-server`,
//! `redis-cli` and fio.

// The servers, as the tests of uzram-remote start them.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use crate::common::clients::{self, fio, missing, succeed};
use crate::common::{Place, collect_within, finish, start, wait_until};
use crate::servers::{Cluster, Redis, able};
use rustix::process::{Signal, kill_process};

/// As much as it takes on a busy machine.
const FIO_WITHIN: Duration = Duration::from_secs(300);

/// fio, as it writes and verifies so much of a disk, and how to find that nothing was lost.
fn verify(uzram: &str, io_size: &str) -> String {
    format!(
        "fio --name=verify --ioengine=nbd --uri=$uri --thread --iodepth=8 --rw=randwrite --bs=4k --size=2G --io_size={io_size} \
         --verify=crc32c --verify_fatal=1 --verify_state_save=0 --buffer_compress_percentage=50 --refill_buffers \
         --output=/dev/null && wait && {uzram} stat zram0 backing_state | grep '^lost 0$'"
    )
}

/// Has fio write so much of the device, at random places, and leave the checks to [`read_back`].
fn write(place: &Place, size: &str, seed: &str) {
    job(place, size, seed, "--do_verify=0");
}

/// Has fio check all that [`write`] wrote.
fn read_back(place: &Place, size: &str, seed: &str) {
    job(place, size, seed, "--verify_only");
}

fn job(place: &Place, size: &str, seed: &str, verify: &str) {
    let (uri, size, seed) =
        (format!("--uri={}", place.uri()), format!("--size={size}"), format!("--randseed={seed}"));
    let job = [
        "--rw=randwrite",
        "--bs=4k",
        &size,
        "--buffer_compress_percentage=50",
        "--verify=crc32c",
        verify,
        &seed,
    ];
    succeed(place, "fio", &fio(&uri, &job));
}

/// Three masters without replicas: one is killed while fio writes and verifies, and nothing is lost.
#[test]
fn fio_verifies_though_a_master_is_killed() {
    if !able() || missing(&["fio"]) {
        return;
    }
    let (place, cluster) = (Place::new(), Cluster::start(3, 0, false));
    // The node that the address names stays.
    let victim = cluster.nodes[2].id();
    let uzram = env!("CARGO_BIN_EXE_uzram");
    let verify = verify(uzram, "512M");
    let command = format!(
        "(until {uzram} stat zram0 backing | grep -q 'pages_written_back .....'; do sleep 0.1; done; kill -KILL {victim}) & {verify}"
    );
    let address = cluster.address();
    let args = [
        "up",
        "--size",
        "2G",
        "--mem-limit",
        "128M",
        "--backing",
        &address,
        "--copies",
        "2",
        "--exec",
        &command,
    ];
    let ended = collect_within(start(&mut place.command(&args)), FIO_WITHIN);
    let said = ended.ok();
    assert!(!said.contains("device is failing"), "{said}");
    // What the daemon left there, it removed; what the dead master had is lost with it.
    let left: u64 =
        cluster.nodes[..2].iter().map(|node| node.ask(&["dbsize"]).trim().parse::<u64>().unwrap()).sum();
    assert_eq!(left, 0);
}

/// With TLS. The process that serves is killed; another one goes on with the objects, also if the server is
/// stopped meanwhile.
#[test]
fn objects_outlive_the_process_that_serves() {
    if !able() || missing(&["fio"]) {
        return;
    }
    let place = Place::new();
    let (redis, port, certificate) = Redis::start_with_tls(&["--requirepass", "secret"], place.root());
    let password = place.root().join("password");
    std::fs::write(&password, "secret\n").unwrap();
    std::fs::set_permissions(&password, std::fs::Permissions::from_mode(0o600)).unwrap();
    let address = format!("rediss://127.0.0.1:{port}");
    let args = ["up", "--size", "64M", "--mem-limit", "8M", "--backing", &address];
    let mut up = place.command(&args);
    up.env("UZRAM_REDIS_PASSWORD_FILE", &password).env("SSL_CERT_FILE", certificate);
    let daemon = crate::common::Daemon::start(up);
    assert!(daemon.facts.contains(&address) && !daemon.facts.contains("secret"), "{}", daemon.facts);
    write(&place, "48M", "7");
    assert!(place.statistic("pages_backed") > 1000);
    for is_stopped in [false, true] {
        place.wait_for_standby();
        let worker = place.worker_id();
        if is_stopped {
            redis.signal(Signal::STOP);
        }
        kill_process(worker, Signal::KILL).unwrap();
        wait_until("another process serves", || {
            place.run(&["status"]).status.success() && place.worker_id() != worker
        });
        if is_stopped {
            wait_until("the user is told", || {
                place.run(&["stat", "zram0"]).ok().contains("device is failing")
            });
            redis.signal(Signal::CONT);
            wait_until("it is well", || {
                place.run(&["stat", "zram0", "backing_state"]).ok().starts_with("ok\n")
            });
        }
        read_back(&place, "48M", "7");
    }
    assert_eq!(place.run(&["stat", "zram0", "backing_state"]).ok().lines().nth(1), Some("lost 0"));
    assert_eq!(place.run(&["stat", "zram0", "backing_copies"]).ok(), "1\n");
    assert_eq!(place.statistic("failed_reads"), 0);
    place.end(daemon);
    let keys = redis.ask(&["-a", "secret", "--no-auth-warning", "dbsize"]);
    assert_eq!(keys.trim(), "0", "left behind");
}

/// Sets the login to a server.
fn log_in<'a>(command: &'a mut Command, server: &crate::servers::s3::Server) -> &'a mut Command {
    let login = [
        ("AWS_ACCESS_KEY_ID", crate::servers::s3::KEY_ID),
        ("AWS_SECRET_ACCESS_KEY", crate::servers::s3::SECRET),
    ];
    command.envs(login).env("AWS_ENDPOINT_URL_S3", server.url()).env("SSL_CERT_FILE", server.certificate())
}

#[test]
fn fio_verifies_with_pages_in_a_bucket() {
    if missing(&["fio"]) {
        return;
    }
    let (place, server) = (Place::new(), crate::servers::s3::Server::start());
    let verify = verify(env!("CARGO_BIN_EXE_uzram"), "384M");
    let size = ["--size", "2G", "--mem-limit", "128M"];
    let mut up = place.command(&["up"]);
    up.args(size).args(["--backing", "s3://cold/pages:3G", "--exec", &verify]);
    let said = collect_within(start(log_in(&mut up, &server)), FIO_WITHIN).ok();
    assert!(!said.contains("device is failing") && !said.contains(crate::servers::s3::SECRET), "{said}");
    assert_eq!(server.objects().len(), 0, "left behind");
}

/// With TLS. The process that serves is killed; another one goes on with the objects, with the login that the
/// first one had from a file.
#[test]
fn objects_in_a_bucket_outlive_the_process_that_serves() {
    if missing(&["fio"]) {
        return;
    }
    let (place, server) = (Place::new(), crate::servers::s3::Server::start_with_tls());
    let credentials = place.root().join("credentials");
    std::fs::write(&credentials, format!("{}\n{}\n", crate::servers::s3::KEY_ID, crate::servers::s3::SECRET))
        .unwrap();
    std::fs::set_permissions(&credentials, std::fs::Permissions::from_mode(0o600)).unwrap();
    let mut up = place.command(&["up", "--size", "64M", "--mem-limit", "8M", "--backing", "s3://cold"]);
    up.env("UZRAM_S3_CREDENTIALS_FILE", &credentials).env("AWS_ENDPOINT_URL", server.url());
    up.env("SSL_CERT_FILE", server.certificate());
    let daemon = crate::common::Daemon::start(up);
    assert!(
        daemon.facts.contains("s3://cold") && !daemon.facts.contains(crate::servers::s3::SECRET),
        "{}",
        daemon.facts
    );
    std::fs::remove_file(&credentials).unwrap();
    write(&place, "48M", "7");
    assert!(place.statistic("pages_backed") > 1000);
    place.take_over();
    read_back(&place, "48M", "7");
    assert_eq!(place.run(&["stat", "zram0", "backing_state"]).ok().lines().nth(1), Some("lost 0"));
    // While it is there, it has a lease.
    let sweep = |args: &[&str]| {
        let mut sweep = place.command(&["backing", "sweep", "s3://cold"]);
        finish_command(log_in(&mut sweep, &server).args(args))
    };
    assert!(sweep(&["--dry-run"]).contains("in use"));
    place.end(daemon);
    assert_eq!(server.objects().len(), 0, "left behind");
}

fn finish_command(command: &mut Command) -> String {
    collect_within(start(command), FIO_WITHIN).ok()
}

#[test]
fn what_cannot_be_used_is_refused_in_one_line() {
    if !able() {
        return;
    }
    let (place, redis) = (Place::new(), Redis::start(&["--requirepass", "secret"]));
    let address = redis.address();
    for (args, status, hint) in [
        (&["up", "--backing", "redis://:secret@127.0.0.1:1"][..], 2, "in a file"),
        (&["up", "--backing", "redis://127.0.0.1:1"], 1, "refused"),
        (&["up", "--backing", &address], 1, "password"),
        (&["up", "--backing", "http://127.0.0.1"], 2, "redis://"),
        (&["up", "--backing", "s3://id:secret@cold"], 2, "in a file"),
        (&["up", "--backing", "s3://cold"], 1, "AWS_ACCESS_KEY_ID"),
        (&["up", "--backing", "s3://cold", "--copies", "2"], 1, "by itself"),
        (&["swap", "on", "--size", "64M", "--backing", "s3://cold"], 2, "swap area cannot use"),
        (&["up", "--copies", "2"], 2, "give --backing"),
        (&["up", "--backing", "/tmp/none/b.img:1M", "--copies", "2"], 1, "one copy"),
        (&["swap", "on", "--size", "64M", "--backing", &address], 2, "swap area cannot use"),
    ] {
        let mut command = place.command(args);
        if args.contains(&"blocks") {
            command.env("UZRAM_REDIS_PASSWORD", "secret");
        }
        let refused = finish(command);
        let line = refused.complaint(status);
        assert!(line.contains(hint) && !line.contains("secret@"), "{args:?}: {line}");
    }
    // One that was started without may open no connections later.
    let _daemon = place.up(&[]);
    let added = place.run(&["add", "zram1", "--size", "16M", "--backing", &address]);
    assert!(added.complaint(1).contains("was started without"), "{}", added.stderr);
}

/// Pages that a file has no room for go to a server, and all are there for the process that serves next.
#[test]
fn a_file_comes_before_a_server() {
    if !able() || missing(&["fio"]) {
        return;
    }
    let (place, redis) = (Place::without_rights(), Redis::start(&[]));
    let file = format!("{}:24M", place.root().join("cold.img").display());
    let address = redis.address();
    let daemon = crate::common::Daemon::start(place.command(&[
        "up",
        "--size",
        "128M",
        "--mem-limit",
        "8M",
        "--backing",
        &file,
        "--backing",
        &address,
    ]));
    assert!(daemon.facts.contains("cold.img, 24 MiB") && daemon.facts.contains(&address), "{}", daemon.facts);
    let keys = || redis.ask(&["dbsize"]).trim().parse::<u64>().unwrap();
    write(&place, "96M", "9");
    let objects = keys();
    // The lease is a key, too.
    assert!(objects > 20, "{objects} keys");
    place.take_over();
    read_back(&place, "96M", "9");
    assert_eq!(
        place.run(&["stat", "zram0", "backing_dev"]).ok(),
        format!("{} {address}\n", file.strip_suffix(":24M").unwrap())
    );
    assert_eq!((place.statistic("failed_reads"), place.statistic("backing_corrupted")), (0, 0));
    place.end(daemon);
    assert_eq!(keys(), 0, "left behind");
}

/// What goes to a file that is encrypted cannot be read there, and can be by the process that serves next.
#[test]
fn a_file_can_be_encrypted() {
    const SENTENCE: &[u8] = b"a sentence that nobody else should read";
    if missing(&["nbdcopy"]) {
        return;
    }
    for encrypts in [false, true] {
        let place = Place::without_rights();
        let path = place.root().join("cold.img");
        let file = format!("{}:64M", path.display());
        let mut args = vec!["up", "--size", "64M", "--mem-limit", "8M", "--backing", &file];
        args.extend(encrypts.then_some("--encrypt"));
        let daemon = crate::common::Daemon::start(place.command(&args));
        let source = clients::random_file(&place, "source", 32 << 20);
        let mut bytes = std::fs::read(&source).unwrap();
        bytes.chunks_mut(4096).for_each(|page| page[1000..1000 + SENTENCE.len()].copy_from_slice(SENTENCE));
        std::fs::write(&source, &bytes).unwrap();
        let (uri, back) = (place.uri(), place.root().join("back"));
        succeed(&place, "nbdcopy", &[clients::arg(&source), &uri]);
        let there = std::fs::read(&path).unwrap();
        let is_readable = there.windows(SENTENCE.len()).any(|window| window == SENTENCE);
        assert_eq!(is_readable, !encrypts);
        let shown = place.run(&["stat", "zram0", "backing_encrypted"]).ok();
        assert_eq!(
            (shown.trim(), daemon.facts.contains("encrypted")),
            (if encrypts { "1" } else { "0" }, encrypts)
        );
        place.take_over();
        assert_eq!(place.run(&["stat", "zram0", "backing_encrypted"]).ok(), shown);
        succeed(&place, "nbdcopy", &[&uri, clients::arg(&back)]);
        let read = std::fs::read(&back).unwrap();
        assert!(read[..bytes.len()] == bytes);
        assert!(place.statistic("pages_backed") > 1000);
        place.end(daemon);
    }
}

/// Whatever a store answers, a program that reads gets EIO, and the state says that reads fail, and why.
#[test]
fn a_bucket_that_refuses_reads_gives_io_errors_and_says_so() {
    if missing(&["nbdcopy", "qemu-io"]) {
        return;
    }
    let (place, server) = (Place::new(), crate::servers::s3::Server::start());
    let mut up = place.command(&["up", "--size", "64M", "--mem-limit", "8M", "--backing", "s3://cold"]);
    log_in(&mut up, &server);
    let daemon = crate::common::Daemon::start(up);
    let (source, uri) = (clients::random_file(&place, "source", 32 << 20), place.uri());
    succeed(&place, "nbdcopy", &[clients::arg(&source), &uri]);
    let state = || place.run(&["stat", "zram0", "backing_state"]).ok();
    assert!(place.statistic("pages_backed") > 1000 && state().starts_with("ok\n"), "{}", state());
    for (status, code) in [(403, "AccessDenied"), (307, "TemporaryRedirect")] {
        server.refuse(Some((status, code)));
        let mut read = Command::new("qemu-io");
        read.args(["-r", "-f", "raw", "-c", "read 0 4M", &uri]);
        let said = collect_within(start(&mut read), Duration::from_secs(60));
        let said = format!("{}{}", said.stdout, said.stderr);
        assert!(said.contains("Input/output error"), "{status}: {said}");
        wait_until("the state says why", || {
            state().starts_with("failing for ") && state().contains(&status.to_string())
        });
    }
    server.refuse(None);
    wait_until("it is well", || state().starts_with("ok\n"));
    place.down();
    daemon.ended();
}
