//! Redis servers on loopback, started for a test and ended with it.

#![allow(dead_code, clippy::unwrap_used)]

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use uzram::random::Random;

/// How long servers may take to get ready.
const READY_WITHIN: Duration = Duration::from_secs(60);

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
        Redis::start_at(free_port, options)
    }

    /// The same at one of the ports that `choose` returns: somebody else may take it before the server does.
    fn start_at(choose: fn() -> u16, options: &[&str]) -> Redis {
        const TRIES: usize = 5;
        for _ in 0..TRIES {
            let mut server = Redis::launch(choose(), options);
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
        panic!("no server starts with {options:?}");
    }

    fn launch(port: u16, options: &[&str]) -> Redis {
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

    /// Returns the text of an address.
    pub fn address(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns the process.
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

/// Masters, each with so many replicas. One cluster at a time: many servers that start at once on few CPUs take each other for
/// dead.
pub struct Cluster {
    pub nodes: Vec<Redis>,
    _alone: MutexGuard<'static, ()>,
}

impl Cluster {
    /// Starts a cluster. With `covered`, no key can be read while some slots have no master.
    pub fn start(masters: usize, replicas: usize, covered: bool) -> Cluster {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let coverage = if covered { "yes" } else { "no" };
        let options = [
            ["--cluster-enabled", "yes"],
            ["--cluster-node-timeout", "2000"],
            ["--cluster-require-full-coverage", coverage],
        ];
        let nodes: Vec<_> = (0..masters * (1 + replicas))
            .map(|_| Redis::start_at(free_cluster_port, options.as_flattened()))
            .collect();
        let addresses: Vec<_> = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        let made = text(Command::new("redis-cli").args(["--cluster", "create"]).args(&addresses).args([
            "--cluster-replicas",
            &replicas.to_string(),
            "--cluster-yes",
        ]));
        assert!(made.contains("All 16384 slots covered"), "{made}");
        wait_until("the cluster is well", || {
            let ports: Vec<_> = nodes.iter().map(|node| node.port.to_string()).collect();
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
        Cluster { nodes, _alone: alone }
    }

    /// Returns the text of an address that names the first node.
    pub fn address(&self) -> String {
        self.nodes[0].address()
    }

    /// Returns the number of keys that masters have.
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
