//! `uzram run`: programs behave as without it, in less memory.
//!
//! The programs in `programs/` check themselves. Each is compiled and run twice, plain and with a limit far
//! below what it needs: outputs and statuses must be the same.

use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::run::{Program, can_run};
use crate::common::{PATIENCE, bare_command, finish, not_root, wait, wait_until, with_file_size};
use serde_json::Value;

/// Checks that the line at the end tells of compressed memory.
fn expect_compressed(said: &str) {
    assert!(said.contains("in memory, with ") && said.contains("(ratio "), "{said}");
}

#[test]
fn blocks_are_as_without() {
    if can_run() {
        expect_compressed(&Program::new("blocks").behaves(&["--limit", "24M"], &[]));
    }
}

#[test]
fn mappings_are_as_without() {
    if can_run() {
        expect_compressed(&Program::new("maps").behaves(&["--limit", "24M"], &[]));
    }
}

#[test]
fn children_are_as_without() {
    if can_run() {
        let program = Program::new("forks");
        for options in [&["--limit", "24M"][..], &["--limit", "48M", "--no-spill"]] {
            expect_compressed(&program.behaves(options, &[]));
        }
    }
}

#[test]
fn small_programs_are_as_without() {
    if can_run() {
        expect_compressed(&Program::new("small").behaves(&["--limit", "24M", "--stats"], &[]));
    }
}

#[test]
fn signals_are_as_without() {
    if can_run() {
        expect_compressed(&Program::new("signals").behaves(&["--limit", "24M"], &[]));
    }
}

#[test]
fn libraries_are_as_without() {
    if can_run() {
        expect_compressed(&Program::new("loads").behaves(&["--limit", "24M"], &[]));
    }
}

#[test]
fn stacks_are_as_without() {
    if can_run() {
        expect_compressed(&Program::new("stacks").behaves(&["--limit", "24M"], &[]));
    }
}

#[test]
fn limits_are_as_without() {
    if can_run() {
        expect_compressed(&Program::new("limits").behaves(&["--limit", "24M"], &[]));
    }
}

/// Runs a shell's script, in which `$run` starts a program, both ways, and compares; returns what was said to
/// standard error.
fn scripts_agree(script: &str) -> String {
    let shell = |run: &str| {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).env("run", run);
        finish(command)
    };
    let (plain, limited) = (shell(""), shell(&format!("{} run --limit 24M --", env!("CARGO_BIN_EXE_uzram"))));
    assert_eq!(limited.status, plain.status, "{script}: {}", limited.stderr);
    assert_eq!(limited.stdout, plain.stdout, "{script}: {}", limited.stderr);
    limited.stderr
}

#[test]
fn programs_with_limited_memory_are_as_without() {
    if !can_run() {
        return;
    }
    let program = Program::new("limits");
    let limits = program.path.display();
    let both = format!("ulimit -v; ulimit -d; {limits} x; exec {limits} x");
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
    let mut shell = Command::new("/bin/sh");
    let script = "ulimit -v 4000000; exec $0 run --limit 24M --hard -- /bin/true";
    shell.args(["-c", script, env!("CARGO_BIN_EXE_uzram")]);
    let refused = finish(shell);
    assert!(!refused.status.success() && refused.stderr.contains("ulimit -v"), "{}", refused.stderr);
}

#[test]
fn rights_that_are_given_up_are_as_without() {
    if not_root() {
        return;
    }
    if can_run() {
        let said = Program::new("rights").behaves(&["--limit", "24M"], &[]);
        expect_compressed(&said);
        let sysctl = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
        assert_eq!(said.contains("goes on without a limit"), sysctl.trim() != "1", "{said}");
    }
}

#[test]
fn ends_are_as_without() {
    if can_run() {
        let program = Program::new("ends");
        for how in ["e", "_", "a", "k"] {
            program.behaves(&["--limit", "24M"], &[how]);
        }
    }
}

#[test]
fn a_python_program_is_right_and_stays_below_the_limit() {
    if !can_run() {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/hungry.py");
    let program = ["/usr/bin/python3", script.to_str().unwrap(), "96"];
    if !Path::new(program[0]).exists() {
        return println!("skipped: there is no {}", program[0]);
    }
    let mut plain = Command::new(program[0]);
    plain.args(&program[1..]);
    let limited = finish(bare_command(&[&["run", "--limit", "32M", "--json", "--"], &program[..]].concat()));
    assert!(limited.status.success(), "{}", limited.stderr);
    assert_eq!(limited.stdout, finish(plain).ok());
    let figures: serde_json::Value = serde_json::from_str(&limited.stderr).unwrap();
    let figure = |name: &str| figures[name].as_u64().unwrap();
    assert!(figure("compressed_max_bytes") < figure("stored_max_bytes"), "{figures}");
    assert!(figure("used_max_bytes") <= 32 << 20, "{figures}");
}

#[test]
fn what_cannot_be_kept_below_the_limit_is_said() {
    if !can_run() {
        return;
    }
    let program = Program::new("loads");
    // Three quarters of what it has can be compressed no further.
    let ended = program.limited(&["--limit", "16M", "--no-spill"], &[]);
    assert!(ended.status.success(), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("uses more than 16 MiB: there is no spill file: give --spill"),
        "{}",
        ended.stderr
    );
    let ended = program.limited(&["--limit", "16M", "--no-spill", "--hard"], &[]);
    assert!(ended.stderr.contains("ends, as it needs more than 16 MiB, and there is no"), "{}", ended.stderr);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&ended.status), Some(libc::SIGABRT));
    let ended = program.limited(&["--limit", "16M", "--spill", "/var/tmp:4M", "--hard"], &[]);
    assert!(ended.stderr.contains("the spill file has no room: raise --limit"), "{}", ended.stderr);
}

