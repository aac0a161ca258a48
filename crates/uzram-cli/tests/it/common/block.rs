//! Block devices and swap in tests: for root, with FUSE and loop devices; leaves nothing behind.

use super::*;
use std::io::read_to_string;

/// How the name of a file begins that tests with mounts and loop devices lock, shared. A test of swap areas,
/// or of what a daemon finds of others, is alone: these are the machine's. Each user has a file: another
/// user's in a sticky directory cannot be opened with O_CREAT.
const LOCK_FILE: &str = "uzram-block-tests";

/// Returns whether block devices are not available, and prints why; the test is then skipped.
pub fn unable() -> bool {
    not_root() || lacks("/dev/fuse") || lacks("/dev/loop-control")
}

/// Returns whether the machine has no such file, and says so.
pub fn lacks(path: &str) -> bool {
    let lacks = !Path::new(path).exists();
    if lacks {
        println!("skipped: no {path}");
    }
    lacks
}

/// The path of a device's file in a mount that was detached.
const DETACHED: &str = "/zram0/disk";

/// A place that removes its daemon's mounts, loop devices and swap areas when dropped, even after a failure.
pub struct BlockPlace {
    place: Place,
    /// Loop devices of detached mounts and swap areas that existed before.
    others: Vec<String>,
    is_alone: bool,
    _lock: File,
}

impl std::ops::Deref for BlockPlace {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.place
    }
}

impl BlockPlace {
    /// Makes a place where block devices are available; otherwise the test is skipped.
    pub fn if_able() -> Option<BlockPlace> {
        BlockPlace::needing("")
    }

    /// The same where these programs are there, too.
    pub fn needing(programs: &(impl Words + ?Sized)) -> Option<BlockPlace> {
        (!unable() && !missing(programs)).then(|| BlockPlace::new(false))
    }

    /// The same while no other test has such a place.
    pub fn alone(programs: &(impl Words + ?Sized)) -> Option<BlockPlace> {
        (!unable() && !missing(programs)).then(|| BlockPlace::new(true))
    }

    pub fn new(is_alone: bool) -> BlockPlace {
        let user = rustix::process::geteuid().as_raw();
        let lock = File::create(std::env::temp_dir().join(format!("{LOCK_FILE}-{user}.lock"))).unwrap();
        if is_alone { lock.lock() } else { lock.lock_shared() }.unwrap();
        remove_left_areas();
        let others = loop_devices(|file| file == Path::new(DETACHED)).into_iter().chain(active_areas());
        BlockPlace { place: Place::new(), others: others.collect(), is_alone, _lock: lock }
    }

    pub fn files(&self) -> PathBuf {
        self.dir().join("mnt/zram0")
    }

    pub fn disk(&self) -> PathBuf {
        self.files().join("disk")
    }

