//! The memory that an allocator takes for each byte stored, when all objects are stored, and after most or
//! half of them, drawn at random, were freed and the allocator was asked to return memory.
//!
//! Stored are objects of one size, nine of ten of which are freed, or compressed pages as blobs of their
//! exact length, of which half are freed: those of the corpus `mixed`, compressed with lz4; one that does not
//! become smaller is stored as it is. uzram has slab caches for objects, and its pool for blobs, which checks
//! them and keeps 8 bytes with each. The program's names of objects are in arrays that do not count.
//!
//! Each allocator is measured in its own child process, so that none disturbs another: anonymous memory now,
//! minus anonymous memory before the allocator was made, by the kernel's count. Pages that the kernel may
//! reclaim at any time (`MADV_FREE`) do not count.

use std::ops::Range;
use std::process::Command;
use std::time::Duration;

use uzram::codec::Algorithm;
use uzram::mem::Arena;
use uzram::slab::{Plain, Sheaves};
use uzram::sync::Arc;
use uzram::units::PAGE_SIZE;
use uzram::zsmalloc::{Handle, Pinned, Pool};
use uzram::{Error, ErrorKind, Result};
use uzram_bench::engine::Packed;
use uzram_bench::harness::corpus::{self, Kind};
use uzram_bench::harness::process::run_to_end;
use uzram_bench::harness::{Report, command, proc_bytes};

use crate::heap::{HARDENED, Heap, PLAIN, SIZES_BYTES, Slab};
use crate::measured::{damaged, names};
use crate::peers::{self, MIMALLOC, SYSTEM};

/// The option that selects the allocator in a child.
pub const CHILD_OPTION: &str = "--memory-of";
const PATIENCE: Duration = Duration::from_secs(600);
/// The seed for contents, and for choosing what is freed.
const SEED: u64 = 1;

/// Measures every allocator of this build with so many objects and compressed pages.
pub fn measure_all(objects: usize, pages: usize, report: &mut Report) -> Result<()> {
    for (size_bytes, column) in SIZES_BYTES.into_iter().zip(["64 bytes", "256 bytes"]) {
        let args = ["--size", &size_bytes.to_string(), "--objects", &objects.to_string()];
        compare("bytes in memory / in use", [None, Some(column)], &names(), &args, report)?;
    }
    let allocators = [&[PLAIN], peers::NAMES].concat();
    let columns = ["all stored", "half freed"].map(Some);
    let args = ["--pages", &pages.to_string()];
    compare("compressed pages: bytes in memory / stored", columns, &allocators, &args, report)
}

