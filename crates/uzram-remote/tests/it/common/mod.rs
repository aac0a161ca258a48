//! Redis servers on loopback, started for a test and ended with it.

pub mod pages;
pub mod proxy;
pub mod s3;

use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use proxy::Proxy;
use rustix::process::{Pid, Signal, kill_process};
use uzram::random::Random;

const READY_WITHIN: Duration = Duration::from_secs(60);

/// Ends a test that needs the programs if they are not installed.
#[allow(unused_macros)]
macro_rules! needs_redis {
    () => {
        if !$crate::common::able() {
            return;
        }
    };
}

/// Returns whether the programs are installed; says so otherwise.
pub fn able() -> bool {
    let is_there = |program| Command::new(program).arg("--version").output().is_ok();
    let able = is_there("redis-server") && is_there("redis-cli");
    if !able {
        eprintln!("skipped: needs redis-server and redis-cli");
    }
    able
}

/// A server, ended when this is dropped.
pub struct Redis {
    pub port: u16,
    child: Child,
    _dir: tempfile::TempDir,
}

impl Redis {
    /// Starts a server with more options, and waits until it answers.
    pub fn start(options: &[&str]) -> Redis {
        Redis::start_at(free_port, |_| options.iter().map(|option| (*option).to_owned()).collect())
    }