/// What is kept below the limit without a spill file is kept below it with one that is full.
#[test]
fn a_full_spill_file_is_no_worse_than_none() {
    if !can_run() {
        return;
    }
    let program = Program::new("halves");
    for spill in [&["--no-spill"][..], &["--spill", "/var/tmp:4M"]] {
        let said = program.behaves(&[&["--limit", "32M"], spill].concat(), &[]);
        assert!(!said.contains("uses more than"), "{spill:?}: {said}");
        let most = said.strip_prefix("uzram: at most ").and_then(|rest| rest.split(' ').next()).unwrap();
        assert!(most.parse::<f64>().unwrap() <= 32.0, "{spill:?}: {said}");
    }
}

/// A cgroup of the memory controller, version 1, without swap for what is in it; removed when it is dropped.
struct SmallHost(PathBuf);

impl SmallHost {
    fn new(limit_bytes: u64) -> Option<SmallHost> {
        let dir = Path::new("/sys/fs/cgroup/memory").join(format!("uzram-test-run-{}", std::process::id()));
        fs::create_dir(&dir).ok()?;
        let host = SmallHost(dir);
        fs::write(host.0.join("memory.limit_in_bytes"), limit_bytes.to_string()).ok()?;
        fs::write(host.0.join("memory.swappiness"), "0").ok()?;
        Some(host)
    }

    /// Returns a command that runs another one in there.
    fn command(&self, words: &[&str]) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo $$ >\"$0/cgroup.procs\" && exec \"$@\""]).arg(&self.0).args(words);
        shell
    }
}

impl Drop for SmallHost {
    fn drop(&mut self) {
        // Its last process may still be exiting.
        wait_until("the cgroup is removed", || fs::remove_dir(&self.0).is_ok());
    }
}

#[test]
fn on_a_host_without_memory_a_program_with_a_limit_lives() {
    if !can_run() {
        return;
    }
    let python = "/usr/bin/python3";
    if !Path::new(python).exists() {
        return println!("skipped: there is no {python}");
    }
    let Some(host) = SmallHost::new(96 << 20) else {
        return println!("skipped: there is no memory controller of cgroups, version 1, for this user");
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/hungry.py");
    let (script, dir) = (script.to_str().unwrap(), tempfile::tempdir().unwrap());
    let spill = format!("{}:1G", dir.path().display());
    let run = |limit: &str| {
        let uzram = env!("CARGO_BIN_EXE_uzram");
        finish(
            host.command(&[uzram, "run", "--limit", limit, "--spill", &spill, "--", python, script, "120"]),
        )
    };
    let lives = run("32M");
    assert!(lives.status.success(), "{:?}: {}", lives.status, lives.stderr);
    assert!(lives.stdout.contains("all as they should be"), "{}", lives.stdout);
    // With a limit that the host does not have the kernel kills it, as it would without one.
    let dies = run("1G");
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&dies.status),
        Some(libc::SIGKILL),
        "{}",
        dies.stderr
    );
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn programs_that_cannot_be_managed_run_as_they_are() {
    if !can_run() {
        return;
    }
    let program = Program::compiled("blocks", &["-static"]);
    let ended = program.limited(&["--limit", "24M"], &[]);
    assert_eq!(
        (ended.status.code(), ended.stdout.as_str()),
        (Some(0), "blocks are right\n"),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.contains("is linked statically: its memory is not managed"), "{}", ended.stderr);
    let refused = program.limited(&["--limit", "24M", "--hard"], &[]);
    assert!(refused.complaint(125).contains("is linked statically"), "{}", refused.stderr);
    assert_eq!(refused.stdout, "");
}

