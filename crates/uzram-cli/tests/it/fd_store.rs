//! A service manager that keeps a daemon's descriptors, as systemd does (`FileDescriptorStoreMax=`): a
//! stand-in that speaks its protocol. For root, with FUSE and loop devices.

use std::collections::BTreeMap;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::common::*;

/// The stand-in: what it keeps, in the order of arrival, and what it was told of the service. Like systemd,
/// it ignores a descriptor that it has, by whatever name, and those beyond its limit, without a word.
struct Manager {
    kept: Arc<Mutex<Kept>>,
    most: usize,
}

#[derive(Default)]
struct Kept {
    fds: Vec<(String, OwnedFd)>,
    is_ready: bool,
}

/// Returns whether two descriptors are of the same open file: kcmp(2).
fn is_same(one: &OwnedFd, other: &OwnedFd) -> bool {
    const KCMP_FILE: libc::c_int = 0;
    let own = std::process::id();
    // SAFETY: the call takes only numbers.
    let compared =
        unsafe { libc::syscall(libc::SYS_kcmp, own, own, KCMP_FILE, one.as_raw_fd(), other.as_raw_fd()) };
    assert!(compared >= 0, "kcmp: {}", std::io::Error::last_os_error());
    compared == 0
}

impl Manager {
    fn new(path: &Path, most: usize) -> Manager {
        let socket = UnixDatagram::bind(path).unwrap();
        let kept = Arc::<Mutex<Kept>>::default();
        let shared = Arc::clone(&kept);
        // Ends with the test's process.
        thread::spawn(move || Manager::listen(&socket, &shared, most));
        Manager { kept, most }
    }

    fn listen(socket: &UnixDatagram, shared: &Mutex<Kept>, most: usize) {
        let mut bytes = vec![0; 64 << 10];
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let received = recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
            let fds: Vec<OwnedFd> = ancillary
                .drain()
                .flat_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
                    _ => Vec::new(),
                })
                .collect();
            let text = str::from_utf8(&bytes[..received.bytes]).unwrap();
            let said: BTreeMap<&str, &str> = text.lines().filter_map(|line| line.split_once('=')).collect();
            let name = said.get("FDNAME").copied().unwrap_or("stored").to_owned();
            assert!(name.len() < 256 && !name.contains(':'), "{name}");
            let mut kept = shared.lock().unwrap();
            if said.get("FDSTORE") == Some(&"1") {
                assert_eq!((fds.len(), said.get("FDPOLL")), (1, Some(&"0")));
                for fd in fds {
                    if kept.fds.len() < most && !kept.fds.iter().any(|(_, other)| is_same(other, &fd)) {
                        kept.fds.push((name.clone(), fd));
                    }
                }
            }
            if said.contains_key("FDSTOREREMOVE") {
                kept.fds.retain(|(other, _)| *other != name);
            }
            kept.is_ready |= said.get("READY") == Some(&"1");
        }
    }

    /// Starts the service with what is kept, and waits until it is ready.
    fn start(&self, place: &Place, args: &str) -> Child {
        let mut kept = self.kept.lock().unwrap();
        let names: Vec<&str> = kept.fds.iter().map(|(name, _)| name.as_str()).collect();
        // The process ID is known only there.
        let mut command = place.command_after("export LISTEN_PID=$$", args);
        command.env("NOTIFY_SOCKET", place.root().join("notify")).env("FDSTORE", self.most.to_string());
        command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        let numbers: Vec<i32> = kept.fds.iter().map(|(_, fd)| fd.as_raw_fd()).collect();
        let hand_over = move || {
            // Above all of them first, so that none is overwritten before it is duplicated.
            for (at, number) in numbers.iter().enumerate() {
                // SAFETY: dup2 is async-signal-safe, and the numbers are open.
                unsafe { libc::dup2(*number, 700 + at as i32) };
            }
            for at in 0..numbers.len() as i32 {
                // SAFETY: as above.
                unsafe {
                    libc::dup2(700 + at, 3 + at);
                    libc::close(700 + at);
                }
            }
            Ok(())
        };
        // SAFETY: only async-signal-safe calls.
        unsafe { command.pre_exec(hand_over) };
        kept.is_ready = false;
        drop(kept);
        let log = File::options().create(true).append(true).open(place.root().join("log")).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        wait_until("the service is ready", || self.kept.lock().unwrap().is_ready);
        child
    }
}

