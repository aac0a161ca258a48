//! The thread that fills a store's reserve of memory ahead of need: see [`Arena::with_reserve_in`].
//!
//! Lock order: the thread holds no lock while it fills a chunk, which may take long: it does nothing else,
//! and no other thread waits for it.

use std::ops::Range;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::base::error::{Error, ErrorKind, Result};
use crate::base::machine_memory::{self, Memory};
use crate::base::mem::Arena;
use crate::base::sync::{Arc, Counter};
use crate::base::thread::{join, spawn_relied_on, touch_stack};
use crate::base::units::{PAGE_SIZE, format_size};
use crate::lru;

use super::designs::StorePool;
use super::slot::SLOT_BYTES;

/// The first delay before it retries when the system gave no memory; doubled with each failure.
const LEAST_DELAY: Duration = Duration::from_millis(10);
/// The longest such delay, and the delay while the limit is reached.
const MOST_DELAY: Duration = Duration::from_secs(1);

/// The refill thread of a store that has a reserve. Dropping this ends it.
pub(super) struct Refiller {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    pool: Arc<StorePool>,
    arena: Arc<Arena>,
    ends: Counter,
}

impl Refiller {
    /// Fills the reserve of the store `name`, and starts the thread that keeps it filled.
    pub(super) fn start(name: &str, pool: Arc<StorePool>, arena: Arc<Arena>) -> Result<Self> {
        let shared = Arc::new(Shared { pool, arena, ends: Counter::new(0) });
        shared.refill().map_err(|error| match error.setting() {
            None => error.with_setting("reserve"),
            Some(_) => error,
        })?;
        let name = format!("uzram-{name}-fill");
        // The arena must not wake a thread that has died.
        let died = |shared: &mut Arc<Shared>, _: &str| shared.arena.set_refiller(None);
        let thread = spawn_relied_on(&name, Arc::clone(&shared), |shared| shared.run(), died)?;
        shared.arena.set_refiller(Some(thread.thread().clone()));
        Ok(Refiller { shared, thread: Some(thread) })
    }
}

impl Drop for Refiller {
    fn drop(&mut self) {
        self.shared.arena.set_refiller(None);
        self.shared.ends.set(1);
        self.thread.take().into_iter().for_each(join);
    }
}

impl Shared {
    fn refill(&self) -> Result<()> {
        self.arena.refill(|pages: Range<u32>| self.pool.populate_for(pages))
    }

    fn run(&self) {
        touch_stack();
        let mut delay = None;
        loop {
            match delay {
                Some(delay) => std::thread::park_timeout(delay),
                None => std::thread::park(),
            }
            if self.ends.get() != 0 {
                return;
            }
            delay = match self.refill() {
                Ok(()) => None,
                Err(error) if error.kind() == ErrorKind::NoSpace => Some(MOST_DELAY),
                Err(_) => Some(delay.map_or(LEAST_DELAY, |delay| (2 * delay).min(MOST_DELAY))),
            };
        }
    }
}

/// Checks that a disk of `pages` pages and its reserve can be in memory at all: populating more would harm
/// other processes, or have this process killed by its cgroup's limit.
pub(super) fn check_fits(pages: u64, reserve_pages: u64) -> Result<()> {
    match machine_memory::read() {
        Ok(memory) => check_fits_into(&memory, pages, reserve_pages),
        // Without /proc the size of the memory is unknown.
        Err(_) => Ok(()),
    }
}

pub(super) fn check_fits_into(memory: &Memory, pages: u64, reserve_pages: u64) -> Result<()> {
    let table_bytes = pages * (SLOT_BYTES + lru::NODE_BYTES) as u64;
    let wanted_bytes = reserve_pages.saturating_mul(PAGE_SIZE as u64).saturating_add(table_bytes);
    let most_bytes = memory.limit_bytes;
    if wanted_bytes < most_bytes {
        return Ok(());
    }
    let wanted = format_size(wanted_bytes);
    let what = if most_bytes < memory.ram_bytes {
        let most = format_size(most_bytes);
        format!("the reserve and the disk's tables take {wanted}, and this process's cgroup allows it {most}")
    } else {
        format!("the reserve and the disk's tables take {wanted}, which this machine does not have")
    };
    Err(Error::new(ErrorKind::NoMemory, what).with_setting("reserve"))
}
