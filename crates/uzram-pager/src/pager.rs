//! A pager and its regions, as programs use them.

use std::mem::ManuallyDrop;
use std::ops::{Bound, Deref, DerefMut, Range, RangeBounds};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use uzram::backing::{Backing, Blocks};
use uzram::codec::{Algorithm, Kind};
use uzram::store::{BackingOptions, PolicyThread, ReclaimOrder, ReclaimPolicy, StoreBuilder};
use uzram::sync::Arc;
use uzram::units::{PAGE_SHIFT, PAGE_SIZE, bytes_to_pages, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use crate::core::{Core, Next};
use crate::map::Part;
use crate::pressure::{self, Goal, Governor, Source};
use crate::room::MOST_WAIT;
use crate::sigbus::{self, Registered};
use crate::signals::Blocked;
use crate::spill::{Spill, SpillThread};
use crate::state::Access;
use crate::stats::PagerStats;
use crate::system::{lock, spawn};
use crate::uffd::{Tells, Uffd};
use crate::waiter::{Waiter, Whose};

/// The default of [`PagerBuilder::capacity`].
pub const DEFAULT_CAPACITY_BYTES: u64 = 256 << 30;
/// The smallest limit: buffers, and the working set of a small loop.
pub const LEAST_LIMIT_BYTES: u64 = 4 << 20;
/// The most of the limit that compressed memory takes, in parts of 64, without room in a spill file and with
/// it: what is in that file is mostly in the system's page cache, too.
const MOST_COMPRESSED_PARTS: [u64; 2] = [56, 1];
/// And at least, in pages: what is spilled at once, and slabs.
const LEAST_COMPRESSED_PAGES: u64 = 128;
/// Whole zspages, so that their memory is free without moving others together.
const SPILL: ReclaimPolicy = ReclaimPolicy {
    high_percent: 90,
    low_percent: 75,
    order: ReclaimOrder::Zspages,
    ..ReclaimPolicy::DEFAULT
};
/// How long the evictor rests when nothing can leave, at least and at most: as long as that has been so, as
/// what it tries to compress takes time from the program.
const REST: Duration = Duration::from_millis(50);
const MOST_REST: Duration = Duration::from_millis(400);
/// How long nothing can leave before memory counts as beyond the limit: [`MOST_WAIT`] if the spill file has
/// room, whose disk may be busy.
const EXCESS_AFTER: Duration = Duration::from_millis(150);
/// How long it leaves taking pages from the program to threads that fault.
const LATER: Duration = Duration::from_millis(5);

/// How a touch of memory that is not there reaches the pager, by userfaultfd(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trap {
    /// As a message to a thread of the pager. System calls may touch the memory, too.
    Message,
    /// As a SIGBUS, whose handler brings the page.
    Signal,
}

impl Trap {
    /// All ways, the best first.
    pub const ALL: [Trap; 2] = [Trap::Message, Trap::Signal];

    /// Returns the name used in settings and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Trap::Message => "message",
            Trap::Signal => "signal",
        }
    }

    fn open(self) -> Result<Uffd> {
        Uffd::new(if self == Trap::Message { Tells::Touches } else { Tells::Nothing })
    }

    /// Returns whether this process can use it on this machine. Errors: why not, and what would allow it.
    pub fn check(self) -> Result<()> {
        self.open().map(drop)
    }
}

/// The settings of a [`Pager`].
#[derive(Clone, Debug)]
pub struct PagerBuilder {
    limit_bytes: u64,
    pub(crate) goal: Option<Goal>,
    capacity_bytes: u64,
    algorithm: Algorithm,
    spill: Option<(PathBuf, u64)>,
    trap: Option<Trap>,
    #[cfg(feature = "designs")]
    pool_design: uzram::designs::PoolDesign,
}

impl PagerBuilder {
    /// Sets the most memory that all regions take together, compressed memory included; at least
    /// [`LEAST_LIMIT_BYTES`]. There is no default.
    #[must_use]
    pub fn limit(self, bytes: u64) -> Self {
        PagerBuilder { limit_bytes: bytes, ..self }
    }

