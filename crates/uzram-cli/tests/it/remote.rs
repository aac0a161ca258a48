//! Backing devices in Redis servers, and in an S3 server, that are started here, as the tests of uzram-remote
//! start them: with `redis-server`, `redis-cli` and fio.

use crate::common::*;
use crate::servers::s3::{KEY_ID, SECRET, Server};
use crate::servers::{Cluster, Redis, able};

/// As much as it takes on a busy machine.
const FIO_WITHIN: Duration = Duration::from_secs(300);

/// Has fio write so much of the device, at random places, and leave the checks to [`read_back`].
fn write(place: &Place, size: &str) {
    place.fio(&format!("{} --do_verify=0", job(size)));
}

/// Has fio check all that [`write`] wrote.
fn read_back(place: &Place, size: &str) {
    place.fio(&format!("{} --verify_only", job(size)));
}

fn job(size: &str) -> String {
    format!(
        "--rw=randwrite --bs=4k --size={size} --buffer_compress_percentage=50 --verify=crc32c --randseed=7"
    )
}

/// Writes a secret that only its owner can read; returns its path.
fn secret(place: &Place, text: &str) -> String {
    let path = place.write("secret", text);
    set_mode(&path, 0o600);
    path
}

/// With TLS. The process that serves is killed; another goes on, also if the server is stopped meanwhile.
#[test]
fn objects_outlive_the_process_that_serves() {
    if !able() || missing("fio") {
        return;
    }
    let place = Place::new();
    let (redis, port, certificate) = Redis::start_with_tls(&["--requirepass", "secret"], place.root());
    let address = format!("rediss://127.0.0.1:{port}");
    let mut up = place.command(&format!("up --size 64M --mem-limit 8M --backing {address}"));
    up.env("UZRAM_REDIS_PASSWORD_FILE", secret(&place, "secret\n")).env("SSL_CERT_FILE", certificate);
    let daemon = Daemon::start(up);
    assert!(daemon.facts.contains(&address) && !daemon.facts.contains("secret"), "{}", daemon.facts);
    write(&place, "48M");
    assert!(place.statistic("pages_backed") > 1000);
    let state = || place.get("backing_state");
    for is_stopped in [false, true] {
        place.wait_for_standby();
        let worker = place.worker_id();
        if is_stopped {
            redis.signal(Signal::STOP);
        }
        kill(worker);
        wait_until("another process serves", || {
            place.run("status").status.success() && place.worker_id() != worker
        });
        if is_stopped {
            wait_until("the user is told", || place.run("stat zram0").ok().contains("device is failing"));
            redis.signal(Signal::CONT);
            wait_until("it is well", || state().starts_with("ok\n"));
        }
        read_back(&place, "48M");
    }
    assert_eq!(state().lines().nth(1), Some("lost 0"));
    assert_eq!(place.get("backing_copies"), "1");
    place.assert_zero("failed_reads");
    place.end(daemon);
    let keys = redis.ask(&["-a", "secret", "--no-auth-warning", "dbsize"]);
    assert_eq!(keys.trim(), "0", "left behind");
}

/// Three masters without replicas: one is killed while fio writes and verifies, and nothing is lost.
#[test]
fn fio_verifies_though_a_master_is_killed() {
    if !able() || missing("fio") {
        return;
    }
    let (place, cluster) = (Place::new(), Cluster::start(3, 0, false));
    // The node that the address names stays.
    let victim = cluster.nodes[2].id();
    let command = format!(
        "(until {UZRAM} stat zram0 backing | grep -q 'pages_written_back .....'; do sleep 0.1; done; \
         kill -KILL {victim}) & fio --name=verify --ioengine=nbd --uri=$uri --thread --iodepth=8 \
         --rw=randwrite --bs=4k --size=2G --io_size=512M --verify=crc32c --verify_fatal=1 \
         --verify_state_save=0 --buffer_compress_percentage=50 --refill_buffers \
         --output=/dev/null && wait && {UZRAM} stat zram0 backing_state | grep '^lost 0$'"
    );
    let mut up = place.command("up --size 2G --mem-limit 128M --copies 2 --backing");
    up.arg(cluster.address()).args(["--exec", &command]);
    let said = collect_within(start(&mut up), FIO_WITHIN).ok();
    assert!(!said.contains("device is failing"), "{said}");
    // What the daemon left there, it removed; what the dead master had is lost with it.
    let left = cluster.nodes[..2].iter().map(|node| node.ask(&["dbsize"]).trim().parse::<u64>().unwrap());
    assert_eq!(left.sum::<u64>(), 0);
}

fn log_in<'a>(command: &'a mut Command, server: &Server) -> &'a mut Command {
    command.envs([("AWS_ACCESS_KEY_ID", KEY_ID), ("AWS_SECRET_ACCESS_KEY", SECRET)]);
    command.env("AWS_ENDPOINT_URL_S3", server.url()).env("SSL_CERT_FILE", server.certificate())
}

/// With TLS, and a login from a file.
#[test]
fn objects_in_a_bucket_outlive_the_process_that_serves() {
    let Some(place) = Place::needing("fio") else { return };
    let server = Server::start_with_tls();
    let credentials = secret(&place, &format!("{KEY_ID}\n{SECRET}\n"));
    let mut up = place.command("up --size 64M --mem-limit 8M --backing s3://cold/pages:3G");
    up.env("UZRAM_S3_CREDENTIALS_FILE", &credentials).env("AWS_ENDPOINT_URL", server.url());
    let daemon = Daemon::start(up.env("SSL_CERT_FILE", server.certificate()));
    assert!(daemon.facts.contains("s3://cold/pages") && !daemon.facts.contains(SECRET), "{}", daemon.facts);
    fs::remove_file(&credentials).unwrap();
    write(&place, "48M");
    assert!(place.statistic("pages_backed") > 1000);
    place.take_over();
    read_back(&place, "48M");
    assert_eq!(place.get("backing_state").lines().nth(1), Some("lost 0"));
    // While it is there, it has a lease.
    let mut sweep = place.command("backing sweep s3://cold/pages --dry-run");
    collect_within(start(log_in(&mut sweep, &server)), FIO_WITHIN).shows(&["in use"]);
    place.end(daemon);
    assert_eq!(server.objects().len(), 0, "left behind");
}

