//! The programs of the `processes` corpus and their data: each some tens of MiB, built within a few seconds.

use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::super::heap::words;

/// A program whose memory is taken.
pub(super) struct Workload {
    /// Its name in tables.
    pub name: &'static str,
    /// The program to run.
    pub program: &'static str,
    /// Adds the program's arguments, and writes files that it needs to the folder that it will run in.
    pub prepare: fn(&Path, &mut Command) -> io::Result<()>,
    /// When it has built its data.
    pub ready: Ready,
}

/// How a program shows that it has built its data. It runs on after that, until it is ended.
pub(super) enum Ready {
    /// It prints `ready`.
    Says,
    /// One of its processes holds so many bytes of anonymous memory.
    Holds(u64),
    /// This, called again and again with the program's folder, has filled it.
    Filled(fn(&Path) -> io::Result<bool>),
}

pub(super) const ALL: [Workload; 6] = [
    Workload { name: "python", program: "python3", prepare: python, ready: Ready::Says },
    Workload { name: "c++", program: "g++", prepare: compiler, ready: Ready::Holds(96 << 20) },
    Workload { name: "node", program: "node", prepare: node, ready: Ready::Says },
    Workload { name: "redis", program: "redis-server", prepare: redis, ready: Ready::Filled(fill_redis) },
    Workload { name: "sqlite", program: "python3", prepare: sqlite, ready: Ready::Says },
    Workload { name: "jvm", program: "java", prepare: jvm, ready: Ready::Says },
];

/// A Python with so much memory that it is worth the while to park it: 1 GiB of its pages are taken.
pub(super) const LARGE_PYTHON: Workload =
    Workload { name: "python", program: "python3", prepare: large_python, ready: Ready::Says };

/// Syntax trees, lines, words and records of the standard library; again and again, until the process has so many MiB.
const PYTHON: &str = r#"
import ast, os, random, re, resource, sys, sysconfig, time
rng = random.Random(1)
folder = sysconfig.get_paths()['stdlib']
names = sorted(name for name in os.listdir(folder) if name.endswith('.py'))
def build(names, first):
    trees, lines, words = {}, {}, {}
    for name in names:
        with open(os.path.join(folder, name), encoding='utf-8') as file:
            text = file.read()
        trees[name] = ast.parse(text)
        lines[name] = text.splitlines()
        for word in re.findall(r'\w+', text):
            words[word] = words.get(word, 0) + 1
    known = sorted(words)
    records = [{'id': first + i, 'name': ' '.join(rng.choices(known, k=3)), 'score': rng.random(),
                'tags': rng.choices(known, k=4), 'seen': {rng.randrange(1 << 20) for _ in range(5)}}
               for i in range(20000)]
    return trees, lines, words, known, records
kept = [build(names[:60], 0)]
while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10 < int(sys.argv[1]):
    kept.append(build(rng.sample(names, 60), 20000 * len(kept)))
print('ready', flush=True)
time.sleep(3600)
"#;

fn python(_: &Path, command: &mut Command) -> io::Result<()> {
    command.args(["-c", PYTHON, "0"]);
    Ok(())
}

/// With more than 1 GiB, for some pages are same-filled, and some of no use.
fn large_python(_: &Path, command: &mut Command) -> io::Result<()> {
    command.args(["-c", PYTHON, "1152"]);
    Ok(())
}

/// Tables and indexes of a database in memory.
const SQLITE: &str = r#"
import random, sqlite3, time
rng = random.Random(2)
words = [''.join(rng.choices('etaoinshrdlu', k=rng.randrange(2, 10))) for _ in range(5000)]
db = sqlite3.connect(':memory:')
db.executescript('''
    create table customers (id integer primary key, name text, mail text, since text);
    create table orders (id integer primary key, customer integer, item text, note text, price real, at integer);
    create index orders_of on orders (customer, at);
    create index items on orders (item);
''')
def text(count):
    return ' '.join(rng.choices(words, k=count))
