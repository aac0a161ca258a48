//! Which functions of this project a warm operation enters, by callgrind's list. That omits what is inlined
//! in every build: one-line accessors.

use std::collections::{BTreeMap, HashMap};
use std::process::Command;

/// Tells a test that it runs under valgrind.
const ROLE: &str = "UZRAM_TEST_CALLS";

/// Returns whether this process is the one whose calls are counted.
pub fn is_counted() -> bool {
    std::env::var_os(ROLE).is_some()
}

/// Runs a test of this program, which does the operation `times` times if [`is_counted`]. Returns the
/// functions that were entered as often, each with its file below `crates/` and its calls; `None` without
/// valgrind. `within`: only while this one runs, if it is not empty.
pub fn functions(test: &str, times: u64, within: &str) -> Option<BTreeMap<String, (String, u64)>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("calls");
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--compress-strings=no"]);
    if !within.is_empty() {
        valgrind.arg(format!("--toggle-collect={within}"));
    }
    valgrind.arg(format!("--callgrind-out-file={}", path.display()));
    let output =
        valgrind.arg(std::env::current_exe().unwrap()).args(["--exact", test]).env(ROLE, "1").output();
    let Ok(output) = output else {
        println!("skipped: valgrind is not installed");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&path).unwrap();
    let (mut files, mut calls) = (HashMap::new(), HashMap::<_, u64>::new());
    let (mut file, mut callee) = ("", "");
    for line in text.lines() {
        match line.split_once('=') {
            Some(("fl", path)) => file = path,
            Some(("fn", name)) => drop(files.insert(name, file)),
            Some(("cfn", name)) => callee = name,
            Some(("calls", count)) => {
                *calls.entry(callee).or_default() += count.split(' ').next().unwrap().parse::<u64>().unwrap();
            }
            _ => {}
        }
    }
    // What the compiler writes.
    let is_generated =
        |name: &str| ["{{closure}}", "drop_in_place", " as core::"].iter().any(|part| name.contains(part));
    let ours = calls.into_iter().filter(|(name, calls)| *calls >= times && !is_generated(name));
    let ours = ours.filter_map(|(name, calls)| {
        let (_, file) = files.get(name)?.split_once("crates/")?;
        Some((name.to_owned(), (file.to_owned(), calls)))
    });
    Some(ours.collect())
}
