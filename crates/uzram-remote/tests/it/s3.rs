//! Pages in an S3 server, which runs in a thread here.

use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::pages::{check, fill, go_and_come_back, store_on, transfer};
use crate::common::s3::{KEY_ID, SECRET, Server, age};
use crate::common::wait_until;
use uzram::backing::{Direction, Filling, Objects};
use uzram::store::PageNo;
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind};
use uzram_remote::{
    DeviceId, Identity, Key, Limits, ObjectStore, RemoteBacking, S3Address, S3Login, S3Store, Swept, sweep_s3,
};

const PAGES: u32 = 3000;
const ADDRESS: &str = "s3://cold/a/b";

fn login(url: String) -> S3Login {
    S3Login {
        access_key_id: KEY_ID.to_owned(),
        secret_access_key: SECRET.to_owned(),
        session_token: None,
        region: "us-east-1".to_owned(),
        endpoint: Some(url),
    }
}

fn open(identity: &Identity, login: &S3Login, address: &str) -> uzram::Result<RemoteBacking<S3Store>> {
    let address = S3Address::parse(address)?;
    RemoteBacking::open(identity, Some(64 << 20), Limits::default(), || S3Store::connect(address, login))
}

fn open_on(server: &Server) -> Arc<RemoteBacking<S3Store>> {
    Arc::new(open(&Identity::new().unwrap(), &login(server.url()), ADDRESS).unwrap())
}

#[test]
fn pages_go_to_a_bucket_and_come_back_and_nothing_stays() {
    let server = Server::start();
    let backing = open_on(&server);
    let store = store_on(&backing, PAGES);
    let is_below =
        || assert!(server.objects().iter().all(|object| object.starts_with(server.path("a/b/uzram"))));
    let is_left = || server.objects().len() == 2;
    go_and_come_back(&store, is_below, || {
        wait_until("all but one extent are removed, and the lease", is_left)
    });
    let health = backing.health();
    assert_eq!((health.expired, health.left_behind, health.stopped), (0, 0, None));
    store.erase_backing();
    assert_eq!(server.objects(), [""; 0].map(std::path::PathBuf::from));
}

#[test]
fn objects_that_were_changed_or_lost_are_read_errors() {
    let server = Server::start();
    let backing = open_on(&server);
    let store = store_on(&backing, PAGES);
    fill(&store, 1);
    for file in server.objects() {
        // Each page's first bytes, wherever it begins.
        let file = std::fs::File::options().read(true).write(true).open(file).unwrap();
        let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes.iter_mut().step_by(500).for_each(|byte| *byte ^= 1);
        file.write_all_at(&bytes, 0).unwrap();
    }
    let mut out = [0; PAGE_SIZE];
    for page in (0..PAGES).step_by(300) {
        assert!(store.read(PageNo(page), &mut out).is_err(), "page {page}");
    }
    assert_eq!(store.backing_stats().lost_reads, 0);
    server.objects().iter().for_each(|object| std::fs::remove_file(object).unwrap());
    assert!(store.read(PageNo(7), &mut out).is_err());
    assert_eq!(store.backing_stats().lost_reads, 1);
}

#[test]
fn a_store_writes_reads_parts_and_removes() {
    let server = Server::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let address = S3Address::parse("s3://cold").unwrap();
        let store = S3Store::connect(address, &login(server.url())).await.unwrap();
        let device = DeviceId::new().unwrap();
        let key = |extent| Key { device, extent, filling: Filling { generation: 3, home: 0 } };
        server.requests();
        let bytes: Vec<u8> = (0..100_000_u32).map(|at| at as u8).collect();
        store.put(key(1), &bytes).await.unwrap();
        assert_eq!(server.objects(), [server.path(&format!("uzram/{device}/1-3"))]);
        assert_eq!(store.get(key(1), 77, 300).await.unwrap(), bytes[77..377]);
        assert_eq!(server.requests(), ["PutObject", "GetObject"], "one for each");
        assert_eq!(store.get(key(1), 99_900, 300).await.unwrap(), bytes[99_900..], "it ends there");
        let lost = async |extent, at| Error::from(store.get(key(extent), at, 4).await.unwrap_err()).kind();
        assert_eq!(lost(1, 100_000).await, ErrorKind::NotFound);
        assert_eq!(lost(2, 0).await, ErrorKind::NotFound);
        store.put(key(5), b"x").await.unwrap();
        server.requests();
        // Also one that is not there.
        assert_eq!(store.remove(vec![key(1), key(2), key(5)]).await, []);
        assert_eq!(server.requests(), ["DeleteObjects"]);
        assert_eq!(store.remove(vec![key(1)]).await, []);
        assert_eq!(server.objects().len(), 0);
        store.check().await.unwrap();
        store.renew_lease(device).await.unwrap();
        store.check().await.unwrap();
        let lease = server.path(&format!("uzram/{device}/lease"));
        std::fs::remove_file(&lease).unwrap();
        store.check().await.unwrap();
        store.renew_lease(device).await.unwrap();
        assert!(lease.exists());
        store.end_lease(device).await;
        assert_eq!(server.objects().len(), 0);
    });
}

