//! `uzram corpus`: whose memory it takes, which, and the file that it makes.

use crate::common::*;

const PAGE_BYTES: usize = 4096;
/// A shell that holds 1 MB of digits and ends of lines, no two pages of which are equal, and has a child.
const HOLDER: &str = "x=$(seq 1000000 1125000); echo holds it; sleep 1000; echo $x";
/// Whole pages of it, at least.
const KNOWN_PAGES: usize = 1_000_000 / PAGE_BYTES - 1;

fn corpus(args: &str) -> Ended {
    finish(bare_command(&format!("corpus {args}")))
}

/// A program that is killed, with those that it started, when it is dropped.
struct Running(Killed);

impl Running {
    fn holder() -> (Running, String) {
        let holder = start(Command::new("sh").args(["-c", HOLDER]).process_group(0));
        let mut holder = Running(Killed(holder));
        let mut line = String::new();
        BufReader::new(holder.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "holds it\n");
        let pid = holder.0.id().to_string();
        (holder, pid)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It fails only if they have ended.
        let _ = rustix::process::kill_process_group(Pid::from_child(&self.0), Signal::KILL);
    }
}

/// Returns the pages of a file that only its user can read.
fn pages(path: &str) -> Vec<Vec<u8>> {
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
    let (first, second) = (place.path("first"), place.path("second"));
    let (_holder, pid) = Running::holder();
    let said = corpus(&format!("-o {first} {pid} {pid}")).ok();
    let found = pages(&first);
    assert!(known(&found) >= KNOWN_PAGES, "{} of {}: {said}", known(&found), found.len());
    assert!(found.iter().all(|page| page.chunks(8).any(|word| word != &page[..8])), "none is same-filled");
    assert!(said.contains(" same-filled, 0 unreadable, 0 beyond --size\n"), "{said}");
    assert!(said.starts_with(&format!("pages     {} of ", found.len())), "{said}");

    let said = corpus(&format!("-o {second} --size 128K {pid}")).ok();
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
    let path = place.path("pages");
    // What is known is in a process that the command starts.
    let script = format!("echo $$ >&2; sh -c \"{}\"; :", HOLDER.replace('$', "\\$"));
    let ended = finish(bare_command(&["corpus", "-o", &path, "--after", "1.5", "--", "sh", "-c", &script]));
    let pid = ended.stderr.lines().next().unwrap().to_owned();
    assert!(ended.stderr.contains("holds it"), "{ended}");
    assert!(!ended.ok().contains("holds it"));
    assert!(known(&pages(&path)) >= KNOWN_PAGES);
    assert!(!Path::new("/proc").join(pid).exists(), "it was ended");
}

#[test]
fn a_failure_is_one_line_and_leaves_no_file() {
    let place = Place::new();
    let out = place.path("p");
    let zombie = Killed(start(&mut Command::new("true")));
    let its_id = zombie.id();
    let stat = format!("/proc/{its_id}/stat");
    wait_until("it is a zombie", || fs::read_to_string(&stat).unwrap().contains(") Z"));
    place.refuses(&[
        ("corpus -o DIR/p 4194305", 1, &["there is no process 4194305"]),
        (&format!("corpus -o DIR/p {its_id}"), 1, &["has ended"]),
        ("corpus -o DIR/p 0", 2, &["PID"]),
        ("corpus -o DIR/p", 2, &["PID"]),
        ("corpus -o DIR/p 1 -- sleep 1000", 2, &["PID"]),
        ("corpus 1", 2, &["--output"]),
        ("corpus -o DIR/p --after 1 1", 2, &["COMMAND"]),
        ("corpus -o DIR/p --after=-1 -- true", 2, &["write seconds"]),
        ("corpus -o DIR/p --after soon -- true", 2, &["write seconds, up to 86400"]),
        ("corpus -o DIR/p --size 4095B 1", 2, &["write 4K to 16G"]),
        ("corpus -o DIR/p --size 17G 1", 2, &["write 4K to 16G"]),
        ("corpus -o DIR/p -- /nonexistent/program", 1, &["cannot start /nonexistent/program: No such file"]),
        ("corpus -o DIR/p -- cmp -s /dev/null /nonexistent/file", 1, &["cmp ended with status 2 after 0."]),
        ("corpus -o /nonexistent/pages -- sleep 1000", 1, &["cannot write /nonexistent/pages: No such"]),
        ("corpus -o DIR -- sleep 1000", 1, &["exists"]),
    ]);
    assert!(!Path::new(&out).exists());
    finish(bare_command(&["corpus", "-o", &out, "1 2"])).says(2, "PID");
}

