//! `uzram list` and `uzram stat`: programs that run under `uzram run`.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::common::run::{Program, can_run};
use crate::common::{Ended, PATIENCE, Place, bare_command, finish, not_root, status_field, wait, wait_until};
use rustix::fs::MemfdFlags;
use serde_json::Value;
use uzram_pager::Figures;

/// A program that has memory, and a child, until this is dropped.
struct Holder {
    child: Child,
    _program: Program,
}

impl Holder {
    /// Starts it, and waits until `ready` processes are.
    fn start(args: &[&str], ready: usize) -> Holder {
        let program = Program::new("holds");
        let mut command = bare_command(&["run", "--limit", "24M", "--", program.path.to_str().unwrap()]);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        assert_eq!(lines.take(ready).map(Result::unwrap).collect::<Vec<_>>(), vec!["ready"; ready]);
        Holder { child, _program: program }
    }

    fn id(&self) -> u64 {
        self.child.id().into()
    }

    /// Returns the child that it has started.
    fn child_id(&self) -> u64 {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.id())).unwrap();
        children.trim().parse().unwrap()
    }

    fn end(&mut self) {
        drop(self.child.stdin.take());
        assert!(wait(&mut self.child, PATIENCE).success());
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // It ends with its child when its input does.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Returns the programs that are listed, with or without a daemon.
fn listed(place: &Place) -> Vec<Value> {
    let ended = place.run(&["list", "--json"]);
    if !ended.status.success() {
        assert!(
            ended.status.code() == Some(3) && ended.stderr.contains("no daemon is running"),
            "{}",
            ended.stderr
        );
        return Vec::new();
    }
    let json: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert!(json["devices"].is_array(), "{json}");
    json["programs"].as_array().unwrap().clone()
}

/// Returns a program, if it is listed.
fn find(place: &Place, id: u64) -> Option<Value> {
    listed(place).into_iter().find(|program| program["pid"] == id)
}

/// Returns how often the thread that publishes figures has waited.
fn waits_of_evictor(id: u64) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{id}/task")).unwrap();
    let statuses = tasks.map(|task| fs::read_to_string(task.unwrap().path().join("status")).unwrap());
    let status = statuses.into_iter().find(|status| status.starts_with("Name:\tuzram-pager-evi")).unwrap();
    status_field(&status, "voluntary_ctxt_switches").parse().unwrap()
}

#[test]
fn running_programs_are_listed() {
    if !can_run() {
        return;
    }
    let (place, mut holder) = (Place::new(), Holder::start(&[], 2));
    let (id, child_id) = (holder.id(), holder.child_id());
    for id in [id, child_id] {
        let compresses = || find(&place, id).is_some_and(|program| program["compressed_bytes"] != 0);
        wait_until("it is listed, and compresses", compresses);
        let program = find(&place, id).unwrap();
        let figure = |name: &str| program[name].as_u64().unwrap();
        assert_eq!((&program["command"], &program["runs"]), (&"holds".into(), &true.into()));
        assert_eq!((figure("limit_bytes"), figure("limit_now_bytes")), (24 << 20, 24 << 20));
        assert!((8 << 20..26 << 20).contains(&figure("used_bytes")), "{program}");
        assert!(figure("used_max_bytes") >= figure("used_bytes"), "{program}");
        assert!(figure("compressed_bytes") < figure("stored_bytes"), "{program}");
        // Together they are what it has.
        let all = ["resident_bytes", "stored_bytes", "spilled_bytes"].map(figure).iter().sum::<u64>();
        assert!(all <= 72 << 20, "{program}");
        assert!(figure("faults") > 100 && figure("fault_us") > 0, "{program}");
        let json = place.json(&["stat", &id.to_string()]);
        assert_eq!((&json["pid"], &json["limit_bytes"]), (&id.into(), &program["limit_bytes"]));
        let text = place.run(&["stat", &id.to_string()]).ok();
        assert!(text.starts_with(&format!("process {id} (holds)\n")), "{text}");
        for row in ["limit                24 MiB", "in memory ", "compressed ", "spilled ", "faults "] {
            assert!(text.contains(&format!("\n  {row}")), "{text}");
        }
    }
    let list = place.run(&["list"]).ok();
    let line = |id: u64| list.lines().find(|line| line.trim_start().starts_with(&format!("{id} holds ")));
    assert!(
        list.trim_start().starts_with("PROCESS ") && line(id).is_some() && line(child_id).is_some(),
        "{list}"
    );
    // Beside devices.
    let daemon = place.up(&[]);
    let list = place.run(&["list"]).ok();
    assert!(
        list.starts_with("NAME ") && list.contains("\nzram0 ") && list.contains("\n\n   PROCESS "),
        "{list}"
    );
    assert!(find(&place, child_id).is_some());
    assert!(place.run(&["stat", "zram0"]).ok().starts_with("zram0\n"));
    assert!(place.run(&["stat", &id.to_string()]).ok().starts_with("process "));
    drop(daemon);
    holder.end();
    assert!(find(&place, id).is_none() && find(&place, child_id).is_none());
    let gone = place.run(&["stat", &id.to_string()]);
    assert!(gone.complaint(3).contains("does not run under `uzram run`"), "{}", gone.stderr);
}