    /// The same with TLS: at a port that is returned, with a certificate that is written to `dir`. It wants
    /// no certificate of clients.
    pub fn start_with_tls(options: &[&str], dir: &Path) -> (Redis, u16, PathBuf) {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let [certificate, key] = ["certificate.pem", "key.pem"].map(|name| dir.join(name));
        std::fs::write(&certificate, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        let port = free_port();
        let (tls_port, [certificate_text, key]) =
            (port.to_string(), [&certificate, &key].map(|path| path.to_str().unwrap()));
        let tls = ["--tls-port", &tls_port, "--tls-cert-file", certificate_text, "--tls-key-file", key];
        let more = ["--tls-ca-cert-file", certificate_text, "--tls-auth-clients", "no"];
        (Redis::start(&[options, &tls, &more].concat()), port, certificate)
    }

    /// The same at one of the ports that `choose` returns, with options for it: somebody else may take it
    /// before the server does.
    fn start_at(choose: fn() -> u16, mut options: impl FnMut(u16) -> Vec<String>) -> Redis {
        const TRIES: usize = 5;
        for _ in 0..TRIES {
            let port = choose();
            let mut server = Redis::launch(port, &options(port));
            let until = Instant::now() + READY_WITHIN;
            while server.child.try_wait().unwrap().is_none() {
                let said = server.ask(&["ping"]);
                if said.contains("PONG") || said.contains("NOAUTH") {
                    return server;
                }
                assert!(Instant::now() < until, "the server says: {said}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        panic!("no server starts");
    }

    fn launch(port: u16, options: &[String]) -> Redis {
        let dir = tempfile::tempdir().unwrap();
        let child = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .arg("--dir")
            .arg(dir.path())
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Redis { port, child, _dir: dir }
    }

    /// Returns what `redis-cli` prints for a command.
    pub fn ask(&self, command: &[&str]) -> String {
        text(Command::new("redis-cli").args(["-p", &self.port.to_string()]).args(command))
    }

    /// Sends commands, a line each, over one connection.
    pub fn ask_all(&self, commands: &str) {
        let mut asking = Command::new("redis-cli")
            .args(["-p", &self.port.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        asking.stdin.take().unwrap().write_all(commands.as_bytes()).unwrap();
        asking.wait().unwrap();
    }

    pub fn address(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns the process, for the tests of the program.
    #[allow(dead_code)]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Masters, each with so many replicas. One cluster at a time: many servers that start at once on few CPUs
/// take each other for dead.
pub struct Cluster {
    pub nodes: Vec<Redis>,
    /// What clients connect to instead, if there are proxies: one of each node.
    pub proxies: Vec<Proxy>,
    _alone: MutexGuard<'static, ()>,
}

impl Cluster {
    /// Starts a cluster. With `covered`, no key can be read while some slots have no master.
    pub fn start(masters: usize, replicas: usize, covered: bool) -> Cluster {
        Cluster::start_nodes(masters, replicas, covered, None)
    }

    /// Starts a cluster behind proxies, which its nodes name instead of themselves. What the nodes tell each
    /// other of the cluster does not go through them.
    pub fn start_behind_proxies(masters: usize, replicas: usize, seed: u64) -> Cluster {
        Cluster::start_nodes(masters, replicas, false, Some(seed))
    }

    fn start_nodes(masters: usize, replicas: usize, covered: bool, seed: Option<u64>) -> Cluster {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let coverage = if covered { "yes" } else { "no" };
        let mut proxies = Vec::new();
        let mut start = |number: usize| {
            let mut proxy = None;
            let node = Redis::start_at(free_cluster_port, |port| {
                proxy = seed.map(|seed| Proxy::start(port, seed + number as u64 * 1_000_000));
                let announced = proxy.as_ref().map_or(port, |proxy| proxy.port);
                [
                    ("enabled", "yes"),
                    ("node-timeout", "2000"),
                    ("require-full-coverage", coverage),
                    ("announce-ip", "127.0.0.1"),
                    ("announce-port", &announced.to_string()),
                    ("announce-bus-port", &(port + 10_000).to_string()),
                ]
                .into_iter()
                .flat_map(|(name, value)| [format!("--cluster-{name}"), value.to_owned()])
                .collect()
            });
            proxies.extend(proxy);
            node
        };
        let nodes: Vec<_> = (0..masters * (1 + replicas)).map(&mut start).collect();
        let addresses: Vec<_> = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        let made = text(Command::new("redis-cli").args(["--cluster", "create"]).args(&addresses).args([
            "--cluster-replicas",
            &replicas.to_string(),
            "--cluster-yes",
        ]));
        assert!(made.contains("All 16384 slots covered"), "{made}");
        wait_until("the cluster is well", || {
            let ports: Vec<_> = match seed {
                Some(_) => proxies.iter().map(|proxy| proxy.port.to_string()).collect(),
                None => nodes.iter().map(|node| node.port.to_string()).collect(),
            };
            nodes.iter().all(|node| {
                // Replicas are known to all some time later.
                let slots = node.ask(&["cluster", "slots"]);
                let has_all = ports.iter().all(|port| slots.lines().any(|line| line.contains(port)));
                let said = node.ask(&["cluster", "info"]);
                has_all
                    && said.contains("cluster_state:ok")
                    && said.contains(&format!("cluster_known_nodes:{}", nodes.len()))
            })
        });
        Cluster { nodes, proxies, _alone: alone }
    }

    /// Returns the text of an address that names the first node.
    pub fn address(&self) -> String {
        match self.proxies.first() {
            Some(proxy) => format!("redis://127.0.0.1:{}", proxy.port),
            None => self.nodes[0].address(),
        }
    }

    /// Returns the replica that a master got at the start: masters come first, and their replicas in some
    /// order.
    pub fn replica_of(&self, master: usize) -> &Redis {
        let id = self.nodes[master].ask(&["cluster", "myid"]);
        let is_its = |node: &&Redis| {
            let lines = node.ask(&["cluster", "nodes"]);
            let own = lines.lines().find(|line| line.contains("myself"));
            own.is_some_and(|own| own.contains(&format!("slave {}", id.trim())))
        };
        self.nodes.iter().find(is_its).expect("each master has a replica")
    }

    pub fn keys(&self) -> u64 {
        let masters = self.nodes.iter().filter(|node| node.ask(&["role"]).starts_with("master"));
        masters.map(|node| node.ask(&["dbsize"]).trim().parse::<u64>().unwrap()).sum()
    }
}

pub fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + READY_WITHIN;
    while !is_so() {
        assert!(Instant::now() < until, "not within {READY_WITHIN:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn text(command: &mut Command) -> String {
    let Output { stdout, stderr, .. } = command.stdin(Stdio::null()).output().unwrap();
    String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A node of a cluster also listens 10000 ports above its own. Both are below those that connections get.
fn free_cluster_port() -> u16 {
    static RANDOM: Mutex<Option<Random>> = Mutex::new(None);
    let mut random = RANDOM.lock().unwrap_or_else(PoisonError::into_inner);
    let random = random.get_or_insert_with(|| Random::new(u64::from(std::process::id())));
    loop {
        let port = 11_000 + random.below(10_000) as u16;
        if [port, port + 10_000].iter().all(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()) {
            return port;
        }
    }
}
