//! The command line: help, usage errors, each command's message without a daemon, and output.

use crate::common::*;

/// `json` has a look at the help of each command.
#[test]
fn the_help_says_what_a_limit_does() {
    assert!(finish(bare_command("--version")).ok().starts_with("uzram "));
    let help = finish(bare_command("up --help")).ok().words().join(" ");
    let (_, limit) = help.split_once("--mem-limit <SIZE> ").unwrap();
    let (limit, _) = limit.split_once("--reserve <SIZE>").unwrap();
    for said in ["--backing", "waits", "ENOSPC", "write error", "zeros"] {
        assert!(limit.contains(said), "{said}: {limit}");
    }
}

#[test]
fn a_command_line_that_makes_no_sense_is_one_line() {
    let place = Place::new();
    place.write("config.toml", "[zram0]\nalgorithm = 'nonesuch'\n");
    place.refuses(&[
        ("fly", 2, &["fly"]),
        ("up --size 1X", 2, &["unknown unit"]),
        ("up --mem-limit lots", 2, &["--mem-limit"]),
        ("up --high many", 2, &["--high"]),
        ("up --lru-enable=exact", 2, &["--lru-enable"]),
        ("up --compact-threshold 101", 2, &["--compact-threshold"]),
        ("up --name a/b", 2, &["--name"]),
        ("up --log loud", 2, &["--log"]),
        ("up --fast", 2, &["--fast"]),
        ("add", 2, &["<NAME>"]),
        ("add a/b", 2, &["<NAME>"]),
        ("add a --size 1X", 2, &["unknown unit"]),
        ("remove", 2, &["<NAME>"]),
        ("list zram0", 2, &["zram0"]),
        ("stat", 2, &["<NAME>"]),
        ("set zram0", 2, &["ATTRIBUTE=VALUE"]),
        ("set zram0 mem_limit", 2, &["ATTRIBUTE=VALUE"]),
        ("set zram0 =1", 2, &["ATTRIBUTE=VALUE"]),
        ("reset", 2, &["<NAME>"]),
        ("down zram0", 2, &["zram0"]),
        ("status zram0", 2, &["zram0"]),
        ("upgrade /bin/true", 2, &["/bin/true"]),
        ("recover --program /bin/true", 2, &["--program"]),
        ("check --xml", 2, &["--xml"]),
        ("attendant", 1, &["only a daemon starts this"]),
        ("up --config DIR/config.toml", 2, &["nonesuch"]),
        ("up --config DIR/missing.toml", 1, &["missing.toml"]),
        ("add a --writeback-after 1h", 2, &["--backing"]),
        // `run` as env(1).
        ("run --limti 64M true", 125, &["--limit <SIZE>"]),
        ("run --limit 64M /etc/passwd", 126, &["/etc/passwd"]),
        ("run --limit 64M /etc/passwd/x", 126, &["/etc/passwd/x"]),
        ("run --limit 64M /no/such/program", 127, &["/no/such/program"]),
    ]);
    assert_eq!(place.run(&["run", "--limit", "64M", ""]).status.code(), Some(127));
    let ended = place.run("");
    assert!(ended.status.code() == Some(2) && ended.stderr.contains("Usage: uzram"), "{ended}");
}

#[test]
fn without_a_daemon_every_client_says_how_to_start_one() {
    let place = Place::new();
    // First without the directory, then with the directory of a crashed daemon.
    for _ in 0..2 {
        for args in ASKING {
            let ended = place.run(args);
            if args == "list" && ended.status.success() {
                // Programs under `uzram run`, of somebody else.
                assert!(ended.stdout.trim_start().starts_with("PROCESS "), "{ended}");
            } else {
                ended.says(3, "no daemon is running in").says(3, "`uzram up`");
            }
        }
        let _ = fs::create_dir(place.dir());
        let _ = std::os::unix::net::UnixListener::bind(place.socket("control.sock"));
    }
}

#[test]
fn without_swap_the_commands_of_swap_say_so() {
    let place = Place::new();
    let here = place.dir().display().to_string();
    let nobody = format!("no daemon is running in '{here}'");
    let no_swap_on = format!("there is no swap: {nobody} (`uzram swap on` starts one)");
    assert_eq!(place.run("swap status").complaint(3), no_swap_on);
    let no_swap = "there is no swap to switch off: ";
    if !not_root() {
        // The command may find block devices that look like a daemon's.
        let off = place.run("swap off");
        let is_found = off.stderr.contains("it is left alone");
        let said = off.complaint(if is_found { 1 } else { 3 });
        assert!(is_found || said == format!("{no_swap}{nobody}"), "{off}");
        // Invalid settings are found before a daemon or its log exists.
        place.run("swap on --algorithm nonesuch").begins(2, "--algorithm nonesuch: ");
        assert!(!place.dir().exists());
    }
    let _daemon = place.up("");
    assert_eq!(place.run("swap status").ok(), "no active swap area\n");
    let json = place.json("swap status");
    assert_eq!((&json["areas"], &json["files"]), (&serde_json::json!([]), &Value::Null));
    let measures = json["protection"].as_array().unwrap().iter().map(|measure| &measure["what"]);
    assert_eq!(measures.collect::<Vec<_>>(), ["capabilities given up", "system calls filtered"]);
    if is_root() {
        let daemon = format!("the daemon in '{here}' has no active swap area (`uzram down` ends it)");
        assert_eq!(place.run("swap off").complaint(1), format!("{no_swap}{daemon}"));
    }
}

