//! The layers of the engine, bottom up: a module imports only from modules below it.

use std::fs;
use std::path::{Path, PathBuf};

const LAYERS: [&str; 9] =
    ["base", "slab", "codec", "stream", "zsmalloc", "lru", "backing", "store", "device"];
const BASE: [&str; 16] = [
    "error",
    "clock",
    "units",
    "file_size",
    "named",
    "random",
    "trusted_path",
    "mountinfo",
    "machine_memory",
    "cpu",
    "sync",
    "failures",
    "thread",
    "counters",
    "mem",
    "work",
];

fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries
        .flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect();
    files.sort();
    files
}

/// Returns the index in `layers` of the module that `path` belongs to.
fn layer_of(path: &Path, layers: &[&str]) -> Option<usize> {
    path.iter().find_map(|part| {
        let name = part.to_str().unwrap().trim_end_matches(".rs");
        layers.iter().position(|layer| *layer == name)
    })
}

/// Returns the code of a file, without comments, white space and test items.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    without_tests(&lines.flat_map(str::chars).filter(|c| !c.is_whitespace()).collect::<String>())
}

/// Returns code without test items.
fn without_tests(code: &str) -> String {
    let (mut kept, mut rest) = (String::new(), code);
    while let Some(at) = ["#[cfg(test)]", "#[cfg(all(test"].iter().filter_map(|cfg| rest.find(cfg)).min() {
        kept += &rest[..at];
        rest = &rest[at + item_len(&rest[at..])..];
    }
    kept + rest
}

/// Returns the length of the item that `code` begins with: to its `;`, or to the end of its braces.
fn item_len(code: &str) -> usize {
    let mut depth = 0;
    let end = code.char_indices().find(|(_, c)| {
        match c {
            '{' | '(' | '[' => depth += 1,
            '}' | ')' | ']' => depth -= 1,
            _ => {}
        }
        depth < 0 || depth == 0 && matches!(c, ';' | '}')
    });
    end.map_or(code.len(), |(at, _)| if depth < 0 { at } else { at + 1 })
}

/// Returns the first names after each `prefix` in `code`, including those in braces.
fn mentions<'a>(code: &'a str, prefix: &str) -> Vec<&'a str> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let first = |rest: &'a str| rest.split(|c| !is_name(c)).next().unwrap();
    let mut names = Vec::new();
    for rest in code.split(prefix).skip(1) {
        let Some(list) = rest.strip_prefix('{') else {
            names.push(first(rest));
            continue;
        };
        // The list's own items are at depth 0.
        let mut depth = 0;
        let mut item = 0;
        for (at, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => {
                    names.push(first(&list[item..]));
                    break;
                }
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    names.push(first(&list[item..]));
                    item = at + 1;
                }
                _ => {}
            }
        }
    }
    names
}

fn check(dir: &Path, prefixes: &[&str], layers: &[&str]) {
    let mut seen = vec![false; layers.len()];
    for file in rust_files(dir) {
        let Some(own) = layer_of(file.strip_prefix(dir).unwrap(), layers) else { continue };
        seen[own] = true;
        let code = code(&file);
        for prefix in prefixes {
            for name in mentions(&code, prefix) {
                let Some(other) = layers.iter().position(|layer| *layer == name) else { continue };
                assert!(other <= own, "{}: '{}' may not use '{name}'", file.display(), layers[own]);
            }
        }
    }
    assert!(seen.iter().all(|seen| *seen), "every layer exists: {layers:?} {seen:?}");
}

#[test]
fn a_module_imports_only_from_below() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    check(&src, &["crate::"], &LAYERS);
    check(&src.join("base"), &["crate::base::", "super::"], &BASE);
    let modules = |file| code(&src.join(file));
    let declared = modules("lib.rs");
    let declared = mentions(&declared, "mod");
    let (layers, others) = declared.split_at(LAYERS.len());
    assert_eq!(layers, LAYERS, "lib.rs declares the layers in their order");
    assert_eq!(others, ["designs"], "and nothing else but this list");
    let base = modules("base/mod.rs");
    let (mut declared, mut listed) = (mentions(&base, "mod"), BASE);
    declared.sort_unstable();
    listed.sort_unstable();
    assert_eq!(declared, listed, "every module of base has its place");
}

#[test]
fn imports_are_found_in_groups_too() {
    let code = "usecrate::{base::mem::{Arena,Run},store};usecrate::slab::Cache;";
    assert_eq!(mentions(code, "crate::"), ["base", "store", "slab"]);
    assert_eq!(mentions("usestd::sync::{Arc,Mutex};", "std::sync::"), ["Arc", "Mutex"]);
}

#[test]
fn what_only_tests_have_is_passed_over_and_nothing_else() {
    let code = "usea;#[cfg(all(test,not(loom)))]modtests;useb;#[cfg(test)]#[x(y)]fnt(){if[1;2]{}}usec;";
    assert_eq!(without_tests(code), "usea;useb;usec;");
    assert_eq!(without_tests("structS{a:A,#[cfg(test)]b:B}usec;"), "structS{a:A,}usec;");
}

/// Only `base::mem` uses mmap and madvise, only `base::sync` uses atomics and locks.
#[test]
fn there_is_one_door_to_memory_and_one_to_locks() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let doors = [
        ("base/mem", "rustix::", &["mm"][..]),
        ("base/mem", "libc::", &["mincore", "mmap", "madvise"]),
        ("base/sync", "std::sync::", &["atomic", "Mutex", "RwLock", "Condvar"]),
        ("base/sync", "loom::", &["sync"]),
    ];
    for file in rust_files(&src) {
        let name = file.strip_prefix(&src).unwrap().to_str().unwrap();
        // Tests may use anything; `base/cpu` cannot use modules above it, and the arena's injected faults are
        // for tests, too.
        if name.ends_with("tests.rs") || name.contains("/tests/") || name.starts_with("base/cpu") {
            continue;
        }
        let code = code(&file).replace("std::sync::Mutex<Option<faults", "");
        for (door, prefix, closed) in doors {
            let used = mentions(&code, prefix).into_iter().find(|used| closed.contains(used));
            assert!(
                used.is_none() || name.starts_with(door),
                "{name} uses {prefix}{used:?}, which is {door}'s"
            );
        }
    }
}