    pub fn mount_point(&self, name: &str) -> PathBuf {
        let dir = self.root().join(name);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// Makes a file system on a block device, and mounts it; returns where.
    pub fn with_file_system(&self, device: &str) -> PathBuf {
        let dir = self.mount_point("fs");
        succeed(self, "mkfs.ext4", &["-q", device]);
        succeed(self, "mount", &[device, arg(&dir)]);
        dir
    }

    /// Starts a daemon that shows its devices as files, of which [`BlockPlace::files`] has the first one's.
    pub fn up_mounted(&self, size: &str, options: &str) -> Daemon {
        self.up_sized(size, &format!("--mount {} {options}", self.dir().join("mnt").display()))
    }

    /// Starts a daemon with an attached device of that size; returns the block device, too.
    pub fn up_attached(&self, size: &str, options: &str) -> (Daemon, String) {
        let daemon = self.up_sized(size, &format!("--attach {options}"));
        (daemon, self.loops().pop().unwrap())
    }

    pub fn loops(&self) -> Vec<String> {
        let root = self.root().canonicalize().unwrap();
        let mut loops = loop_devices(|file| file.starts_with(&root));
        if self.is_alone {
            loops.extend(self.detached());
        }
        loops
    }

    /// Returns the new loop devices of detached mounts, of which only the path relative to their root is
    /// known: they may be another test's, unless this one is alone.
    fn detached(&self) -> Vec<String> {
        let mut detached = loop_devices(|file| file == Path::new(DETACHED));
        detached.retain(|device| !self.others.contains(device));
        detached
    }

    pub fn swap_on(&self, options: &str) -> String {
        swap_device(&self.run(&format!("swap on {options}")).ok())
    }

    pub fn swap_off(&self) {
        self.run("swap off").ok();
        self.assert_clean();
    }

    /// Returns the loop devices that have become swap areas since this place was created.
    pub fn swap_areas(&self) -> Vec<String> {
        active_areas().filter(|area| !self.others.contains(area)).collect()
    }

    /// Returns the mounts below this place's directory, the last first.
    pub fn mounts(&self) -> Vec<String> {
        let root = self.root().canonicalize().unwrap();
        let list = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let dirs = list.lines().filter_map(|line| line.split(' ').nth(4));
        let mut dirs: Vec<String> =
            dirs.filter(|dir| Path::new(dir).starts_with(&root)).map(str::to_owned).collect();
        dirs.reverse();
        dirs
    }

    /// Ends the daemon, which succeeds and leaves nothing; returns its log.
    pub fn end_clean(&self, daemon: Daemon) -> String {
        let said = self.end(daemon);
        self.assert_clean();
        said
    }

    /// Checks that no loop device, swap area or mount is left. A loop device that another program has open is
    /// freed only when that closes it.
    pub fn assert_clean(&self) {
        wait_until("loop devices are free", || self.loops().is_empty() && self.detached().is_empty());
        assert_eq!(self.mounts(), [""; 0]);
        assert_eq!(self.swap_areas(), [""; 0]);
    }
}

impl Drop for BlockPlace {
    fn drop(&mut self) {
        // Cleans up after a failed test; these commands fail if nothing is left.
        let mut loops = self.loops();
        loops.extend(self.swap_areas());
        for device in &loops {
            let _ = run(&self.place, "swapoff", &[device]);
        }
        if loops.is_empty() && self.mounts().is_empty() {
            return;
        }
        let _ = self.run(&["down"]);
        for dir in self.mounts() {
            let _ = run(&self.place, "umount", &["-l", &dir]);
        }
        for device in &loops {
            let _ = run(&self.place, "losetup", &["-d", device]);
        }
    }
}

pub fn swap_device(facts: &str) -> String {
    let words = facts.lines().find_map(|line| line.strip_prefix("swap "));
    words.unwrap_or_else(|| panic!("{facts}")).words()[0].to_owned()
}

/// Returns the loop devices whose file's path satisfies `wanted`.
fn loop_devices(wanted: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut devices = Vec::new();
    for entry in fs::read_dir("/sys/block").unwrap() {
        let entry = entry.unwrap();
        let Ok(file) = fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        if wanted(Path::new(file.trim_end())) {
            devices.push(format!("/dev/{}", entry.file_name().into_string().unwrap()));
        }
    }
    devices
}

/// Removes the swap areas that killed tests have left in temporary directories: the kernel would swap this
/// test's pages out to them, and no daemon takes these.
fn remove_left_areas() {
    // Its file is gone, or does not answer.
    let is_left = |file: &Path| {
        (file == Path::new(DETACHED) || file.starts_with(std::env::temp_dir())) && fs::metadata(file).is_err()
    };
    for device in loop_devices(is_left) {
        if active_areas().any(|area| area == device) {
            println!("{device}: a swap area that an earlier test has left");
            for program in ["swapoff", "losetup -d"] {
                let _ = Command::new("sh").args(["-c", &format!("timeout 60 {program} {device}")]).status();
            }
        }
    }
}

fn active_areas() -> impl Iterator<Item = String> {
    let areas = uzram_serve::swap_area::active().unwrap().into_iter();
    areas.map(|area| area.path.to_str().unwrap().to_owned()).filter(|area| area.starts_with("/dev/loop"))
}

pub fn swapped_bytes(device: &str) -> u64 {
    swapped_bytes_if_on(device).unwrap()
}

/// `None` if it is not an active swap area.
pub fn swapped_bytes_if_on(device: &str) -> Option<u64> {
    let mut areas = uzram_serve::swap_area::active().unwrap().into_iter();
    areas.find(|area| area.path == Path::new(device)).map(|area| area.used_bytes)
}

/// A cgroup of the memory controller, version 1, removed when dropped.
pub struct Cgroup {
    dir: PathBuf,
}

impl Cgroup {
    /// Creates a cgroup with this limit; prints a note and returns `None` if there is no such controller.
    pub fn new(name: &str, limit_bytes: u64) -> Option<Cgroup> {
        Cgroup::of("memory", name).inspect(|cgroup| cgroup.set_limit(limit_bytes))
    }

