//! `uzram run`: programs behave as without it, in less memory.
//!
//! The programs in `programs/` check themselves. Each is compiled and run twice, plain and with a limit far
//! below what it needs: outputs and statuses must be the same.

use crate::common::*;

/// By how much a program may exceed its limit for a moment: as fast as it grows.
const BURST_BYTES: u64 = 64 << 20;

/// Checks that the line at the end tells of compressed memory.
fn expect_compressed(said: &str) {
    assert!(said.contains("in memory, with ") && said.contains("(ratio "), "{said}");
}

#[test]
fn programs_are_as_without() {
    let Some(_run) = Run::if_able() else { return };
    let plugin = Program::compiled("plugin", "-shared -fPIC");
    let plugin = arg(&plugin.path);
    for (name, made, options, args) in [
        ("blocks", "", "--limit 48M", ""),
        ("maps", "", "--limit 24M", ""),
        ("forks", "", "--limit 24M", ""),
        ("forks", "", "--limit 48M --no-spill", ""),
        ("small", "", "--limit 24M --stats", ""),
        ("huge", "", "--limit 24M", ""),
        ("signals", "", "--limit 24M", ""),
        ("loads", "", "--limit 24M", ""),
        ("discards", "", "--limit 4M", ""),
        ("stacks", "", "--limit 24M", ""),
        ("limits", "", "--limit 24M", ""),
        ("odd", "", "--limit 24M --spill /var/tmp:1G", ""),
        ("allocates", "-rdynamic", "--limit 24M --spill /var/tmp:1G", plugin),
        ("allocates", "-rdynamic -DOWN -fno-builtin", "--limit 24M --spill /var/tmp:1G", plugin),
    ] {
        println!("{name} {made} {options}");
        let said = Program::compiled(name, made).behaves(options, args);
        expect_compressed(&said);
        assert!(!said.contains("goes on without"), "{said}");
    }
}

#[test]
fn programs_with_limited_memory_are_as_without() {
    let Some(program) = Program::if_able("limits") else { return };
    let path = arg(&program.path);
    for (outside, inside, why) in [
        ("ulimit -v 4000000", "true", "ulimit -v"),
        ("ulimit -S -d 400000", "true", "ulimit -d"),
        ("true", "ulimit -v 2000000", "ulimit -v"),
        ("true", "ulimit -d 2000000", "ulimit -d"),
    ] {
        let inside = format!("{inside}; ulimit -v; ulimit -d; {path} x; exec {path} x");
        let script = format!("{outside}; exec $run /bin/sh -c '{inside}'");
        let shell = |run: &str| finish(Command::new("/bin/sh").args(["-c", &script]).env("run", run));
        let (plain, limited) = (shell(""), shell(&format!("{UZRAM} run --limit 24M --")));
        assert_eq!((limited.status, &limited.stdout), (plain.status, &plain.stdout), "{script}: {limited}");
        let is_said = |line: &&str| line.contains(why) && line.ends_with("runs without a limit");
        let is_said = limited.stderr.lines().filter(is_said).count() >= 2;
        assert!(is_said && !limited.stderr.contains("(ratio "), "{script}: {limited}");
    }
    let script = "ulimit -v 4000000; exec $0 run --limit 24M --hard -- /bin/true";
    let refused = finish(Command::new("/bin/sh").args(["-c", script, UZRAM]));
    assert!(!refused.status.success() && refused.stderr.contains("ulimit -v"), "{refused}");
}

/// Returns whether every user may use userfaultfd.
fn all_have_the_right() -> bool {
    fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default().trim() == "1"
}

#[test]
fn rights_that_are_given_up_are_as_without() {
    if not_root() {
        return;
    }
    let Some(program) = Program::if_able("rights") else { return };
    let said = program.behaves("--limit 24M", "");
    expect_compressed(&said);
    assert_eq!(said.contains("goes on without a limit"), !all_have_the_right(), "{said}");
}

