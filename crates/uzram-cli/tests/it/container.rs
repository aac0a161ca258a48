//! Daemons where a container or a shell puts them: as PID 1, with the processes of another PID namespace in
//! `/proc`, and with limits on files and processes.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::common::{Ended, Place, finish, has_program, program_path, wait_until, with_file_size};
use rustix::process::{Signal, kill_process};

/// Waits until all orphans, who say who they are, are reaped.
const LEAVE_ORPHANS: &str = r#"
    for n in 1 2 3 4 5 6 7 8; do (sh -c 'echo $$ >> orphans' &); done
    tries=0
    until [ "$(wc -l < orphans)" = 8 ] && ! ls -d $(sed 's,^,/proc/,' orphans) 2> /dev/null; do
        tries=$((tries + 1)); [ $tries -lt 500 ] || exit 7
        sleep 0.02
    done"#;

/// Returns the command `uzram args` as PID 1; `None`, after it has said why, if there can be none.
fn as_pid_1(place: &Place, options: &[&str], args: &[&str]) -> Option<Command> {
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["-p", "-f", "--kill-child"]).args(options).env("PATH", program_path());
        command.env("UZRAM_RUNTIME_DIR", place.dir()).current_dir(place.root());
        command
    };
    let mut can = unshare();
    can.arg("true");
    if !rustix::process::geteuid().is_root() || !finish(can).status.success() {
        println!("skipped: no PID namespaces");
        return None;
    }
    let mut command = unshare();
    command.arg(env!("CARGO_BIN_EXE_uzram")).args(args);
    Some(command)
}

#[test]
fn as_pid_1_it_reaps_what_its_command_leaves() {
    for survives in [&[][..], &["--no-survive"]] {
        let place = Place::new();
        let args = [&["up", "--size", "4M", "--exec", LEAVE_ORPHANS], survives].concat();
        let Some(command) = as_pid_1(&place, &["--mount-proc"], &args) else { return };
        let ended = finish(command);
        assert!(ended.status.success(), "{survives:?}: {}: {}", ended.status, ended.stderr);
    }
}

/// `/proc` is that of the namespace outside: whatever has the number of the dead process there says nothing
/// of it.
#[test]
fn another_process_takes_over_where_proc_shows_other_processes() {
    let place = Place::new();
    let uzram = env!("CARGO_BIN_EXE_uzram");
    let script = format!(
        r#"number() {{ '{uzram}' status --json | tr -d ' ,"' | sed -n "s/^$1://p"; }}
        until [ "$(number standby_ready)" = true ]; do sleep 0.02; done
        kill -9 "$(number worker_pid)"
        until [ "$(number take_overs)" = 1 ]; do sleep 0.02; done"#
    );
    let args = ["up", "--size", "4M", "--exec", &script];
    let Some(command) = as_pid_1(&place, &[], &args) else { return };
    let ended = finish(command);
    assert!(ended.status.success(), "{}: {}", ended.status, ended.stderr);
}

#[test]
fn a_limit_on_the_length_of_files_is_named_and_kills_nobody() {
    let place = Place::new();
    let refused = |ended: Ended| {
        let complaint = ended.complaint(1).to_owned();
        assert!(complaint.contains("RLIMIT_FSIZE") && complaint.contains("ulimit -f"), "{complaint}");
    };
    let limited = |args: &[&str], bytes| finish(with_file_size(place.command(args), bytes));
    for bytes in [0, 1, 4096, 100 << 10] {
        for survives in [&[][..], &["--no-survive"]] {
            refused(limited(&[&["up", "--size", "1M", "--exec", "true"], survives].concat(), bytes));
        }
    }
    let cold = format!("{}:64M", place.root().join("cold").display());
    let args = ["up", "--size", "1M", "--no-survive", "--exec", "true", "--backing", &cold];
    refused(limited(&args, 8 << 20));
    refused(limited(&["up", "--size", "4G", "--exec", "true"], 8 << 20));

    // What the command does with its own limit is its own affair.
    let own = ["up", "--size", "1M", "--exec", "ulimit -f 0; echo > file; exit 3"];
    let mut command = place.command(&own);
    assert_eq!(
        finish({
            command.current_dir(place.root());
            command
        })
        .status
        .code(),
        Some(128 + libc::SIGXFSZ)
    );

    // Output that goes to a file.
    let mut command = with_file_size(place.command(&["check"]), 0);
    let output = File::create(place.root().join("output")).unwrap();
    let child = command.stdout(output).stderr(std::process::Stdio::piped()).spawn().unwrap();
    refused(crate::common::collect(child));
}

/// Returns how many threads a user has.
fn threads_of(user: u32) -> u64 {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let threads = processes.filter_map(|process| {
        let status = fs::read_to_string(process.path().join("status")).ok()?;
        let of = crate::common::status_field_if_any(&status, "Uid")?;
        let is_ours = of.split_whitespace().next() == Some(&*user.to_string());
        is_ours.then(|| crate::common::status_field(&status, "Threads").parse::<u64>().unwrap())
    });
    threads.sum()
}

/// It may start a process, and that one no thread.
#[test]
fn a_daemon_goes_on_when_no_stand_by_can_be_started() {
    if !rustix::process::geteuid().is_root() || !has_program("prlimit") {
        println!("skipped: not root, or no prlimit");
        return;
    }
    // Nobody else's.
    let user = 2_000_000_000 + std::process::id();
    let place = Place::of_user(user);
    let daemon = place.start(&["up", "--size", "4M"]);
    let status = |field: &str| {
        let ended = place.run(&["status", "--json"]);
        let status: Option<serde_json::Value> = serde_json::from_str(&ended.stdout).ok();
        status.map_or(serde_json::Value::Null, |status| status[field].clone())
    };
    let wait_for_standby = || wait_until("a stand-by is ready", || status("standby_ready") == true);
    wait_for_standby();
    // The soft limit, as that user: it needs no privilege.
    let limit = |most: &str| {
        let mut command = Command::new("prlimit");
        command.arg(format!("--pid={}", daemon.id())).arg(format!("--nproc={most}:"));
        command.uid(user).gid(user);
        finish(command).ok();
    };
    let standby = place.process("standby_pid").unwrap();
    limit("0");
    kill_process(standby, Signal::KILL).unwrap();
    let its_files = format!("/proc/{}", standby.as_raw_nonzero());
    wait_until("it is gone", || !Path::new(&its_files).exists());
    limit(&(threads_of(user) + 1).to_string());
    wait_until("the next one has failed", || daemon.said().contains("no stand-by: cannot start a thread"));
    limit("1000");
    wait_for_standby();
    assert_eq!(status("take_overs"), 0);
    place.down();
    let (status, said) = daemon.ended();
    assert!(status.success(), "{said}");
}