#[test]
fn stores_that_cannot_be_used_are_refused_soon() {
    let server = Server::start();
    let good = login(server.url());
    let refused = |login: S3Login, address: &str| {
        let started = Instant::now();
        let opened = open(&Identity::new().unwrap(), &login, address);
        let error = opened.map(drop).expect_err(&format!("{address} at {:?}", login.endpoint));
        assert!(started.elapsed() < Duration::from_secs(6), "{address}: {:?}", started.elapsed());
        assert!(!error.to_string().contains(SECRET), "{error}");
        (error.kind(), error.to_string())
    };
    let at = |url: &str| S3Login { endpoint: Some(url.to_owned()), ..good.clone() };
    let secret = |secret: &str| S3Login { secret_access_key: secret.to_owned(), ..good.clone() };
    let id = |id: &str| S3Login { access_key_id: id.to_owned(), ..good.clone() };
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_url = format!("http://{}", silent.local_addr().unwrap());
    let stranger = Server::start_with_tls();
    let cases = [
        (at("http://127.0.0.1:1"), ADDRESS, ErrorKind::Io, "refused"),
        (at("http://name.invalid"), ADDRESS, ErrorKind::Io, "backing_dev"),
        (good.clone(), "s3://other/a", ErrorKind::Invalid, "no such bucket"),
        (secret("x"), ADDRESS, ErrorKind::Permission, "secret key"),
        (id("x"), ADDRESS, ErrorKind::Permission, "access key"),
        (good.clone(), "s3://cold/read-only", ErrorKind::Permission, "does not permit"),
        // It takes connections and says nothing.
        (at(&silent_url), ADDRESS, ErrorKind::Io, "did not answer"),
        // It speaks no TLS.
        (at(&server.url().replace("http", "https")), ADDRESS, ErrorKind::Io, ""),
        // It has a certificate of its own.
        (at(&stranger.url()), ADDRESS, ErrorKind::Io, "has a certificate that this machine does not trust"),
    ];
    // At once, as some take all the time that they have.
    std::thread::scope(|scope| {
        for (login, address, kind, why) in cases {
            scope.spawn(move || {
                let (found, what) = refused(login, address);
                assert!(found == kind && what.contains(why), "{address}: {what}");
            });
        }
    });
    // Its disk is broken.
    server.make("a/b");
    let (kind, what) = refused(good.clone(), ADDRESS);
    assert!(kind == ErrorKind::Io && what.contains(ADDRESS), "{what}");
    assert_eq!(stranger.requests(), [""; 0]);
}

/// A server that is away for a while: what is written meanwhile fails, soon at once, and all goes on when it
/// is there. Another process goes on, too, though it starts while the server is away.
#[test]
fn a_server_that_is_away_for_a_while_loses_nothing() {
    let server = Server::start();
    let limits = Limits {
        read_deadline: Duration::from_millis(500),
        write_deadline: Duration::from_millis(500),
        ..Limits::default()
    };
    let (address, login) = (S3Address::parse(ADDRESS).unwrap(), login(server.url()));
    let identity = Identity::new().unwrap();
    let connect = || S3Store::connect(address.clone(), &login);
    let backing = RemoteBacking::open(&identity, Some(64 << 20), limits, connect).unwrap();
    transfer(&backing, Direction::Write, 1).unwrap();
    let mut other = None;
    let server = server.without(|| {
        assert!(transfer(&backing, Direction::Read, 1).is_err());
        for extent in 2..5 {
            assert!(transfer(&backing, Direction::Write, extent).is_err());
        }
        let started = Instant::now();
        assert!(transfer(&backing, Direction::Write, 5).is_err());
        assert!(started.elapsed() < limits.write_deadline, "it does not wait any more");
        assert!(backing.health().stopped.is_some());
        let store = S3Store::new(address.clone(), &login).unwrap();
        let store = std::sync::Mutex::new(Some(store));
        let connect = move || std::future::ready(Ok(store.lock().unwrap().take().unwrap()));
        let resumed = other.insert(RemoteBacking::resume(&identity, 64 << 20, limits, connect).unwrap());
        assert!(transfer(resumed, Direction::Read, 1).is_err());
    });
    wait_until("it is written to again", || transfer(&backing, Direction::Write, 6).is_ok());
    assert_eq!(transfer(&backing, Direction::Read, 1), Ok(1));
    assert_eq!(backing.health().stopped, None);
    let other = other.unwrap();
    assert_eq!(transfer(&other, Direction::Read, 6), Ok(6));
    wait_until("the other one can write, too", || transfer(&other, Direction::Write, 7).is_ok());
    assert_eq!(transfer(&backing, Direction::Read, 7), Ok(7));
    // What may have been written late is removed.
    wait_until("three objects are left, and the lease", || server.objects().len() == 4);
    drop(backing);
    other.end();
    assert_eq!(server.objects().len(), 3, "the lease is over");
}

