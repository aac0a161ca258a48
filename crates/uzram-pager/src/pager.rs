//! A pager and its regions, as programs use them.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Range, RangeBounds};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use uzram::backing::{Backing, Blocks};
use uzram::codec::{Algorithm, Kind};
use uzram::store::{BackingOptions, PolicyThread, Store, StoreBuilder};
use uzram::sync::Arc;
use uzram::units::{PAGE_SHIFT, PAGE_SIZE, bytes_to_pages, pages_to_bytes};
use uzram::{Error, ErrorKind, Result};

use crate::areas::{Areas, Run};
use crate::core::{Core, Next, lock, spawn};
use crate::pressure::{self, Governor};
use crate::publisher::Publisher;
use crate::signals::Blocked;
use crate::spill::{Spill, SpillThread};
use crate::state::Access;
use crate::stats::PagerStats;
use crate::trap::guard::Guard;
use crate::trap::sigsegv::{self, Handler, Registered};
use crate::trap::uffd::Uffd;
use crate::trap::{Children, Space, Trap};
use crate::waiters::{MOST_THREADS, Waiters};

/// The default of [`PagerBuilder::capacity`].
pub const DEFAULT_CAPACITY_BYTES: u64 = 256 << 30;
/// The smallest limit: buffers, and the working set of a small loop.
pub const LEAST_LIMIT_BYTES: u64 = 4 << 20;
/// The most of the limit that compressed memory takes, in eighths, without room in a spill file and with it.
/// What it takes pages that are in use do not have: with a quarter, node in half of its memory had a third
/// more faults. zswap takes a fifth of memory by default.
const MOST_COMPRESSED_EIGHTHS: [u64; 2] = [7, 1];
/// How long the evictor rests when nothing can leave; and at most, as it rests twice as long each time once
/// memory counts as beyond the limit: what it tries to compress takes time from the program.
const REST: Duration = Duration::from_millis(50);
const MOST_REST: Duration = Duration::from_millis(400);
/// How often it finds so before memory counts as beyond the limit: what is being written to the spill file
/// may take as long.
const EXCESS_AFTER: u32 = 3;
/// How long it leaves taking pages from the program to threads that fault.
const LATER: Duration = Duration::from_millis(5);

/// How a touch of memory that is not there is trapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrapKind {
    /// userfaultfd(2).
    Uffd,
    /// Guard pages and SIGSEGV.
    Guard,
}

impl TrapKind {
    /// All ways, the best first.
    pub const ALL: [TrapKind; 2] = [TrapKind::Uffd, TrapKind::Guard];

    /// Returns the name used in settings and messages.
    pub const fn name(self) -> &'static str {
        match self {
            TrapKind::Uffd => "uffd",
            TrapKind::Guard => "guard",
        }
    }

    /// Returns the best way that this process can use on this machine. Errors: why there is none, and what
    /// would allow each.
    fn of_this_process() -> Result<TrapKind> {
        let Err(no_uffd) = TrapKind::Uffd.check() else { return Ok(TrapKind::Uffd) };
        if TrapKind::Guard.check().is_ok() {
            return Ok(TrapKind::Guard);
        }
        let what = "touches of memory can be trapped neither by guard pages, which takes Linux 6.15, nor by userfaultfd, which takes \
                    Linux 6.8 and root, CAP_SYS_PTRACE, access to /dev/userfaultfd, or the sysctl vm.unprivileged_userfaultfd=1";
        Err(Error::new(no_uffd.kind(), what).with_setting("trap"))
    }

    /// Returns whether this process can use it on this machine.
    ///
    /// # Errors
    /// Why not, and what would allow it.
    pub fn check(self) -> Result<()> {
        match self {
            TrapKind::Uffd => Uffd::new(Arc::new(Space::new(1)?), Children::Exclude).map(drop),
            TrapKind::Guard => Guard::check(),
        }
    }
}

