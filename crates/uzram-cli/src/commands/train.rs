//! `uzram train`: makes a dictionary from sample pages, and measures its benefit on other pages.
//!
//! Samples are spread evenly over all files, few enough that training takes seconds. Left out are same-filled
//! pages, which no codec sees, and duplicates: a page used for training must not be used for measuring.

use std::collections::HashSet;
use std::fs::{self, File};
use std::hash::BuildHasher;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use uzram::codec::{Algorithm, Dictionary, Encoder, Kind, MAX_DICTIONARY_BYTES, ROOM_BYTES, train};
use uzram::sync::Mutex;
use uzram::units::{PAGE_SIZE, Page, format_size, same_word};

use crate::config::size_expr;
use crate::failure::{Context, Failure, Result};
use crate::output::report;
use crate::terminal::live;

/// The most sample pages: 64 MiB, a thousand times the default size of a dictionary.
const MAX_PAGES: u64 = 16384;
const LEAST_BYTES: u64 = 1 << 10;
/// One page in this many is held out.
const HELD_OUT_ONE_OF: usize = 8;

/// Make a dictionary for lz4, lz4hc, zstd and memory from files of sample pages.
///
/// Samples should resemble the device's future contents: disk images, or memory, in pages of 4 KiB. One page
/// in eight is held out, to measure the dictionary on pages that it was not made from.
#[derive(clap::Args)]
#[command(after_help = "Example: uzram train image.raw -o /etc/uzram/pages.dict
         uzram up --algorithm zstd:3,dict=/etc/uzram/pages.dict")]
pub struct TrainArgs {
    /// Files of pages; an incomplete page at a file's end is ignored
    #[arg(required = true, value_name = "CORPUS")]
    corpora: Vec<PathBuf>,
    /// The dictionary file to create; an existing file is not overwritten
    #[arg(short, long, value_name = "DICT")]
    output: PathBuf,
    /// The dictionary's size, 1K to 1M
    #[arg(long, value_name = "SIZE", default_value = "64K", value_parser = parse_dictionary_size)]
    size: u64,
    /// The zstd level to measure with [default: uzram's default for zstd]
    #[arg(long, value_name = "L", allow_negative_numbers = true)]
    level: Option<i32>,
}

fn parse_dictionary_size(text: &str) -> std::result::Result<u64, String> {
    size_expr::of_option_within(text, LEAST_BYTES..=MAX_DICTIONARY_BYTES as u64, "1K to 1M")
}

pub fn run(args: &TrainArgs) -> Result<()> {
    let exists = || Failure::line(format!("{} exists: remove it or write another", args.output.display()));
    if args.output.symlink_metadata().is_ok() {
        return Err(exists());
    }
    let plain = Algorithm::new(Kind::Zstd, args.level, None).usage(|| "--level")?;
    let size_bytes = usize::try_from(args.size).context(|| "--size")?;
    let stage = Mutex::unordered("reading the samples".to_owned());
    let now = |what: String| *stage.lock() = what;
    let shown = || Some(stage.lock().clone());
    let (samples, bytes, (without, with)) = live::while_showing(shown, || {
        let samples = Samples::take(&args.corpora)?;
        now(format!("training on {} pages", samples.training.len()));
        let bytes = train(&samples.training, size_bytes).context(|| "cannot train")?;
        now(format!("measuring with {} pages", samples.held_out.len()));
        let stored = measure(&samples.held_out, &plain, bytes.clone()).context(|| "cannot measure")?;
        Ok::<_, Failure>((samples, bytes, stored))
    })?;

    let cannot = || format!("cannot write {}", args.output.display());
    let mut file = match File::create_new(&args.output) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Err(exists()),
        file => file.context(cannot)?,
    };
    let written = file.write_all(&bytes).and_then(|()| file.sync_all());
    // An incomplete dictionary is useless, and this process created the file.
    written.inspect_err(|_| drop(fs::remove_file(&args.output))).context(cannot)?;
    samples.report(&args.output, bytes.len(), &plain, without, with)
}

/// Pages to train on, and others to measure with.
#[derive(Default)]
struct Samples {
    training: Vec<Page>,
    held_out: Vec<Page>,
    all: u64,
    taken: u64,
    same_filled: u64,
    repeated: u64,
}