/// A process that goes on renews the lease at once, which may be over: a sweep looks twice within seconds.
#[test]
fn a_lease_is_renewed_after_a_take_over() {
    let server = Server::start();
    let (address, login) = (S3Address::parse(ADDRESS).unwrap(), login(server.url()));
    let connect = move || std::future::ready(S3Store::new(address.clone(), &login));
    let started = Instant::now();
    let backing =
        RemoteBacking::resume(&Identity::new().unwrap(), 64 << 20, Limits::default(), connect).unwrap();
    wait_until("there is a lease", || !server.objects().is_empty());
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    backing.end();
    assert!(server.objects().is_empty());
}

/// What a device left that was killed is removed, once its lease is over; devices with a lease, and objects
/// of others, stay.
#[test]
fn what_a_dead_device_left_can_be_swept() {
    let server = Server::start();
    let backing = open_on(&server);
    let store = store_on(&backing, PAGES);
    fill(&store, 1);
    let sweep = |only_look| sweep_s3(&S3Address::parse(ADDRESS).unwrap(), &login(server.url()), only_look);
    let [dead, gone] = [DeviceId::new().unwrap(), DeviceId::new().unwrap()].map(|device| device.to_string());
    let others = ["a/b/uzram/other", "a/b/uzram/x/7-1", "a/7-1"].map(str::to_owned);
    let left = [format!("a/b/uzram/{dead}/7-1"), format!("a/b/uzram/{gone}/lease")];
    others.iter().chain(&left).for_each(|name| server.make(name));
    let objects = server.objects().len();
    let found = sweep(true).unwrap();
    assert_eq!(found[&dead], Swept { objects: 1, is_leased: false });
    // A lease alone is somebody's who begins.
    assert_eq!(found[&gone], Swept { objects: 0, is_leased: true });
    assert_eq!((found.len(), found.values().filter(|swept| swept.objects > 1).count()), (3, 1), "{found:?}");
    age(&server.path(&left[1]), Duration::from_secs(601));
    let found = sweep(true).unwrap();
    assert_eq!(found[&gone], Swept { objects: 1, is_leased: false });
    // Looking removes nothing.
    assert_eq!(server.objects().len(), objects);
    assert_eq!(sweep(false).unwrap(), found);
    assert_eq!(server.objects().len(), objects - 2);
    assert_eq!(sweep(true).unwrap().len(), 1);
    assert!(others.iter().all(|name| server.path(name).exists()));
    check(&store, 1);
    // A device that ends leaves nothing.
    store.erase_backing();
    assert_eq!((sweep(true).unwrap().len(), server.objects().len()), (0, others.len()));
    // Without the right login, nothing is known.
    let other = S3Login { secret_access_key: "x".to_owned(), ..login(server.url()) };
    let refused = sweep_s3(&S3Address::parse(ADDRESS).unwrap(), &other, false).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Permission);
}

/// Whatever a server answers, a read is an error of the device, or waits until the server is well; and the
/// state says why.
#[test]
fn answers_are_read_errors_or_waited_for() {
    const OBJECT: &str = "/1-1";
    let server = Server::start();
    let login = login(server.url());
    let open = |read_deadline| {
        let limits = Limits { read_deadline, ..Limits::default() };
        let connect = || std::future::ready(S3Store::new(S3Address::parse(ADDRESS).unwrap(), &login));
        RemoteBacking::open(&Identity::new().unwrap(), Some(64 << 20), limits, connect).unwrap()
    };
    let [patient, hasty] = [Duration::from_secs(60), Duration::from_millis(700)].map(open);
    let read =
        |backing| transfer(backing, Direction::Read, 1).map_err(|error| (error.kind(), error.to_string()));
    [&patient, &hasty].iter().for_each(|backing| _ = transfer(backing, Direction::Write, 1).unwrap());
    let why = |backing: &RemoteBacking<S3Store>| backing.health().stopped.map(|trouble| trouble.why);
    for (status, code, kind) in [
        (404, "NoSuchKey", ErrorKind::NotFound),
        (507, "Words", ErrorKind::NoSpace),
        (307, "TemporaryRedirect", ErrorKind::Io),
        (404, "NoSuchBucket", ErrorKind::Io),
        (400, "ExpiredToken", ErrorKind::Io),
        (403, "AccessDenied", ErrorKind::Io),
    ] {
        server.refuse(Some((status, code)));
        server.reads_of(OBJECT);
        let (found, what) = read(&patient).unwrap_err();
        assert_eq!((found, server.reads_of(OBJECT)), (kind, 1), "{status} {code}: {what}");
        assert!(what.contains(format!("status {status} {code}").trim_end()), "{what}");
    }
    let is_denied = || why(&patient).is_some_and(|why| why.contains("does not permit"));
    wait_until("the state says so", is_denied);
    server.refuse(None);
    wait_until("it is well", || why(&patient).is_none());
    read(&patient).unwrap();
    server.refuse(Some((503, "SlowDown")));
    server.reads_of(OBJECT);
    assert_eq!(read(&hasty).unwrap_err().0, ErrorKind::Io);
    assert!(server.reads_of(OBJECT) > 1, "it is tried again");
    // Longer than a few tries take.
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&patient));
        std::thread::sleep(Duration::from_millis(1500));
        server.refuse(None);
        reader.join().unwrap().expect("it waits");
    });
}
