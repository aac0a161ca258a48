//! The worked example of CONTRIBUTING.md, which adds a lock design to a table: tests that the text stays
//! right.

use std::fs;
use std::path::{Path, PathBuf};

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(path)
}

fn changes() -> Vec<String> {
    let text = fs::read_to_string(root("CONTRIBUTING.md")).unwrap();
    let block = |rest: &str| rest.split_inclusive('\n').take_while(|line| *line != "```\n").collect();
    text.split("```diff\n").skip(1).map(block).collect()
}

/// Every change of an existing file still has its place: the lines around what it adds are there, once.
#[test]
fn the_changes_of_the_text_still_apply() {
    let changes = changes();
    assert!(changes.len() >= 4, "{changes:?}");
    for change in changes {
        let (path, change) = change.split_once('\n').unwrap();
        let path = path.strip_prefix("--- ").unwrap();
        let text = fs::read_to_string(root(path)).unwrap();
        for hunk in change.split("@@\n").filter(|hunk| !hunk.is_empty()) {
            let is_added = |line: &&str| line.starts_with('+');
            let context: String = hunk
                .lines()
                .filter(|line| !is_added(line))
                .map(|line| format!("{}\n", line.strip_prefix([' ', '-']).unwrap_or(line)))
                .collect();
            assert!(
                hunk.lines().any(|line| is_added(&line)) && !context.trim().is_empty(),
                "{path}:\n{hunk}"
            );
            assert_eq!(text.matches(&context).count(), 1, "{path} has not, or not once:\n{context}");
        }
    }
}

/// Every path that the text names is there.
#[test]
fn the_files_of_the_text_are_there() {
    let text = fs::read_to_string(root("CONTRIBUTING.md")).unwrap();
    let example = text.split("## A lock design in a table").nth(1).unwrap();
    let names = example.split('`').skip(1).step_by(2);
    let paths: Vec<&str> = names.filter(|name| name.contains('/') && !name.contains([' ', '\n'])).collect();
    assert!(paths.len() > 5, "{paths:?}");
    for path in paths {
        assert!(root(path).exists(), "{path}");
    }
}
