//! The layers of the engine, bottom up: a module imports only from modules below it.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

const LAYERS: [&str; 7] = ["base", "slab", "codec", "stream", "zsmalloc", "store", "device"];
const BASE: [&str; 6] = ["error", "units", "random", "sync", "cpu", "mem"];

fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries
        .flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect();
    files.sort();
    files
}

/// The place in `layers` of the module that `path` belongs to.
fn layer_of(path: &Path, layers: &[&str]) -> Option<usize> {
    path.iter().find_map(|part| {
        let name = part.to_str().unwrap().trim_end_matches(".rs");
        layers.iter().position(|layer| *layer == name)
    })
}

/// The names that follow `prefix` in the code (not the comments) of a file.
fn mentions<'a>(text: &'a str, prefix: &str) -> Vec<&'a str> {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.flat_map(|line| line.split(prefix).skip(1))
        .map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap())
        .collect()
}

fn check(dir: &Path, prefixes: &[&str], layers: &[&str]) {
    let mut seen = vec![false; layers.len()];
    for file in rust_files(dir) {
        let Some(own) = layer_of(file.strip_prefix(dir).unwrap(), layers) else { continue };
        seen[own] = true;
        let text = fs::read_to_string(&file).unwrap();
        for prefix in prefixes {
            for name in mentions(&text, prefix) {
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
    let lib = fs::read_to_string(src.join("lib.rs")).unwrap();
    let declared = mentions(&lib, "pub mod ");
    assert_eq!(declared, LAYERS, "lib.rs declares the layers in their order");
}

/// The doors: mmap and madvise belong to `base::mem`, atomics and locks to `base::sync`.
#[test]
fn there_is_one_door_to_memory_and_one_to_locks() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let doors = [
        ("base/mem", &["rustix::mm::", "libc::mincore", "libc::mmap"][..]),
        ("base/sync", &["std::sync::atomic", "std::sync::Mutex", "std::sync::RwLock", "loom::sync"][..]),
    ];
    for file in rust_files(&src) {
        let name = file.strip_prefix(&src).unwrap().to_str().unwrap();
        // Tests may use what they like, and the CPU number cannot come from above itself.
        if name.ends_with("tests.rs") || name == "base/cpu.rs" {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(all(test").next().unwrap();
        for (door, names) in doors {
            let used = names.iter().find(|used| code.contains(**used));
            assert!(used.is_none() || name.starts_with(door), "{name} uses {used:?}, which is {door}'s");
        }
    }
}