/// Measures allocators, each in a child, and adds a column for each state that has a name.
fn compare(
    table: &str,
    columns: [Option<&'static str>; 2],
    allocators: &[&str],
    args: &[&str],
    report: &mut Report,
) -> Result<()> {
    let mut add = |row: &str, figures: [f64; 2]| {
        for (column, figure) in columns.into_iter().zip(figures) {
            column.into_iter().for_each(|column| report.row(table, row, &[(column, figure)]));
        }
    };
    let (mut ours, mut best) = ([f64::NAN; 2], [f64::INFINITY; 2]);
    for allocator in allocators {
        let mut child = Command::new(command::this_program()?);
        let printed = run_to_end(child.args([CHILD_OPTION, allocator]).args(args), PATIENCE)?;
        let numbers: Vec<f64> = printed.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [all, rest] = numbers[..] else {
            let what = format!("the memory of {allocator}: the child printed '{}'", printed.trim());
            return Err(Error::new(ErrorKind::Io, what));
        };
        match *allocator {
            PLAIN => ours = [all, rest],
            HARDENED => {}
            _ => best = [best[0].min(all), best[1].min(rest)],
        }
        add(allocator, [all, rest]);
    }
    add("uzram / the best other", [ours[0] / best[0], ours[1] / best[1]]);
    Ok(())
}

/// Run by a child: returns the bytes in memory for each byte stored, of so many objects of a size or, without
/// one, of so many compressed pages.
pub fn measure(allocator: &str, size: Option<usize>, objects: usize, pages: usize) -> Result<[f64; 2]> {
    let contents = match size {
        Some(size_bytes) => Contents::objects(size_bytes, objects),
        // In a thread, to which the C library gives memory of its own: blobs in what compressing has freed
        // would not grow the process.
        None => std::thread::spawn(move || Contents::compressed(pages))
            .join()
            .map_err(|_| Error::new(ErrorKind::Io, "compressing the pages failed"))??,
    };
    let max_objects = contents.spans.len() as u64;
    match (allocator, size) {
        (PLAIN, Some(size)) => resident(|| Slab::<Plain<Sheaves>>::new(size, max_objects), &contents),
        (HARDENED, Some(size)) => resident(|| Slab::<Sheaves>::new(size, max_objects), &contents),
        (PLAIN, None) => {
            let handles = (0..contents.spans.len()).map(|_| None).collect();
            resident(|| UzramPool::new(&contents, handles), &contents)
        }
        (SYSTEM, _) => resident(|| Ok(peers::System), &contents),
        (MIMALLOC, _) => resident(|| Ok(peers::Mimalloc), &contents),
        #[cfg(feature = "jemalloc")]
        (peers::JEMALLOC, _) => resident(|| Ok(peers::Jemalloc), &contents),
        #[cfg(feature = "snmalloc")]
        (peers::SNMALLOC, _) => resident(|| Ok(peers::Snmalloc), &contents),
        _ => {
            let what = format!("there is no allocator '{allocator}'");
            Err(Error::invalid(what).with_setting(CHILD_OPTION))
        }
    }
}

struct Contents {
    bytes: Vec<u8>,
    spans: Vec<Range<usize>>,
    /// One object in so many stays when some are freed.
    kept_one_in: usize,
}

impl Contents {
    fn objects(size_bytes: usize, count: usize) -> Contents {
        const NOISE_BYTES: usize = 1 << 16;
        let mut random = fastrand::Rng::with_seed(SEED);
        let bytes = (0..NOISE_BYTES + size_bytes).map(|_| random.u8(..)).collect();
        let starts = (0..count).map(|_| random.usize(..NOISE_BYTES));
        Contents { bytes, spans: starts.map(|start| start..start + size_bytes).collect(), kept_one_in: 10 }
    }

    fn compressed(pages: usize) -> Result<Contents> {
        let packed = Packed::new(&Algorithm::default(), PAGE_SIZE, &corpus::build(Kind::Mixed, pages)?)?;
        let mut contents = Contents { bytes: Vec::new(), spans: Vec::new(), kept_one_in: 2 };
        for page in (0..pages).map(|page| packed.page(page)) {
            let start = contents.bytes.len();
            contents.bytes.extend_from_slice(page);
            contents.spans.push(start..contents.bytes.len());
        }
        Ok(contents)
    }

    fn of(&self, at: usize) -> &[u8] {
        &self.bytes[self.spans[at].clone()]
    }
}

/// An allocator of objects; each is named by a word.
trait Allocator {
    /// Stores a copy.
    fn store(&mut self, contents: &[u8]) -> Result<u64>;

    /// Returns whether an object still has these contents.
    ///
    /// # Safety
    /// `store` returned that name for contents of this length, and it was not freed since.
    unsafe fn holds(&self, name: u64, contents: &[u8]) -> Result<bool>;

    /// Frees an object of that length.
    ///
    /// # Safety
    /// As for `holds`.
    unsafe fn free(&mut self, name: u64, len: usize) -> Result<()>;

    /// Returns as much memory to the system as it can.
    fn give_back(&self) -> Result<()>;
}

/// Returns the bytes in memory for each byte stored, of all objects, and after some were freed. What making
/// the allocator takes counts.
fn resident<A: Allocator>(make: impl FnOnce() -> Result<A>, contents: &Contents) -> Result<[f64; 2]> {
    // Touched before the first measurement, as is the memory that reading /proc needs.
    let mut names = vec![1u64; contents.spans.len()];
    let mut order: Vec<usize> = (0..names.len()).collect();
    fastrand::Rng::with_seed(SEED).shuffle(&mut order);
    let (kept, freed) = order.split_at(names.len() / contents.kept_one_in);
    anonymous_bytes()?;
    Heap::give_back(&peers::System)?;
    let before_bytes = anonymous_bytes()?;
    let per_byte = |stored_bytes: usize| -> Result<f64> {
        Ok(anonymous_bytes()?.saturating_sub(before_bytes) as f64 / stored_bytes as f64)
    };
    let mut allocator = make()?;
    for (at, name) in names.iter_mut().enumerate() {
        *name = allocator.store(contents.of(at))?;
    }
    let all = per_byte(order.iter().map(|at| contents.spans[*at].len()).sum())?;
    for &at in freed {
        // SAFETY: each index is in `order` once, so each object is freed once, with its length.
        unsafe { allocator.free(names[at], contents.spans[at].len()) }?;
    }
    allocator.give_back()?;
    let rest = per_byte(kept.iter().map(|at| contents.spans[*at].len()).sum())?;
    for &at in kept {
        // SAFETY: those that are kept are in use.
        if !unsafe { allocator.holds(names[at], contents.of(at)) }? {
            return Err(damaged());
        }
    }
    Ok([all, rest])
}

/// Returns this process's anonymous memory, without pages that the kernel may reclaim at any time.
fn anonymous_bytes() -> Result<u64> {
    let field = |name| proc_bytes("self", "smaps_rollup", &[name]);
    let of = |(anonymous, lazy): (u64, u64)| anonymous.saturating_sub(lazy);
    field("Anonymous").zip(field("LazyFree")).map(of).ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "/proc/self/smaps_rollup has no Anonymous and LazyFree")
    })
}

