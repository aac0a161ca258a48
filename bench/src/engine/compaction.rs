//! The gains and costs of compaction: how tightly a scattered pool is packed, beside what its objects need
//! and the kernel's, and how reads slow down meanwhile.
//!
//! A pool is scattered by overwrites of random pages, with contents whose sizes change over time (`churn`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use uzram::Result;
use uzram::codec::Algorithm;
use uzram::units::{PAGE_SIZE, format_size, page_of, pages_to_bytes};
use uzram::zsmalloc::ClassStat;

use super::compare::{ROUNDS, add_rounds, speeds};
use super::kernel_zram::KernelDevice;
use super::measure::{Measurement, Plan, measure};
use super::packed::Packed;
use super::pattern::Pattern;
use super::target::{Target, verify_pages};
use super::uzram_device::UzramDevice;
use crate::harness::corpus::Corpus;
use crate::harness::report::{each, jobs_text, mib, quotient};
use crate::harness::rounds::in_turn;
use crate::harness::{Options, Report, SEED, go_on, joined};

/// How often each page is overwritten, on average, before a pool is compacted.
const OVERWRITES_PER_PAGE: usize = 10;
/// Overwrites between two checks of the stop flag.
const LOOK_EVERY: usize = 4096;
/// Bytes before the contents of an object that is not huge.
const HEADER_BYTES: u64 = 8;
/// The part of the device that is overwritten in a second while it is read.
const OVERWRITTEN_PER_SECOND: f64 = 0.05;
/// The interval at which the writer writes what is due.
const WRITE_EVERY: Duration = Duration::from_millis(1);
/// The time for a running step of the background compactor to end.
const SETTLE: Duration = Duration::from_millis(50);

/// The pages of a corpus in two halves, by their compressed sizes.
struct Halves {
    by_size: Vec<usize>,
}

impl Halves {
    fn new(corpus: &Corpus, algorithm: &Algorithm) -> Result<Halves> {
        let packed = Packed::new(algorithm, PAGE_SIZE, corpus)?;
        let mut by_size: Vec<usize> = (0..corpus.page_count()).collect();
        by_size.sort_by_key(|page| packed.page(*page).len());
        Ok(Halves { by_size })
    }

    fn pages(&self, upper: bool) -> &[usize] {
        let (low, high) = self.by_size.split_at(self.by_size.len() / 2);
        if upper || low.is_empty() { high } else { low }
    }
}

/// Returns an endless sequence of overwrites, each a page of the device and one of the corpus; the same seed
/// gives the same one. Pages of the corpus are from its upper and its lower half in turn: in each pass of so
/// many overwrites some classes lose objects that others gain, as when a disk's use changes.
fn churn(
    halves: &Halves,
    page_count: usize,
    pass: usize,
    seed: u64,
) -> impl Iterator<Item = (usize, usize)> + use<'_> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0usize..).map(move |done| {
        let from = halves.pages((done / pass.max(1)).is_multiple_of(2));
        (rng.usize(..page_count), from[rng.usize(..from.len())])
    })
}

/// Measures both.
pub fn run(options: &Options) -> Result<Report> {
    let corpus = options.load_corpus()?;
    let halves = Halves::new(&corpus, &options.algorithm)?;
    let page_count = page_of(options.amount(256 << 20, 4 << 20)) as usize;
    let mut report = Report::default();
    let pools = Pools { options, corpus: &corpus, halves, page_count };
    pools.density(&mut report)?;
    pools.reads(&mut report)?;
    Ok(report)
}

struct Pools<'a> {
    options: &'a Options,
    corpus: &'a Corpus,
    halves: Halves,
    page_count: usize,
}

