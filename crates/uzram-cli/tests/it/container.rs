//! Daemons where a container or a shell puts them: as PID 1, with the processes of another PID namespace in
//! `/proc`, and with limits on files and processes.

use crate::common::*;

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
    if !is_root() || !finish(unshare().arg("true")).status.success() {
        println!("skipped: no PID namespaces");
        return None;
    }
    let mut command = unshare();
    command.arg(UZRAM).args(args);
    Some(command)
}

#[test]
fn as_pid_1_it_reaps_what_its_command_leaves() {
    for survives in [&[][..], &["--no-survive"]] {
        let place = Place::new();
        let args = [&["up", "--size", "4M", "--exec", LEAVE_ORPHANS], survives].concat();
        let Some(command) = as_pid_1(&place, &["--mount-proc"], &args) else { return };
        finish(command).ok();
    }
}

/// `/proc` is that of the namespace outside, where another process may have the number of the dead one.
#[test]
fn another_process_takes_over_where_proc_shows_other_processes() {
    let place = Place::new();
    let script = format!(
        r#"number() {{ '{UZRAM}' status --json | tr -d ' ,"' | sed -n "s/^$1://p"; }}
        until [ "$(number standby_ready)" = true ]; do sleep 0.02; done
        kill -9 "$(number worker_pid)"
        until [ "$(number take_overs)" = 1 ]; do sleep 0.02; done"#
    );
    let args = ["up", "--size", "4M", "--exec", &script];
    let Some(command) = as_pid_1(&place, &[], &args) else { return };
    finish(command).ok();
}

#[test]
fn a_limit_on_the_length_of_files_is_named_and_kills_nobody() {
    let place = Place::new();
    let refused = |ended: Ended| _ = ended.says(1, "RLIMIT_FSIZE").says(1, "ulimit -f");
    let limited = |args: &str, bytes| refused(finish(with_file_size(place.command(args), bytes)));
    for bytes in [0, 1, 4096, 100 << 10] {
        limited("up --size 1M --exec true", bytes);
        limited("up --size 1M --exec true --no-survive", bytes);
    }
    let cold = place.path("cold:64M");
    limited(&format!("up --size 1M --no-survive --exec true --backing {cold}"), 8 << 20);
    limited("up --size 4G --exec true", 8 << 20);

    // What the command does with its own limit is its own affair.
    let mut command = place.command(&["up", "--size", "1M", "--exec", "ulimit -f 0; echo > file; exit 3"]);
    assert_eq!(finish(command.current_dir(place.root())).status.code(), Some(128 + libc::SIGXFSZ));

    // Output that goes to a file.
    let mut command = with_file_size(place.command("check"), 0);
    command.stdout(File::create(place.root().join("output")).unwrap()).stderr(Stdio::piped());
    refused(collect(command.spawn().unwrap()));
}

fn threads_of(user: u32) -> u64 {
    let threads = fs::read_dir("/proc").unwrap().flatten().filter_map(|process| {
        let status = fs::read_to_string(process.path().join("status")).ok()?;
        let is_ours = status_field_if_any(&status, "Uid")?.words()[0] == user.to_string();
        is_ours.then(|| status_field(&status, "Threads").parse::<u64>().unwrap())
    });
    threads.sum()
}

/// It may start a process, and that one no thread.
#[test]
fn a_daemon_goes_on_when_no_stand_by_can_be_started() {
    if not_root() || missing("prlimit") {
        return;
    }
    // Nobody else's.
    let user = 2_000_000_000 + std::process::id();
    let place = Place::of_user(user);
    let daemon = place.start("up --size 4M");
    place.wait_for_standby();
    // The soft limit, as that user: it needs no privilege.
    let limit = |most: u64| {
        let mut command = Command::new("prlimit");
        command.arg(format!("--pid={}", daemon.id())).arg(format!("--nproc={most}:"));
        finish(command.uid(user).gid(user)).ok();
    };
    let standby = place.process("standby_pid").unwrap();
    limit(0);
    kill(standby);
    wait_until("it is gone", || of_process(standby, "stat").is_empty());
    limit(threads_of(user) + 1);
    wait_until("the next one has failed", || daemon.said().contains("no stand-by: cannot start a thread"));
    limit(1000);
    place.wait_for_standby();
    assert_eq!(place.take_overs(), 0);
    place.end(daemon);
}
