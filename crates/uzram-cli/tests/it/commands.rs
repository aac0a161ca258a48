//! The command line: help, usage errors, each command's message without a daemon, and output.

use std::process::Stdio;

use crate::common::{Place, bare_command, collect, finish};
use serde_json::Value;

const COMMANDS: &[&str] = &[
    "up",
    "run",
    "add",
    "remove",
    "list",
    "stat",
    "set",
    "reset",
    "down",
    "bench",
    "check",
    "lab",
    "train",
    "status",
    "upgrade",
    "recover",
    #[cfg(feature = "remote")]
    "backing",
];

#[test]
fn every_command_has_help_with_an_example() {
    let overview = finish(bare_command(&["--help"])).ok();
    for command in COMMANDS.iter().copied() {
        assert!(overview.contains(&format!("\n  {command} ")), "{overview}");
        if ["bench", "lab"].contains(&command) {
            // Separate programs, whose own tests check their help.
            continue;
        }
        let help = finish(bare_command(&[command, "--help"])).ok();
        assert!(help.contains("Example") && help.contains(&format!("uzram {command}")), "{help}");
    }
    assert!(finish(bare_command(&["--version"])).ok().starts_with("uzram "));
    let help = finish(bare_command(&["up", "--help"])).ok();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, limit) = help.split_once("--mem-limit <SIZE> ").unwrap();
    let (limit, _) = limit.split_once("--reserve <SIZE>").unwrap();
    for said in ["--backing", "waits", "ENOSPC", "write error", "zeros"] {
        assert!(limit.contains(said), "{said}: {limit}");
    }
}

#[test]
fn a_command_line_that_makes_no_sense_is_one_line_and_status_2() {
    for (args, mentions) in [
        (&["fly"][..], "fly"),
        (&["up", "--size", "1X"], "unknown unit"),
        (&["up", "--size", ""], "no digits"),
        (&["up", "--size", "99999999T"], "too large"),
        (&["up", "--mem-limit", "lots"], "--mem-limit"),
        (&["up", "--high", "many"], "--high"),
        (&["up", "--lru-enable=exact"], "--lru-enable"),
        (&["up", "--compact-threshold", "101"], "--compact-threshold"),
        (&["up", "--name", "a/b"], "--name"),
        (&["up", "--log", "loud"], "--log"),
        (&["up", "--fast"], "--fast"),
        (&["add"], "<NAME>"),
        (&["add", "a/b"], "<NAME>"),
        (&["add", "a", "--size", "1X"], "unknown unit"),
        (&["remove"], "<NAME>"),
        (&["list", "zram0"], "zram0"),
        (&["stat"], "<NAME>"),
        (&["set", "zram0"], "ATTRIBUTE=VALUE"),
        (&["set", "zram0", "mem_limit"], "ATTRIBUTE=VALUE"),
        (&["set", "zram0", "=1"], "ATTRIBUTE=VALUE"),
        (&["reset"], "<NAME>"),
        (&["down", "zram0"], "zram0"),
        (&["status", "zram0"], "zram0"),
        (&["upgrade", "/bin/true"], "/bin/true"),
        (&["recover", "--program", "/bin/true"], "--program"),
        (&["check", "--xml"], "--xml"),
    ] {
        let ended = finish(bare_command(args));
        let line = ended.complaint(2);
        assert!(line.contains(mentions), "{args:?}: {line}");
    }
    let ended = finish(bare_command(&[]));
    assert_eq!(ended.status.code(), Some(2));
    assert!(ended.stderr.contains("Usage: uzram"), "{}", ended.stderr);
}