#[test]
fn a_bucket_that_refuses_reads_gives_io_errors_and_says_so() {
    let Some(place) = Place::needing("nbdcopy qemu-io") else { return };
    let server = Server::start();
    let mut up = place.command("up --size 64M --mem-limit 8M --backing s3://cold");
    let daemon = Daemon::start(log_in(&mut up, &server));
    place.copy_in(&random_file(&place, "source", 32 << 20));
    let state = || place.get("backing_state");
    assert!(place.statistic("pages_backed") > 1000 && state().starts_with("ok\n"), "{}", state());
    for (status, code) in [(403, "AccessDenied"), (307, "TemporaryRedirect")] {
        server.refuse(Some((status, code)));
        let ended = run(&place, "qemu-io", &["-r", "-f", "raw", "-c", "read 0 4M", &place.uri()]);
        assert!(ended.to_string().contains("Input/output error"), "{status}: {ended}");
        wait_until("the state says why", || {
            state().starts_with("failing for ") && state().contains(&status.to_string())
        });
    }
    server.refuse(None);
    wait_until("it is well", || state().starts_with("ok\n"));
    place.down();
    daemon.ended();
}

#[test]
fn what_cannot_be_used_is_refused_in_one_line() {
    if !able() {
        return;
    }
    let (place, redis) = (Place::new(), Redis::start(&["--requirepass", "secret"]));
    for (args, status, hint) in [
        ("up --backing redis://:secret@127.0.0.1:1", 2, "in a file"),
        ("up --backing redis://127.0.0.1:1", 1, "refused"),
        ("up --backing ADDRESS", 1, "password"),
        ("up --backing http://127.0.0.1", 2, "redis://"),
        ("up --backing s3://id:secret@cold", 2, "in a file"),
        ("up --backing s3://cold", 1, "AWS_ACCESS_KEY_ID"),
        ("up --backing s3://cold --copies 2", 1, "by itself"),
        ("swap on --size 64M --backing s3://cold", 2, "swap area cannot use"),
        ("up --copies 2", 2, "give --backing"),
        ("up --backing /tmp/none/b.img:1M --copies 2", 1, "one copy"),
        ("swap on --size 64M --backing ADDRESS", 2, "swap area cannot use"),
    ] {
        let ended = place.run(&args.replace("ADDRESS", &redis.address()));
        assert!(!ended.says(status, hint).stderr.contains("secret@"), "{args}");
    }
    // One that was started without may open no connections later.
    let _daemon = place.up("");
    let add = format!("add zram1 --size 16M --backing {}", redis.address());
    place.run(&add).says(1, "was started without");
}

/// Pages that a file has no room for go to a server, and all are there for the process that serves next.
#[test]
fn a_file_comes_before_a_server() {
    if !able() || missing("fio") {
        return;
    }
    let (place, redis) = (Place::without_rights(), Redis::start(&[]));
    let (file, address) = (place.path("cold.img"), redis.address());
    let daemon = place.up_sized("128M", &format!("--mem-limit 8M --backing {file}:24M --backing {address}"));
    assert!(daemon.facts.contains("cold.img, 24 MiB") && daemon.facts.contains(&address), "{}", daemon.facts);
    let keys = || redis.ask(&["dbsize"]).trim().parse::<u64>().unwrap();
    write(&place, "96M");
    // The lease is a key, too.
    assert!(keys() > 20, "{} keys", keys());
    place.take_over();
    read_back(&place, "96M");
    assert_eq!(place.get("backing_dev"), format!("{file} {address}"));
    place.assert_zero("failed_reads backing_corrupted");
    place.end(daemon);
    assert_eq!(keys(), 0, "left behind");
}

/// What goes to a file that is encrypted cannot be read there, and can be by the process that serves next.
#[test]
fn a_file_can_be_encrypted() {
    const SENTENCE: &[u8] = b"a sentence that nobody else should read";
    if missing("nbdcopy") {
        return;
    }
    for (option, shown) in [("", "0"), ("--encrypt", "1")] {
        let place = Place::without_rights();
        let backing = place.path("cold.img:64M");
        let daemon = place.up_sized("64M", &format!("--mem-limit 8M --backing {backing} {option}"));
        let mut bytes = Random::new(1).bytes(32 << 20);
        bytes.chunks_mut(4096).for_each(|page| page[1000..1000 + SENTENCE.len()].copy_from_slice(SENTENCE));
        let source = PathBuf::from(place.write("source", &bytes));
        place.copy_in(&source);
        let there = fs::read(place.path("cold.img")).unwrap();
        let is_readable = contains(&there, SENTENCE);
        assert_eq!(
            (is_readable, daemon.facts.contains("encrypted")),
            (option.is_empty(), !option.is_empty())
        );
        assert_eq!(place.get("backing_encrypted"), shown);
        place.take_over();
        assert_eq!(place.get("backing_encrypted"), shown);
        place.assert_holds(&source);
        assert!(place.statistic("pages_backed") > 1000);
        place.end(daemon);
    }
}
