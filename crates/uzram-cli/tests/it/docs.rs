//! The commands of README.md and of the pages below docs/: blocks marked `sh run` are run unchanged, by root,
//! in their own mount namespace and runtime directory. Examples in Rust are documentation tests of the crate
//! `uzram`.

use crate::common::*;

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

/// Returns the blocks of a page that begin with "```sh run", and the line of each.
fn blocks(page: &str) -> Vec<(usize, String)> {
    let (mut blocks, mut open) = (Vec::new(), None);
    for (line, number) in page.lines().zip(1..) {
        open = match (open, line.strip_prefix("```")) {
            (None, Some(language)) => Some((language == "sh run", number, String::new())),
            (Some((is_run, at, text)), None) => Some((is_run, at, text + line + "\n")),
            (Some((is_run, at, text)), Some(_)) => {
                blocks.extend(is_run.then_some((at, text)));
                None
            }
            (None, None) => None,
        };
    }
    blocks
}

#[test]
fn blocks_are_found() {
    let page = "a\n```sh run\none\n\ntwo\n```\n```sh\nno\n```\n```\n```sh run\nthree\n```\n";
    // The third has no language, and contains the text after it.
    assert_eq!(blocks(page), [(2, "one\n\ntwo\n".to_owned())]);
}

#[test]
fn commands_of_the_documents_run() {
    if not_root() {
        return;
    }
    let program = Path::new(UZRAM).parent().unwrap();
    let path = format!("{}:{}", program.display(), program_path().display());
    let mut ran = 0;
    for page in pages() {
        for (line, block) in blocks(&fs::read_to_string(&page).unwrap()) {
            let place = Place::new();
            let mut command = isolated(&format!("set -eu\n{block}"));
            command.current_dir(place.root()).env("PATH", &path).env("UZRAM_RUNTIME_DIR", place.dir());
            let ended = finish(command);
            assert!(ended.status.success(), "{}:{line}: {ended}", page.display());
            ran += 1;
        }
    }
    assert!(ran > 5, "{ran} blocks are marked");
}