    /// Has the pager find a lower limit: the least with which threads wait for memory for less than this
    /// share of the time, in percent of one thread's; 0.1 is a good start.
    #[must_use]
    pub fn pressure(self, goal_percent: f64) -> Self {
        PagerBuilder { goal: Some(Goal { percent: goal_percent, source: Source::open() }), ..self }
    }

    /// Sets the address space for all regions together, of which none takes memory before it is touched.
    #[must_use]
    pub fn capacity(self, bytes: u64) -> Self {
        PagerBuilder { capacity_bytes: bytes, ..self }
    }

    /// Sets the algorithm that compresses pages. By default `memory`, or lz4 where the CPU lacks the vectors
    /// for that.
    #[must_use]
    pub fn algorithm(self, algorithm: Algorithm) -> Self {
        PagerBuilder { algorithm, ..self }
    }

    /// Has pages for which there is no room in memory, compressed, go to a file of up to `bytes` bytes in the
    /// folder `path`. The file has no name, and ends with the process.
    #[must_use]
    pub fn spill(self, path: impl Into<PathBuf>, bytes: u64) -> Self {
        PagerBuilder { spill: Some((path.into(), bytes)), ..self }
    }

    /// Sets how touches are trapped. By default the best way that this process can use.
    #[must_use]
    pub fn trap(self, trap: Trap) -> Self {
        PagerBuilder { trap: Some(trap), ..self }
    }

    /// Sets the lock design of the pool that stores compressed pages: for measurements.
    #[doc(hidden)]
    #[must_use]
    #[cfg(feature = "designs")]
    pub fn pool_design(self, pool_design: uzram::designs::PoolDesign) -> Self {
        PagerBuilder { pool_design, ..self }
    }

    /// Makes the pager.
    ///
    /// # Errors
    /// `Invalid` for a limit or capacity out of range; `Permission` or `Unsupported` for a way to trap
    /// touches that this process cannot use; `NoMemory`; for the spill file, those of opening it.
    pub fn build(self) -> Result<Pager> {
        if self.limit_bytes < LEAST_LIMIT_BYTES {
            return Err(Error::invalid("a pager needs a limit of at least 4 MiB").with_setting("limit"));
        }
        if self.goal.as_ref().is_some_and(|goal| !(goal.percent > 0.0 && goal.percent <= 100.0)) {
            let what = "a goal for pressure is a percentage above 0, up to 100";
            return Err(Error::invalid(what).with_setting("pressure"));
        }
        let open = |trap: Trap| trap.open().map(|uffd| (trap, Arc::new(uffd)));
        let (trap, uffd) = match self.trap {
            Some(trap) => open(trap),
            None => open(Trap::Message).or_else(|_| open(Trap::Signal)),
        }?;
        // All threads are started below.
        let _blocked = Blocked::new();
        let core = self.core(Arc::clone(&uffd))?;
        let (mut waiter, mut handler) = (None, None);
        if trap == Trap::Message {
            let mut serves = Waiter::new(Arc::clone(&core), uffd, Whose::Own);
            waiter = Some(Thread::start("uzram-pager", &core, move || serves.serve())?);
        } else {
            handler = Some(sigbus::register(Arc::clone(&core))?);
        }
        let threads = Threads::start(&core, self.goal)?;
        let threads = ManuallyDrop::new((waiter, handler, threads));
        Ok(Pager(Arc::new(Inner { core, threads, trap, process: std::process::id() })))
    }

