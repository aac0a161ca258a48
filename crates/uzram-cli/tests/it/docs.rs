//! The commands of README.md and of the pages below docs/: blocks marked `sh run` are run unchanged, by root,
//! in their own mount namespace and runtime directory. Examples in Rust are documentation tests of the crate
//! `uzram`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Place, finish, not_root};

/// Returns README.md and every page below docs/.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let (mut pages, mut dirs) = (vec![root.join("README.md")], vec![root.join("docs")]);
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            match path.extension() {
                Some(extension) if extension == "md" => pages.push(path),
                _ if path.is_dir() => dirs.push(path),
                _ => {}
            }
        }
    }
    pages.sort();
    pages
}

/// Returns the blocks of a page that begin with "```LANGUAGE", and the line of each.
fn blocks(page: &str, language: &str) -> Vec<(usize, String)> {
    let (mut blocks, mut open) = (Vec::new(), None::<(&str, usize, String)>);
    for (line, number) in page.lines().zip(1..) {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(of)) => open = Some((of, number, String::new())),
            (Some(_), Some(_)) => {
                blocks.extend(open.take().filter(|(of, ..)| *of == language).map(|(_, at, text)| (at, text)));
            }
            (Some((.., text)), None) => *text += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    blocks
}

#[test]
fn blocks_are_found() {
    let page = "a\n```sh run\none\n\ntwo\n```\n```sh\nno\n```\n```\n```sh run\nthree\n```\n";
    // The third has no language, and contains the text after it.
    assert_eq!(blocks(page, "sh run"), [(2, "one\n\ntwo\n".to_owned())]);
    assert_eq!(blocks(page, "sh"), [(7, "no\n".to_owned())]);
}

#[test]
fn commands_of_the_documents_run() {
    if not_root() {
        return;
    }
    let program = Path::new(env!("CARGO_BIN_EXE_uzram")).parent().unwrap();
    let path = format!("{}:{}:/usr/sbin:/sbin", program.display(), std::env::var("PATH").unwrap());
    let mut ran = 0;
    for page in pages() {
        for (line, block) in blocks(&fs::read_to_string(&page).unwrap(), "sh run") {
            let place = Place::new();
            let mut command = Command::new("unshare");
            command.args(["--mount", "sh", "-euc", &block]).current_dir(place.root());
            command.env("PATH", &path).env("UZRAM_RUNTIME_DIR", place.dir());
            let ended = finish(command);
            let told = format!("{}{}", ended.stdout, ended.stderr);
            assert!(ended.status.success(), "{}:{line}: {}\n{told}", page.display(), ended.status);
            ran += 1;
        }
    }
    assert!(ran > 5, "{ran} blocks are marked");
}
