//! Pages in Redis servers that are started here. Needs `redis-server` and `redis-cli`.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::pages::{self, check, check_reads, fill, go_and_come_back, store_on, try_fill};
use crate::common::{Cluster, Redis, wait_until};
use rustix::process::Signal;
use uzram::ErrorKind;
use uzram::backing::{Direction, Filling, Objects};
use uzram::store::PolicyThread;
use uzram_remote::{
    Address, Credentials, DeviceId, Identity, Key, Limits, ObjectStore, RedisStore, RemoteBacking, Swept,
    sweep,
};

const PAGES: u32 = 4000;

fn open(address: &str, copies: u8) -> uzram::Result<RemoteBacking<RedisStore>> {
    let address = Address::parse(address)?;
    let connect = || RedisStore::connect(address, Credentials::default(), copies);
    RemoteBacking::open(&Identity::new()?, Some(64 << 20), Limits::default(), connect)
}

/// Returns why a store cannot be used, which is found out soon.
fn refused(address: &str, copies: u8) -> (ErrorKind, String) {
    let started = Instant::now();
    let error = open(address, copies).map(drop).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(6), "{address}: {:?}", started.elapsed());
    (error.kind(), error.to_string())
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn keys<'a>(nodes: &'a [Redis], end: &str) -> Vec<(&'a Redis, String)> {
    let of_node = |node: &'a Redis| {
        let keys = node.ask(&["keys", &format!("uzram:*{end}")]);
        keys.split_whitespace().map(|key| (node, key.to_owned())).collect::<Vec<_>>()
    };
    nodes.iter().flat_map(of_node).collect()
}

#[test]
fn pages_go_to_a_server_and_come_back_and_nothing_stays() {
    needs_redis!();
    let redis = Redis::start(&[]);
    let address = redis.address();
    let backing = Arc::new(open(&address, 1).unwrap());
    let store = store_on(&backing, PAGES);
    let is_left = || redis.ask(&["dbsize"]).trim() == "2";
    go_and_come_back(&store, || (), || wait_until("all but one extent are removed, and the lease", is_left));
    let health = backing.health();
    assert_eq!((health.expired, health.left_behind, health.stopped), (0, 0, None));
    store.erase_backing();
    full_servers_keep_the_lease_and_remove_objects(&[redis], &address, 1);
}

/// A cluster in which no key can be read while a slot has no master, with a replica of each: it spreads
/// objects, moves them, and loses a master.
#[test]
fn a_cluster_spreads_objects_and_survives_the_death_of_a_master() {
    needs_redis!();
    let cluster = Cluster::start(3, 1, true);
    let (address, masters) = (cluster.address(), &cluster.nodes[..3]);
    for (address, copies, why) in
        [(address.clone(), 2, "cluster-require-full-coverage"), (format!("{address}/3"), 1, "database")]
    {
        let (kind, what) = refused(&address, copies);
        assert!(kind == ErrorKind::Unsupported && what.contains(why), "{address}: {what}");
    }
    a_device_that_is_cut_off_from_one_master_keeps_its_objects(&address, masters);
    let backing = Arc::new(open(&address, 1).unwrap());
    let store = store_on(&backing, PAGES);
    // Its pages are away: what is read during the move is read from there.
    fill(&store, 1);
    let [from, to, _] = masters else { panic!("three masters") };
    move_an_object(from, to, || check(&store, 1));
    fill(&store, 2);
    check(&store, 2);
    fill(&store, 2);
    // A replica that loads its data says so instead.
    let keys = |node: &Redis| node.ask(&["dbsize"]).trim().parse::<u64>().unwrap_or(0);
    assert!(masters.iter().all(|node| keys(node) > 1), "each master has more than the lease");
    wait_until("the replicas have them all", || {
        cluster.nodes.iter().map(keys).sum::<u64>() == 2 * cluster.keys()
    });
    to.signal(Signal::KILL);
    // At first only a replica has them, and then it is their master.
    check(&store, 2);
    wait_until("they can be written again", || try_fill(&store, 3).is_ok());
    check(&store, 3);
    check_reads(&store);
    assert_eq!(backing.health().stopped, None);
}

/// A device that is cut off from any one master for so long that its lease is over there, and not from the
/// others, is in use.
fn a_device_that_is_cut_off_from_one_master_keeps_its_objects(address: &str, masters: &[Redis]) {
    let device = DeviceId::new().unwrap();
    block_on(async {
        let address = Address::parse(address).unwrap();
        let store = RedisStore::connect(address, Credentials::default(), 1).await.unwrap();
        store.renew_lease(device).await.unwrap();
        for extent in 0..30 {
            let key = Key { device, extent, filling: Filling { generation: 1, home: 0 } };
            store.put(key, b"object").await.unwrap();
        }
    });
    for (node, lease) in keys(masters, "lease") {
        assert_eq!(node.ask(&["del", &lease]).trim(), "1");
        let found = sweep(address, true).unwrap();
        assert_eq!(found[&device.to_string()], Swept { objects: 30, is_leased: true });
        // It is there again.
        node.ask(&["set", &lease, "host"]);
    }
    // What comes next finds no objects but its own.
    masters.iter().for_each(|node| assert_eq!(node.ask(&["flushall"]).trim(), "OK"));
}