impl<H: Heap> Allocator for H {
    fn store(&mut self, contents: &[u8]) -> Result<u64> {
        let name = self.alloc(contents.len())?;
        // SAFETY: the object was just allocated, with room for these contents, and nothing else uses it.
        unsafe { self.address(name).copy_from_nonoverlapping(contents.as_ptr(), contents.len()) };
        Ok(name)
    }

    unsafe fn holds(&self, name: u64, contents: &[u8]) -> Result<bool> {
        // SAFETY: the caller's object came from `store`, with this length, and is in use.
        Ok(unsafe { std::slice::from_raw_parts(self.address(name), contents.len()) } == contents)
    }

    unsafe fn free(&mut self, name: u64, len: usize) -> Result<()> {
        // SAFETY: as above.
        unsafe { Heap::free(self, name, len) }
    }

    fn give_back(&self) -> Result<()> {
        Heap::give_back(self)
    }
}

struct UzramPool {
    pool: Pool<Pinned>,
    arena: Arc<Arena>,
    /// The handles, by name; one that was freed is `None`. In memory before the first measurement, as the
    /// other allocators' names are.
    handles: Vec<Option<Handle>>,
    stored: usize,
}

impl UzramPool {
    fn new(contents: &Contents, handles: Vec<Option<Handle>>) -> Result<UzramPool> {
        // Room for objects that were freed and not yet compacted.
        let arena = Arc::new(Arena::new(4 * contents.bytes.len() as u64 + (64 << 20))?);
        let pool = Pool::builder("bench").build_in(Arc::clone(&arena))?;
        Ok(UzramPool { pool, arena, handles, stored: 0 })
    }
}

fn freed_before() -> Error {
    Error::invalid("the blob was freed before")
}

impl Allocator for UzramPool {
    fn store(&mut self, contents: &[u8]) -> Result<u64> {
        self.handles[self.stored] = Some(self.pool.store(contents)?.into_handle());
        self.stored += 1;
        Ok(self.stored as u64 - 1)
    }

    unsafe fn holds(&self, name: u64, contents: &[u8]) -> Result<bool> {
        Ok(*self.pool.read(self.handles[name as usize].as_ref().ok_or_else(freed_before)?)? == *contents)
    }

    unsafe fn free(&mut self, name: u64, _: usize) -> Result<()> {
        self.pool.free(self.handles[name as usize].take().ok_or_else(freed_before)?)
    }

    fn give_back(&self) -> Result<()> {
        self.pool.compact();
        self.arena.release_free();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All of its objects are in one place.
    struct OnePlace(Vec<u8>);

    impl Allocator for OnePlace {
        fn store(&mut self, contents: &[u8]) -> Result<u64> {
            self.0 = contents.to_vec();
            Ok(0)
        }

        unsafe fn holds(&self, _: u64, contents: &[u8]) -> Result<bool> {
            Ok(self.0 == contents)
        }

        unsafe fn free(&mut self, _: u64, _: usize) -> Result<()> {
            Ok(())
        }

        fn give_back(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_allocator_that_loses_objects_is_found() {
        let error = resident(|| Ok(OnePlace(Vec::new())), &Contents::objects(64, 100)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    }
}
