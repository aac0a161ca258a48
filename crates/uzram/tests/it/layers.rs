//! Which file imports which, in all crates: none imports one that imports it, and modules import only those
//! that are declared before them. And who uses what of the system.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The folders whose `mod.rs` or `lib.rs` declares modules in the order in which they may import each other.
const ORDERED: [&str; 10] = [
    "crates/uzram/src",
    "crates/uzram/src/base",
    "crates/uzram-cli/src",
    "crates/uzram-cli/src/client",
    "crates/uzram-cli/src/commands",
    "crates/uzram-cli/src/config",
    "crates/uzram-cli/src/daemon",
    "crates/uzram-cli/src/swap",
    "crates/uzram-cli/src/system",
    "crates/uzram-cli/src/terminal",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the files below a folder that are not only for tests.
fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries
        .filter(|path| !path.file_name().unwrap().to_str().unwrap().contains("test"))
        .flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect();
    files.sort();
    files
}

/// Returns the code of a file, without comments and test items.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    // In a module inside the file `super` is the file.
    let mut is_inside = false;
    let lines = lines.map(|line| {
        is_inside =
            if line.ends_with(" {") && line.contains("mod ") { true } else { is_inside && line != "}" };
        if is_inside {
            line.replace("super::super", "crate_").replace("super::", "self::").replace("crate_", "super")
        } else {
            line.to_owned()
        }
    });
    without_tests(
        &lines.flat_map(|line| [line, "\n".to_owned()]).collect::<String>().replace("(in crate::", "(in "),
    )
}

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

fn paths(code: &str, prefix: &str) -> Vec<String> {
    let starts = code.match_indices(prefix).map(|(at, _)| at);
    let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let starts = starts.filter(|at| !code[..*at].ends_with(is_name));
    starts.flat_map(|at| tree(&code[at..])).collect()
}

fn tree(code: &str) -> Vec<String> {
    let end = code.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).unwrap_or(code.len());
    let (prefix, rest) = code.split_at(end);
    if !rest.starts_with('{') {
        return vec![prefix.trim_end_matches("::").to_owned()];
    }
    let (mut depth, mut item, mut all) = (0, 1, Vec::new());
    for (at, c) in rest.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 1 && c == ',' || depth == 0 {
            all.extend(tree(rest[item..at].trim_start()).iter().map(|path| format!("{prefix}{path}")));
            item = at + 1;
        }
        if depth == 0 {
            break;
        }
    }
    all
}

/// A file's module: what it imports, and what it hands on, as paths from the crate's root.
#[derive(Default)]
struct Module {
    file: PathBuf,
    imports: BTreeSet<String>,
    exports: BTreeSet<String>,
}

/// Returns a path from the crate's root; `None` for another crate's.
fn absolute(module: &str, path: &str, is_child: impl Fn(&str) -> bool) -> Option<String> {
    let (first, rest) = path.split_once("::").unwrap_or((path, ""));
    let join = |a: &str, b: &str| [a, b].join("::").trim_matches(':').to_owned();
    match first {
        "crate" => Some(rest.to_owned()),
        "self" => Some(join(module, rest)),
        "super" => {
            let parent = module.rsplit_once("::").map_or("", |(parent, _)| parent);
            if rest.starts_with("super") {
                absolute(parent, rest, is_child)
            } else {
                Some(join(parent, rest))
            }
        }
        _ => is_child(&join(module, first)).then(|| join(module, path)),
    }
}

fn modules(src: &Path) -> BTreeMap<String, Module> {
    let mut codes = BTreeMap::new();
    for file in rust_files(src) {
        let name = file.strip_prefix(src).unwrap().with_extension("").to_str().unwrap().replace('/', "::");
        let is_root = name == "lib" || name == "main" && !src.join("lib.rs").exists();
        let name = if is_root { "" } else { name.strip_suffix("::mod").unwrap_or(&name) }.to_owned();
        codes.insert(name, (code(&file), file));
    }
    let module = |(name, (code, file)): (&String, &(String, PathBuf))| {
        let mut module = Module { file: file.clone(), ..Module::default() };
        let from_root = |path: String| absolute(name, &path, |child| codes.contains_key(child));
        for (at, _) in code.match_indices("use ") {
            let line = &code[code[..at].rfind('\n').map_or(0, |at| at + 1)..at];
            let found = tree(&code[at + 4..]).into_iter().filter_map(from_root);
            match line.trim() {
                "" => module.imports.extend(found),
                "pub" | "pub(crate)" | "pub(super)" => module.exports.extend(found),
                _ => {}
            }
        }
        let inline = ["crate::", "super::", "self::"].iter().flat_map(|prefix| paths(code, prefix));
        module.imports.extend(inline.filter_map(from_root).filter(|path| !module.exports.contains(path)));
        (name.clone(), module)
    };
    codes.iter().map(module).collect()
}

