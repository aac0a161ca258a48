//! The program that `make dist` builds: static, small, and able to run in a root directory with nothing but
//! itself, `/dev`, `/proc` and `/sys`. For root; `make test` builds the program and runs this.

use tempfile::TempDir;

use crate::common::*;

/// A third of it is the pager's image.
const MOST_BYTES: u64 = 10 << 20;
/// The type of the ELF program header that names a dynamic linker (elf(5)).
const PT_INTERP: u32 = 3;

fn program() -> PathBuf {
    Path::new(UZRAM).ancestors().nth(2).unwrap().join("dist/uzram")
}

/// A root directory for one program.
struct Root(TempDir);

impl Root {
    fn new() -> Root {
        let root = Root(tempfile::tempdir().unwrap());
        "dev proc sys run".words().iter().for_each(|dir| fs::create_dir(root.0.path().join(dir)).unwrap());
        fs::copy(program(), root.0.path().join("uzram")).unwrap();
        root
    }

    /// Returns the command `/uzram args` in this root, in its own mount namespace.
    fn command(&self, args: &str) -> Command {
        let mut command = self.script("exec chroot . /uzram \"$@\"");
        command.args(args.words());
        command
    }

    /// Returns a script with this directory as working directory, in its own mount namespace.
    fn script(&self, script: &str) -> Command {
        let mounts = "cd \"$0\" && for dir in dev proc sys; do mount --rbind /$dir $dir || exit 99; done";
        let mut command = isolated(&format!("{mounts}; {script}"));
        command.arg(self.0.path()).env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command
    }

    fn run(&self, args: &str) -> Ended {
        finish(self.command(args))
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
    let type_of = |header: &[u8]| u32::from_le_bytes(header[..4].try_into().unwrap());
    let types: Vec<u32> = bytes[start..].chunks(len).take(count).map(type_of).collect();
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
    finish(command.arg("--runtime-dir").arg(dir.path().join("run")))
        .says(1, "built without encryption (the feature 'remote')");
    assert!(!file.exists());
}

#[test]
#[ignore = "needs target/dist/uzram, which `make dist` builds"]
fn it_serves_where_nothing_else_is() {
    if not_root() {
        return;
    }
    let root = Root::new();
    let checks: Value = serde_json::from_str(&root.run("check --json").ok()).unwrap();
    let checks = checks["checks"].as_array().unwrap();
    let works = |name: &str| checks.iter().any(|check| check["name"] == name && check["works"] == "yes");
    assert!(works("rseq"), "{checks:?}");
    let mut daemon = Killed(start(&mut root.command("up --size 64M")));
    wait_until("it answers", || root.run("status").status.success());
    assert_eq!(root.run("stat zram0 disksize").ok().trim(), (64 << 20).to_string());
    // Clients run outside.
    let uri = format!("nbd+unix:///zram0?socket={}", root.0.path().join("run/uzram/nbd.sock").display());
    let [file, copy] = ["bytes", "copy"].map(|name| root.0.path().join(name));
    let bytes = Random::new(1).bytes(4 << 20);
    fs::write(&file, &bytes).unwrap();
    finish(Command::new("nbdcopy").args([arg(&file), &uri])).ok();
    finish(Command::new("nbdcopy").args([&uri, arg(&copy)])).ok();
    assert!(fs::read(&copy).unwrap()[..bytes.len()] == bytes);
    wait_until("it may end", || root.run("down").status.success());
    assert!(wait(&mut daemon.0, PATIENCE).success());
    // The whole of swap: FUSE, a loop device, the program's own helper, and back.
    if unable() {
        return;
    }
    assert!(works("FUSE") && works("loop"), "{checks:?}");
    // In one mount namespace: another would not see the daemon's mounts.
    let script =
        "chroot . /uzram swap on --size 64M >&2 && chroot . /uzram swap status; chroot . /uzram swap off >&2";
    finish(root.script(script)).shows(&["64.0 MiB"]);
}