    /// Creates a cgroup of the controller of threads; as above.
    pub fn of_threads(name: &str) -> Option<Cgroup> {
        Cgroup::of("pids", name)
    }

    fn of(controller: &str, name: &str) -> Option<Cgroup> {
        let root = format!("/sys/fs/cgroup/{controller}");
        if not_root() || lacks(&root) {
            return None;
        }
        let cgroup = Cgroup { dir: format!("{root}/uzram-{name}-{}", std::process::id()).into() };
        fs::create_dir(&cgroup.dir).unwrap();
        Some(cgroup)
    }

    pub fn set(&self, name: &str, value: &str) {
        fs::write(self.dir.join(name), value).unwrap();
    }

    pub fn set_limit(&self, bytes: u64) {
        self.set("memory.limit_in_bytes", &bytes.to_string());
    }

    /// Sets the limit to the memory that it has, or as near to that as the kernel allows.
    pub fn fill(&self) {
        let used = fs::read_to_string(self.dir.join("memory.usage_in_bytes")).unwrap();
        let used: u64 = used.trim().parse().unwrap();
        let limit = self.dir.join("memory.limit_in_bytes");
        let set = (0..64).find(|mib| fs::write(&limit, (used + (mib << 20)).to_string()).is_ok());
        assert!(set.is_some());
    }

    /// Has the kernel reclaim all of its memory that can be.
    pub fn empty(&self) {
        // Fails if some stays.
        let _ = fs::write(self.dir.join("memory.force_empty"), "0");
    }

    pub fn swapped_bytes(&self) -> u64 {
        let stat = fs::read_to_string(self.dir.join("memory.stat")).unwrap();
        let line = stat.lines().find_map(|line| line.strip_prefix("swap ")).unwrap();
        line.parse().unwrap()
    }

    /// A command that begins in here; it is told the folder in the environment, as `CGROUP`.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("sh");
        command.env("CGROUP", &self.dir);
        command.args(["-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$@\""]);
        command.arg(&self.dir).arg(program.as_ref()).stdin(Stdio::null());
        command
    }