#[test]
fn nothing_is_overwritten_and_no_link_followed() {
    let place = Place::new();
    let (link, absent) = (place.path("link"), place.path("absent"));
    let file = place.write("file", "precious");
    symlink(&file, &link).unwrap();
    let to = |path: &str| corpus(&format!("-o {path} {}", std::process::id()));
    for path in [&file, &link] {
        assert!(to(path).complaint(1).ends_with("exists: remove it or write another"));
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }
    // In a directory that everybody may write to, not even a link to nothing.
    let open = place.path("open");
    fs::create_dir(&open).unwrap();
    set_mode(&open, 0o1777);
    symlink(&absent, format!("{open}/trap")).unwrap();
    symlink(place.root(), format!("{open}/into")).unwrap();
    to(&format!("{open}/trap")).says(1, "exists: remove it");
    to(&format!("{open}/into/absent")).says(1, "is a symbolic link that is not followed");
    assert!(!Path::new(&absent).exists());
}

#[test]
fn another_users_memory_is_refused() {
    let Some(place) = Place::if_root() else { return };
    set_mode(place.root(), 0o777);
    // The build's directory may be for root alone.
    let (program, path) = (place.copy_of_program(), place.path("pages"));
    let as_nobody = |args: &str| {
        let mut command = Command::new(&program);
        finish(command.args(["corpus", "-o", &path]).args(args.words()).uid(NOBODY).gid(NOBODY))
    };
    let (_holder, pid) = Running::holder();
    let why = format!("no permission to read the memory of process {pid}: root has it");
    as_nobody(&pid).says(1, &why);
    assert!(!Path::new(&path).exists());
    // Its own programs it may read.
    as_nobody("--after 0.3 -- sleep 1000").ok();
    assert_eq!(fs::metadata(&path).unwrap().uid(), NOBODY);
    assert!(!pages(&path).is_empty());
}

#[test]
fn a_signal_ends_the_command_and_leaves_no_file() {
    let place = Place::new();
    let path = place.path("pages");
    let mut command = bare_command(&format!("corpus -o {path} --after 1000 -- sleep 1000"));
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let child = start(&mut command);
        let pid = Pid::from_child(&child);
        let mut sleeper = String::new();
        wait_until("it has started its command", || {
            sleeper = of_process(pid, &format!("task/{}/children", child.id())).trim().to_owned();
            fs::read_to_string(format!("/proc/{sleeper}/comm")).unwrap_or_default() == "sleep\n"
        });
        assert!(Path::new(&path).exists());
        kill_process(pid, signal).unwrap();
        assert_eq!(collect(child).complaint(1), "interrupted", "{signal:?}");
        assert!(!Path::new(&path).exists() && !Path::new("/proc").join(sleeper).exists());
    }
}

#[test]
fn a_full_disk_is_reported() {
    let Some(place) = Place::if_root() else { return };
    let (_holder, pid) = Running::holder();
    let script =
        "mount -t tmpfs -o size=64k none $1 && $0 corpus -o $1/pages $2; status=$?; ls $1; exit $status";
    let mut command = isolated(script);
    finish(command.arg(UZRAM).arg(place.root()).arg(pid)).says(1, "pages: No space left on device");
}
