//! A device in this process, and what it is compared with.

use uzram::Result;
use uzram::units::{format_size, pages_to_bytes};

use super::codec_loop::CodecLoop;
use super::compare::{Comparison, ROUNDS, compare};
use super::kernel_zram::KernelDevice;
use super::measure::SAMPLE_EVERY;
use super::pattern::Pattern;
use super::target::{Target, checked_page_count, verify};
use super::uzram_device::UzramDevice;
use crate::harness::report::{mib, quotient};
use crate::harness::{Options, Report};

/// A target that uzram is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Against {
    /// The bare loop of the engine's codec on the same pages: the physical limit
    Codec,
    /// A kernel zram device, hot-added for the run (as root)
    Kernel,
    /// A uzram device that does not track its cold pages
    NoLru,
    /// A uzram device with lz4, whatever the algorithm of the first one is
    Lz4,
}

/// What to measure.
#[derive(Clone, Copy)]
pub struct Bench<'a> {
    /// The patterns, jobs and rounds; without patterns only memory is measured.
    pub comparison: Comparison<'a>,
    /// The device's size; `None` for the corpus's. A shorter corpus is repeated.
    pub size_bytes: Option<u64>,
    /// The targets to compare with.
    pub against: &'a [Against],
    /// Whether the memory of the filled device is told.
    pub memory: bool,
}

/// Runs the benchmark.
pub fn run(bench: &Bench<'_>) -> Result<Report> {
    let Bench { comparison: Comparison { options, .. }, against, .. } = *bench;
    options.check(&[])?;
    // The engine stores same-filled pages without its codec: there would be nothing to compare.
    let corpus = match against.contains(&Against::Codec) {
        true => options.load_corpus()?.without_same_filled()?,
        false => options.load_corpus()?,
    };
    let page_count = bench.size_bytes.map_or(Ok(corpus.page_count()), checked_page_count)?;
    let size_bytes = pages_to_bytes(page_count as u64);
    let algorithm = &options.algorithm;
    let mut report = Report::default();

    let named = |name, attributes: &[(&str, String)]| {
        UzramDevice::with_attributes(attributes, size_bytes).map(|device| UzramDevice { name, ..device })
    };
    let with_algorithm = ("comp_algorithm", algorithm.to_string());
    let device = named("uzram", std::slice::from_ref(&with_algorithm))?;
    let without_lru = || named("no-lru", &[with_algorithm, ("lru_enable", "0".to_owned())]);
    let without_lru = against.contains(&Against::NoLru).then(without_lru).transpose()?;
    let with_lz4 = || named("lz4", &[("comp_algorithm", "lz4".to_owned())]);
    let with_lz4 = against.contains(&Against::Lz4).then(with_lz4).transpose()?;
    let codec = || CodecLoop::new(algorithm.clone(), &corpus);
    let codec = against.contains(&Against::Codec).then(codec).transpose()?;
    let kernel = against.contains(&Against::Kernel).then(|| KernelDevice::add(algorithm, size_bytes));
    let kernel = kernel.and_then(|added| {
        added.inspect_err(|error| report.note(format!("kernel zram left out: {error}"))).ok()
    });

    let mut targets: Vec<&dyn Target> = vec![&device];
    // Next to the device that they differ least from.
    targets.extend([&without_lru, &with_lz4].into_iter().flatten().map(|device| device as &dyn Target));
    targets.extend(codec.as_ref().map(|codec| codec as &dyn Target));
    targets.extend(kernel.as_ref().map(|kernel| kernel as &dyn Target));
    for target in &targets {
        target.fill(&corpus)?;
        verify(*target, &corpus, page_count)?;
        options.go_on()?;
    }
    if bench.memory {
        add_memory(&mut report, &device, kernel.as_ref(), page_count == corpus.page_count())?;
    }
    compare(&bench.comparison, &targets, &corpus, page_count, &mut report)?;
    let [device, corpus] = [size_bytes, pages_to_bytes(corpus.page_count() as u64)].map(format_size);
    report.note(format!("device {device}, corpus {}, {corpus}", options.corpus.name()));
    describe(options, &targets, &mut report);
    Ok(report)
}