#[test]
fn check_says_for_each_thing_how_it_knows() {
    let json: Value = serde_json::from_str(&finish(bare_command("check --json")).ok()).unwrap();
    let checks = json["checks"].as_array().unwrap();
    let text = finish(bare_command("check")).ok();
    let names = "FUSE,loop,pager: message,pager: signal,io_uring,rseq,locked memory,capabilities,survival,kernel zram";
    for name in names.split(',') {
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
    let path = place.path("uzram.toml");
    let check = |text: &str| place.run(&["check", "--config", &place.write("uzram.toml", text)]);
    let policy = place.write("policy.toml", "high = 80\n");
    let backed = format!("backing = '{}'\npolicy = '{policy}'\n", place.path("cold.img:1M"));
    let text = format!(
        "[a]\nsize = 'min(1G, ram * 4)'\nswap = true\n[b]\nsize = '8M'\n{backed}\n[c]\nhost-memory-limit = 0\n"
    );
    let said = check(&text).ok();
    let lines: Vec<_> = said.lines().collect();
    assert_eq!(lines[..3], [format!("ok: {path}").as_str(), "a: 1 GiB, swap", "b: 8 MiB"]);
    assert!(lines.len() == 4 && lines[3].starts_with("no device c: the machine has "), "{said}");
    // It gives the same messages as `up`.
    for text in [
        "",
        "[a]\nsizze = '1M'\n",
        "[a]\nsize = '17T'\n",
        "[a]\nalgorithm = 'zstd,dict=/nonexistent/dict'\n",
        "[a]\nmem-limit = '4K'\n",
        "[a]\nbacking = 'cold.img:1M'\n[a.attributes]\nlru_enable = 2\n",
        "[a]\npolicy = '/nonexistent/policy.toml'\n",
        "tls-key = '/nonexistent/key'\ntls-cert = '/nonexistent/cert'\n[a]\n",
        "listen = 'tcp:0.0.0.0:0'\n[a]\n",
    ] {
        let checked = check(text);
        let up = place.run(&format!("up --log error --config {path}"));
        let status = up.status.code().unwrap();
        assert!(status != 0, "{text}");
        assert_eq!(checked.complaint(status), up.complaint(status), "{text}");
    }
    place.run("check --config /nonexistent/uzram.toml").begins(1, "/nonexistent/uzram.toml: ");
    assert!(!place.root().join("cold.img").exists() && !place.dir().exists());
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    for args in ["check", "check --json", "--help", "up --help"] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let ended = collect(bare_command(args).stdout(writer).stderr(Stdio::piped()).spawn().unwrap());
        assert!(ended.status.success() && ended.stderr.is_empty(), "{args}: {ended}");
    }
    // A full disk is a failure.
    let full = open("/dev/full");
    let child = bare_command("check").stdout(full).stderr(Stdio::piped()).spawn().unwrap();
    collect(child).says(1, "cannot write the output");
}

/// `docs/security.md` names a test for each line, as `file::test`, or `…::test` in the file named last.
#[test]
fn the_security_page_names_tests_that_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/security.md")).unwrap();
    let (mut file, mut named) = (String::new(), 0);
    for quoted in page.split('`').skip(1).step_by(2) {
        let Some((of, test)) = quoted.split_once("::").filter(|(_, test)| *test != "test") else { continue };
        if of != "…" {
            let folders = "uzram-cli/tests/it uzram-serve/tests/it uzram-remote/tests/it uzram-remote/src
                uzram/src/backing/tests";
            let folders = folders.words().into_iter();
            let mut paths = folders.map(|at| root.join(format!("crates/{at}/{of}.rs")));
            let text = paths.find_map(|path| fs::read_to_string(path).ok());
            file = text.unwrap_or_else(|| panic!("there is no {of}.rs"));
        }
        let test = test.strip_prefix("tests::").unwrap_or(test);
        assert!(file.contains(&format!("fn {test}(")), "{quoted}");
        named += 1;
    }
    assert!(named > 40, "{named}");
}

/// Creates a program that prints its name and arguments, and exits with status 7.
fn sibling(dir: &Path, name: &str) {
    let path = dir.join(name);
    fs::write(&path, "#!/bin/sh\necho \"$0\" \"$@\"\nexit 7\n").unwrap();
    set_mode(&path, 0o755);
}

#[test]
fn the_program_beside_it_comes_before_path() {
    let (place, elsewhere) = (Place::new(), tempfile::tempdir().unwrap());
    let uzram = place.copy_of_program();
    let run = |word: &str| {
        finish(Command::new(&uzram).args([word, "--help", "--json", "x y"]).env("PATH", elsewhere.path()))
    };
    for (word, name) in [("bench", "uzram-bench"), ("lab", "uzram-lab")] {
        run(word).says(1, &format!("{name} is neither beside uzram nor in PATH"));
        for dir in [elsewhere.path(), place.root()] {
            sibling(dir, name);
            let ended = run(word);
            let wanted = format!("{} --help --json x y\n", dir.join(name).display());
            assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(7), wanted.as_str()));
        }
    }
}

#[test]
fn a_program_that_cannot_be_run_is_named() {
    let place = Place::new();
    let uzram = place.copy_of_program();
    let program = place.write("uzram-lab", "not a program");
    finish(Command::new(&uzram).args(["lab", "list"])).says(1, &program);
}
