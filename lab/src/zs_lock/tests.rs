use super::*;
use crate::experiment::testing::{corpus, plan};

/// Each device has the locks that its rows are named after, and stays 80 % full with any number of threads.
#[test]
fn disks_stay_full_to_four_fifths() {
    let corpus = corpus().load().unwrap();
    for design in (SERIES.designs)().all() {
        let device =
            UzramDevice::with_attributes(&[("pool_design", design.clone())], files::DISK_BYTES).unwrap();
        let disk = &device.open;
        assert_eq!(device.device.get("pool_design").unwrap(), design);
        let mut files = Files::default();
        files.fill(disk, &corpus).unwrap();
        let full = || device.device.stats().orig_data_bytes as f64 / files::DISK_BYTES as f64;
        assert!((full() - 0.8).abs() < 1e-9, "{design}: {}", full());
        for (jobs, work) in [(1, 400), (32, 32 * 250), (7, 5000), (256, 256 * 100)] {
            let plan = plan(0, jobs, work);
            let before = device.device.stats();
            let ended = files.use_by_threads(disk, &corpus, &plan).unwrap();
            let written = ended.iter().map(|done| done.units).sum::<u64>();
            let after = device.device.stats();
            assert!((work..work + (jobs * FILE_PAGES) as u64).contains(&written), "{design}, {jobs} jobs");
            assert_eq!(after.pages_written - before.pages_written, written, "{design}, {jobs} jobs");
            assert_eq!(after.pages_read - before.pages_read, written, "{design}, {jobs} jobs");
            assert!((full() - 0.8).abs() < 0.05, "{design}, {jobs} jobs: {}", full());
        }
        assert_eq!(device.device.stats().corrupted_objects, 0);
    }
}

#[test]
fn a_file_that_reads_back_otherwise_is_found_out() {
    let corpus = corpus().load().unwrap();
    let device = UzramDevice::with_attributes(&[], files::DISK_BYTES).unwrap();
    let mut files = Files::default();
    files.fill(&device.open, &corpus).unwrap();
    device.open.write_zeroes(0, files::DISK_BYTES).unwrap();
    let plan = plan(0, 2, 10_000);
    let error = files.use_by_threads(&device.open, &corpus, &plan).err().unwrap();
    assert_eq!(error.kind(), uzram::ErrorKind::Corrupt, "{error}");
}
