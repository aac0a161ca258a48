//! The command line: help, usage errors, each command's message without a daemon, and output.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{Place, bare_command, collect, finish, not_root};
use serde_json::Value;

#[test]
fn without_a_daemon_every_client_says_how_to_start_one() {
    let place = Place::new();
    let clients: [&[&str]; 12] = [
        &["add", "zram1"],
        &["remove", "zram1"],
        &["list"],
        &["stat", "zram0"],
        &["set", "zram0", "mem_limit=1M"],
        &["reset", "zram0"],
        &["down"],
        &["status"],
        &["upgrade"],
        &["upgrade", "--program", "/bin/true"],
        &["recover"],
        &["recover", "zram0"],
    ];
    // First without the directory, then with the directory of a crashed daemon.
    for _ in 0..2 {
        for args in clients {
            let ended = place.run(args);
            if args == ["list"] && ended.status.success() {
                // Programs under `uzram run`, of somebody else.
                assert!(ended.stdout.trim_start().starts_with("PROCESS "), "{}", ended.stdout);
                continue;
            }
            let line = ended.complaint(3);
            assert!(line.contains("no daemon is running in") && line.contains("`uzram up`"), "{line}");
        }
        let _ = std::fs::create_dir(place.dir());
        let _ = std::os::unix::net::UnixListener::bind(place.socket("control.sock"));
    }
}

#[test]
fn without_swap_the_commands_of_swap_say_so() {
    let place = Place::new();
    let here = place.dir().display().to_string();
    let absent = format!("there is no swap: no daemon is running in '{here}' (`uzram swap on` starts one)");
    place.refuses(&[(&["swap", "status"], 3, &[&absent])]);
    if !not_root() {
        // Invalid settings are found before a daemon or its log exists.
        place.refuses(&[(&["swap", "on", "--algorithm", "nonesuch"], 2, &["--algorithm nonesuch: "])]);
        assert!(!place.dir().exists());
    }
    let _daemon = place.up(&[]);
    assert_eq!(place.run(&["swap", "status"]).ok(), "no active swap area\n");
    let json = place.json(&["swap", "status"]);
    assert_eq!((&json["areas"], &json["files"]), (&serde_json::json!([]), &Value::Null));
    let measures = json["protection"].as_array().unwrap().iter().map(|measure| &measure["what"]);
    assert_eq!(measures.collect::<Vec<_>>(), ["capabilities given up", "system calls filtered"]);
    if !not_root() {
        let wanted =
            format!("there is no swap to switch off: the daemon in '{here}' has no active swap area");
        place.refuses(&[(&["swap", "off"], 1, &[&wanted, "(`uzram down` ends it)"])]);
    }
}

#[test]
fn check_says_for_each_thing_how_it_knows() {
    let json: Value = serde_json::from_str(&finish(bare_command(&["check", "--json"])).ok()).unwrap();
    let checks = json["checks"].as_array().unwrap();
    let text = finish(bare_command(&["check"])).ok();
    for name in [
        "FUSE",
        "loop",
        "pager: uffd",
        "pager: guard",
        "io_uring",
        "rseq",
        "locked memory",
        "capabilities",
        "survival",
        "kernel zram",
    ] {
        let check = checks.iter().find(|check| check["name"] == name).unwrap();
        assert!(["yes", "partly", "no"].contains(&check["works"].as_str().unwrap()), "{check}");
        for field in ["checked_by", "follows"] {
            let said = check[field].as_str().unwrap();
            assert!(!said.is_empty() && text.contains(said), "{check}\n{text}");
        }
    }
    assert_eq!(text.lines().count(), checks.len());
}

