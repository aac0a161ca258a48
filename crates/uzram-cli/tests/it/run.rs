//! `uzram run`: programs behave as without it, in less memory.
//!
//! The programs in `programs/` check themselves. Each is compiled and run twice, plain and with a limit far
//! below what it needs: outputs and statuses must be the same.

use crate::common::*;

/// Checks that the line at the end tells of compressed memory.
fn expect_compressed(said: &str) {
    assert!(said.contains("in memory, with ") && said.contains("(ratio "), "{said}");
}

#[test]
fn programs_are_as_without() {
    for (name, options) in [
        ("blocks", "--limit 24M"),
        ("maps", "--limit 24M"),
        ("forks", "--limit 24M"),
        ("forks", "--limit 48M --no-spill"),
        ("small", "--limit 24M --stats"),
        ("signals", "--limit 24M"),
        ("loads", "--limit 24M"),
        ("stacks", "--limit 24M"),
        ("limits", "--limit 24M"),
    ] {
        let Some(program) = Program::if_able(name) else { return };
        println!("{name} {options}");
        expect_compressed(&program.behaves(options, ""));
    }
}

/// Runs a shell's script, in which `$run` starts a program, both ways, and compares; returns what was said to
/// standard error.
fn scripts_agree(script: &str) -> String {
    let shell = |run: &str| finish(Command::new("/bin/sh").args(["-c", script]).env("run", run));
    let (plain, limited) = (shell(""), shell(&format!("{UZRAM} run --limit 24M --")));
    assert_eq!((&limited.status, &limited.stdout), (&plain.status, &plain.stdout), "{script}: {limited}");
    limited.stderr
}

#[test]
fn programs_with_limited_memory_are_as_without() {
    let Some(program) = Program::if_able("limits") else { return };
    let both = "ulimit -v; ulimit -d; PROGRAM x; exec PROGRAM x".replace("PROGRAM", arg(&program.path));
    for script in [
        format!("ulimit -v 4000000; exec $run /bin/sh -c '{both}'"),
        format!("ulimit -S -d 400000; exec $run /bin/sh -c '{both}'"),
        format!("exec $run /bin/sh -c 'ulimit -v 2000000; {both}'"),
        format!("exec $run /bin/sh -c 'ulimit -d 2000000; {both}'"),
    ] {
        let said = scripts_agree(&script);
        let lines = said.matches("runs without a limit: its address space or data is limited").count();
        assert!(lines >= 2 && !said.contains("(ratio "), "{script}: {said}");
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

/// Returns Python and a program for it that needs so many MiB, if Python is there.
fn hungry(mib: u64) -> Option<String> {
    let python = "/usr/bin/python3";
    if !Path::new(python).exists() {
        println!("skipped: there is no {python}");
        return None;
    }
    Some(format!("{python} {}/../../examples/hungry.py {mib}", env!("CARGO_MANIFEST_DIR")))
}

#[test]
fn a_python_program_is_right_and_stays_below_the_limit() {
    let (Some(run), Some(program)) = (Run::if_able(), hungry(96)) else { return };
    let limited = run.run(&format!("--limit 32M --json -- {program}"));
    assert!(limited.status.success(), "{limited}");
    let words = program.words();
    assert_eq!(limited.stdout, finish(Command::new(words[0]).args(&words[1..])).ok());
    let figures: Value = serde_json::from_str(&limited.stderr).unwrap();
    let figure = |name: &str| figures[name].as_u64().unwrap();
    assert!(figure("compressed_max_bytes") < figure("stored_max_bytes"), "{figures}");
    assert!(figure("used_max_bytes") <= 32 << 20, "{figures}");
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
        assert!(most.parse::<f64>().unwrap() <= 32.0, "{spill}: {said}");
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

#[test]
fn programs_that_cannot_be_managed_run_as_they_are() {
    let Some(_run) = Run::if_able() else { return };
    let program = Program::compiled("blocks", "-static");
    let ended = program.limited("--limit 24M", "");
    assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(0), "blocks are right\n"), "{ended}");
    assert!(ended.stderr.contains("is linked statically: its memory is not managed"), "{ended}");
    program.limited("--limit 24M --hard", "").says(125, "is linked statically");
}

#[test]
fn a_program_that_never_needs_much_has_no_pager() {
    let Some(run) = Run::if_able() else { return };
    let ended = run.run("--limit 64M -- /bin/echo hello");
    assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(0), "hello\n"));
    assert!(ended.stderr.contains("never used enough memory to compress any (limit 64 MiB)"), "{ended}");
    // What it starts says nothing, but with --stats.
    for (options, lines) in [(&[][..], 1..2), (&["--stats"], 3..99)] {
        let shell = ["--limit", "64M", "--", "/bin/sh", "-c", "/bin/echo inner; exit 3"];
        let ended = run.run(&[options, &shell].concat());
        assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(3), "inner\n"));
        assert!(lines.contains(&ended.stderr.lines().count()), "{ended}");
    }
}