#[test]
fn ends_are_as_without() {
    let Some(program) = Program::if_able("ends") else { return };
    for how in ["e", "_", "a", "k"] {
        program.behaves("--limit 24M", how);
    }
}

/// The pager leaves when the kernel has counted the exec, which comes after files were closed.
#[test]
fn a_slow_close_at_an_exec_is_as_without() {
    if Run::if_root().is_none() {
        return;
    }
    if !Path::new("/dev/fuse").exists() {
        return println!("skipped: no /dev/fuse");
    }
    Program::compiled("closes", "").behaves("--limit 24M", "");
}

/// Returns Python and a program for it that needs so many MiB, if Python is there.
fn hungry(mib: u64) -> Option<String> {
    let python = "/usr/bin/python3";
    let program = format!("{python} {}/../../examples/hungry.py {mib}", env!("CARGO_MANIFEST_DIR"));
    (!missing(python)).then_some(program)
}

#[test]
fn a_python_program_is_right_and_stays_below_the_limit() {
    let (Some(run), Some(program)) = (Run::if_able(), hungry(96)) else { return };
    // Of this size, the spill file is written through twice, and cleaned.
    let limited = run.run(&format!("--limit 32M --spill /var/tmp:70M --json -- {program}"));
    assert!(limited.status.success(), "{limited}");
    let words = program.words();
    assert_eq!(limited.stdout, finish(Command::new(words[0]).args(&words[1..])).ok());
    let figures: Value = serde_json::from_str(&limited.stderr).unwrap();
    let figure = |name: &str| figures[name].as_u64().unwrap();
    assert!(figure("compressed_max_bytes") < figure("stored_max_bytes"), "{figures}");
    assert!(figure("used_max_bytes") <= (32 << 20) + BURST_BYTES, "{figures}");
    // All of it is in use until the end.
    assert!(figure("used_bytes") <= 32 << 20, "{figures}");
}

#[test]
fn what_cannot_be_kept_below_the_limit_is_said() {
    let Some(program) = Program::if_able("loads") else { return };
    // Three quarters of what it has can be compressed no further.
    for (options, signal, said) in [
        ("--no-spill", None, "uses more than 16 MiB: there is no spill file: give --spill"),
        ("--no-spill --hard", Some(libc::SIGABRT), "ends, as it needs more than 16 MiB, and there is no"),
        ("--spill /var/tmp:4M --hard", Some(libc::SIGABRT), "the spill file has no room: raise --limit"),
    ] {
        let ended = program.limited(&format!("--limit 16M {options}"), "");
        assert!(ended.stderr.contains(said), "{options}: {ended}");
        assert!(ended.status.signal() == signal && (signal.is_some() || ended.status.success()), "{ended}");
    }
}

/// What is kept below the limit without a spill file is kept below it with one that is full.
#[test]
fn a_full_spill_file_is_no_worse_than_none() {
    let Some(program) = Program::if_able("halves") else { return };
    for spill in ["--no-spill", "--spill /var/tmp:4M"] {
        let said = program.behaves(&format!("--limit 32M {spill}"), "");
        assert!(!said.contains("uses more than"), "{spill}: {said}");
        let most = said.strip_prefix("uzram: at most ").and_then(|rest| rest.split(' ').next()).unwrap();
        assert!(most.parse::<f64>().unwrap() <= 32.0 + (BURST_BYTES >> 20) as f64, "{spill}: {said}");
    }
}