db.executemany('insert into customers values (?, ?, ?, ?)',
    ((i, text(2), rng.choice(words) + '@example.com', f'20{rng.randrange(10, 26)}-{rng.randrange(1, 13):02}-07')
     for i in range(40000)))
db.executemany('insert into orders values (?, ?, ?, ?, ?, ?)',
    ((i, rng.randrange(40000), text(2), text(rng.randrange(12)), round(rng.random() * 500, 2),
      1700000000 + rng.randrange(86400 * 365)) for i in range(160000)))
db.execute('delete from orders where id % 9 = 4')
db.commit()
print('ready', flush=True)
time.sleep(3600)
"#;

fn sqlite(_: &Path, command: &mut Command) -> io::Result<()> {
    command.args(["-c", SQLITE]);
    Ok(())
}

/// Parsed JSON, maps, closures, strings and typed arrays.
const NODE: &str = r#"
let state = 3;
const next = (below) => (state = (Math.imul(state, 1103515245) + 12345) >>> 0, (state >>> 8) % below);
const word = () => Array.from({length: 2 + next(8)}, () => 'etaoinshrdlu'[next(12)]).join('');
const words = Array.from({length: 5000}, word);
const pick = () => words[next(words.length)];
const record = (id) => ({id, name: `${pick()} ${pick()}`, tags: [pick(), pick(), pick()], score: next(1e6) / 7,
    position: {x: next(1e5) / 9, y: next(1e5) / 11}, active: next(2) === 1});
const text = JSON.stringify(Array.from({length: 40000}, (_, id) => record(id)));
const parsed = JSON.parse(text);
const byName = new Map(parsed.map((item) => [item.name + item.id, item]));
const sessions = new Set(parsed.map((item) => item.id.toString(36) + pick()));
const listeners = parsed.slice(0, 20000).map((item) => () => item.score + item.position.x);
const floats = Float64Array.from({length: 500000}, () => next(1e9) / 1e5);
console.log('ready');
setInterval(() => [byName, sessions, listeners, floats, text], 1000000);
"#;

fn node(_: &Path, command: &mut Command) -> io::Result<()> {
    command.args(["-e", NODE]);
    Ok(())
}

/// A tree, hash maps, strings and arrays of a program with a small heap, which is collected a few times.
const JVM: &str = r#"
import java.util.*;

public class Main {
    record Order(long id, String name, double price, List<String> tags, long[] times) {}

    public static void main(String[] arguments) throws Exception {
        Random random = new Random(4);
        String[] words = new String[5000];
        for (int i = 0; i < words.length; i++) {
            StringBuilder word = new StringBuilder();
            for (int letters = 2 + random.nextInt(8); letters > 0; letters--) {
                word.append("etaoinshrdlu".charAt(random.nextInt(12)));
            }
            words[i] = word.toString();
        }
        Map<String, Order> byName = new HashMap<>();
        TreeMap<Long, Order> byId = new TreeMap<>();
        for (long id = 0; id < 120000; id++) {
            String name = words[random.nextInt(5000)] + " " + words[random.nextInt(5000)] + " " + id;
            List<String> tags = new ArrayList<>();
            for (int tag = random.nextInt(4); tag >= 0; tag--) tags.add(words[random.nextInt(5000)]);
            long[] times = {1700000000000L + random.nextInt(), 1700000000000L + random.nextInt(), id};
            Order order = new Order(id, name, random.nextDouble() * 500, tags, times);
            byName.put(name, order);
            byId.put(random.nextLong(), order);
        }
        System.out.println("ready");
        Thread.sleep(3600000);
        System.out.println(byName.size() + byId.size());
    }
}
"#;

fn jvm(dir: &Path, command: &mut Command) -> io::Result<()> {
    fs::write(dir.join("Main.java"), JVM)?;
    command.args(["-Xmx192m", "Main.java"]);
    Ok(())
}

/// A program of many templates, which the compiler takes seconds for, and more memory than is waited for.
const COMPILED: &str = r#"
#include <algorithm>
#include <functional>
#include <future>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