/// Gives a slot with an object to another master, the object first: the old one says where it is, then where
/// the slot is.
fn move_an_object(from: &Redis, to: &Redis, check: impl Fn()) {
    let ask = |node: &Redis, command: &[&str]| node.ask(command).trim().to_owned();
    let is_object = |key: &str| key.starts_with("uzram:") && !key.ends_with("lease");
    let keys = ask(from, &["keys", "*"]);
    let key = keys.lines().find(|key| is_object(key)).expect("each master has some");
    let slot = ask(from, &["cluster", "keyslot", key]);
    let [old, new] = [from, to].map(|node| ask(node, &["cluster", "myid"]));
    let set = |node: &Redis, rest: &[&str]| {
        let said = ask(node, &[&["cluster", "setslot", &slot], rest].concat());
        assert_eq!(said, "OK", "{rest:?}");
    };
    set(to, &["importing", &old]);
    set(from, &["migrating", &new]);
    let migrated = ask(from, &["migrate", "127.0.0.1", &to.port.to_string(), key, "0", "5000"]);
    assert_eq!(migrated, "OK");
    check();
    assert_eq!(ask(to, &["cluster", "countkeysinslot", &slot]), "1", "it is still there");
    [to, from].iter().for_each(|node| set(node, &["node", &new]));
    check();
}

/// Three masters without replicas, of which the last test kills one.
#[test]
fn a_cluster_without_replicas_keeps_two_copies() {
    needs_redis!();
    let cluster = Cluster::start(3, 0, false);
    a_lease_hands_on_the_epoch(&cluster);
    let address = cluster.address();
    full_servers_keep_the_lease_and_remove_objects(&cluster.nodes, &address, 2);
    what_a_dead_device_left_can_be_swept(&cluster);
    with_two_copies_a_master_may_be_lost(&cluster);
}

/// A master is killed and stays away: what it had is copied again, to masters that are well.
fn with_two_copies_a_master_may_be_lost(cluster: &Cluster) {
    let address = Address::parse(&cluster.address()).unwrap();
    let connect = || async {
        let store = RedisStore::connect(address, Credentials::default(), 2).await?;
        store.set_settled_after(Duration::from_millis(500));
        Ok(store)
    };
    let identity = Identity::new().unwrap();
    let backing = RemoteBacking::open(&identity, Some(64 << 20), Limits::default(), connect).unwrap();
    let backing = Arc::new(backing);
    let store = Arc::new(store_on(&backing, PAGES));
    let _policy = PolicyThread::start("test", &store).unwrap();
    fill(&store, 1);
    // The lease has a key at each master.
    let objects = cluster.keys() - 3;
    assert!(objects > 4 && objects.is_multiple_of(2), "{objects}");
    assert_eq!(backing.health().degraded, None);
    // What is read is in memory then: nothing of this one is copied again.
    let reader = store_on(&Arc::new(open(&cluster.address(), 2).unwrap()), PAGES);
    fill(&reader, 1);
    cluster.nodes[1].signal(Signal::KILL);
    // The one that is away could have leases.
    let dead = format!("127.0.0.1:{} of ", cluster.nodes[1].port);
    let refusal = sweep(&cluster.address(), false).unwrap_err().to_string();
    assert!(refusal.contains(&dead), "{refusal}");
    check(&reader, 1);
    check_reads(&reader);
    reader.erase_backing();
    wait_until("the state names the node that is away", || {
        let health = backing.health();
        health.degraded.is_some_and(|trouble| trouble.why.contains(&dead)) && health.stopped.is_none()
    });
    // Of all objects there is a copy at each of the two that are left.
    wait_until("all copies are there again", || {
        let keys = |node: &Redis| node.ask(&["dbsize"]).trim().parse::<u64>().unwrap();
        let now = [0, 2].map(|node| keys(&cluster.nodes[node]));
        // Those of the lease at the dead one are not.
        now[0] == now[1] && 2 * now[0] > objects
    });
    check(&store, 1);
    // New objects go to the other two.
    wait_until("pages can be written", || try_fill(&store, 2).is_ok());
    assert!(store.backing_stats().pages >= u64::from(PAGES) / 2);
    check(&store, 2);
    check_reads(&store);
}