#[test]
fn a_configuration_file_is_checked_and_nothing_is_started() {
    let place = Place::new();
    let root = place.root();
    let (config, policy) = (root.join("uzram.toml"), root.join("policy.toml"));
    let image = root.join("cold.img");
    let check = |text: &str| {
        std::fs::write(&config, text).unwrap();
        place.run(&["check", "--config", config.to_str().unwrap()])
    };
    std::fs::write(&policy, "high = 80\n").unwrap();
    let backed = format!("backing = '{}:1M'\npolicy = '{}'\n", image.display(), policy.display());
    let text = format!(
        "[a]\nsize = 'min(1G, ram * 4)'\nswap = true\n[b]\nsize = '8M'\n{backed}\n[c]\nhost-memory-limit = 0\n"
    );
    let said = check(&text).ok();
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines[0], format!("ok: {}", config.display()));
    assert_eq!(lines[1..3], ["a: 1 GiB, swap", "b: 8 MiB"]);
    assert!(lines.len() == 4 && lines[3].starts_with("no device c: the machine has "), "{said}");
    // It gives the same messages as `up`.
    for text in [
        "",
        "[a]\nsize = 64\n",
        "[a]\nsizze = '1M'\n",
        "[a]\nsize = '17T'\n",
        "[a]\nalgorithm = 'nonesuch'\n",
        "[a]\nalgorithm = 'zstd,dict=/nonexistent/dict'\n",
        "[a]\nmem-limit = '4K'\n",
        "[a]\nbacking = 'cold.img:1M'\n[a.attributes]\nlru_enable = 2\n",
        "[a]\n[a.attributes]\npolicy_high = 101\n",
        "[a]\n[a.attributes]\ncompact = 1\n",
        "[a]\npolicy = '/nonexistent/policy.toml'\n",
        "tls-key = '/nonexistent/key'\n[a]\n",
        "tls-key = '/nonexistent/key'\ntls-cert = '/nonexistent/cert'\n[a]\n",
        "listen = 'tcp:0.0.0.0:0'\n[a]\n",
    ] {
        let checked = check(text);
        let up = place.run(&["up", "--log", "error", "--config", config.to_str().unwrap()]);
        let status = up.status.code().unwrap();
        assert!(status != 0, "{text}");
        assert_eq!(checked.complaint(status), up.complaint(status), "{text}");
    }
    let missing = place.run(&["check", "--config", "/nonexistent/uzram.toml"]);
    assert!(missing.complaint(1).starts_with("/nonexistent/uzram.toml: "), "{missing}");
    assert!(!image.exists() && !place.dir().exists());
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    for args in [&["check"][..], &["check", "--json"], &["--help"], &["up", "--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = bare_command(args).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let ended = collect(child);
        assert!(ended.status.success() && ended.stderr.is_empty(), "{args:?}: {ended}");
    }
    // A full disk is a failure.
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let child = bare_command(&["check"]).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    collect(child).says(1, "cannot write the output");
}

/// `docs/security.md` names a test for each line, as `file::test`, or `…::test` in the file named last.
#[test]
fn the_security_page_names_tests_that_are_there() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/security.md")).unwrap();
    let mut file = String::new();
    let mut named = 0;
    for quoted in page.split('`').skip(1).step_by(2) {
        let Some((of, test)) = quoted.split_once("::").filter(|(_, test)| *test != "test") else { continue };
        if of != "…" {
            let folders = ["cli/tests/it", "serve/tests/it", "remote/tests/it", "remote/src"]
                .map(|at| format!("uzram-{at}"));
            file = folders
                .map(|folder| root.join("crates").join(folder).join(of).with_extension("rs"))
                .iter()
                .find_map(|path| std::fs::read_to_string(path).ok())
                .unwrap_or_else(|| panic!("there is no {of}.rs"));
        }
        let test = test.strip_prefix("tests::").unwrap_or(test);
        assert!(file.contains(&format!("fn {test}(")), "{quoted}");
        named += 1;
    }
    assert!(named > 40, "{named}");
}

fn copy(dir: &Path) -> PathBuf {
    let (from, to) = (Path::new(env!("CARGO_BIN_EXE_uzram")), dir.join("uzram"));
    fs::hard_link(from, &to).or_else(|_| fs::copy(from, &to).map(drop)).unwrap();
    to
}

/// Creates a program that prints its name and arguments, and exits with status 7.
fn sibling(dir: &Path, name: &str) {
    let path = dir.join(name);
    fs::write(&path, "#!/bin/sh\necho \"$0\" \"$@\"\nexit 7\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn the_program_beside_it_comes_before_path() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let uzram = copy(dir.path());
    let run = |word: &str| {
        finish(Command::new(&uzram).args([word, "--help", "--json", "x y"]).env("PATH", elsewhere.path()))
    };
    for (word, name) in [("bench", "uzram-bench"), ("lab", "uzram-lab")] {
        run(word).says(1, &format!("{name} is neither beside uzram nor in PATH"));
        for dir in [elsewhere.path(), dir.path()] {
            sibling(dir, name);
            let ended = run(word);
            let wanted = format!("{} --help --json x y\n", dir.join(name).display());
            assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(7), wanted.as_str()));
        }
    }
}

#[test]
fn a_program_that_cannot_be_run_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let uzram = copy(dir.path());
    let program = dir.path().join("uzram-lab");
    fs::write(&program, "not a program").unwrap();
    finish(Command::new(&uzram).args(["lab", "list"])).says(1, program.to_str().unwrap());
}