/// Adds the memory of the filled device, and the kernel's after the same fill.
fn add_memory(
    report: &mut Report,
    device: &UzramDevice,
    kernel: Option<&KernelDevice>,
    of_corpus: bool,
) -> Result<()> {
    const TABLE: &str = "memory of a filled device";
    let size = if of_corpus { "as large as the corpus" } else { "of another size" };
    let stats = device.device.stats();
    let mut add = |name, compressed, used| {
        let cells = [
            ("compressed MiB", mib(compressed)),
            ("used MiB", mib(used)),
            ("used / compressed", quotient(used, compressed)),
        ];
        report.row(TABLE, &format!("{size}, {name}"), &cells);
    };
    add("uzram", stats.compr_data_bytes, stats.mem_used_bytes);
    if let Some(kernel) = kernel {
        let [compressed_bytes, used_bytes] = kernel.zram.memory()?;
        add("kernel", compressed_bytes, used_bytes);
    }
    Ok(())
}

fn describe(options: &Options, targets: &[&dyn Target], report: &mut Report) {
    report.note(format!(
        "{} interleaved rounds of {:.2} s, medians; every {SAMPLE_EVERY}th page timed; ratio = uzram / target, \
         median of the rounds' ratios",
        options.rounds(ROUNDS),
        options.duration.as_secs_f64()
    ));
    for target in targets {
        match target.name() {
            "codec" => report.note(
                "codec: the bare loop on the same pages in the same order; same-filled pages left out of every \
                 target; pages that reach the huge threshold are copied",
            ),
            "no-lru" => report.note("no-lru: a uzram device with lru_enable=0"),
            "kernel" => report.note(
                "kernel: in process against a block device (O_DIRECT, a system call a page), with lz4 beside \
                 memory",
            ),
            _ => {}
        }
    }
}

/// Measures what the targets of the engine's speed and memory take.
pub fn of_targets(options: &Options) -> Result<Report> {
    const PATTERNS: [Pattern; 2] = [Pattern::RandRead, Pattern::RandWrite];
    let comparison = Comparison { options, table: "4 KiB pages", patterns: &PATTERNS, jobs: &[1, 2] };
    let against = &[Against::Codec, Against::Kernel];
    let speed = Bench { comparison, size_bytes: None, against, memory: false };
    let mut report = run(&speed)?;
    PATTERNS.into_iter().for_each(|pattern| add_gain(&mut report, pattern));
    let slices = Comparison { options: &options.in_slices(ROUNDS), table: "beside no LRU", ..comparison };
    report.append(run(&Bench { comparison: slices, against: &[Against::NoLru], ..speed })?);
    let comparison = Comparison { patterns: &[], ..comparison };
    for size_bytes in [None, Some(options.amount(1 << 30, 1 << 20))] {
        report.append(run(&Bench { comparison, size_bytes, against: &[Against::Kernel], memory: true })?);
    }
    Ok(report)
}

/// Adds uzram's gain from a second job, divided by the bare codec's gain: the median of the rounds' ratios.
fn add_gain(report: &mut Report, pattern: Pattern) {
    let gains = |target: &str| -> Vec<f64> {
        let rounds = |jobs| report.figure("4 KiB pages", &format!("{pattern}, {jobs}, {target}"), "MB/s");
        let pairs = rounds("1 job").zip(rounds("2 jobs")).into_iter();
        pairs.flat_map(|(one, two)| two.rounds.iter().zip(&one.rounds)).map(|(two, one)| two / one).collect()
    };
    let (uzram, codec) = (gains("uzram"), gains("codec"));
    report.ratio("gain from 1 to 2 jobs", pattern.name(), "/ codec", [&uzram, &codec]);
}