/// The settings of a [`Pager`].
#[derive(Clone, Debug)]
pub struct PagerBuilder {
    limit_bytes: u64,
    goal_percent: Option<f64>,
    capacity_bytes: u64,
    algorithm: Algorithm,
    spill: Option<(PathBuf, u64)>,
    trap: Option<TrapKind>,
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
    /// share of the time, in percent of one thread's; 0.1 is a good start. The kernel's own pressure counts
    /// too.
    #[must_use]
    pub fn pressure(self, goal_percent: f64) -> Self {
        PagerBuilder { goal_percent: Some(goal_percent), ..self }
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
    pub fn trap(self, trap: TrapKind) -> Self {
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
        if self.goal_percent.is_some_and(|goal| !(goal > 0.0 && goal <= 100.0)) {
            let what = "a goal for pressure is a percentage above 0, up to 100";
            return Err(Error::invalid(what).with_setting("pressure"));
        }
        let trap = match self.trap {
            Some(trap) => trap,
            None => TrapKind::of_this_process()?,
        };
        // All threads are started below.
        let _blocked = Blocked::new();
        let pages = bytes_to_pages(self.capacity_bytes);
        let any = match trap {
            TrapKind::Uffd => AnyPager::Uffd(OfUffd::new(&self, pages)?),
            TrapKind::Guard => {
                trap.check()?;
                AnyPager::Guard(OfGuard::new(&self, pages)?)
            }
        };
        Ok(Pager(Arc::new(Inner { any: ManuallyDrop::new(any), trap, process: std::process::id() })))
    }

    /// Builds the core, whose store keeps what leaves memory.
    pub(crate) fn core<T: Trap>(
        &self,
        trap: T,
        areas: Arc<Mutex<Areas>>,
        pages: u64,
    ) -> Result<(Arc<Core<T>>, Writers)> {
        let limit_pages = self.limit_bytes >> PAGE_SHIFT;
        let most_compressed = MOST_COMPRESSED_EIGHTHS.map(|eighths| limit_pages * eighths / 8);
        let mut store = StoreBuilder::new("pager", pages)
            .algorithm(self.algorithm.clone())
            .limit_pages(most_compressed[usize::from(self.spill.is_some())]);
        #[cfg(feature = "designs")]
        {
            store = store.pool_design(self.pool_design);
        }
        if self.spill.is_none() {
            // It says which pages go to the file.
            store = store.lru(false);
        }
        let spill = self.spill.as_ref().map(|(dir, bytes)| Spill::new(dir, *bytes)).transpose()?;
        if let Some(spill) = &spill {
            let spill = Backing::Blocks(Arc::<Spill>::clone(spill) as Arc<dyn Blocks>);
            store = store.backing(BackingOptions::packed(spill));
        }
        let store = Arc::new(store.build().map_err(rename)?);
        let writers = Writers::start(&store, spill)?;
        let most_compressed = self.spill.is_some().then_some(most_compressed);
        let core = Core::new(trap, areas, store, limit_pages, most_compressed)?;
        Ok((Arc::new(core), writers))
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    pub(crate) fn goal_percent(&self) -> Option<f64> {
        self.goal_percent
    }
}

/// Returns an error of the store with the pager's own settings.
fn rename(error: Error) -> Error {
    match error.setting() {
        Some("mem_limit") => Error::new(error.kind(), error.to_string()).with_setting("limit"),
        Some("disksize") => Error::new(error.kind(), error.to_string()).with_setting("capacity"),
        _ => error,
    }
}

/// The threads that write to the spill file.
pub(crate) struct Writers {
    // Dropped in this order.
    _policy: PolicyThread,
    _thread: Option<SpillThread>,
    spill: Option<Arc<Spill>>,
}

impl Writers {
    /// Starts them. Errors: `NoMemory`.
    pub(crate) fn start(store: &Arc<Store>, spill: Option<Arc<Spill>>) -> Result<Writers> {
        let thread = spill.as_ref().map(Spill::start_thread).transpose()?;
        Ok(Writers { _policy: PolicyThread::start("pager", store)?, _thread: thread, spill })
    }

    pub(crate) fn spill(&self) -> Option<Arc<Spill>> {
        self.spill.clone()
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
    /// Dropped by the process that made it alone: a child has neither its threads nor its memory.
    any: ManuallyDrop<AnyPager>,
    trap: TrapKind,
    /// The process that made it. A child has none of its memory.
    process: u32,
}

/// A pager by the way it traps touches.
enum AnyPager {
    Uffd(OfUffd),
    Guard(OfGuard),
}

/// Calls a method of the core, whichever it is.
macro_rules! with_core {
    ($any:expr, $core:ident => $call:expr) => {
        match &*$any {
            AnyPager::Uffd(OfUffd { core: $core, .. }) => $call,
            AnyPager::Guard(OfGuard { core: $core, .. }) => $call,
        }
    };
}

/// The thread that evicts, and frees what was unmapped.
pub(crate) struct Evictor<T: Trap> {
    core: Arc<Core<T>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Trap> Evictor<T> {
    pub(crate) fn start(core: &Arc<Core<T>>, goal_percent: Option<f64>) -> Result<Self> {
        let theirs = Arc::clone(core);
        let (most, least) = (core.room.limit_pages(), LEAST_LIMIT_BYTES >> PAGE_SHIFT);
        let mut governor = goal_percent.map(|goal_percent| Governor::new(goal_percent, most, least));
        let thread = spawn("uzram-pager-evict", move || {
            let (mut has_rested, mut stuck) = (false, 0);
            let mut publisher = Publisher::default();
            while !theirs.ends.load(Ordering::Relaxed) {
                let evicting = lock(&theirs.evicting);
                theirs.clean();
                if let Some(governor) = &mut governor {
                    governor.look(&theirs.room, &theirs.store, theirs.stats().fault_us);
                }
                theirs.share_memory();
                let next = theirs.make_room(has_rested);
                theirs.most_stored();
                // With the lock: it takes others of the store, which must be free when the process forks.
                let until_look = publisher.look(&theirs.publishing, || theirs.memory_stats());
                drop(evicting);
                let is_excess = next == Next::Stuck && theirs.room.is_exceeded(&theirs.store);
                stuck = if is_excess { stuck + 1 } else { 0 };
                if let Some(on_excess) = theirs.on_excess.get().filter(|_| stuck == EXCESS_AFTER) {
                    on_excess();
                }
                has_rested = next == Next::Later;
                let rest = match (next, &governor) {
                    (Next::Later, _) => Some(LATER),
                    (Next::Stuck, _) => {
                        let doublings = stuck.saturating_sub(EXCESS_AFTER).min(8);
                        Some(REST.saturating_mul(1 << doublings).min(MOST_REST))
                    }
                    (Next::Enough, Some(_)) => Some(pressure::INTERVAL),
                    (Next::Enough, None) => None,
                };
                theirs.room.rest(rest.into_iter().chain(until_look).min());
            }
        })?;
        Ok(Evictor { core: Arc::clone(core), thread: Some(thread) })
    }
}

impl<T: Trap> Drop for Evictor<T> {
    fn drop(&mut self) {
        self.core.ends.store(true, Ordering::Relaxed);
        self.core.room.wake_evictor();
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

/// With userfaultfd: threads that wait for touches.
struct OfUffd {
    // Dropped in this order, after the threads.
    _evictor: Evictor<Uffd>,
    _writers: Writers,
    core: Arc<Core<Uffd>>,
    waiters: Arc<Waiters>,
}

impl OfUffd {
    fn new(builder: &PagerBuilder, pages: u64) -> Result<Self> {
        let trap = Uffd::new(Arc::new(Space::new(pages)?), Children::Exclude)?;
        let areas = Arc::new(Mutex::new(Areas::new(pages)));
        let (core, writers) = builder.core(trap, areas, pages)?;
        let evictor = Evictor::start(&core, builder.goal_percent)?;
        // Nothing that can fail comes after: a message ends its threads.
        let waiters = Waiters::start(&core, 1, MOST_THREADS)?;
        Ok(OfUffd { _evictor: evictor, _writers: writers, core, waiters })
    }
}

impl Drop for OfUffd {
    fn drop(&mut self) {
        self.waiters.end();
    }
}

/// With SIGSEGV.
struct OfGuard {
    // Dropped in this order.
    _registered: Registered,
    _evictor: Evictor<Guard>,
    _writers: Writers,
    core: Arc<Core<Guard>>,
}

impl OfGuard {
    fn new(builder: &PagerBuilder, pages: u64) -> Result<Self> {
        let areas = Arc::new(Mutex::new(Areas::new(pages)));
        let (core, writers) = builder.core(Guard::new(pages)?, areas, pages)?;
        let (start, len_bytes) = (core.trap.space().start(), core.trap.space().len_bytes());
        let handler = Box::new(Touches(Arc::clone(&core)));
        Ok(OfGuard {
            _registered: sigsegv::register(start, len_bytes, handler)?,
            _evictor: Evictor::start(&core, builder.goal_percent)?,
            _writers: writers,
            core,
        })
    }
}

/// What the handler calls.
struct Touches(Arc<Core<Guard>>);

impl Handler for Touches {
    fn touched(&self, address: usize, writes: bool) -> bool {
        let Touches(core) = self;
        core.trap.space().page_at(address).is_some_and(|page| core.fault(page, writes, true))
    }
}

impl Pager {
    /// Returns a builder.
    pub fn builder() -> PagerBuilder {
        PagerBuilder {
            limit_bytes: 0,
            goal_percent: None,
            capacity_bytes: DEFAULT_CAPACITY_BYTES,
            algorithm: Kind::for_memory().into(),
            spill: None,
            trap: None,
            #[cfg(feature = "designs")]
            pool_design: uzram::designs::PoolDesign::default(),
        }
    }

    /// Returns how touches are trapped.
    pub fn trap(&self) -> TrapKind {
        self.0.trap
    }

    /// Returns what the pager holds, and what it has done.
    pub fn stats(&self) -> PagerStats {
        with_core!(self.0.any, core => core.stats())
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
        let run = with_core!(self.0.any, core => core.map(len))?;
        Ok(Region {
            start: with_core!(self.0.any, core => core.trap.space().address(run.first)),
            len,
            run,
            pins: Mutex::default(),
            pager: self.clone(),
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.check_process().is_ok() {
            // SAFETY: not used any more, as this is being dropped.
            unsafe { ManuallyDrop::drop(&mut self.any) };
        }
    }
}

impl Inner {
    /// # Errors
    /// `Busy` in a child of the process that made the pager.
    fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Busy, "a child of the process that made the pager has none of its memory"))
    }
}

/// Memory of a [`Pager`]: plain bytes, of which those that are not used are compressed. Unmapped when it is
/// dropped.
pub struct Region {
    start: *mut u8,
    len: usize,
    run: Run,
    /// Pinned pages; a page may be pinned several times.
    pins: Mutex<Vec<Run>>,
    pager: Pager,
}

// SAFETY: the memory belongs to no thread, and is accessed by the rules of references to the region.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Compresses the pages that lie in a range of bytes as a whole, and gives their memory back. Those that
    /// are in use by the kernel, pinned, or for which there is no room, stay.
    ///
    /// # Errors
    /// `OutOfRange`; `Busy` in a child process.
    pub fn pageout(&self, bytes: impl RangeBounds<usize>) -> Result<()> {
        let run = self.inner_pages(bytes)?;
        let _blocked = Blocked::new();
        with_core!(self.pager.0.any, core => core.page_out(run));
        Ok(())
    }

    /// Brings the pages in which a range of bytes lies, as long as there is room below the limit.
    ///
    /// # Errors
    /// As [`Region::pageout`].
    pub fn prefetch(&self, bytes: impl RangeBounds<usize>) -> Result<()> {
        let run = self.outer_pages(bytes)?;
        let _blocked = Blocked::new();
        with_core!(self.pager.0.any, core => core.prefetch(run));
        Ok(())
    }

    /// Says in what order the pages in which a range of bytes lies are going to be touched.
    ///
    /// # Errors
    /// As [`Region::pageout`].
    pub fn advise(&self, bytes: impl RangeBounds<usize>, access: Access) -> Result<()> {
        let run = self.outer_pages(bytes)?;
        with_core!(self.pager.0.any, core => core.advise(run, access));
        Ok(())
    }

    /// Fills a range of bytes with zeros; whole pages of it take no memory then.
    ///
    /// # Errors
    /// As [`Region::pageout`].
    pub fn discard(&mut self, bytes: impl RangeBounds<usize>) -> Result<()> {
        let range = self.range(bytes)?;
        let run = self.inner_pages(range.clone())?;
        let first = (run.first - self.run.first) as usize * PAGE_SIZE;
        if run.pages == 0 {
            self[range].fill(0);
            return Ok(());
        }
        let end = (first + run.bytes()).min(self.len);
        self[range.start..first].fill(0);
        self[end..range.end.max(end)].fill(0);
        let _blocked = Blocked::new();
        with_core!(self.pager.0.any, core => core.discard(run));
        Ok(())
    }

    /// Keeps the pages in which a range of bytes lies in memory until the result is dropped: for memory that
    /// system calls access, where touches are trapped by SIGSEGV, and for asynchronous transfers. They count
    /// against the limit.
    ///
    /// # Errors
    /// As [`Region::pageout`]; `Corrupt` if a page cannot be read.
    pub fn pin(&self, bytes: impl RangeBounds<usize>) -> Result<Pin<'_>> {
        let run = self.outer_pages(bytes)?;
        lock(&self.pins).push(run);
        let pin = Pin { region: self, run };
        let _blocked = Blocked::new();
        if with_core!(self.pager.0.any, core => core.pin(run)) {
            return Ok(pin);
        }
        Err(Error::new(ErrorKind::Corrupt, "a page cannot be read"))
    }

    /// Returns the address of the first byte. Other threads may access the memory through it, by Rust's rules
    /// for raw pointers, until the region is dropped.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Checks a range of bytes.
    fn range(&self, bytes: impl RangeBounds<usize>) -> Result<Range<usize>> {
        use std::ops::Bound;
        self.pager.0.check_process()?;
        let start = match bytes.start_bound() {
            Bound::Included(start) => Some(*start),
            Bound::Excluded(start) => start.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let end = match bytes.end_bound() {
            Bound::Included(end) => end.checked_add(1),
            Bound::Excluded(end) => Some(*end),
            Bound::Unbounded => Some(self.len),
        };
        match (start, end) {
            (Some(start), Some(end)) if start <= end && end <= self.len => Ok(start..end),
            _ => Err(Error::new(ErrorKind::OutOfRange, "a range beyond the end of the region")),
        }
    }

    /// Returns the pages that lie in a range as a whole; what is behind the last byte of the region counts as
    /// in it.
    fn inner_pages(&self, bytes: impl RangeBounds<usize>) -> Result<Run> {
        let range = self.range(bytes)?;
        let first = range.start.next_multiple_of(PAGE_SIZE);
        let end = if range.end == self.len { self.run.bytes() } else { range.end / PAGE_SIZE * PAGE_SIZE };
        Ok(self.run_of(first.min(end)..end))
    }

    /// Returns the pages in which a range lies.
    fn outer_pages(&self, bytes: impl RangeBounds<usize>) -> Result<Run> {
        let range = self.range(bytes)?;
        if range.is_empty() {
            return Ok(self.run_of(0..0));
        }
        Ok(self.run_of(range.start / PAGE_SIZE * PAGE_SIZE..range.end.next_multiple_of(PAGE_SIZE)))
    }

    fn run_of(&self, bytes: Range<usize>) -> Run {
        Run { first: self.run.first + (bytes.start >> PAGE_SHIFT) as u64, pages: bytes.len() >> PAGE_SHIFT }
    }
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the region has these bytes for as long as it lives. They come when they are touched.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.pager.0.check_process().is_err() {
            return;
        }
        let _blocked = Blocked::new();
        with_core!(self.pager.0.any, core => core.unmap(self.run));
    }
}

/// Memory that stays until this is dropped: see [`Region::pin`].
pub struct Pin<'a> {
    region: &'a Region,
    run: Run,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        if self.region.pager.0.check_process().is_err() {
            return;
        }
        let mut pins = lock(&self.region.pins);
        if let Some(at) = pins.iter().position(|run| *run == self.run) {
            pins.swap_remove(at);
        }
        let is_pinned = |page| pins.iter().any(|run| run.numbers().contains(&page));
        with_core!(self.region.pager.0.any, core => core.unpin(self.run, is_pinned));
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({} bytes)", self.len)
    }
}

impl std::fmt::Debug for Pager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stats = self.stats();
        write!(f, "Pager({}, {} bytes)", self.0.trap.name(), pages_to_bytes(stats.limit_pages))
    }
}
