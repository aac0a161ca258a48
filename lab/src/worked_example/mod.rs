//! The worked example of CONTRIBUTING.md, which adds a lock design and its table: compiled and run here, and
//! compared with the text, so that the text stays right.

#![allow(clippy::unwrap_used)]

mod pool_lock;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::experiment::LabOptions;
use crate::experiment::testing::{assert_complete, rounds, run_short};
use uzram_bench::harness::Source;
use uzram_bench::harness::corpus::Kind;

/// Returns a path in the source tree.
fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(path)
}

/// Returns CONTRIBUTING.md's blocks in a language.
fn blocks(language: &str) -> Vec<String> {
    let text = fs::read_to_string(root("CONTRIBUTING.md")).unwrap();
    let opening = format!("```{language}\n");
    let block = |rest: &str| rest.split_inclusive('\n').take_while(|line| *line != "```\n").collect();
    text.split(&opening).skip(1).map(block).collect()
}

#[test]
fn the_example_is_measured() {
    let options = LabOptions {
        rounds: rounds(1, Duration::from_micros(500)),
        corpus: Source::Built(Kind::Mixed, 64),
        ..LabOptions::default()
    };
    for row in &run_short(&pool_lock::SERIES, &options, 3, &["store-free", "class-indexed"]).rows {
        assert_complete(&pool_lock::SERIES, row);
        assert!(row.after.median("ns_per_object").unwrap() > 1.0);
    }
}

#[test]
fn the_text_shows_the_code_that_is_tested() {
    let code = blocks("rust");
    assert_eq!(code.len(), 1);
    assert!(code[0] == include_str!("pool_lock.rs"), "CONTRIBUTING.md differs from pool_lock.rs");
}

/// Every change of an existing file still has its place: the lines around what it adds are there, once.
#[test]
fn the_changes_of_the_text_still_apply() {
    let changes = blocks("diff");
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
                .map(|line| format!("{}\n", line.strip_prefix(' ').unwrap_or(line)))
                .collect();
            assert!(
                hunk.lines().any(|line| is_added(&line)) && !context.trim().is_empty(),
                "{path}:\n{hunk}"
            );
            assert_eq!(text.matches(&context).count(), 1, "{path} has not, or not once:\n{context}");
        }
    }
}

/// Every path that the text names is there, apart from those it adds.
#[test]
fn the_files_of_the_text_are_there() {
    let text = fs::read_to_string(root("CONTRIBUTING.md")).unwrap();
    let example = text.split("## A lock design and its table").nth(1).unwrap();
    let names = example.split('`').skip(1).step_by(2);
    let paths: Vec<&str> = names.filter(|name| name.contains('/') && !name.contains([' ', '\n'])).collect();
    assert!(paths.len() > 5, "{paths:?}");
    for path in paths {
        assert!(root(path).exists() || path.contains("pool_lock") || path.contains("pool-lock"), "{path}");
    }
}