/// Servers that are full keep what is there, and let go of what is discarded.
fn full_servers_keep_the_lease_and_remove_objects(nodes: &[Redis], address: &str, copies: u8) {
    let backing = Arc::new(open(address, copies).unwrap());
    let store = store_on(&backing, PAGES);
    fill(&store, 1);
    nodes.iter().for_each(|node| drop(node.ask(&["config", "set", "maxmemory", "1"])));
    wait_until("nothing is written", || backing.health().stopped.is_some());
    assert!(try_fill(&store, 2).is_err());
    let leases = keys(nodes, "lease");
    assert!(leases.len() >= copies.into());
    leases.iter().for_each(|(node, lease)| drop(node.ask(&["expire", lease, "20"])));
    wait_until("a lease lasts longer again", || {
        let ttl = |(node, lease): &(&Redis, String)| node.ask(&["ttl", lease]).trim().parse::<u32>().unwrap();
        leases.iter().filter(|lease| ttl(lease) > 500).count() >= copies.into()
    });
    check(&store, 2);
    store.discard_pages(0..PAGES.into());
    wait_until("all objects are removed", || keys(nodes, "").iter().all(|(_, key)| key.ends_with("lease")));
    nodes.iter().for_each(|node| drop(node.ask(&["config", "set", "maxmemory", "0"])));
    wait_until("pages can be written again", || try_fill(&store, 3).is_ok());
    check(&store, 3);
    check_reads(&store);
    store.erase_backing();
    assert!(keys(nodes, "").is_empty());
}

/// The lease tells the next process how often masters have begun anew.
fn a_lease_hands_on_the_epoch(cluster: &Cluster) {
    let address = Address::parse(&cluster.address()).unwrap();
    block_on(async {
        let device = DeviceId::new().unwrap();
        let store = RedisStore::connect(address.clone(), Credentials::default(), 2).await.unwrap();
        store.renew_lease(device).await.unwrap();
        drop(store);
        let leases = keys(&cluster.nodes, "lease");
        assert_eq!(leases.len(), 3, "at each master");
        let is =
            |epoch: &str| leases.iter().all(|(node, key)| node.ask(&["get", key]).trim().ends_with(epoch));
        assert!(is(" 0"));
        // Two of them are older.
        for ((node, key), epoch) in leases.iter().zip(["host 7", "host 21", "host 3"]) {
            assert!(node.ask(&["set", key, epoch]).contains("OK"));
        }
        let store = RedisStore::reconnect(address, Credentials::default(), 2).await.unwrap();
        store.renew_lease(device).await.unwrap();
        assert!(is(" 21"));
        assert_eq!(store.home(1) >> 28, 0b1000 | (21 % 8));
        // It is renewed at the others while a master is away; all of it ends.
        leases.iter().for_each(|(node, key)| drop(node.ask(&["expire", key, "20"])));
        leases[0].0.signal(Signal::STOP);
        store.renew_lease(device).await.unwrap();
        leases[0].0.signal(Signal::CONT);
        for (node, key) in &leases[1..] {
            assert!(node.ask(&["ttl", key]).trim().parse::<u32>().unwrap() > 500);
        }
        assert_eq!(cluster.keys(), 3);
        store.end_lease(device).await;
        assert_eq!(cluster.keys(), 0);
    });
}

/// What a device left that was killed is removed, once its lease is over; devices with a lease, and keys of
/// others, stay.
fn what_a_dead_device_left_can_be_swept(cluster: &Cluster) {
    let address = cluster.address();
    let devices: Vec<_> = (1..=2)
        .map(|copies| {
            let backing = Arc::new(open(&address, copies).unwrap());
            let store = store_on(&backing, PAGES);
            fill(&store, 1);
            (store, backing)
        })
        .collect();
    let dead = "0123456789abcdef".repeat(2);
    let set = |key: &str| assert!(cluster.nodes[0].ask(&["-c", "set", key, "x"]).contains("OK"), "{key}");
    let others = ["uzram:other", "7"];
    [format!("uzram:{dead}:7:1"), format!("uzram:{dead}:{{12}}:7:1")].iter().for_each(|key| set(key));
    others.iter().for_each(|key| set(key));
    let found = sweep(&address, true).unwrap();
    assert_eq!(found[&dead], Swept { objects: 2, is_leased: false });
    let leased = |found: &BTreeMap<String, Swept>| {
        found.values().filter(|swept| swept.is_leased && swept.objects > 1).count()
    };
    assert_eq!((found.len(), leased(&found)), (3, 2), "{found:?}");
    // Looking removes nothing.
    assert_eq!(sweep(&address, true).unwrap(), found);
    assert_eq!(sweep(&address, false).unwrap(), found);
    let found = sweep(&address, false).unwrap();
    assert_eq!((found.len(), leased(&found)), (2, 2), "{found:?}");
    devices.iter().for_each(|(store, _)| check(store, 1));
    others.iter().for_each(|key| assert!(cluster.nodes[0].ask(&["-c", "get", key]).contains('x'), "{key}"));
    // A device that ends leaves nothing.
    devices.iter().for_each(|(store, _)| store.erase_backing());
    assert_eq!(sweep(&address, true).unwrap(), BTreeMap::new());
    assert_eq!(cluster.keys(), 2);
    others.iter().for_each(|key| drop(cluster.nodes[0].ask(&["-c", "del", key])));
}