#[test]
fn its_status_and_end_are_the_program_s() {
    let Some(run) = Run::if_able() else { return };
    let shell = |options: &[&str], script: &str| {
        run.run(&[&["--limit", "64M"], options, &["--", "sh", "-c", script]].concat())
    };
    // As those of this program's own failures.
    for status in [2, 3, 125, 126, 127] {
        assert_eq!(shell(&[], &format!("exit {status}")).status.code(), Some(status));
    }
    assert_eq!(shell(&[], "kill -KILL $$").status.signal(), Some(9));
    // As JSON, each process has a line of its own.
    for (options, lines) in [(&["--json"][..], 1..2), (&["--json", "--stats"], 2..9)] {
        let ended = shell(options, "/bin/true; exit 7");
        let figures = ended.stderr.lines().map(|line| serde_json::from_str(line).unwrap());
        let figures: Vec<Value> = figures.collect();
        assert!(ended.status.code() == Some(7) && lines.contains(&figures.len()), "{ended}");
        assert!(figures.iter().all(|one| one["pid"].is_u64() && one["limit_bytes"] == 64 << 20), "{ended}");
    }
}

#[test]
fn nothing_stays_behind_of_a_killed_process() {
    let Some(program) = Program::if_able("ends") else { return };
    let dir = tempfile::tempdir().unwrap();
    for nth in 0..5u64 {
        let mut command = bare_command(&format!("run --limit 24M --spill {}:256M --", dir.path().display()));
        command.arg(&program.path).arg("x").stdout(Stdio::null()).stderr(Stdio::null());
        // It never gets to its end: it writes as fast as it can.
        let mut child = Killed(command.spawn().unwrap());
        let id = child.id();
        let opens = || fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().flatten();
        let spills = || opens().any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.starts_with(dir.path())));
        wait_until("it spills", spills);
        thread::sleep(Duration::from_millis(30 * nth));
        let _ = child.kill();
        wait(&mut child, PATIENCE);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_user_without_the_right_is_told_what_to_do() {
    if not_root() || Run::if_able().is_none() {
        return;
    }
    if all_have_the_right() {
        return println!("skipped: every user has the right here");
    }
    let ended = finish(bare_command("run --limit 24M -- /bin/true").uid(NOBODY).gid(NOBODY));
    for said in ["CAP_SYS_PTRACE", "vm.unprivileged_userfaultfd=1", "docker run --device /dev/userfaultfd"] {
        ended.says(125, said);
    }
}

#[test]
fn bad_command_lines_are_refused() {
    let Some(run) = Run::if_able() else { return };
    for (args, status, said) in [
        ("-- /bin/true", 125, "--limit"),
        ("--limit 1M -- /bin/true", 125, "the least is 4 MiB"),
        ("--limit 64M --algorithm none -- /bin/true", 125, "--algorithm"),
        ("--limit 64M --pressure 0 -- /bin/true", 125, "above 0"),
        ("--limit 64M --spill /var/tmp:x -- /bin/true", 125, "--spill DIR:SIZE"),
        ("--limit 64M -- no-such-program", 127, "there is no program"),
        ("--limit 64M --spill /no/such/folder -- /bin/true", 125, "/no/such/folder"),
    ] {
        run.run(args).says(status, said);
    }
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
