//! A device with two copies in a cluster, of which one node at a time fails in some way while pages are read
//! and written. Needs `redis-server` and `redis-cli`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::pages::{contents, store_on};
use crate::common::proxy::Mode;
use crate::common::{Cluster, wait_until};
use rustix::process::Signal;
use uzram::backing::Objects;
use uzram::random::Random;
use uzram::store::{PageNo, Store, Writeback};
use uzram::units::PAGE_SIZE;
use uzram_remote::{Address, Credentials, Identity, Limits, RedisStore, RemoteBacking};

const PAGES: u32 = 2000;
const LASTS: Duration = Duration::from_secs(2);
/// One that the nodes of the cluster notice, too.
const LASTS_LONG: Duration = Duration::from_secs(5);
/// The most time that is taken to have enough reads.
const LASTS_AT_MOST: Duration = Duration::from_secs(60);

/// What happens to a node, and ends later.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Proxy(Mode),
    Stopped,
    /// Its memory is used up.
    Full,
    /// Its replica becomes the master.
    FailingOver,
    Killed,
}

struct Device {
    store: Arc<Store>,
    backing: Arc<RemoteBacking<RedisStore>>,
    versions: Vec<u32>,
    random: Random,
}

impl Device {
    fn new(address: &str, seed: u64) -> Device {
        let address = Address::parse(address).unwrap();
        let connect = || RedisStore::connect(address, Credentials::default(), 2);
        let backing =
            RemoteBacking::open(&Identity::new().unwrap(), Some(64 << 20), Limits::default(), connect);
        let backing = Arc::new(backing.unwrap());
        let mut device = Device {
            store: Arc::new(store_on(&backing, PAGES)),
            backing,
            versions: vec![0; PAGES as usize],
            random: Random::new(seed),
        };
        (0..PAGES).for_each(|page| device.write(page));
        device
    }

    fn write(&mut self, page: u32) {
        self.versions[page as usize] += 1;
        let contents = contents(page, self.versions[page as usize]);
        self.store.write(PageNo(page), &contents).unwrap();
    }

    /// Reads a page; panics if it is not as it was written last. Returns whether it went to the cluster,
    /// unless it fails.
    fn read(&self, page: u32, why: &str) -> Option<bool> {
        let mut out = [0; PAGE_SIZE];
        let before = self.store.backing_stats().reads;
        match self.store.read(PageNo(page), &mut out) {
            Ok(()) => {
                assert!(out == contents(page, self.versions[page as usize]), "{why}: page {page} is wrong")
            }
            Err(error) => {
                eprintln!("{why}: page {page}: {error}");
                return None;
            }
        }
        Some(self.store.backing_stats().reads > before)
    }

    /// Reads and writes pages for a while, on a busy machine until there was `enough` of it, as another
    /// thread has pages leave. Returns how many reads failed, and how many went to the cluster.
    fn use_for(&mut self, lasts: Duration, enough: impl Fn(u64) -> bool, why: &str) -> (u64, u64) {
        let ends = AtomicBool::new(false);
        let store = Arc::clone(&self.store);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    // Fails while the node does.
                    let _ = store.write_back(&Writeback::default());
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            let (started, mut failed, mut reads) = (Instant::now(), 0, 0);
            while started.elapsed() < lasts || !enough(reads) && started.elapsed() < LASTS_AT_MOST {
                let page = self.random.below(PAGES as usize) as u32;
                if self.random.below(4) == 0 {
                    self.write(page);
                    continue;
                }
                let read = self.read(page, why);
                failed += u64::from(read.is_none());
                reads += u64::from(read == Some(true));
            }
            ends.store(true, Ordering::Relaxed);
            (failed, reads)
        })
    }

    /// Waits until objects have two copies again: what one node lost may be what the next one is asked for.
    fn recover(&mut self) {
        wait_until("pages can be written", || {
            self.backing.health().stopped.is_none() && self.store.write_back(&Writeback::default()).is_ok()
        });
        (0..PAGES).for_each(|page| self.write(page));
        wait_until("pages are written", || self.store.write_back(&Writeback::default()).is_ok());
    }
}

fn begin(cluster: &Cluster, fault: Fault, node: usize) {
    match fault {
        Fault::None => {}
        Fault::Proxy(mode) => cluster.proxies[node].set(mode),
        Fault::Stopped => cluster.nodes[node].signal(Signal::STOP),
        Fault::Full => drop(cluster.nodes[node].ask(&["config", "set", "maxmemory", "1"])),
        Fault::FailingOver => {
            let said = cluster.replica_of(node).ask(&["cluster", "failover"]);
            assert!(said.contains("OK"), "{said}");
        }
        Fault::Killed => cluster.nodes[node].signal(Signal::KILL),
    }
}

fn end(cluster: &Cluster, fault: Fault, node: usize) {
    match fault {
        Fault::None | Fault::FailingOver | Fault::Killed => {}
        Fault::Proxy(_) => cluster.proxies[node].set(Mode::Pass),
        Fault::Stopped => cluster.nodes[node].signal(Signal::CONT),
        Fault::Full => drop(cluster.nodes[node].ask(&["config", "set", "maxmemory", "0"])),
    }
}

#[test]
fn whatever_one_node_does_no_read_fails_or_is_wrong() {
    needs_redis!();
    let seed =
        std::env::var("SEED").map_or_else(|_| u64::from(std::process::id()), |seed| seed.parse().unwrap());
    eprintln!("SEED={seed}");
    let cluster = Cluster::start_behind_proxies(3, 1, seed);
    let mut device = Device::new(&cluster.address(), seed);
    device.recover();
    let mut others = Random::new(seed);
    for (fault, node) in [
        (Fault::None, 0),
        (Fault::Proxy(Mode::Delay), 0),
        (Fault::Proxy(Mode::Reset), 1),
        (Fault::Proxy(Mode::Drop), 2),
        (Fault::Full, others.below(3)),
        (Fault::FailingOver, 0),
        (Fault::Stopped, 1),
        // Its replica gets damaged bytes, too.
        (Fault::Proxy(Mode::Corrupt), 2),
        (Fault::Killed, 2),
    ] {
        let why = format!("SEED={seed}: {fault:?}");
        let lasts = if matches!(fault, Fault::Stopped | Fault::Killed) { LASTS_LONG } else { LASTS };
        begin(&cluster, fault, node);
        let damaged = || match fault {
            Fault::Proxy(Mode::Corrupt) => cluster.proxies[node].damaged() > 10,
            _ => true,
        };
        let (failed, reads) = device.use_for(lasts, |reads| reads > 50 && damaged(), &why);
        end(&cluster, fault, node);
        eprintln!("{fault:?}: {reads} reads, {:?}", device.backing.health());
        assert_eq!(failed, 0, "{why}");
        assert!(reads > 50, "{why}: {reads} reads");
        assert!(damaged(), "{why}");
        if fault != Fault::Killed {
            device.recover();
        }
    }
    (0..PAGES).for_each(|page| assert!(device.read(page, "at the end").is_some()));
}
