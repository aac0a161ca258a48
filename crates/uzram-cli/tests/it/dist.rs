//! The program that `make dist` builds: static, small, and able to run in a root directory with nothing but
//! itself, `/dev`, `/proc` and `/sys`. For root; `make test` builds the program and runs this.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use crate::common::*;
use tempfile::TempDir;

/// The most bytes of the program.
const MOST_BYTES: u64 = 8 << 20;
/// The type of the ELF program header that names a dynamic linker (elf(5)).
const PT_INTERP: u32 = 3;

fn program() -> PathBuf {
    let target = Path::new(env!("CARGO_BIN_EXE_uzram")).ancestors().nth(2).unwrap();
    target.join("dist/uzram")
}

/// A root directory for one program.
struct Root(TempDir);

impl Root {
    fn new() -> Root {
        let root = Root(tempfile::tempdir().unwrap());
        ["dev", "proc", "sys", "run"].iter().for_each(|dir| fs::create_dir(root.0.path().join(dir)).unwrap());
        fs::copy(program(), root.0.path().join("uzram")).unwrap();
        root
    }

    /// Returns the command `/uzram args` in this root, in its own mount namespace.
    fn command(&self, args: &[&str]) -> Command {
        self.script("exec chroot . /uzram \"$@\"", args)
    }

    /// Returns a script with this directory as working directory, in its own mount namespace.
    fn script(&self, script: &str, args: &[&str]) -> Command {
        let mounts = "cd \"$0\" && for dir in dev proc sys; do mount --rbind /$dir $dir || exit 99; done";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &format!("{mounts}; {script}")]).arg(self.0.path()).args(args);
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command
    }

    fn run(&self, args: &[&str]) -> Ended {
        finish(self.command(args))
    }
}

/// Ends the daemon of a failed test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already if nothing failed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs target/dist/uzram, which `make dist` builds"]
fn it_is_static_and_small() {
    let bytes = fs::read(program()).unwrap();
    assert!(bytes.len() as u64 <= MOST_BYTES, "{} bytes", bytes.len());
    // Offset, size and number of the program headers of a 64-bit ELF file.
    let u16_at = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let (start, len, count) = (u16_at(0x20), u16_at(0x36), u16_at(0x38));
    let types =
        (0..count).map(|number| u32::from_le_bytes(bytes[start + number * len..][..4].try_into().unwrap()));
    let types: Vec<u32> = types.collect();
    assert!(!types.is_empty() && !types.contains(&PT_INTERP), "{types:?}");
}

/// It is built without the feature `remote`: it refuses encryption, and makes no file.
#[test]
#[ignore = "needs target/dist/uzram, which `make dist` builds"]
fn without_encryption_it_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cold");
    let mut command = Command::new(program());
    command.args(["up", "--size", "1M", "--encrypt", "--backing", &format!("{}:4M", file.display())]);
    command.arg("--runtime-dir").arg(dir.path().join("run"));
    let said = finish(command);
    assert!(said.complaint(1).contains("built without encryption (the feature 'remote')"), "{}", said.stderr);
    assert!(!file.exists());
}

#[test]
#[ignore = "needs target/dist/uzram, which `make dist` builds"]
fn it_serves_where_nothing_else_is() {
    if not_root() {
        return;
    }
    let root = Root::new();
    let checks: serde_json::Value = serde_json::from_str(&root.run(&["check", "--json"]).ok()).unwrap();
    let works = |name: &str| {
        let checks = checks["checks"].as_array().unwrap();
        checks.iter().find(|check| check["name"] == name).unwrap()["works"] == "yes"
    };
    assert!(works("rseq"), "{checks}");
    let mut daemon = Running(start(&mut root.command(&["up", "--size", "64M"])));
    wait_until("it answers", || root.run(&["status"]).status.success());
    assert_eq!(root.run(&["stat", "zram0", "disksize"]).ok().trim(), (64 << 20).to_string());
    // Clients run outside.
    let socket = root.0.path().join("run/uzram/nbd.sock");
    let file = root.0.path().join("bytes");
    let bytes: Vec<u8> = (0..4u32 << 20).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect();
    fs::write(&file, &bytes).unwrap();
    let uri = format!("nbd+unix:///zram0?socket={}", socket.display());
    finish_copy(&file.to_string_lossy(), &uri);
    let copy = root.0.path().join("copy");
    fs::write(&copy, "").unwrap();
    finish_copy(&uri, &copy.to_string_lossy());
    assert!(fs::read(&copy).unwrap()[..bytes.len()] == bytes);
    wait_until("it may end", || root.run(&["down"]).status.success());
    assert!(wait(&mut daemon.0, PATIENCE).success());
    // The whole of swap: FUSE, a loop device, the program's own helper, and back.
    if block::unable() {
        return;
    }
    assert!(works("FUSE") && works("loop"), "{checks}");
    // In one mount namespace: another would not see the daemon's mounts.
    let script =
        "chroot . /uzram swap on --size 64M >&2 && chroot . /uzram swap status; chroot . /uzram swap off >&2";
    let status = finish(root.script(script, &[])).ok();
    assert!(status.contains("64.0 MiB"), "{status}");
}

fn finish_copy(from: &str, to: &str) {
    let mut command = Command::new("nbdcopy");
    command.args([from, to]);
    finish(command).ok();
}
