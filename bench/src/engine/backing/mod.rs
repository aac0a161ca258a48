//! The gains and costs of a backing file: the speed of writeback and the room that pages take (`written`),
//! write amplification when the file is nearly full (`overwrites`), and the speed of a data set larger than
//! its memory (`zipf`). `scratch` has the stores and their files.

mod overwrites;
mod scratch;
mod written;
mod zipf;

use uzram::Result;

use crate::engine::zipf::PAGES_PER_LIMIT;
use crate::harness::{Options, Report, unsupported};
use overwrites::LIVE_PERCENT;
use scratch::Scratch;

/// Measures all of it. Same-filled pages are left out.
pub fn run(options: &Options) -> Result<Report> {
    let corpus = options.load_corpus()?.without_same_filled()?;
    let mib = |normal: u64, small: u64| options.amount(normal, small) << 20;
    let (written_bytes, overwritten_bytes, limit_bytes) = (mib(512, 4), mib(128, 4), mib(64, 2));
    // For a data set that does not compress, and for some dead data.
    let zipf_file_bytes = limit_bytes * PAGES_PER_LIMIT / 4 * 5;
    let scratch = || {
        options.go_on()?;
        Scratch::new(&options.dir, &corpus, &options.algorithm)
    };
    // Of the largest files, of which there are those of one part at a time.
    let most_bytes = written_bytes.max(overwritten_bytes).max(2 * zipf_file_bytes);
    let try_room = |scratch: Scratch<'_>| scratch.file("room", most_bytes).map(drop);
    scratch().and_then(try_room).map_err(|error| unsupported(error.to_string()))?;
    let mut report = Report::default();
    // Each is a separate statement, at whose end its files are removed, before those of the next are made.
    written::measure(options, written_bytes, &scratch()?, &mut report)?;
    overwrites::measure(options, overwritten_bytes, LIVE_PERCENT, &scratch()?, &mut report)?;
    zipf::measure(options, [limit_bytes, zipf_file_bytes], &scratch()?, &mut report)?;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::harness::process::find;

    fn tiny(dir: &tempfile::TempDir) -> Options {
        Options { dir: dir.path().to_owned(), ..Options::tiny(300) }
    }

    #[test]
    fn all_of_it_is_measured_and_the_files_go() {
        let dir = tempfile::tempdir().unwrap();
        let options = tiny(&dir);
        let mut report = run(&options).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        // A file that is less full, in the test alone.
        let corpus = options.load_corpus().unwrap().without_same_filled().unwrap();
        let scratch = Scratch::new(dir.path(), &corpus, &options.algorithm).unwrap();
        overwrites::measure(&options, 4 << 20, 70, &scratch, &mut report).unwrap();
        let of = |table: &str, row: &str, column| report.get(table, row, column).unwrap();
        let written = |column| of("writeback", "all pages", column);
        assert!(written("compressed MiB") < written("written MiB"), "{report}");
        assert!(written("bytes / compressed") > 1.0 && written("MB/s") > 0.0, "{report}");
        assert!((0.5..=1.0).contains(&written("reads / page")), "{report}");
        match find("fio") {
            None => println!("skipped: fio is missing"),
            Some(_) => assert!(written("/ fio") > 0.0, "{report}"),
        }
        let [less, packed] = ["packed, 70 % live", "packed, 80 % live"]
            .map(|row| ["live %", "moved MiB"].map(|column| of("random overwrites", row, column)));
        assert!((75.0..85.0).contains(&packed[0]) && packed[1] > 0.0, "{report}");
        assert!(less[0] < packed[0] - 5.0 && less[1] < packed[1], "{report}");
        let zipf = |column| of("Zipf access to 4 x the limit", "limited", column);
        assert!((0.1..99.0).contains(&zipf("misses %")) && zipf("/ computed") > 0.0, "{report}");
    }

    #[test]
    fn a_stop_ends_it_and_the_files_go() {
        let dir = tempfile::tempdir().unwrap();
        let count = || fs::read_dir(dir.path()).unwrap().count();
        let options = Options { repeat: Some(1000), ..tiny(&dir) };
        let stop = Arc::clone(&options.stop);
        thread::scope(|scope| {
            let running = scope.spawn(|| run(&options));
            while count() == 0 && !running.is_finished() {
                thread::sleep(Duration::from_millis(1));
            }
            stop.store(true, Ordering::Relaxed);
            assert!(running.join().unwrap().unwrap_err().to_string().contains("interrupted"));
        });
        assert_eq!(count(), 0);
    }

    #[test]
    fn what_keeps_files_from_being_made_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { dir: "/nonexistent".into(), ..tiny(&dir) };
        assert!(run(&options).unwrap_err().to_string().contains("/nonexistent"));
        let corpus = options.load_corpus().unwrap().without_same_filled().unwrap();
        let scratch = Scratch::new(dir.path(), &corpus, &options.algorithm).unwrap();
        assert!(scratch.file("room", 1 << 60).err().unwrap().to_string().contains("room"));
    }
}
