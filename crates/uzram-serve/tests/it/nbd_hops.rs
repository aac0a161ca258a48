//! How many functions of this crate and the engine a warm read passes through, by callgrind's list, which
//! omits what is inlined in every build: one-line accessors.

use std::collections::{BTreeMap, HashMap};
use std::process::Command;

use crate::common::{TestServer, cmd};

const ROLE: &str = "UZRAM_TEST_HOPS";
const READS: u64 = 500;
const MAX_FUNCTIONS: usize = 25;

/// Reads a compressed page that was written before, by a connection with structured replies.
fn read_a_page() {
    let server = TestServer::new("1M");
    let mut client = server.ready(true);
    let page = b"sixteen of text.".repeat(256);
    assert_eq!(client.write(4096, &page).error, 0);
    for _ in 0..READS {
        client.request(0, cmd::READ, 4096, 4096, &[]);
        assert!(client.reply(0).data() == page);
    }
}

/// Returns the calls of each function in callgrind's output, where a name stands in full only once.
fn calls(text: &str) -> BTreeMap<&str, u64> {
    let (mut names, mut calls, mut callee) = (HashMap::new(), BTreeMap::new(), "");
    for line in text.lines() {
        let name = line.strip_prefix("fn=").or_else(|| line.strip_prefix("cfn="));
        if let Some((id, full)) = name.map(|name| name.split_once(' ').unwrap_or((name, ""))) {
            let name = names.entry(id).or_insert(full);
            callee = if line.starts_with('c') { *name } else { callee };
        } else if let Some(count) = line.strip_prefix("calls=") {
            let count: u64 = count.split(' ').next().unwrap().parse().unwrap();
            *calls.entry(callee).or_default() += count;
        }
    }
    calls
}

#[test]
fn a_read_passes_through_few_functions() {
    if std::env::var_os(ROLE).is_some() {
        return read_a_page();
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("calls");
    let mut valgrind = Command::new("valgrind");
    valgrind.arg("--tool=callgrind").arg(format!("--callgrind-out-file={}", file.display()));
    valgrind.arg(std::env::current_exe().unwrap());
    valgrind.args(["--exact", "nbd_hops::a_read_passes_through_few_functions"]).env(ROLE, "1");
    let Ok(output) = valgrind.output() else { return println!("skipped: valgrind is not installed") };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&file).unwrap();
    let is_ours = |name: &str| {
        let generated = ["{{closure}}", "drop_in_place", " as core::"];
        name.contains("uzram") && !generated.iter().any(|part| name.contains(part))
    };
    let mut passed: Vec<_> =
        calls(&text).into_iter().filter(|(name, calls)| *calls >= READS && is_ours(name)).collect();
    passed.sort_by_key(|(_, calls)| std::cmp::Reverse(*calls));
    let list: Vec<_> = passed.iter().map(|(name, calls)| format!("{calls:6} {name}")).collect();
    println!("{} functions:\n{}", list.len(), list.join("\n"));
    assert!(list.len() <= MAX_FUNCTIONS, "{} functions:\n{}", list.len(), list.join("\n"));
}