#[test]
fn a_program_that_never_needs_much_has_no_pager() {
    if !can_run() {
        return;
    }
    let ended = finish(bare_command(&["run", "--limit", "64M", "--", "/bin/echo", "hello"]));
    assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(0), "hello\n"));
    assert!(
        ended.stderr.contains("never used enough memory to compress any (limit 64 MiB)"),
        "{}",
        ended.stderr
    );
    // What it starts says nothing, but with --stats.
    let shell = ["--", "/bin/sh", "-c", "/bin/echo inner; exit 3"];
    let ended = finish(bare_command(&[&["run", "--limit", "64M"][..], &shell].concat()));
    assert_eq!((ended.status.code(), ended.stdout.as_str()), (Some(3), "inner\n"));
    assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    let ended = finish(bare_command(&[&["run", "--limit", "64M", "--stats"][..], &shell].concat()));
    assert!(ended.stderr.lines().count() > 2, "{}", ended.stderr);
}

#[test]
fn its_status_and_end_are_the_program_s() {
    if !can_run() {
        return;
    }
    let shell = |options: &[&str], script: &str| {
        finish(bare_command(&[&["run", "--limit", "64M"], options, &["--", "sh", "-c", script]].concat()))
    };
    // As those of this program's own failures.
    for status in [2, 3, 125, 126, 127] {
        assert_eq!(shell(&[], &format!("exit {status}")).status.code(), Some(status));
    }
    assert_eq!(shell(&[], "kill -KILL $$").status.signal(), Some(9));
    // As JSON, each process has a line of its own.
    for (options, lines) in [(&["--json"][..], 1..2), (&["--json", "--stats"], 2..9)] {
        let ended = shell(options, "/bin/true; exit 7");
        let figures: Vec<Value> =
            ended.stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(ended.status.code() == Some(7) && lines.contains(&figures.len()), "{}", ended.stderr);
        assert!(
            figures.iter().all(|one| one["pid"].is_u64() && one["limit_bytes"] == 64 << 20),
            "{}",
            ended.stderr
        );
    }
}

#[test]
fn nothing_stays_behind_of_a_killed_process() {
    if !can_run() {
        return;
    }
    let (program, dir) = (Program::new("ends"), tempfile::tempdir().unwrap());
    let spill = format!("{}:256M", dir.path().display());
    for nth in 0..5u64 {
        let mut command = bare_command(&["run", "--limit", "24M", "--spill", &spill, "--"]);
        // It never gets to its end: it writes as fast as it can.
        let mut child =
            command.arg(&program.path).arg("x").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let id = child.id();
        let opens = || fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().flatten();
        let spills = || opens().any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.starts_with(dir.path())));
        wait_until("it spills", spills);
        std::thread::sleep(Duration::from_millis(30 * nth));
        let _ = child.kill();
        wait(&mut child, PATIENCE);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_user_without_the_right_is_told_what_to_do() {
    if not_root() {
        return;
    }
    let sysctl = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    if !can_run() || sysctl.trim() == "1" {
        return println!("skipped: every user has the right here");
    }
    let mut command = bare_command(&["run", "--limit", "24M", "--", "/bin/true"]);
    command.uid(65534).gid(65534);
    let ended = finish(command);
    let complaint = ended.complaint(125);
    for wanted in ["CAP_SYS_PTRACE", "vm.unprivileged_userfaultfd=1", "docker run --device /dev/userfaultfd"]
    {
        assert!(complaint.contains(wanted), "{complaint}");
    }
}

#[test]
fn bad_command_lines_are_refused() {
    if !can_run() {
        return;
    }
    let run = |args: &[&str]| finish(bare_command(&[&["run"], args].concat()));
    for (args, wanted) in [
        (&["--", "/bin/true"][..], "--limit"),
        (&["--limit", "1M", "--", "/bin/true"], "the least is 4 MiB"),
        (&["--limit", "64M", "--algorithm", "none", "--", "/bin/true"], "--algorithm"),
        (&["--limit", "64M", "--pressure", "0", "--", "/bin/true"], "above 0"),
        (&["--limit", "64M", "--spill", "/var/tmp:x", "--", "/bin/true"], "--spill DIR:SIZE"),
    ] {
        let ended = run(args);
        assert!(ended.complaint(125).contains(wanted), "{args:?}: {}", ended.stderr);
    }
    assert!(run(&["--limit", "64M", "--", "no-such-program"]).complaint(127).contains("there is no program"));
    let spill = ["--limit", "64M", "--spill", "/no/such/folder", "--", "/bin/true"];
    assert!(run(&spill).complaint(125).contains("/no/such/folder"));
}

#[test]
fn a_program_is_not_given_a_spill_file_that_it_may_not_write() {
    if !can_run() {
        return;
    }
    let limited = |args: &[&str]| finish(with_file_size(bare_command(args), 32 << 20));
    let ended = limited(&["run", "--limit", "16M", "--", "cat", "/dev/null"]);
    let complaint = ended.complaint(125);
    assert!(complaint.contains("RLIMIT_FSIZE") && complaint.contains("--spill"), "{complaint}");
    for spill in [&["--spill", "/var/tmp:32M"][..], &["--no-spill"]] {
        let ended = limited(&[&["run", "--limit", "16M"], spill, &["--", "cat", "/dev/null"]].concat());
        assert!(ended.status.success(), "{}", ended.stderr);
    }
}