#[test]
fn exit_statuses_have_one_meaning() {
    let place = Place::new();
    let path = |name: &str| place.root().join(name).display().to_string();
    let (config, policy, missing) = (path("config.toml"), path("policy.toml"), path("missing.toml"));
    std::fs::write(&config, "[zram0]\nalgorithm = 'nonesuch'\n").unwrap();
    std::fs::write(&policy, "high = 101\n").unwrap();
    let (config, policy, missing) = (config.as_str(), policy.as_str(), missing.as_str());
    for (args, status) in [
        (&["--version"][..], 0),
        (&["up", "--size", "1M", "--exec", "true"], 0),
        // The command failed.
        (&["check"], 0),
        (&["check", "--config", missing], 1),
        (&["up", "--config", missing], 1),
        (&["up", "--policy", missing], 1),
        (&["up", "--backing", "/dev/null"], 1),
        (&["up", "--tls-cert", missing, "--tls-key", missing], 1),
        (&["train", missing, "-o", "/nonexistent/dict"], 1),
        // The command line is invalid.
        (&["fly"], 2),
        (&["up", "--size", "1X"], 2),
        (&["up", "--size", "17T"], 2),
        (&["up", "--algorithm", "nonesuch"], 2),
        (&["up", "--mem-limit", "4K"], 2),
        (&["up", "--force"], 2),
        (&["up", "--writeback-after", "soon", "--backing", "/nonexistent"], 2),
        (&["up", "--policy", policy], 2),
        (&["up", "--config", config], 2),
        (&["up", "--tls-key", missing], 2),
        (&["up", "--listen", "tcp:0.0.0.0:0"], 2),
        (&["add", "a", "--writeback-after", "1h"], 2),
        (&["train", missing, "-o", "/nonexistent/dict", "--size", "1"], 2),
        // There is no daemon.
        (&["status"], 3),
        (&["stat", "zram0", "--json"], 3),
        (&["set", "zram0", "mem_limit=1M"], 3),
        (&["down"], 3),
        (&["swap", "status"], 3),
        // `run` as env(1).
        (&["run", "--limit", "1K", "true"], 125),
        (&["run", "--limti", "64M", "true"], 125),
        (&["run", "--limit", "64M", "--spill", "/no/such/folder", "sh"], 125),
        (&["run", "--limit", "64M", "/etc/passwd"], 126),
        (&["run", "--limit", "64M", "/etc"], 126),
        (&["run", "--limit", "64M", "/etc/passwd/x"], 126),
        (&["run", "--limit", "64M", "no-such-program"], 127),
        (&["run", "--limit", "64M", "/no/such/program"], 127),
        (&["run", "--limit", "64M", ""], 127),
        // The status of the `--exec` command.
        (&["up", "--size", "1M", "--exec", "exit 7"], 7),
        (&["up", "--size", "1M", "--exec", "kill -KILL $$"], 137),
    ] {
        let place = Place::new();
        let ended = place.run(args);
        assert_eq!(ended.status.code(), Some(status), "{args:?}: {}", ended.stderr);
        assert!(status != 2 || !place.dir().exists(), "{args:?}: something was tried");
    }
}

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
    let is_root = rustix::process::geteuid().is_root();
    let swap = |command: &str| {
        let ended = place.run(&["swap", command]);
        (ended.status.code(), ended.complaint(ended.status.code().unwrap()).to_owned())
    };
    let here = place.dir().display().to_string();
    let absent = format!("there is no swap: no daemon is running in '{here}' (`uzram swap on` starts one)");
    assert_eq!(swap("status"), (Some(3), absent));
    if is_root {
        // The command may find block devices that look like a daemon's.
        let (status, line) = swap("off");
        let absent = format!("there is no swap to switch off: no daemon is running in '{here}'");
        assert!((status, &line) == (Some(3), &absent) || line.contains("it is left alone"), "{line}");
        // Invalid settings are found before a daemon or its log exists.
        let on = place.run(&["swap", "on", "--algorithm", "nonesuch"]);
        assert!(
            on.complaint(2).starts_with("--algorithm nonesuch: ") && !place.dir().exists(),
            "{}",
            on.stderr
        );
    }
    let _daemon = place.up(&[]);
    assert_eq!(place.run(&["swap", "status"]).ok(), "no active swap area\n");
    let json = place.json(&["swap", "status"]);
    assert_eq!((&json["areas"], &json["files"]), (&serde_json::json!([]), &Value::Null));
    let measures = json["protection"].as_array().unwrap().iter().map(|measure| &measure["what"]);
    assert_eq!(measures.collect::<Vec<_>>(), ["capabilities given up", "system calls filtered"]);
    if is_root {
        let line = swap("off");
        let wanted =
            format!("there is no swap to switch off: the daemon in '{here}' has no active swap area");
        assert_eq!(line, (Some(1), format!("{wanted} (`uzram down` ends it)")));
    } else {
        println!("skipped: swap is switched off by root");
    }
}

#[test]
fn status_says_which_process_serves() {
    let place = Place::new();
    let _daemon = place.up(&[]);
    let json = place.json(&["status"]);
    let worker_pid = json["worker_pid"].as_u64().unwrap();
    assert_eq!((&json["take_overs"], &json["last_outage_ms"]), (&0.into(), &Value::Null));
    for key in ["holder_pid", "standby_pid", "standby_ready", "gave_up", "pid", "files", "protection"] {
        assert!(json.get(key).is_some(), "{key}: {json}");
    }
    let text = place.run(&["status"]).ok();
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    for row in [["worker", &worker_pid.to_string()], ["take-overs", "0"], ["files", "none"]] {
        assert!(rows.iter().any(|found| found == &row), "{row:?}: {text}");
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
    assert!(missing.complaint(1).starts_with("/nonexistent/uzram.toml: "), "{}", missing.stderr);
    assert!(!image.exists() && !place.dir().exists());
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    for args in [&["check"][..], &["check", "--json"], &["--help"], &["up", "--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = bare_command(args).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let ended = collect(child);
        assert!(ended.status.success() && ended.stderr.is_empty(), "{args:?}: {}", ended.stderr);
    }
    // A full disk is a failure.
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let child = bare_command(&["check"]).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    assert!(collect(child).complaint(1).contains("cannot write the output"));
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
