//! `uzram list` and `uzram stat`: programs that run under `uzram run`.

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;
use uzram_pager::Figures;

use crate::common::*;

/// A program that has memory, and a child, which ends with its input when this is dropped.
struct Holder {
    child: Killed,
    _program: Program,
}

impl Holder {
    /// Starts it where it can be, and waits until `ready` processes are.
    fn if_able(args: &[&str], ready: usize) -> Option<Holder> {
        let program = Program::if_able("holds")?;
        let mut command = bare_command(&["run", "--limit", "24M", "--", arg(&program.path)]);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = Killed(command.spawn().unwrap());
        let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        assert_eq!(lines.take(ready).map(Result::unwrap).collect::<Vec<_>>(), vec!["ready"; ready]);
        Some(Holder { child, _program: program })
    }

    fn id(&self) -> u64 {
        self.child.id().into()
    }

    fn child_id(&self) -> u64 {
        children(self.child.id(), "holds")[..].try_into().map(|[id]: [u32; 1]| id.into()).unwrap()
    }

    fn end(&mut self) {
        drop(self.child.stdin.take());
        assert!(wait(&mut self.child, PATIENCE).success());
    }
}

/// Returns the programs that are listed, with or without a daemon.
fn listed(place: &Place) -> Vec<Value> {
    let ended = place.run("list --json");
    if !ended.status.success() {
        assert!(ended.status.code() == Some(3) && ended.stderr.contains("no daemon is running"), "{ended}");
        return Vec::new();
    }
    let json: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert!(json["devices"].is_array(), "{json}");
    json["programs"].as_array().unwrap().clone()
}

fn find(place: &Place, id: u64) -> Option<Value> {
    listed(place).into_iter().find(|program| program["pid"] == id)
}

#[test]
fn running_programs_are_listed() {
    let Some(mut holder) = Holder::if_able(&["looks"], 2) else { return };
    let place = Place::new();
    let (id, child_id) = (holder.id(), holder.child_id());
    for id in [id, child_id] {
        let most = 26 << 20;
        let is_within = |program: Value| program["used_bytes"].as_u64().is_some_and(|bytes| bytes < most);
        let compresses = |program: &Value| program["compressed_bytes"] != 0 && program["faults"] != 0;
        let is_kept = || find(&place, id).filter(compresses).is_some_and(is_within);
        wait_until("it is listed, compresses, and keeps its limit", is_kept);
        let program = find(&place, id).unwrap();
        let figure = |name: &str| program[name].as_u64().unwrap();
        assert_eq!((&program["command"], &program["runs"]), (&"holds".into(), &true.into()));
        assert_eq!((figure("limit_bytes"), figure("limit_now_bytes")), (24 << 20, 24 << 20));
        assert!((8 << 20..most).contains(&figure("used_bytes")), "{program}");
        assert!(figure("used_max_bytes") >= figure("used_bytes"), "{program}");
        assert!(figure("compressed_bytes") < figure("stored_bytes"), "{program}");
        // Together they are what it has.
        let all = ["resident_bytes", "stored_bytes", "spilled_bytes"].map(figure).iter().sum::<u64>();
        assert!(all <= 72 << 20, "{program}");
        assert!(figure("faults") > 100 && figure("fault_us") > 0, "{program}");
        let json = place.json(&format!("stat {id}"));
        assert_eq!((&json["pid"], &json["limit_bytes"]), (&id.into(), &program["limit_bytes"]));
        let rows = ["limit                24 MiB", "in memory ", "compressed ", "spilled ", "faults "];
        let text = place.run(&format!("stat {id}")).shows(&rows.map(|row| format!("\n  {row}")));
        assert!(text.starts_with(&format!("process {id} (holds)\n")), "{text}");
    }
    let list = place.run("list").ok();
    let is_there = |id: u64| list.lines().any(|line| line.trim_start().starts_with(&format!("{id} holds ")));
    assert!(list.trim_start().starts_with("PROCESS ") && is_there(id) && is_there(child_id), "{list}");
    // Beside devices.
    let daemon = place.up("");
    let list = place.run("list").shows(&["\nzram0 ", "\n\n   PROCESS "]);
    assert!(list.starts_with("NAME "), "{list}");
    assert!(find(&place, child_id).is_some());
    assert!(place.run("stat zram0").ok().starts_with("zram0\n"));
    assert!(place.run(&format!("stat {id}")).ok().starts_with("process "));
    drop(daemon);
    holder.end();
    assert!(find(&place, id).is_none() && find(&place, child_id).is_none());
    place.run(&format!("stat {id}")).says(3, "does not run under `uzram run`");
}

