//! `uzram corpus`: whose memory it takes, which, and the file that it makes.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::common::{Ended, PATIENCE, Place, bare_command, collect_within, finish, not_root, wait_until};
use rustix::process::{Pid, Signal, kill_process};

const PAGE_BYTES: usize = 4096;
const NOBODY: u32 = 65534;
/// A shell that holds 1 MB of digits and ends of lines, no two pages of which are equal, and has a child.
const HOLDER: &str = "x=$(seq 1000000 1125000); echo holds it; sleep 1000; echo $x";
/// Whole pages of it, at least.
const KNOWN_PAGES: usize = 1_000_000 / PAGE_BYTES - 1;

fn corpus(args: &[&str]) -> Ended {
    finish(bare_command(&[&["corpus"], args].concat()))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A program that is killed when it is dropped.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Running {
        Running(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// A process whose memory is known.
    fn holder() -> (Running, String) {
        use std::io::{BufRead, BufReader};
        let mut holder = Running::start(Command::new("sh").args(["-c", HOLDER]).process_group(0));
        let mut line = String::new();
        BufReader::new(holder.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "holds it\n");
        let pid = holder.0.id().to_string();
        (holder, pid)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // They fail only if it has ended.
        let _ = rustix::process::kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the pages of a file that only its user can read.
fn pages(path: &Path) -> Vec<Vec<u8>> {
    assert_eq!(fs::symlink_metadata(path).unwrap().mode() & 0o7777, 0o600);
    let bytes = fs::read(path).unwrap();
    assert_eq!(bytes.len() % PAGE_BYTES, 0);
    bytes.chunks(PAGE_BYTES).map(<[u8]>::to_vec).collect()
}

fn known(pages: &[Vec<u8>]) -> usize {
    let is_known = |byte: &u8| byte.is_ascii_digit() || *byte == b'\n';
    pages.iter().filter(|page| page.iter().all(is_known)).count()
}

#[test]
fn the_memory_of_a_process_is_written_to_a_file() {
    let place = Place::new();
    let (first, second) = (place.root().join("first"), place.root().join("second"));
    let (_holder, pid) = Running::holder();
    let said = corpus(&["-o", text(&first), &pid, &pid]).ok();
    let found = pages(&first);
    assert!(known(&found) >= KNOWN_PAGES, "{} of {}: {said}", known(&found), found.len());
    assert!(found.iter().all(|page| page.chunks(8).any(|word| word != &page[..8])), "none is same-filled");
    assert!(said.contains(" same-filled, 0 unreadable, 0 beyond --size\n"), "{said}");
    assert!(said.starts_with(&format!("pages     {} of ", found.len())), "{said}");

    let said = corpus(&["-o", text(&second), "--size", "128K", &pid]).ok();
    let some = pages(&second);
    assert!(some.len() == 32 && !said.contains(" 0 beyond"), "{said}");
    // From its beginning to its end.
    let first_place = found.iter().position(|page| page == &some[0]).unwrap();
    let last_place = found.iter().rposition(|page| page == &some[31]).unwrap();
    assert!(first_place < found.len() / 4 && last_place > found.len() / 2, "{first_place} to {last_place}");
}

#[test]
fn a_command_is_started_and_ended() {
    let place = Place::new();
    let path = place.root().join("pages");
    // What is known is in a process that the command starts.
    let script = format!("echo $$ >&2; sh -c \"{}\"; :", HOLDER.replace('$', "\\$"));
    let ended = corpus(&["-o", text(&path), "--after", "1.5", "--", "sh", "-c", &script]);
    let pid = ended.stderr.lines().next().unwrap().to_owned();
    assert!(ended.stderr.contains("holds it"), "{}", ended.stderr);
    assert!(!ended.ok().contains("holds it"));
    assert!(known(&pages(&path)) >= KNOWN_PAGES);
    assert!(!Path::new("/proc").join(pid).exists(), "it was ended");
}

#[test]
fn a_failure_is_one_line_and_leaves_no_file() {
    let place = Place::new();
    let path = place.root().join("pages");
    let out = text(&path);
    let zombie = Running::start(&mut Command::new("true"));
    let zombie_pid = zombie.0.id().to_string();
    let stat = format!("/proc/{zombie_pid}/stat");
    wait_until("it is a zombie", || fs::read_to_string(&stat).unwrap().contains(") Z"));
    for (args, status, mentions) in [
        (&["-o", out, "4194305"][..], 1, "there is no process 4194305"),
        (&["-o", out, &zombie_pid], 1, "has ended"),
        (&["-o", out, "0"], 2, "PID"),
        (&["-o", out, "1 2"], 2, "PID"),
        (&["-o", out], 2, "PID"),
        (&["-o", out, "1", "--", "sleep", "1000"], 2, "PID"),
        (&["1"], 2, "--output"),
        (&["-o", out, "--after", "1", "1"], 2, "COMMAND"),
        (&["-o", out, "--after=-1", "--", "true"], 2, "write seconds"),
        (&["-o", out, "--after", "soon", "--", "true"], 2, "write seconds, up to 86400"),
        (&["-o", out, "--size", "4095B", "1"], 2, "write 4K to 16G"),
        (&["-o", out, "--size", "17G", "1"], 2, "write 4K to 16G"),
        (&["-o", out, "--", "/nonexistent/program"], 1, "cannot start /nonexistent/program: No such file"),
        (&["-o", out, "--", "sh", "-c", "exit 3"], 1, "sh ended with status 3 after 0."),
        (&["-o", "/nonexistent/pages", "--", "sleep", "1000"], 1, "cannot write /nonexistent/pages: No such"),
        (&["-o", text(place.root()), "--", "sleep", "1000"], 1, "exists"),
    ] {
        let ended = corpus(args);
        let line = ended.complaint(status);
        assert!(line.contains(mentions), "{args:?}: {line}");
        assert!(!path.exists(), "{args:?}");
    }
}

#[test]
fn nothing_is_overwritten_and_no_link_followed() {
    let place = Place::new();
    let (file, link, dangling) =
        (place.root().join("file"), place.root().join("link"), place.root().join("dangling"));
    fs::write(&file, "precious").unwrap();
    symlink(&file, &link).unwrap();
    symlink(place.root().join("absent"), &dangling).unwrap();
    let pid = std::process::id().to_string();
    for path in [&file, &link] {
        let ended = corpus(&["-o", text(path), &pid]);
        assert!(ended.complaint(1).ends_with("exists: remove it or write another"), "{}", ended.stderr);
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }
    // In a directory that everybody may write to, not even a link to nothing.
    let open = place.root().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o1777)).unwrap();
    let (trap, into) = (open.join("trap"), open.join("into"));
    symlink(place.root().join("absent"), &trap).unwrap();
    symlink(place.root(), &into).unwrap();
    assert!(corpus(&["-o", text(&trap), &pid]).complaint(1).contains("exists: remove it"));
    let ended = corpus(&["-o", text(&into.join("absent")), &pid]);
    assert!(ended.complaint(1).contains("is a symbolic link that is not followed"), "{}", ended.stderr);
    assert!(!place.root().join("absent").exists());
}

#[test]
fn another_users_memory_is_refused() {
    if not_root() {
        return;
    }
    let place = Place::new();
    fs::set_permissions(place.root(), fs::Permissions::from_mode(0o777)).unwrap();
    // The build's directory may be for root alone.
    let program = place.root().join("uzram");
    let built = env!("CARGO_BIN_EXE_uzram");
    fs::hard_link(built, &program).or_else(|_| fs::copy(built, &program).map(drop)).unwrap();
    let path: PathBuf = place.root().join("pages");
    let as_nobody = |args: &[&str]| {
        let mut command = Command::new(&program);
        command.args(["corpus", "-o", text(&path)]).args(args).uid(NOBODY).gid(NOBODY);
        finish(command)
    };
    let (_holder, pid) = Running::holder();
    let ended = as_nobody(&[&pid]);
    assert!(
        ended
            .complaint(1)
            .contains(&format!("no permission to read the memory of process {pid}: root has it"))
    );
    assert!(!path.exists());
    // Its own programs it may read.
    as_nobody(&["--after", "0.3", "--", "sleep", "1000"]).ok();
    assert_eq!(fs::metadata(&path).unwrap().uid(), NOBODY);
    assert!(!pages(&path).is_empty());
}

#[test]
fn a_signal_ends_the_command_and_leaves_no_file() {
    let place = Place::new();
    let path = place.root().join("pages");
    let mut command = bare_command(&["corpus", "-o", text(&path), "--after", "1000", "--", "sleep", "1000"]);
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let child = crate::common::start(&mut command);
        let pid = child.id();
        let children = format!("/proc/{pid}/task/{pid}/children");
        let mut sleeper = String::new();
        wait_until("it has started its command", || {
            sleeper = fs::read_to_string(&children).unwrap_or_default().trim().to_owned();
            let comm = fs::read_to_string(format!("/proc/{sleeper}/comm")).unwrap_or_default();
            comm == "sleep\n"
        });
        assert!(path.exists());
        kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
        assert_eq!(collect_within(child, PATIENCE).complaint(1), "interrupted", "{signal:?}");
        assert!(!path.exists() && !Path::new("/proc").join(sleeper).exists());
    }
}

#[test]
fn a_full_disk_is_reported() {
    if not_root() {
        return;
    }
    let place = Place::new();
    let (_holder, pid) = Running::holder();
    let script = "mount -t tmpfs -o size=64k none \"$1\" && \"$0\" corpus -o \"$1/pages\" \"$2\"; \
                  status=$?; ls \"$1\"; exit $status";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_uzram"), text(place.root()), &pid]);
    let ended = finish(command);
    assert!(ended.complaint(1).contains("pages: No space left on device"), "{}", ended.stderr);
}