impl Pools<'_> {
    /// Fills and scatters a device and compacts it; then the kernel's, with the same pages in the same order.
    fn density(&self, report: &mut Report) -> Result<()> {
        const TABLE: &str = "compaction";
        let size_bytes = pages_to_bytes(self.page_count as u64);
        // Only the explicit `compact` below may compact.
        let device = UzramDevice::with_attributes(&[("compact_threshold", "0".to_owned())], size_bytes)?;
        let contents = self.scatter(&device)?;
        let scattered = device.device.stats();
        let start = Instant::now();
        device.device.set("compact", "1")?;
        let compact_ms = start.elapsed().as_secs_f64() * 1e3;
        let (compacted, classes) = (device.device.stats(), device.device.class_stats());
        verify_pages(&device, self.corpus, contents.into_iter().enumerate())?;
        drop(device);

        let ideal_bytes = classes.iter().map(side_by_side_bytes).sum();
        let objects: u64 = classes.iter().map(|class| class.obj_used).sum();
        let object_bytes = compacted.compr_data_bytes + (objects - compacted.huge_pages) * HEADER_BYTES;
        for (name, stats) in [("scattered", &scattered), ("compacted", &compacted)] {
            let cells = [
                ("used MiB", mib(stats.mem_used_bytes)),
                ("charged MiB", mib(stats.mem_charged_bytes)),
                ("chunks MiB", mib(stats.mem_chunk_bytes)),
                ("used / objects", quotient(stats.mem_used_bytes, object_bytes)),
                ("used / packed", quotient(stats.mem_used_bytes, ideal_bytes)),
                ("chunks / charged", quotient(stats.mem_chunk_bytes, stats.mem_charged_bytes)),
            ];
            report.row(TABLE, name, &cells);
        }
        match KernelDevice::add(&self.options.algorithm, size_bytes) {
            Ok(kernel) => {
                let contents = self.scatter(&kernel)?;
                let [_, scattered_bytes] = kernel.zram.memory()?;
                kernel.zram.compact()?;
                let [_, used_bytes] = kernel.zram.memory()?;
                verify_pages(&kernel, self.corpus, contents.into_iter().enumerate())?;
                report.row(TABLE, "kernel zram, scattered", &[("used MiB", mib(scattered_bytes))]);
                report.row(TABLE, "kernel zram, compacted", &[("used MiB", mib(used_bytes))]);
                let ratio = quotient(compacted.mem_used_bytes, used_bytes);
                report.row(TABLE, "compacted", &[("used / kernel's", ratio)]);
            }
            Err(error) => report.note(format!("not compared with kernel zram's compaction: {error}")),
        }
        report.note(format!(
            "compaction of {} after {OVERWRITES_PER_PAGE} overwrites of each page, in {compact_ms:.0} ms; objects {}, \
             packed by class {}",
            format_size(size_bytes),
            format_size(object_bytes),
            format_size(ideal_bytes)
        ));
        Ok(())
    }

    /// Fills a target and scatters its pool; returns which corpus page each page then holds.
    fn scatter(&self, target: &dyn Target) -> Result<Vec<usize>> {
        let Pools { options, corpus, ref halves, page_count } = *self;
        target.fill(corpus)?;
        let mut contents: Vec<usize> = (0..page_count).collect();
        let mut worker = target.worker()?;
        let churn = churn(halves, page_count, page_count, SEED);
        for (number, (page, corpus_page)) in churn.take(page_count * OVERWRITES_PER_PAGE).enumerate() {
            worker.write(page, corpus.page(corpus_page))?;
            contents[page] = corpus_page;
            if number % LOOK_EVERY == 0 {
                go_on(&options.stop)?;
            }
        }
        Ok(contents)
    }

    /// Reads random pages while another thread overwrites some, so that there is always something to compact,
    /// but only in every other round is it compacted, by the device's own thread, with compact_threshold=1
    /// and compact_rate=256M. Each of these is compared with the other one of its round.
    fn reads(&self, report: &mut Report) -> Result<()> {
        let Pools { options, corpus, ref halves, page_count } = *self;
        const TABLE: &str = "randread during compaction";
        let attributes = [("compact_threshold", "0"), ("compact_rate", "256M")]
            .map(|(name, value)| (name, value.to_owned()));
        let device = UzramDevice::with_attributes(&attributes, pages_to_bytes(page_count as u64))?;
        device.fill(corpus)?;
        for jobs in [1, 2] {
            let rounds: [_; 2] = in_turn(options.rounds(ROUNDS), &options.stop, |number, which| {
                let plan = Plan::of_round(options, Pattern::RandRead, jobs, number, corpus, page_count);
                round(&device, which == 1, &plan, halves)
            })?;
            let p999 = |rounds: &[Measurement]| each(rounds, |round| round.latencies.quantile_us(0.999));
            let idle = &rounds[0];
            for (name, reads) in ["nobody", "background"].into_iter().zip(&rounds) {
                let row = format!("{}, {name}", jobs_text(jobs));
                add_rounds(report, TABLE, &row, reads);
                report.ratio(TABLE, &row, "MB/s ratio", [&speeds(reads), &speeds(idle)]);
                report.ratio(TABLE, &row, "p99.9 ratio", [&p999(reads), &p999(idle)]);
            }
        }
        Ok(())
    }
}

