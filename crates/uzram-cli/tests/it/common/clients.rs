//! Common NBD clients and file system tools, run in a test's own directory.

use super::*;

/// How long a client may run on a slow machine.
const CLIENT_WITHIN: Duration = Duration::from_secs(130);

/// Returns whether one of these programs is missing, and prints which; the test is then skipped.
pub fn missing(programs: &(impl Words + ?Sized)) -> bool {
    let missing = programs.words().into_iter().find(|program| !has_program(program));
    if let Some(program) = missing {
        println!("skipped: {program} is not installed");
    }
    missing.is_some()
}

/// Returns a command in the place's directory, killed after two minutes.
pub fn client(place: &Place, program: &str, args: &(impl Words + ?Sized)) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "120", program]).args(args.words());
    command.current_dir(place.root()).env("PATH", program_path()).stdin(Stdio::null());
    command
}

pub fn run(place: &Place, program: &str, args: &(impl Words + ?Sized)) -> Ended {
    collect_within(start(&mut client(place, program, args)), CLIENT_WITHIN)
}

/// Runs a client that must succeed; returns its output.
pub fn succeed(place: &Place, program: &str, args: &(impl Words + ?Sized)) -> String {
    let ended = run(place, program, args);
    assert!(ended.status.success(), "{program} {:?}: {ended}", args.words());
    ended.stdout
}

/// Runs a client that must fail by itself; returns its complaint.
pub fn complain(place: &Place, program: &str, args: &(impl Words + ?Sized)) -> String {
    let ended = run(place, program, args);
    let by_itself = ended.status.code().is_some_and(|code| code != 0 && code < 124);
    assert!(by_itself, "{program} {:?}: {ended}", args.words());
    ended.stdout + &ended.stderr
}

pub fn qemu_io(place: &Place, commands: &[&str]) {
    let uri = place.uri();
    let mut args = vec!["-f", "raw"];
    commands.iter().for_each(|command| args.extend(["-c", command]));
    args.push(&uri);
    let said = succeed(place, "qemu-io", &args);
    assert!(!said.contains("failed"), "{said}");
}

impl Place {
    /// Returns a fio job of one process on the device here, which writes no files.
    pub fn job(&self, options: &str) -> String {
        format!("--name=test --ioengine=nbd --uri={} --thread --verify_state_save=0 {options}", self.uri())
    }

    pub fn fio(&self, options: &str) {
        succeed(self, "fio", &self.job(options));
    }

    pub fn copy_in(&self, file: &Path) {
        succeed(self, "nbdcopy", &[arg(file), &self.uri()]);
    }

    pub fn copy_out(&self, uri: &str, name: &str) -> PathBuf {
        succeed(self, "nbdcopy", &[uri, name]);
        self.root().join(name)
    }

    /// Checks that the device here has the contents of a file, and zeros behind them.
    pub fn assert_holds(&self, file: &Path) {
        let (wanted, read) = (fs::read(file).unwrap(), fs::read(self.copy_out(&self.uri(), "copy")).unwrap());
        assert!(read.starts_with(&wanted), "the contents changed");
        assert!(is_zero(&read[wanted.len()..]), "something follows the contents");
    }
}

/// Creates a file of seeded random bytes, which do not compress.
pub fn random_file(place: &Place, name: &str, len_bytes: usize) -> PathBuf {
    PathBuf::from(place.write(name, Random::new(len_bytes as u64).bytes(len_bytes)))
}

pub fn arg(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns so many bytes of text that lz4 compresses and zstd compresses better: numbers in decimal.
pub fn decimals(bytes: usize) -> String {
    let (mut random, mut text) = (Random::new(1), String::new());
    while text.len() < bytes {
        text += &format!("{} ", random.below(10_000));
    }
    text.truncate(bytes);
    text
}