    pub fn uzram(&self, place: &Place, args: &(impl Words + ?Sized)) -> Command {
        let mut command = self.command(UZRAM);
        command.args(args.words()).env("UZRAM_RUNTIME_DIR", place.dir());
        command
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its last process may still be ending.
        let deadline = Instant::now() + Duration::from_secs(2);
        while fs::remove_dir(&self.dir).is_err() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Returns the active swap areas, and the last errors in the kernel's log: why it has killed a process.
fn last_of_kernel() -> String {
    let script = "cat /proc/swaps; dmesg | grep -E 'oom-kill:|memory: usage|rror|Killed' | tail -n 20";
    let said = Command::new("sh").args(["-c", script]).output().unwrap();
    String::from_utf8_lossy(&said.stdout).into_owned()
}

const HOG_VARIABLE: &str = "UZRAM_TEST_HOG";

/// The body of a hog's process: fills its memory, then checks and changes pages at random for a time or until
/// SIGTERM, and finally checks all of them. Panics if a page has wrong contents.
#[test]
#[ignore = "the process that other tests start"]
fn hog() {
    let Ok(text) = std::env::var(HOG_VARIABLE) else { return };
    let (mib, seconds) = text.split_once(' ').unwrap();
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGTERM, asked.clone()).unwrap();
    let pages: usize = mib.parse::<usize>().unwrap() << 8;
    let end = Instant::now() + Duration::from_secs(seconds.parse().unwrap());
    let mut memory = vec![[0u64; 512]; pages];
    let mut generations = vec![0u32; pages];
    for (number, page) in memory.iter_mut().enumerate() {
        *page = contents(number, 0);
    }
    let mut random = Random::new(1);
    while Instant::now() < end && !asked.load(std::sync::atomic::Ordering::Relaxed) {
        let number = random.below(pages);
        assert!(memory[number] == contents(number, generations[number]), "page {number} has changed");
        if random.next() >> 63 == 1 {
            generations[number] += 1;
            memory[number] = contents(number, generations[number]);
        }
    }
    for (number, page) in memory.iter().enumerate() {
        assert!(*page == contents(number, generations[number]), "page {number} has changed");
    }
    println!("all pages are as they were left");
}

/// Returns the contents of a hog's page: up to half of it is random, so that pages compress differently well.
/// The random bytes have few values, so that zstd makes pages smaller than lz4 does.
fn contents(number: usize, generation: u32) -> [u64; 512] {
    let mut state = ((number as u64) << 32 | u64::from(generation)) ^ 0x5851_f42d_4c95_7f2d;
    let mut page = [number as u64 * 31 + u64::from(generation); 512];
    for word in page.iter_mut().take(number % 5 * 64) {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        *word = (state ^ state >> 29) & 0x0f0f_0f0f_0f0f_0f0f;
    }
    page
}

/// A process that uses more memory than its limit, and checks it; killed when dropped.
pub struct Hog {
    child: Killed,
}

impl Hog {
    /// Starts a hog in a cgroup, which checks and changes `mib` MiB for `seconds`.
    pub fn start(cgroup: &Cgroup, mib: u64, seconds: u64) -> Hog {
        let mut command = cgroup.command(std::env::current_exe().unwrap());
        command.args(["--exact", "common::block::hog", "--ignored", "--nocapture"]);
        command.env(HOG_VARIABLE, format!("{mib} {seconds}"));
        Hog { child: Killed(start(&mut command)) }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Ends it if `ends`, else waits until it ends. All of its pages must be as it left them.
    pub fn verified(mut self, patience: Duration, ends: bool) {
        if ends {
            assert!(self.is_running());
            self.signal(Signal::TERM);
        }
        let ended = self.ended(patience);
        assert!(ended.status.success(), "{ended}");
        assert!(ended.stdout.contains("all pages are as they were left"), "{ended}");
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub fn swaps_out(mut self, device: &str, bytes: u64) -> Hog {
        wait_until("much is swapped out", || swapped_bytes(device) > bytes || !self.is_running());
        if !self.is_running() {
            let ended = self.ended(Duration::ZERO);
            panic!("{ended}");
        }
        self
    }

    pub fn ended(mut self, patience: Duration) -> Ended {
        let status = wait(&mut self.child, patience);
        let stdout = read_to_string(self.child.stdout.take().unwrap()).unwrap();
        let mut stderr = read_to_string(self.child.stderr.take().unwrap()).unwrap();
        if status.signal() == Some(Signal::KILL.as_raw()) {
            stderr += &last_of_kernel();
        }
        Ended { status, stdout, stderr }
    }
}