/// Returns the size of a class with full zspages only, except one, of which only the needed pages count.
fn side_by_side_bytes(stat: &ClassStat) -> u64 {
    let (pages, objs) = (u64::from(stat.class.pages_per_zspage), u64::from(stat.class.objs_per_zspage));
    let rest_bytes = stat.obj_used % objs * u64::from(stat.class.size_bytes);
    pages_to_bytes(stat.obj_used / objs * pages + rest_bytes.div_ceil(PAGE_SIZE as u64))
}

/// Reads while the device is overwritten and, perhaps, compacted.
fn round(device: &UzramDevice, compacts: bool, plan: &Plan<'_>, halves: &Halves) -> Result<Measurement> {
    let ends = &AtomicBool::new(false);
    let reads = thread::scope(|scope| {
        let writer = scope.spawn(move || overwrite(device, plan, halves, ends));
        let set = if compacts { device.device.set("compact_threshold", "1") } else { Ok(()) };
        let reads = set.and_then(|()| measure(device, plan));
        ends.store(true, Ordering::Relaxed);
        joined(writer)?;
        reads
    })?;
    if compacts {
        device.device.set("compact_threshold", "0")?;
        thread::sleep(SETTLE);
    }
    Ok(reads)
}

/// Overwrites random pages at the rate, until `ends` is set.
fn overwrite(device: &UzramDevice, plan: &Plan<'_>, halves: &Halves, ends: &AtomicBool) -> Result<()> {
    let pages_per_s = plan.page_count as f64 * OVERWRITTEN_PER_SECOND;
    // Sizes change several times within a measurement.
    let pass = (pages_per_s / 4.0) as usize;
    let mut churn = churn(halves, plan.page_count, pass, !plan.seed);
    let mut worker = device.worker()?;
    let (start, mut written) = (Instant::now(), 0);
    while !ends.load(Ordering::Relaxed) {
        thread::sleep(WRITE_EVERY);
        let due = (start.elapsed().as_secs_f64() * pages_per_s) as usize;
        for (page, corpus_page) in churn.by_ref().take(due.saturating_sub(written)) {
            worker.write(page, plan.corpus.page(corpus_page))?;
        }
        written = due;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns pages whose first `noisy` bytes are noise.
    fn corpus(noisy: &[usize]) -> Corpus {
        let mut rng = fastrand::Rng::with_seed(3);
        let page = |noisy: &usize| -> Vec<u8> {
            (0..PAGE_SIZE).map(|at| if at < *noisy { rng.u8(..) } else { 7 }).collect()
        };
        Corpus::from_bytes(&noisy.iter().flat_map(page).collect::<Vec<u8>>()).unwrap()
    }

    #[test]
    fn passes_take_from_the_halves_in_turn() {
        let halves = Halves::new(&corpus(&[4000, 100, 3000, 50, 2000]), &Algorithm::default()).unwrap();
        let overwrites = |seed| churn(&halves, 9, 10, seed).take(40).collect::<Vec<_>>();
        let done = overwrites(1);
        assert!(done == overwrites(1) && done != overwrites(2));
        for (number, (page, corpus_page)) in done.iter().enumerate() {
            assert!(*page < 9);
            assert_eq!([0, 2, 4].contains(corpus_page), number / 10 % 2 == 0, "{number}");
        }
        let halves = Halves::new(&corpus(&[9]), &Algorithm::default()).unwrap();
        assert!(churn(&halves, 2, 1, 1).take(9).all(|(_, corpus_page)| corpus_page == 0));
    }

    #[test]
    fn a_scattered_pool_is_packed_and_reads_go_on() {
        let report = run(&Options::tiny(96)).unwrap();
        let of = |row, column| report.get("compaction", row, column).unwrap();
        assert!(of("compacted", "used MiB") < of("scattered", "used MiB"), "{report}");
        assert!((1.0..1.3).contains(&of("compacted", "used / packed")), "{report}");
        assert_eq!(
            report.column("randread during compaction", "MB/s").filter(|speed| *speed > 0.0).count(),
            4
        );
        if let Some(note) = report.notes.iter().find(|note| note.contains("not compared")) {
            println!("skipped: {note}");
        }
    }
}
