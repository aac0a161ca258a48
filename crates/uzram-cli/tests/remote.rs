//! Backing devices in Redis servers that are started here: with `redis-server`, `redis-cli` and fio.

#![allow(clippy::unwrap_used)]

mod common;
// The servers, as the tests of uzram-remote start them.
#[path = "../../uzram-remote/tests/common/mod.rs"]
mod servers;

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use common::clients::{fio, missing, succeed};
use common::{Place, collect_within, finish, start, wait_until};
use rustix::process::{Signal, kill_process};
use servers::{Cluster, Redis, able};

/// As much as it takes on a busy machine.
const FIO_WITHIN: Duration = Duration::from_secs(300);

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
    let command = format!(
        "(until {uzram} stat zram0 backing | grep -q 'pages_written_back .....'; do sleep 0.1; done; kill -KILL {victim}) &
         fio --name=verify --ioengine=nbd --uri=$uri --thread --iodepth=8 --rw=randwrite --bs=4k --size=2G --io_size=512M \
         --verify=crc32c --verify_fatal=1 --verify_state_save=0 --buffer_compress_percentage=50 --refill_buffers \
         --output=/dev/null && wait && {uzram} stat zram0 backing_state | grep '^lost 0$'"
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
    assert!(!said.contains("not written to"), "{said}");
    // What the daemon left there, it removed; what the dead master had is lost with it.
    let left: u64 =
        cluster.nodes[..2].iter().map(|node| node.ask(&["dbsize"]).trim().parse::<u64>().unwrap()).sum();
    assert_eq!(left, 0);
}

/// The process that serves is killed; another one goes on with the objects, also if the server is stopped
/// meanwhile.
#[test]
fn objects_outlive_the_process_that_serves() {
    if !able() || missing(&["fio"]) {
        return;
    }
    let (place, redis) = (Place::new(), Redis::start(&["--requirepass", "secret"]));
    let password = place.root().join("password");
    std::fs::write(&password, "secret\n").unwrap();
    std::fs::set_permissions(&password, std::fs::Permissions::from_mode(0o600)).unwrap();
    let address = redis.address();
    let args = ["up", "--size", "64M", "--mem-limit", "8M", "--backing", &address];
    let mut up = place.command(&args);
    up.env("UZRAM_REDIS_PASSWORD_FILE", &password);
    let daemon = common::Daemon::start(up);
    assert!(daemon.facts.contains(&address) && !daemon.facts.contains("secret"), "{}", daemon.facts);
    let uri = format!("--uri={}", place.uri());
    let job =
        ["--rw=randwrite", "--bs=4k", "--size=48M", "--buffer_compress_percentage=50", "--verify=crc32c"];
    let write = [&job[..], &["--do_verify=0", "--randseed=7"]].concat();
    let read = [&job[..], &["--verify_only", "--randseed=7"]].concat();
    succeed(&place, "fio", &fio(&uri, &write));
    assert!(place.statistic("pages_backed") > 1000);
    let standby_is_ready = || {
        let status: serde_json::Value = serde_json::from_str(&place.run(&["status", "--json"]).ok()).unwrap();
        status["standby_ready"] == true
    };
    for is_stopped in [false, true] {
        wait_until("a stand-by is ready", standby_is_ready);
        let worker = place.worker_id();
        if is_stopped {
            redis.signal(Signal::STOP);
        }
        kill_process(worker, Signal::KILL).unwrap();
        wait_until("another process serves", || {
            place.run(&["status"]).status.success() && place.worker_id() != worker
        });
        if is_stopped {
            wait_until("the user is told", || place.run(&["stat", "zram0"]).ok().contains("not written to"));
            redis.signal(Signal::CONT);
            wait_until("it is well", || {
                place.run(&["stat", "zram0", "backing_state"]).ok().starts_with("ok\n")
            });
        }
        succeed(&place, "fio", &fio(&uri, &read));
    }
    assert_eq!(place.run(&["stat", "zram0", "backing_state"]).ok().lines().nth(1), Some("lost 0"));
    assert_eq!(place.run(&["stat", "zram0", "backing_copies"]).ok(), "1\n");
    assert_eq!(place.statistic("failed_reads"), 0);
    place.down();
    let (status, said) = daemon.ended();
    assert!(status.success(), "{said}");
    let keys = redis.ask(&["-a", "secret", "--no-auth-warning", "dbsize"]);
    assert_eq!(keys.trim(), "0", "left behind");
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
        (&["up", "--backing", &address, "--writeback-layout", "blocks"], 1, "packed"),
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