impl Samples {
    /// Samples pages at even distances from the files, as if they were concatenated.
    fn take(paths: &[PathBuf]) -> Result<Samples> {
        let files = paths.iter().map(|path| open(path)).collect::<Result<Vec<_>>>()?;
        let all: u64 = files.iter().map(|(_, pages)| pages).sum();
        let step = u64::max(1, all.div_ceil(MAX_PAGES));
        let mut samples = Samples { all, ..Samples::default() };
        let (hasher, mut seen) = (std::hash::RandomState::new(), HashSet::new());
        // Index of the next page, from the start of the current file.
        let mut next = 0;
        for ((file, pages), path) in files.iter().zip(paths) {
            while next < *pages {
                let mut page = [0; PAGE_SIZE];
                file.read_exact_at(&mut page, next * PAGE_SIZE as u64)
                    .context(|| format!("cannot read {}", path.display()))?;
                samples.add(page, |page| seen.insert(hasher.hash_one(page)));
                next += step;
            }
            next -= pages;
        }
        if samples.held_out.is_empty() {
            let used = samples.training.len();
            return Err(Failure::line(format!("{used} different pages are too few to train on: give more")));
        }
        Ok(samples)
    }

    /// Prints the dictionary's figures, and the bytes stored for the pages that were held out, `without` it
    /// and `with` it.
    fn report(
        &self,
        output: &Path,
        dictionary_bytes: usize,
        plain: &Algorithm,
        without: usize,
        with: usize,
    ) -> Result<()> {
        let held_out = self.held_out.len();
        let trained = json!({
            "pages": self.all,
            "taken_pages": self.taken,
            "same_filled_pages": self.same_filled,
            "repeated_pages": self.repeated,
            "training_pages": self.training.len(),
            "held_out_pages": held_out,
            "dictionary_bytes": dictionary_bytes,
            // A path need not be UTF-8, which JSON is.
            "path": output.to_string_lossy(),
            "algorithm": plain.to_string(),
            "without_dictionary_bytes": without,
            "with_dictionary_bytes": with,
        });
        let ratio = |bytes: usize| (held_out * PAGE_SIZE) as f64 / bytes as f64;
        report(&trained, |_| {
            format!(
                "pages       {} of {}; left out: {} same-filled, {} repeated\n\
                 trained on  {} pages\n\
                 dictionary  {dictionary_bytes} bytes, {}\n\
                 held out    {held_out} pages, with {plain}\n  \
                   ratio     {:.2} without the dictionary, {:.2} with it\n  \
                   stored    {} without, {} with it: {:.1} % less\n",
                self.taken,
                self.all,
                self.same_filled,
                self.repeated,
                self.training.len(),
                output.display(),
                ratio(without),
                ratio(with),
                format_size(without as u64),
                format_size(with as u64),
                100.0 * (1.0 - with as f64 / without as f64),
            )
        })
    }

    fn add(&mut self, page: Page, is_new: impl FnOnce(&Page) -> bool) {
        self.taken += 1;
        if same_word(&page).is_some() {
            self.same_filled += 1;
        } else if !is_new(&page) {
            self.repeated += 1;
        } else if (self.training.len() + self.held_out.len()) % HELD_OUT_ONE_OF == HELD_OUT_ONE_OF - 1 {
            self.held_out.push(page);
        } else {
            self.training.push(page);
        }
    }
}

/// Opens a file; returns it and its number of whole pages.
fn open(path: &Path) -> Result<(File, u64)> {
    let cannot = || format!("cannot read {}", path.display());
    let metadata = fs::metadata(path).context(cannot)?;
    // Opening a FIFO would wait for a writer.
    if !metadata.is_file() {
        return Err(Failure::line(format!("{}: not a regular file", cannot())));
    }
    Ok((File::open(path).context(cannot)?, metadata.len() / PAGE_SIZE as u64))
}

/// Returns the bytes stored for `pages` by `plain`, without and with the dictionary.
fn measure(pages: &[Page], plain: &Algorithm, dictionary: Vec<u8>) -> uzram::Result<(usize, usize)> {
    let dictionary = Dictionary::new("/trained", dictionary)?;
    let with = Algorithm::new(plain.kind(), Some(plain.level()), Some(dictionary))?;
    let stored_bytes = |algorithm: &Algorithm| -> uzram::Result<usize> {
        let (mut encoder, mut out) = (Encoder::new(algorithm)?, [0; ROOM_BYTES]);
        // An incompressible page is stored uncompressed.
        let stored = |page| encoder.encode(page, &mut out).unwrap_or(PAGE_SIZE).min(PAGE_SIZE);
        Ok(pages.iter().map(stored).sum())
    };
    Ok((stored_bytes(plain)?, stored_bytes(&with)?))
}