template <int N> struct Table {
    std::map<int, std::vector<std::string>> rows;
    std::unordered_map<std::string, std::tuple<int, double, std::shared_ptr<Table<N - 1>>>> index;
    std::variant<int, std::string, std::vector<double>> value;
    std::regex pattern{"([a-z]+)-([0-9]+)"};

    double add(const std::string &line) {
        std::smatch match;
        std::vector<std::pair<std::string, int>> parts;
        if (std::regex_search(line, match, pattern)) {
            for (const auto &part : match) parts.emplace_back(part.str(), N);
        }
        std::sort(parts.begin(), parts.end(), [](auto &a, auto &b) { return a.second + N < b.second; });
        for (auto &[name, number] : parts) {
            rows[number].push_back(name);
            auto next = std::make_shared<Table<N - 1>>();
            index[name] = {number, next->add(name), next};
        }
        std::function<double(int)> walk = [this, &walk](int at) { return at <= N ? 0.5 : walk(at - 1) + rows.size(); };
        auto later = std::async([&] { return walk(N + 7); });
        std::ostringstream out;
        std::visit([&](auto &held) { out << sizeof(held); }, value);
        return later.get() + out.str().size();
    }
};
template <> struct Table<0> {
    double add(const std::string &) { return 1; }
};

int main() {
    std::cout << Table<150>().add("words-12") << std::endl;
}
"#;

fn compiler(dir: &Path, command: &mut Command) -> io::Result<()> {
    fs::write(dir.join("main.cpp"), COMPILED)?;
    command.args(["-std=c++17", "-O2", "-g", "-ftemplate-depth=1000", "-c", "main.cpp", "-o", "main.o"]);
    Ok(())
}

const REDIS_SOCKET: &str = "redis.sock";

fn redis(_: &Path, command: &mut Command) -> io::Result<()> {
    // It persists nothing, and no other user can connect.
    command.args(["--port", "0", "--unixsocket", REDIS_SOCKET, "--unixsocketperm", "700"]);
    command.args(["--save", "", "--appendonly", "no"]);
    Ok(())
}

/// Fills a server with sessions, counters, lists and rankings, once it serves.
fn fill_redis(dir: &Path) -> io::Result<bool> {
    const COMMANDS: usize = 160_000;
    let stream = match UnixStream::connect(dir.join(REDIS_SOCKET)) {
        Ok(stream) => stream,
        // It does not serve yet.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            return Ok(false);
        }
        Err(error) => return Err(error),
    };
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.set_write_timeout(Some(Duration::from_secs(10)))?;
    let (mut rng, mut answers) = (fastrand::Rng::with_seed(5), BufReader::new(stream.try_clone()?));
    let (words, mut line) = (words(&mut rng, 5000), String::new());
    let mut stream = stream;
    for from in (0..COMMANDS).step_by(1000) {
        let mut batch = String::new();
        for id in from..from + 1000 {
            let (first, second) = (&words[rng.usize(..5000)], &words[rng.usize(..5000)]);
            let (number, time) = (rng.u32(..100_000), 1_700_000_000 + rng.u32(..30_000_000));
            batch += &match id % 5 {
                0 => format!(
                    "SET session:{id} '{{\"user\":\"{first}\",\"token\":\"{:032x}\",\"at\":{time},\"cart\":[{number},{id}]}}'\r\n",
                    rng.u128(..)
                ),
                1 => format!(
                    "HSET user:{id} name {first}.{second} mail {first}@example.com visits {number} at {time}\r\n"
                ),
                2 => format!("RPUSH queue:{} {first}:{second}:{time}\r\n", id % 700),
                3 => format!("ZADD ranking:{} {number} {first}-{id}\r\n", id % 40),
                _ => format!("SET count:{first}:{id} {number}\r\n"),
            };
        }
        stream.write_all(batch.as_bytes())?;
        for _ in 0..1000 {
            line.clear();
            if answers.read_line(&mut line)? == 0 || line.starts_with('-') {
                return Err(io::Error::other(format!("it refused a command: {}", line.trim())));
            }
        }
    }
    Ok(true)
}