#[test]
fn a_service_goes_on_after_a_restart_and_after_a_kill_of_all_its_processes() {
    let Some(place) = BlockPlace::if_able() else { return };
    let manager = Manager::new(&place.root().join("notify"), 512);
    let args = format!("up --size 32M --attach --backing {}", place.path("cold:32M"));
    let mut service = manager.start(&place, &args);
    for change in ["add second --size 8M", "add third --size 8M", "remove third"] {
        place.run(change).ok();
    }
    let device = place.loops().pop().unwrap();
    let disk = open(&device);
    for round in 0..4u8 {
        disk.write_all_at(&[round + 1; 4096], u64::from(round) << 16).unwrap();
        rustix::fs::fdatasync(&disk).unwrap();
        if round == 2 {
            // The next program goes on with what the one before has stored.
            place.run("upgrade").ok();
            place.run("add fourth --size 8M").ok();
        }
        if round % 2 == 0 {
            // Restarted: it leaves all to the manager.
            place.run("down --keep").ok();
            assert!(service.wait().unwrap().success());
        } else {
            service.kill().unwrap();
            service.wait().unwrap();
        }
        service = manager.start(&place, &args);
        assert_eq!(place.json("status")["holder_pid"], service.id());
        assert_eq!(place.loops(), [device.as_str()]);
        let direct = File::open(&device).unwrap();
        for before in 0..=round {
            let mut read = [0; 4096];
            direct.read_exact_at(&mut read, u64::from(before) << 16).unwrap();
            assert_eq!(read, [before + 1; 4096], "round {round}");
        }
        let list = place.run("list").shows(&["second"]);
        assert!(!list.contains("third") && list.contains("fourth") == (round >= 2), "{list}");
    }
    drop(disk);
    place.run("down").ok();
    assert!(service.wait().unwrap().success());
    place.assert_clean();
    wait_until("nothing is kept", || manager.kept.lock().unwrap().fds.is_empty());
    // Nobody who is no service's process takes anything, and without a manager nothing can be left.
    let daemon = place.up("");
    place.run("down --keep").says(1, "no service manager");
    place.end(daemon);
}

#[test]
fn a_daemon_that_needs_more_than_the_manager_keeps_says_so_and_does_not_leave_it_there() {
    let Some(place) = Place::needing("qemu-io") else { return };
    let manager = Manager::new(&place.root().join("notify"), 10);
    let mut service = manager.start(&place, "up --size 8M");
    for number in 0..8 {
        place.run(&format!("add more{number} --size 8M")).ok();
    }
    let why = "FDSTORE allows 10: raise FileDescriptorStoreMax=";
    let log = fs::read_to_string(place.path("log")).unwrap();
    assert!(log.contains(why), "{log}");
    place.run("down --keep").says(1, why);
    // A start would find no state that is only a part.
    let has_state =
        || manager.kept.lock().unwrap().fds.iter().any(|(name, _)| name.starts_with("uzram-state-"));
    wait_until("no state is kept", || !has_state());
    // When there is room again, all that is there now is kept, though other descriptors have the numbers of
    // those that are gone.
    (0..8).for_each(|number| _ = place.run(&format!("remove more{number}")).ok());
    wait_until("a state is kept", has_state);
    place.run("add again --size 8M").ok();
    let again = place.uri().replace("/zram0", "/again");
    succeed(&place, "qemu-io", &["-f", "raw", "-c", "write -P 7 0 4096", &again]);
    place.run("down --keep").ok();
    assert!(service.wait().unwrap().success());
    service = manager.start(&place, "up --size 8M");
    let said = succeed(&place, "qemu-io", &["-r", "-f", "raw", "-c", "read -P 7 0 4096", &again]);
    assert!(!said.contains("Pattern verification failed"), "{said}");
    place.down();
    assert!(service.wait().unwrap().success());
    wait_until("nothing is kept", || manager.kept.lock().unwrap().fds.is_empty());
}