#[test]
fn a_program_that_does_nothing_is_not_woken_for_its_figures() {
    if !can_run() {
        return;
    }
    let holder = Holder::start(&[], 2);
    let mut waits = waits_of_evictor(holder.id());
    wait_until("it has settled", || {
        std::thread::sleep(Duration::from_millis(2500));
        let before = std::mem::replace(&mut waits, waits_of_evictor(holder.id()));
        before == waits
    });
}

#[test]
fn a_small_program_is_listed_with_its_limit() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let shell = "/bin/sleep 60 & echo $!; read line; kill $!";
    let mut command = bare_command(&["run", "--limit", "32M", "--", "/bin/sh", "-c", shell]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let sleeper: u64 = line.trim().parse().unwrap();
    for (id, name) in [(u64::from(child.id()), "sh"), (sleeper, "sleep")] {
        wait_until("it is listed", || find(&place, id).is_some_and(|program| program["command"] == name));
        let program = find(&place, id).unwrap();
        assert_eq!((&program["limit_bytes"], &program["runs"]), (&(32u64 << 20).into(), &false.into()));
        assert!(place.run(&["stat", &id.to_string()]).ok().contains("nothing is compressed"));
    }
    drop(child.stdin.take());
    wait(&mut child, PATIENCE);
}

#[test]
fn a_child_that_shares_the_memory_is_not_listed() {
    if !can_run() {
        return;
    }
    let (place, holder) = (Place::new(), Holder::start(&["vfork"], 1));
    wait_until("the parent is listed", || find(&place, holder.id()).is_some());
    let has_descriptor = |id: u64| {
        let opens = fs::read_dir(format!("/proc/{id}/fd")).unwrap();
        opens
            .flatten()
            .any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.starts_with("/memfd:uzram-run (deleted)")))
    };
    assert!(has_descriptor(holder.child_id()));
    assert!(find(&place, holder.child_id()).is_none());
}

/// Makes a file that looks like a process's figures.
fn fake(name: &str, contents: &[u8], bytes: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create(name, flags).unwrap();
    let mut file = File::from(fd);
    file.write_all(contents).unwrap();
    file.set_len(bytes).unwrap();
    file.into()
}

#[test]
fn what_only_looks_like_figures_is_left_out() {
    let (place, own) = (Place::new(), std::process::id());
    let (len, name) = (Figures::TEXT_BYTES as u64, Figures::FILE_NAME);
    let of = |process: u64| Figures { process, limit_bytes: 77 << 20, ..Figures::default() }.to_text();
    let mut fakes = vec![
        fake(name, b"", 0),
        fake(name, b"", len),
        fake(name, &[0xff; Figures::TEXT_BYTES], len),
        fake(name, &of(own.into()), len + 1),
        fake(name, &of(own.into()), 1 << 40),
        // Another process's, and another name.
        fake(name, &of(1), len),
        fake("uzram-runs", &of(own.into()), len),
    ];
    rustix::fs::fcntl_add_seals(&fakes[2], rustix::fs::SealFlags::all()).unwrap_or_default();
    assert!(find(&place, own.into()).is_none());
    let stat = place.run(&["stat", &own.to_string()]);
    assert!(stat.complaint(3).contains("does not run under `uzram run`"), "{}", stat.stderr);
    // What is right is found among them.
    fakes.push(fake(name, &of(own.into()), len));
    assert_eq!(find(&place, own.into()).unwrap()["limit_bytes"], 77 << 20);
}

#[test]
fn programs_of_other_users_are_not_shown() {
    if not_root() {
        return;
    }
    if !can_run() {
        return;
    }
    let (place, holder) = (Place::new(), Holder::start(&[], 2));
    wait_until("root sees it", || find(&place, holder.id()).is_some());
    let as_other = |args: &[&str]| -> Ended {
        let mut command = bare_command(args);
        command.uid(65534).gid(65534).env("UZRAM_RUNTIME_DIR", "/nonexistent");
        finish(command)
    };
    let list = as_other(&["list"]);
    assert!(list.complaint(3).contains("no daemon is running"), "{}", list.stderr);
    let stat = as_other(&["stat", &holder.id().to_string()]);
    assert!(stat.complaint(3).contains("or is another user's"), "{}", stat.stderr);
}