/// Single servers have different objects: a device goes on with the one that has its objects.
#[test]
fn of_single_servers_one_is_chosen_for_good() {
    needs_redis!();
    let servers = [Redis::start(&[]), Redis::start(&[])];
    let named = servers.each_ref().map(|redis| redis.address().split_off("redis://".len()));
    let address = Address::parse(&format!("redis://{}:64M", named.join(",")));
    block_on(async {
        let store = RedisStore::connect(address.unwrap(), Credentials::default(), 1).await.unwrap();
        let next = store.address_of_all().await.unwrap().to_string();
        assert!(next.contains(&named[0]) && !next.contains(&named[1]), "{next}");
    });
}

#[test]
fn servers_that_cannot_be_used_are_refused_soon() {
    needs_redis!();
    let login = Redis::start(&["--requirepass", "secret"]);
    let evicts = Redis::start(&["--maxmemory-policy", "allkeys-lru"]);
    let full = Redis::start(&["--maxmemory", "100kb"]);
    let master = Redis::start(&[]);
    let master_port = master.port.to_string();
    let replica = Redis::start(&["--replicaof", "127.0.0.1", &master_port]);
    let dir = tempfile::tempdir().unwrap();
    let (_tls, tls_port, _) = Redis::start_with_tls(&[], dir.path());
    for (address, copies, kind, why) in [
        ("redis://127.0.0.1:1".to_owned(), 1, ErrorKind::Io, "refused"),
        ("redis://name.invalid:1".to_owned(), 1, ErrorKind::Io, ""),
        (login.address(), 1, ErrorKind::Permission, "password"),
        (evicts.address(), 1, ErrorKind::Unsupported, "allkeys-lru"),
        (full.address(), 1, ErrorKind::NoSpace, "full"),
        (replica.address(), 1, ErrorKind::Unsupported, master_port.as_str()),
        (master.address(), 2, ErrorKind::Invalid, "cluster"),
        (
            format!("rediss://127.0.0.1:{tls_port}"),
            1,
            ErrorKind::Io,
            "certificate that this machine does not trust",
        ),
    ] {
        let (found, what) = refused(&address, copies);
        assert!(found == kind && what.contains(why), "{address}: {what}");
    }
    let stopped = Redis::start(&[]);
    stopped.signal(Signal::STOP);
    let (kind, what) = refused(&stopped.address(), 1);
    stopped.signal(Signal::CONT);
    assert_eq!(kind, ErrorKind::Io, "{what}");
}

/// A server that has too many clients closes new connections with an error. It is waited for.
#[test]
fn a_server_with_too_many_clients_is_waited_for() {
    needs_redis!();
    let redis = Redis::start(&[]);
    let (address, identity) = (Address::parse(&redis.address()).unwrap(), Identity::new().unwrap());
    let limits = Limits { read_deadline: Duration::from_secs(60), ..Limits::default() };
    let connect = || RedisStore::connect(address, Credentials::default(), 1);
    let backing = RemoteBacking::open(&identity, Some(64 << 20), limits, connect).unwrap();
    let transfer = |direction| pages::transfer(&backing, direction, 0);
    transfer(Direction::Write).unwrap();
    let ids = redis.ask(&["client", "list"]);
    // That of redis-cli itself asks for the list.
    let ids = ids.lines().filter(|line| !line.contains("cmd=client"));
    let ids = ids.filter_map(|line| line.strip_prefix("id=")?.split(' ').next());
    let kill: String = ids.map(|id| format!("client kill id {id}\n")).collect();
    assert!(!kill.is_empty());
    let others: Vec<_> = (0..20).map(|_| TcpStream::connect(("127.0.0.1", redis.port)).unwrap()).collect();
    // By one client, as there is no other one then.
    redis.ask_all(&format!("config set maxclients 10\n{kill}"));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| transfer(Direction::Read));
        std::thread::sleep(Duration::from_millis(1500));
        assert!(redis.ask(&["ping"]).contains("max number of clients"));
        assert!(!reader.is_finished(), "{:?}", reader.join());
        drop(others);
        reader.join().unwrap().expect("it waits");
    });
}