/// Returns the module that has what a path leads to, past those that hand it on.
fn home<'a>(modules: &'a BTreeMap<String, Module>, path: &str) -> Option<&'a String> {
    if let Some((name, _)) = modules.get_key_value(path) {
        return Some(name);
    }
    let (parent, item) = path.rsplit_once("::").unwrap_or(("", path));
    let Some((name, module)) = modules.get_key_value(parent) else { return home(modules, parent) };
    let handed = module.exports.iter().find(|export| export.rsplit("::").next() == Some(item));
    handed.filter(|export| *export != path).map_or(Some(name), |export| home(modules, export))
}

#[test]
fn no_file_imports_one_that_imports_it() {
    let root = root();
    let crates = fs::read_dir(root.join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let others = ["bench", "bench/allocators", "lab", "fuzz"].map(|name| root.join(name));
    let mut circles = Vec::new();
    for src in crates.chain(others).map(|dir| dir.join("src")) {
        let modules = modules(&src);
        let mut edges = BTreeSet::new();
        for (name, module) in &modules {
            let targets = module.imports.iter().filter_map(|path| home(&modules, path));
            edges.extend(targets.filter(|target| *target != name).map(|target| (name, target)));
        }
        let back = edges.iter().filter(|(from, to)| from < to && edges.contains(&(*to, *from)));
        circles.extend(
            back.map(|(from, to)| (&modules[*from].file, &modules[*to].file))
                .map(|(a, b)| format!("{} and {}", a.display(), b.display())),
        );
        for ordered in ORDERED.map(|dir| root.join(dir)) {
            let Ok(inside) = ordered.strip_prefix(&src) else { continue };
            let parent = inside.to_str().unwrap().replace('/', "::");
            let text = code(&modules[&parent].file);
            let order: Vec<&str> = text.lines().filter_map(|line| declared(line)).collect();
            assert!(order.len() > 1, "{order:?}");
            let place = |module: &str| {
                let module =
                    module.strip_prefix(parent.as_str())?.trim_start_matches(':').split("::").next()?;
                order.iter().position(|declared| *declared == module)
            };
            for (from, to) in &edges {
                let (Some(own), Some(other)) = (place(from), place(to)) else { continue };
                assert!(other <= own, "{from} imports {to}, which is declared after it");
            }
        }
    }
    assert!(circles.is_empty(), "{circles:#?}");
}

fn declared(line: &str) -> Option<&str> {
    let line = ["pub ", "pub(crate) "].iter().find_map(|word| line.strip_prefix(word)).unwrap_or(line);
    line.strip_prefix("mod ")?.strip_suffix(';')
}

#[test]
fn imports_are_found_in_groups_too() {
    let found = tree("crate::{a::b::{C, self},\n d as e};");
    assert_eq!(found, ["crate::a::b::C", "crate::a::b::self", "crate::d"]);
    let found = paths("use std::sync::{Arc, Mutex}; std::sync::mpsc::channel()", "std::sync::");
    assert_eq!(found, ["std::sync::Arc", "std::sync::Mutex", "std::sync::mpsc::channel"]);
    assert_eq!(absolute("a::b", "super::super::c", |_| false).unwrap(), "c");
    assert_eq!(absolute("a", "b::C", |child| child == "a::b").unwrap(), "a::b::C");
}

#[test]
fn what_only_tests_have_is_passed_over_and_nothing_else() {
    let code = "use a;#[cfg(all(test, not(loom)))]mod tests;use b;#[cfg(test)]#[x(y)]fn t(){if[1;2]{}}use c;";
    assert_eq!(without_tests(code), "use a;use b;use c;");
    assert_eq!(without_tests("struct S{a:A,#[cfg(test)]b:B}use c;"), "struct S{a:A,}use c;");
}

/// Only `base::mem` uses mmap and madvise, only `base::sync` uses atomics and locks.
#[test]
fn there_is_one_door_to_memory_and_one_to_locks() {
    let src = root().join("crates/uzram/src");
    let doors = [
        ("base/mem", "rustix::", &["mm"][..]),
        ("base/mem", "libc::", &["mincore", "mmap", "madvise"]),
        ("base/sync", "std::sync::", &["atomic", "Mutex", "RwLock", "Condvar"]),
        ("base/sync", "loom::", &["sync"]),
    ];
    for file in rust_files(&src) {
        let name = file.strip_prefix(&src).unwrap().to_str().unwrap();
        // `base/cpu` cannot use modules above it, and the arena's injected faults are for tests.
        if name.starts_with("base/cpu") {
            continue;
        }
        let code = code(&file).replace("std::sync::Mutex<Option<faults", "");
        for (door, prefix, closed) in doors {
            let names = paths(&code, prefix);
            let names = names.iter().filter_map(|path| path.strip_prefix(prefix)?.split("::").next());
            let used = names.into_iter().find(|used| closed.contains(used));
            let is_inside = used.is_none() || name.starts_with(door);
            assert!(is_inside, "{name} uses {prefix}{used:?}, which is {door}'s");
        }
    }
}
