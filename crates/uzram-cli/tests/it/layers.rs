//! The modules of the program, bottom up: `lib.rs` and each folder's `mod.rs` declare them in the order in
//! which they may import each other.

use std::fs;
use std::path::{Path, PathBuf};

fn declared(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap();
    let modules = text.lines().filter_map(|line| {
        line.strip_prefix("pub ").unwrap_or(line).strip_prefix("mod ")?.strip_suffix(';').map(str::to_owned)
    });
    modules.filter(|name| name != "tests").collect()
}

fn rust_files(path: &Path) -> Vec<PathBuf> {
    if path.is_dir() {
        fs::read_dir(path).unwrap().flat_map(|entry| rust_files(&entry.unwrap().path())).collect()
    } else {
        vec![path.to_owned()]
    }
}

/// Returns the code of a module: its file or folder, without comments and white space.
fn code(dir: &Path, module: &str) -> String {
    let paths = [dir.join(module), dir.join(module).with_extension("rs")];
    let files = paths.iter().filter(|path| path.exists()).flat_map(|path| rust_files(path));
    let texts = files.map(|file| fs::read_to_string(file).unwrap()).collect::<String>();
    let lines = texts.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(str::chars).filter(|c| !c.is_whitespace()).collect()
}

/// Returns whether a module's code names a module below `prefix`, by its path or in braces.
fn uses(code: &str, prefix: &str, module: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    code.split(prefix).skip(1).any(|rest| {
        let end = if rest.starts_with('{') { rest.find("};").unwrap_or(rest.len()) } else { 0 };
        let names = if end > 0 { &rest[1..end] } else { rest.split(|c| !is_name(c)).next().unwrap() };
        names.split(|c| !is_name(c)).any(|name| name == module)
    })
}

fn check(dir: &Path, prefix: &str, modules: &[String]) {
    assert!(!modules.is_empty(), "{}", dir.display());
    for (at, module) in modules.iter().enumerate() {
        let code = code(dir, module);
        for above in &modules[at + 1..] {
            assert!(
                !uses(&code, prefix, above),
                "{prefix}{module} imports {above}, which is declared after it"
            );
        }
    }
}

#[test]
fn a_module_imports_only_from_those_declared_before_it() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let folders = declared(&src.join("lib.rs"));
    check(&src, "crate::", &folders);
    for folder in folders.iter().filter(|folder| src.join(folder).is_dir()) {
        check(&src.join(folder), &format!("crate::{folder}::"), &declared(&src.join(folder).join("mod.rs")));
    }
}

#[test]
fn imports_are_found_in_groups_too() {
    let code = "usecrate::{failure::{Failure,Result},swap};usecrate::client::control;";
    for (prefix, module, wanted) in [
        ("crate::", "swap", true),
        ("crate::", "client", true),
        ("crate::", "control", false),
        ("crate::client::", "control", true),
        ("crate::client::", "clients", false),
    ] {
        assert_eq!(uses(code, prefix, module), wanted, "{prefix}{module}");
    }
}