    /// Builds the core, whose store keeps what leaves memory.
    pub(crate) fn core(&self, uffd: Arc<Uffd>) -> Result<Arc<Core>> {
        let limit_pages = self.limit_bytes >> PAGE_SHIFT;
        let [without_room, with_room] = MOST_COMPRESSED_PARTS.map(|parts| limit_pages * parts / 64);
        let most_compressed = [without_room, with_room.max(LEAST_COMPRESSED_PAGES)];
        let spill = self.spill.as_ref().map(|(dir, bytes)| Spill::new(dir, *bytes)).transpose()?;
        let mut store = StoreBuilder::new("pager", bytes_to_pages(self.capacity_bytes))
            .algorithm(self.algorithm.clone())
            .lru(false)
            .limit_pages(most_compressed[usize::from(spill.is_some())]);
        #[cfg(feature = "designs")]
        {
            store = store.pool_design(self.pool_design);
        }
        if let Some(spill) = &spill {
            let spill = Backing::Blocks(Arc::<Spill>::clone(spill) as Arc<dyn Blocks>);
            store = store.backing(BackingOptions::packed(spill)).policy(SPILL);
        }
        // Errors name the pager's own settings.
        let rename = |error: Error| match error.setting() {
            Some("mem_limit") => Error::new(error.kind(), error.to_string()).with_setting("limit"),
            Some("disksize") => Error::new(error.kind(), error.to_string()).with_setting("capacity"),
            _ => error,
        };
        let store = Arc::new(store.build().map_err(rename)?);
        Core::new(uffd, store, spill, limit_pages, most_compressed).map(Arc::new)
    }
}

/// Memory of this process that is compressed when it is cold.
///
/// ```
/// use uzram_pager::Pager;
///
/// let pager = Pager::builder().limit(64 << 20).build()?;
/// let mut region = pager.map(256 << 20)?;
/// region[5000] = 7;
/// region.pageout(..)?;
/// assert_eq!(region[5000], 7);
/// # Ok::<(), uzram::Error>(())
/// ```
#[derive(Clone)]
pub struct Pager(Arc<Inner>);

struct Inner {
    core: Arc<Core>,
    /// Dropped in this order, by the process that made them alone: a child has neither them nor their memory.
    threads: ManuallyDrop<(Option<Thread>, Option<Registered>, Threads)>,
    trap: Trap,
    process: u32,
}

/// The threads that evict, and write to the spill file.
pub(crate) struct Threads {
    // Dropped in this order.
    evictor: Thread,
    _policy: PolicyThread,
    _spill: Option<SpillThread>,
}

impl Threads {
    /// Errors: `NoMemory`.
    pub(crate) fn start(core: &Arc<Core>, goal: Option<Goal>) -> Result<Threads> {
        let spill = core.spill.as_ref().map(Spill::start_thread).transpose()?;
        let policy = PolicyThread::start("pager", &core.store)?;
        let theirs = Arc::clone(core);
        let evictor = Thread::start("uzram-pager-evict", core, move || evict(&theirs, goal))?;
        Ok(Threads { evictor, _policy: policy, _spill: spill })
    }

