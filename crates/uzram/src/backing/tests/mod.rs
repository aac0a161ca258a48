//! Tests of backings. Each runs with both engines where they could differ.

mod claims;
mod faults;
mod files;
mod model;

use std::collections::HashMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::*;
use crate::base::error::{Error, ErrorKind};
use crate::base::sync::{Condvar, Mutex, classes};

const ENGINES: [Engine; 2] = [Engine::Uring, Engine::Threads];

/// Creates a directory on the disk: many systems have `/tmp` in memory.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(if Path::new("/var/tmp").is_dir() { "/var/tmp" } else { "/tmp" })
        .expect("a directory")
}

/// The header's length, if blocks of O_DIRECT have 4096 bytes at most.
const HEADER_BYTES: u64 = MARK_BYTES as u64;

fn file_bytes(path: &Path) -> u64 {
    std::fs::metadata(path).expect("a file").len()
}

fn own_file(path: &Path, contents: &[u8]) {
    std::fs::write(path, contents).expect("a file");
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).expect("ours");
}

fn options(path: &Path, size_bytes: u64, engine: Engine) -> FileOptions {
    FileOptions { size_bytes: Some(size_bytes), engine, ..FileOptions::new(path) }
}

fn open(path: &Path, size_bytes: u64, engine: Engine) -> FileBacking {
    FileBacking::open(&options(path, size_bytes, engine)).expect("a backing")
}

type Where = (Direction, u64);

pub(super) fn transfer(
    (direction, offset): Where,
    len_bytes: usize,
    buffer: Buffer,
    token: u64,
    completion: Arc<dyn Completion>,
) -> Transfer {
    Transfer { direction, offset, len_bytes, filling: Filling::default(), buffer, token, completion }
}

const DEADLINE: Duration = Duration::from_secs(60);

/// The results of transfers, by token. A transfer that ends twice is a failure.
pub(super) struct Ends {
    ends: Mutex<HashMap<u64, Done>>,
    changed: Condvar,
}

impl Ends {
    pub(in crate::backing) fn new() -> Arc<Self> {
        let ends = Mutex::new(&classes::LRU_PAGEVEC, HashMap::new());
        Arc::new(Ends { ends, changed: Condvar::new() })
    }

    fn start(self: &Arc<Self>, on: &dyn Blocks, at: Where, buffer: Buffer, token: u64) {
        let len_bytes = buffer.len();
        self.start_part(on, at, len_bytes, buffer, token);
    }

    fn start_part(
        self: &Arc<Self>,
        on: &dyn Blocks,
        at: Where,
        len_bytes: usize,
        buffer: Buffer,
        token: u64,
    ) {
        on.start(transfer(at, len_bytes, buffer, token, Arc::<Ends>::clone(self)));
    }

    pub(in crate::backing) fn wait(&self, token: u64) -> Done {
        let deadline = Instant::now() + DEADLINE;
        let mut ends = self.ends.lock();
        loop {
            let now = Instant::now();
            match ends.remove(&token) {
                Some(end) => return end,
                None if now < deadline => ends = ends.wait_for(&self.changed, deadline - now),
                None => panic!("the transfer {token} does not end"),
            }
        }
    }

    pub(in crate::backing) fn count(&self) -> usize {
        self.ends.lock().len()
    }
}

impl Completion for Ends {
    fn done(&self, token: u64, buffer: Buffer, result: Result<()>) {
        let before = self.ends.lock().insert(token, (buffer, result));
        // A panic here would be caught.
        if before.is_some() {
            eprintln!("the transfer {token} ended twice");
            std::process::abort();
        }
        self.changed.notify_all();
    }
}