#[test]
fn on_a_host_without_memory_a_program_with_a_limit_lives() {
    let (Some(_run), Some(program)) = (Run::if_able(), hungry(80)) else { return };
    let Some(host) = Cgroup::new("run", 64 << 20) else { return };
    host.set("memory.swappiness", "0");
    let dir = tempfile::tempdir().unwrap();
    let run = |limit: &str| {
        let words = format!("run --limit {limit} --spill {}:1G -- {program}", dir.path().display());
        finish(host.command(UZRAM).args(words.words()))
    };
    run("24M").shows(&["all as they should be"]);
    // With a limit that the host does not have the kernel kills it, as it would without one.
    let dies = run("1G");
    assert_eq!(dies.status.signal(), Some(libc::SIGKILL), "{dies}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Memory is managed when a program nears its limit. The threads for that may not be had then, or not all.
#[test]
fn where_threads_cannot_be_started_a_program_runs_without_a_limit() {
    let (Some(_run), Some(cgroup)) = (Run::if_able(), Cgroup::of_threads("run")) else { return };
    let python = "/usr/bin/python3";
    if missing(python) {
        return;
    }
    let grows = "import os, sys, time
path = os.environ['CGROUP'] + '/pids.'
print(int(open(path + 'current').read()) + int(sys.argv[1]), file=open(path + 'max', 'w'))
x = bytearray(60 << 20)
for at in range(0, len(x), 4096): x[at] = at >> 12 & 255
time.sleep(0.5)
print(all(x[at] == at >> 12 & 255 for at in range(0, len(x), 4096)))";
    for (more, options) in (0..6).flat_map(|more| [(more, ""), (more, "--hard")]) {
        cgroup.set("pids.max", "max");
        let run = format!("run --limit 24M {options} -- {python} -c");
        let ended = finish(cgroup.command(UZRAM).args(run.words()).args([grows, &more.to_string()]));
        let is_refused = ended.stderr.contains("Resource temporarily unavailable");
        let ends = is_refused && options == "--hard";
        assert!(if ends { !ended.status.success() } else { ended.stdout == "True\n" }, "{more}: {ended}");
        assert!(is_refused != ended.stderr.contains("in memory, with"), "{more}: {ended}");
        assert_eq!(ended.stderr.lines().count(), 1, "{more}: {ended}");
        // None of the threads, or all.
        assert!(if more == 0 { is_refused } else { more < 5 || !is_refused }, "{more}: {ended}");
    }
}

#[test]
fn its_status_and_end_are_the_program_s() {
    let Some(run) = Run::if_able() else { return };
    let shell =
        |options: &str, script: &str| run.run(&[&options.words()[..], &["--", "sh", "-c", script]].concat());
    // As those of this program's own failures.
    for status in [2, 3, 125, 126, 127] {
        let ended = shell("--limit 64M", &format!("exit {status}"));
        let is_said = ended.stderr.contains("never used enough memory to compress any (limit 64 MiB)");
        assert!(ended.status.code() == Some(status) && is_said, "{ended}");
    }
    assert_eq!(shell("--limit 64M", "kill -KILL $$").status.signal(), Some(9));
    // What it starts says nothing, but with --stats: as JSON, each process has a line of its own.
    for (options, lines) in
        [("--json", 1..2), ("--json --stats", 2..9), ("--stats=json", 2..9), ("--json --stats=text", 2..9)]
    {
        let ended = shell(&format!("--limit 64M {options}"), "/bin/true; exit 7");
        let figures = ended.stderr.lines().map(|line| serde_json::from_str(line).unwrap());
        let figures: Vec<Value> = figures.collect();
        assert!(ended.status.code() == Some(7) && lines.contains(&figures.len()), "{ended}");
        assert!(figures.iter().all(|one| one["pid"].is_u64() && one["limit_bytes"] == 64 << 20), "{ended}");
    }
}

#[test]
fn a_quiet_run_says_nothing_at_its_end() {
    let Some(program) = Program::if_able("halves") else { return };
    assert_eq!(program.behaves("--limit 32M --quiet", ""), "");
}

#[test]
fn nothing_stays_behind_of_a_killed_process() {
    let Some(program) = Program::if_able("ends") else { return };
    let dir = tempfile::tempdir().unwrap();
    for nth in 0..5u64 {
        let mut command = bare_command(&format!("run --limit 24M --spill {}:256M --", dir.path().display()));
        // It never gets to its end: it writes as fast as it can.
        let mut child = Killed(start(command.arg(&program.path).arg("x")));
        let id = child.id();
        let is_spill = |fd: fs::DirEntry| fs::read_link(fd.path()).is_ok_and(|to| to.starts_with(dir.path()));
        wait_until("it spills", || {
            let opens = |pager| fs::read_dir(format!("/proc/{pager}/fd")).into_iter().flatten().flatten();
            children(id, "uzram-pager").into_iter().flat_map(opens).any(is_spill)
        });
        thread::sleep(Duration::from_millis(30 * nth));
        let _ = child.kill();
        wait(&mut child, PATIENCE);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_user_without_the_right_is_told_what_to_do() {
    if Run::if_root().is_none() {
        return;
    }
    if all_have_the_right() {
        return println!("skipped: every user has the right here");
    }
    let run = |options: &str| {
        let command = format!("run --limit 24M {options} -- /bin/sh -c");
        finish(bare_command(&command).arg("echo here; exit 4").uid(NOBODY).gid(NOBODY))
    };
    let (as_it_is, refused) = (run(""), run("--hard"));
    assert_eq!((as_it_is.status.code(), &*as_it_is.stdout), (Some(4), "here\n"), "{as_it_is}");
    assert_eq!(as_it_is.stderr.lines().count(), 1, "{as_it_is}");
    let docker = "docker run --device /dev/userfaultfd";
    let sysctl = "vm.unprivileged_userfaultfd=1";
    for said in ["root", "CAP_SYS_PTRACE", sysctl, docker, "its memory is not managed"] {
        refused.says(125, said).says(125, "--hard was given");
        assert!(as_it_is.stderr.contains(said), "{as_it_is}");
    }
}

#[test]
fn bad_command_lines_are_refused() {
    let Some(_run) = Run::if_able() else { return };
    let place = Place::new();
    set_mode(&place.write("lost", "#!/no/such/interpreter\n"), 0o755);
    set_mode(&place.write("lost-twice", format!("#!{}\n", place.path("lost"))), 0o755);
    let other_dir = "give another --spill DIR, or --no-spill";
    place.refuses(&[
        ("run -- /bin/true", 125, &["--limit"]),
        ("run --limit 1M -- /bin/true", 125, &["the least is 4 MiB"]),
        ("run --limit 64M --algorithm none -- /bin/true", 125, &["--algorithm"]),
        ("run --limit 64M --pressure 0 -- /bin/true", 125, &["above 0"]),
        ("run --limit 64M --spill /var/tmp:x -- /bin/true", 125, &["--spill DIR:SIZE"]),
        ("run --limit 64M --spill DIR/lost -- /bin/true", 125, &["/lost: Not a directory", other_dir]),
        ("run --limit 64M --spill /no/such/folder -- /bin/true", 125, &["/no/such/folder: ", other_dir]),
        ("run --limit 64M --stats=xml -- /bin/true", 125, &["--stats"]),
        ("run --limit 64M --quiet --stats -- /bin/true", 125, &["--quiet"]),
        ("run --limit 64M --quiet -- no-such-program", 127, &["there is no program"]),
        ("run --limit 64M -- DIR/lost", 127, &["its interpreter /no/such/interpreter is missing"]),
        (
            "run --limit 64M --hard -- DIR/lost-twice",
            127,
            &["its interpreter /no/such/interpreter is missing"],
        ),
    ]);
}

#[test]
fn a_program_is_not_given_a_spill_file_that_it_may_not_write() {
    let Some(_run) = Run::if_able() else { return };
    let limited = |options: &str| {
        let run = bare_command(&format!("run --limit 16M {options} -- cat /dev/null"));
        finish(with_file_size(run, 32 << 20))
    };
    limited("").says(125, "RLIMIT_FSIZE").says(125, "--spill");
    for spill in ["--spill /var/tmp:32M", "--no-spill"] {
        limited(spill).ok();
    }
}