    /// Returns whether the thread that evicts has not ended.
    pub(crate) fn evicts(&self) -> bool {
        self.evictor.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

/// Evicts, and frees what was unmapped, until the pager ends.
fn evict(core: &Core, goal: Option<Goal>) {
    let (most, least) = (core.room.limit_pages.get(), LEAST_LIMIT_BYTES >> PAGE_SHIFT);
    let mut governor = goal.map(|goal| Governor::new(goal, most, least));
    let (mut has_rested, mut stuck) = (false, None::<Instant>);
    loop {
        let number = core.room.evictor.number();
        if core.ends.load(Ordering::Relaxed) {
            return;
        }
        core.clean();
        if let Some(governor) = &mut governor {
            governor.look(&core.room, core.stats().fault_us);
        }
        core.share_memory();
        let next = core.make_room(has_rested);
        // The most is noted.
        core.figures();
        let is_excess = next == Next::Stuck && core.room.is_exceeded();
        stuck = is_excess.then(|| stuck.unwrap_or_else(Instant::now));
        let so_long = stuck.map_or(Duration::ZERO, |since| since.elapsed());
        let is_long = so_long >= EXCESS_AFTER && (so_long >= MOST_WAIT || !core.waits_for_spill());
        core.is_exceeded.store(is_long, Ordering::Relaxed);
        has_rested = next == Next::Later;
        let rest = match next {
            Next::Later => Some(LATER),
            Next::Stuck => Some(so_long.clamp(REST, MOST_REST)),
            Next::Enough => governor.is_some().then_some(pressure::INTERVAL),
        };
        core.room.evictor.wait(number, rest);
    }
}

/// A thread that serves until the core ends, which dropping this has it do.
struct Thread {
    core: Arc<Core>,
    thread: Option<JoinHandle<()>>,
}

impl Thread {
    fn start(name: &str, core: &Arc<Core>, run: impl FnOnce() + Send + 'static) -> Result<Thread> {
        Ok(Thread { core: Arc::clone(core), thread: Some(spawn(name, run)?) })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.core.ends.store(true, Ordering::Relaxed);
        self.core.room.evictor.ring();
        self.core.room.wake_reader();
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl Pager {
    /// Returns a builder.
    pub fn builder() -> PagerBuilder {
        PagerBuilder {
            limit_bytes: 0,
            goal: None,
            capacity_bytes: DEFAULT_CAPACITY_BYTES,
            algorithm: Kind::for_memory().into(),
            spill: None,
            trap: None,
            #[cfg(feature = "designs")]
            pool_design: uzram::designs::PoolDesign::default(),
        }
    }

    /// Returns how touches are trapped.
    pub fn trap(&self) -> Trap {
        self.0.trap
    }

    /// Returns what the pager holds, and what it has done.
    pub fn stats(&self) -> PagerStats {
        let _blocked = Blocked::new();
        self.0.core.stats()
    }

    /// Maps memory of `len` bytes, all zeros.
    ///
    /// # Errors
    /// `Invalid` for no bytes; `NoSpace` beyond the capacity; `NoMemory`; `Busy` in a child of the process
    /// that made the pager.
    pub fn map(&self, len: usize) -> Result<Region> {
        if len == 0 {
            return Err(Error::invalid("a region has at least one byte"));
        }
        self.0.check_process()?;
        let _blocked = Blocked::new();
        let part = self.0.core.map_new(len)?;
        Ok(Region { len, part, pins: Mutex::default(), pager: self.clone() })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.check_process().is_ok() {
            // SAFETY: not used any more, as this is being dropped.
            unsafe { ManuallyDrop::drop(&mut self.threads) };
        }
    }
}

impl Inner {
    fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Busy, "a child of the process that made the pager has none of its memory"))
    }
}

/// Memory of a [`Pager`]: plain bytes, of which those that are not used are compressed. Unmapped when it is
/// dropped. What takes a range of bytes fails with `OutOfRange`, and with `Busy` in a child process.
#[derive(Debug)]
pub struct Region {
    len: usize,
    part: Part,
    /// Pinned pages; a page may be pinned several times.
    pins: Mutex<Vec<Part>>,
    pager: Pager,
}

impl Region {
    /// Compresses the pages that lie in a range of bytes as a whole, and gives their memory back. Those that
    /// are in use by the kernel, pinned, or for which there is no room, stay.
    pub fn pageout(&self, bytes: impl RangeBounds<usize>) -> Result<()> {
        let part = self.inner_pages(bytes)?;
        let _blocked = Blocked::new();
        self.pager.0.core.page_out(part);
        Ok(())
    }

    /// Brings the pages in which a range of bytes lies, as long as there is room below the limit.
    pub fn prefetch(&self, bytes: impl RangeBounds<usize>) -> Result<()> {
        let part = self.outer_pages(bytes)?;
        let _blocked = Blocked::new();
        self.pager.0.core.prefetch(part);
        Ok(())
    }

    /// Says in what order the pages in which a range of bytes lies are going to be touched.
    pub fn advise(&self, bytes: impl RangeBounds<usize>, access: Access) -> Result<()> {
        let part = self.outer_pages(bytes)?;
        self.pager.0.core.advise(part, access);
        Ok(())
    }

