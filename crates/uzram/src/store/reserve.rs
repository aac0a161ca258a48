//! The thread that fills a store's reserve of memory, ahead of need: see [`Arena::with_reserve`].
//!
//! It does nothing else, as it may be the system that it waits for, for long. Nobody waits for it.
//!
//! Lock order: it holds no lock while it fills a chunk.

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
use crate::zsmalloc::AnyPool;

use super::slot::SLOT_BYTES;

/// How soon it tries again when the system gave no memory; twice as long each time that follows.
const LEAST_DELAY: Duration = Duration::from_millis(10);
/// As long as that goes on at most, and while the limit is met.
const MOST_DELAY: Duration = Duration::from_secs(1);

/// The thread of a store that has a reserve. Dropped, it ends.
pub(super) struct Refiller {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    pool: Arc<AnyPool>,
    arena: Arc<Arena>,
    /// Not 0 when the thread is to end.
    ends: Counter,
}

impl Refiller {
    /// Fills the reserve of the store of that name, and starts the thread that goes on with it.
    ///
    /// # Errors
    /// `NoMemory` when the system gives no memory, or no thread.
    pub(super) fn start(name: &str, pool: Arc<AnyPool>, arena: Arc<Arena>) -> Result<Self> {
        let shared = Arc::new(Shared { pool, arena, ends: Counter::new(0) });
        shared.refill().map_err(|error| match error.setting() {
            None => error.with_setting("reserve"),
            Some(_) => error,
        })?;
        let name = format!("uzram-{name}-fill");
        // Without it nobody is told any more when the reserve has to be filled.
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

/// Fails where a disk of so many pages and its reserve can never be in memory: having the system give it would end in
/// harm to others, or would have this process killed where a cgroup bounds what it may have.
///
/// # Errors
/// `NoMemory` then.
pub(super) fn check_fits(pages: u64, reserve_pages: u64) -> Result<()> {
    match machine_memory::read() {
        Ok(memory) => check_fits_into(&memory, pages, reserve_pages),
        // Without /proc nothing is known.
        Err(_) => Ok(()),
    }
}

/// [`check_fits`], for so much memory.
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
