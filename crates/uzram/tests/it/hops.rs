//! How far somebody goes who reads what a page write does.

use std::collections::BTreeSet;

use crate::calls::{functions, is_counted};
use uzram::device::Device;
use uzram::random::Random;
use uzram::units::{PAGE_SIZE, Page};

const MOST_FUNCTIONS: usize = 45;
const MOST_FILES: usize = 16;
const PAGES: u64 = 256;
const ROUNDS: u64 = 4;

fn contents(number: u64) -> Page {
    let mut page = [number as u8; PAGE_SIZE];
    Random::new(number).fill(&mut page[..PAGE_SIZE / 2]);
    page
}

fn write_pages() {
    let device = Device::new("zram0").unwrap();
    device.set("disksize", &(PAGES * PAGE_SIZE as u64).to_string()).unwrap();
    let disk = device.open().unwrap();
    for round in 0..ROUNDS {
        for number in 0..PAGES {
            disk.write(number * PAGE_SIZE as u64, &contents(number + round)).unwrap();
        }
    }
}

#[test]
fn a_page_write_passes_through_few_functions() {
    if is_counted() {
        return write_pages();
    }
    let times = PAGES * (ROUNDS - 1);
    let Some(functions) = functions("hops::a_page_write_passes_through_few_functions", times, "") else {
        return;
    };
    // The contents are the test's; the order of locks is checked in builds for tests alone.
    let others = |name: &str| ["random", "sync::hold"].iter().any(|part| name.contains(part));
    let functions: Vec<_> = functions
        .into_iter()
        .filter(|(name, (file, _))| file.starts_with("uzram/src/") && !others(name))
        .collect();
    let files: BTreeSet<_> = functions.iter().map(|(_, (file, _))| file).collect();
    println!("{} functions in {} files: {functions:#?}", functions.len(), files.len());
    assert!(functions.len() > 10, "valgrind has seen the write");
    assert!(functions.len() <= MOST_FUNCTIONS && files.len() <= MOST_FILES);
}