    /// Fills a range of bytes with zeros; whole pages of it take no memory then.
    pub fn discard(&mut self, bytes: impl RangeBounds<usize>) -> Result<()> {
        let range = self.range(bytes)?;
        let part = self.inner_pages(range.clone())?;
        let first = if part.pages > 0 { part.address - self.part.address } else { range.end };
        let end = (first + part.bytes()).min(self.len);
        self[range.start..first].fill(0);
        self[end..range.end.max(end)].fill(0);
        let _blocked = Blocked::new();
        self.pager.0.core.discard(part);
        Ok(())
    }

    /// Keeps the pages in which a range of bytes lies in memory until the result is dropped: for memory that
    /// system calls access, where touches are signals, and for asynchronous transfers. They count
    /// against the limit.
    ///
    /// # Errors
    /// Also `Corrupt` if a page cannot be read.
    pub fn pin(&self, bytes: impl RangeBounds<usize>) -> Result<Pin<'_>> {
        let part = self.outer_pages(bytes)?;
        lock(&self.pins).push(part);
        let pin = Pin { region: self, part };
        let _blocked = Blocked::new();
        if self.pager.0.core.pin(part) {
            return Ok(pin);
        }
        Err(Error::new(ErrorKind::Corrupt, "a page cannot be read"))
    }

    /// Returns the address of the first byte. Other threads may access the memory through it, by Rust's rules
    /// for raw pointers, until the region is dropped.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.part.address)
    }

    fn range(&self, bytes: impl RangeBounds<usize>) -> Result<Range<usize>> {
        self.pager.0.check_process()?;
        let start = match bytes.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match bytes.end_bound() {
            Bound::Included(last) => last.saturating_add(1),
            Bound::Excluded(end) => *end,
            Bound::Unbounded => self.len,
        };
        if start > end || end > self.len {
            return Err(Error::new(ErrorKind::OutOfRange, "a range beyond the end of the region"));
        }
        Ok(start..end)
    }

    /// Returns the pages that lie in a range as a whole, without what is behind the region's last byte.
    fn inner_pages(&self, bytes: impl RangeBounds<usize>) -> Result<Part> {
        let range = self.range(bytes)?;
        let first = range.start.div_ceil(PAGE_SIZE);
        let end = if range.end == self.len { self.part.pages } else { range.end / PAGE_SIZE };
        Ok(self.part.from(first.min(end), end.saturating_sub(first)))
    }

    /// Returns the pages in which a range lies.
    fn outer_pages(&self, bytes: impl RangeBounds<usize>) -> Result<Part> {
        let range = self.range(bytes)?;
        let first = range.start / PAGE_SIZE;
        let pages = if range.is_empty() { 0 } else { range.end.div_ceil(PAGE_SIZE) - first };
        Ok(self.part.from(first, pages))
    }
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the region has these bytes for as long as it lives. They come when they are touched.
        unsafe { std::slice::from_raw_parts(self.as_mut_ptr(), self.len) }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.pager.0.check_process().is_ok() {
            let _blocked = Blocked::new();
            self.pager.0.core.unmap(self.part);
        }
    }
}

/// Memory that stays until this is dropped: see [`Region::pin`].
pub struct Pin<'a> {
    region: &'a Region,
    part: Part,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        if self.region.pager.0.check_process().is_err() {
            return;
        }
        let mut pins = lock(&self.region.pins);
        if let Some(at) = pins.iter().position(|part| *part == self.part) {
            pins.swap_remove(at);
        }
        let is_pinned = |page| pins.iter().any(|part| part.numbers().contains(&page));
        self.region.pager.0.core.unpin(self.part, is_pinned);
    }
}

impl std::fmt::Debug for Pager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let limit_bytes = pages_to_bytes(self.stats().limit_pages);
        write!(f, "Pager({}, {limit_bytes} bytes)", self.0.trap.name())
    }
}