/// Its size is looked at every 8 ms, as it is near its limit, and nothing else wakes a thread.
#[test]
fn of_a_program_that_does_nothing_the_size_is_looked_at_now_and_then() {
    const SECONDS: u64 = 2;
    let Some(holder) = Holder::if_able(&[], 2) else { return };
    let [pager] = children(holder.child.id(), "uzram-pager")[..] else { panic!("there is one pager") };
    let waits_of = |task: fs::DirEntry| -> u64 {
        let status = fs::read_to_string(task.path().join("status")).unwrap();
        status_field(&status, "voluntary_ctxt_switches").parse().unwrap()
    };
    let waits = || fs::read_dir(format!("/proc/{pager}/task")).unwrap().flatten().map(waits_of).sum::<u64>();
    wait_until("it has settled", || {
        let before = waits();
        thread::sleep(Duration::from_secs(SECONDS));
        waits() - before <= SECONDS * 1000 / 8 * 11 / 10
    });
}

#[test]
fn a_small_program_is_listed_with_its_limit() {
    let Some(_run) = Run::if_able() else { return };
    let place = Place::new();
    let shell = "/bin/sleep 60 & echo $!; read line; kill $!";
    let mut command = bare_command(&["run", "--limit", "32M", "--", "/bin/sh", "-c", shell]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let sleeper: u64 = line.trim().parse().unwrap();
    for (id, name) in [(u64::from(child.id()), "sh"), (sleeper, "sleep")] {
        wait_until("it is listed", || find(&place, id).is_some_and(|program| program["command"] == name));
        let program = find(&place, id).unwrap();
        assert_eq!((&program["limit_bytes"], &program["runs"]), (&(32u64 << 20).into(), &false.into()));
        place.run(&format!("stat {id}")).shows(&["nothing is compressed"]);
    }
    drop(child.stdin.take());
    wait(&mut child, PATIENCE);
}

#[test]
fn a_child_that_shares_the_memory_is_not_listed() {
    let Some(holder) = Holder::if_able(&["vfork"], 1) else { return };
    let place = Place::new();
    wait_until("the parent is listed", || find(&place, holder.id()).is_some());
    assert!(find(&place, holder.child_id()).is_none());
}

/// Makes a file that looks like a process's figures. Programs inherit it.
fn fake(name: &str, contents: &[u8], bytes: u64) -> OwnedFd {
    let mut file = File::from(rustix::fs::memfd_create(name, MemfdFlags::ALLOW_SEALING).unwrap());
    file.write_all(contents).unwrap();
    file.set_len(bytes).unwrap();
    file.into()
}

/// A child of this process with the name of a pager.
struct Fake {
    process: Pid,
    _stack: Vec<u8>,
}

impl Fake {
    /// Starts one that has the memory of this process, as a pager has that of its program; or a copy.
    fn start(flags: i32, name: &'static CStr) -> Fake {
        extern "C" fn wait_for_end(name: *mut libc::c_void) -> i32 {
            // SAFETY: system calls alone, on a stack of its own. None fails, so that `errno` stays the
            // parent's.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::prctl(libc::PR_SET_NAME, name);
                loop {
                    libc::pause();
                }
            }
        }
        let mut stack = vec![0u8; 64 << 10];
        let top = stack.as_mut_ptr_range().end.map_addr(|address| address & !15);
        let argument = name.as_ptr().cast_mut().cast();
        // SAFETY: the stack is there until the child has ended.
        let id = unsafe { libc::clone(wait_for_end, top.cast(), flags | libc::SIGCHLD, argument) };
        let process = Pid::from_raw(id).unwrap();
        wait_until("it has its name", || of_process(process, "comm").trim_end() == name.to_str().unwrap());
        Fake { process, _stack: stack }
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        kill(self.process);
        rustix::process::waitpid(Some(self.process), rustix::process::WaitOptions::empty()).unwrap();
    }
}

#[test]
fn what_only_looks_like_figures_is_left_out() {
    const PAGER: &CStr = c"uzram-pager";
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
    let pager = Fake::start(libc::CLONE_VM, PAGER);
    assert!(find(&place, own.into()).is_none());
    place.run(&format!("stat {own}")).says(3, "does not run under `uzram run`");
    drop(pager);
    // What is right is found among them: if a process has it that has this memory, and a pager's name. One
    // that has that name alone may be a child of another user's.
    fakes.push(fake(name, &of(own.into()), len));
    for (flags, name, is_found) in
        [(libc::CLONE_VM, c"uzram-pagers", false), (0, PAGER, false), (libc::CLONE_VM, PAGER, true)]
    {
        let pager = Fake::start(flags, name);
        let found = find(&place, own.into());
        assert_eq!(found.as_ref().map(|found| found["limit_bytes"] == 77 << 20), is_found.then_some(true));
        assert_eq!(find(&place, pager.process.as_raw_pid() as u64), None);
    }
}

#[test]
fn programs_of_other_users_are_not_shown() {
    let Some(place) = Place::if_root() else { return };
    let Some(holder) = Holder::if_able(&[], 2) else { return };
    wait_until("root sees it", || find(&place, holder.id()).is_some());
    let as_other = |args: &str| {
        finish(bare_command(args).uid(NOBODY).gid(NOBODY).env("UZRAM_RUNTIME_DIR", "/nonexistent"))
    };
    as_other("list").says(3, "no daemon is running");
    as_other(&format!("stat {}", holder.id())).says(3, "or is another user's");
}
