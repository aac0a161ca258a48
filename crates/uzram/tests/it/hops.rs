//! How far somebody goes who reads what a page write does: the engine's functions that it enters, inlined ones too,
//! and their files.
//!
//! valgrind runs a process that writes a page once it is warm, and notes the instructions; addr2line(1) says which
//! functions an instruction belongs to.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};

use uzram::device::{Device, OpenDevice};
use uzram::random::Random;
use uzram::units::{PAGE_SIZE, Page};

/// Has the process be the one that valgrind runs.
const CHILD: &str = "UZRAM_TEST_HOPS";
const MOST_FUNCTIONS: usize = 45;
const MOST_FILES: usize = 16;
const PAGES: u64 = 256;

fn contents(number: u64) -> Page {
    let mut page = [number as u8; PAGE_SIZE];
    Random::new(number).fill(&mut page[..PAGE_SIZE / 2]);
    page
}

/// The write that is looked at.
#[inline(never)]
fn the_write(disk: &OpenDevice, page: &Page) {
    disk.write(0, page).unwrap();
}

fn write_pages() {
    let device = Device::new("zram0").unwrap();
    device.set("disksize", &(PAGES * PAGE_SIZE as u64).to_string()).unwrap();
    let disk = device.open().unwrap();
    for round in 0..3 {
        for number in 0..PAGES {
            disk.write(number * PAGE_SIZE as u64, &contents(number + round)).unwrap();
        }
    }
    the_write(&disk, &contents(1));
}

/// Returns the addresses of the program's own instructions that callgrind's output has, as text.
fn addresses(output: &str) -> BTreeSet<&str> {
    let mut addresses = BTreeSet::new();
    let (mut is_own, mut is_call) = (false, false);
    for line in output.lines() {
        if let Some(object) = line.strip_prefix("ob=") {
            is_own = object.contains("/deps/it-");
        } else if line.starts_with("0x") {
            // The line below `calls=` has the cost of what was called.
            if is_own && !is_call {
                addresses.extend(line.split(' ').next());
            }
            is_call = false;
        } else if line.starts_with("calls=") {
            is_call = true;
        }
    }
    addresses
}

#[test]
fn a_page_write_is_read_in_an_hour() {
    if std::env::var_os(CHILD).is_some() {
        return write_pages();
    }
    for program in ["valgrind", "addr2line"] {
        if Command::new(program).arg("--version").output().is_err() {
            return println!("skipped: needs {program}");
        }
    }
    let (program, dir) = (std::env::current_exe().unwrap(), tempfile::tempdir().unwrap());
    let path = dir.path().join("callgrind.out");
    let ended = Command::new("timeout")
        .args(["300", "valgrind", "--tool=callgrind", "--dump-instr=yes", "--compress-strings=no"])
        .args(["--compress-pos=no", "--toggle-collect=*hops*the_write*"])
        .arg(format!("--callgrind-out-file={}", path.display()))
        .arg(&program)
        .args(["--exact", "hops::a_page_write_is_read_in_an_hour", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let output = std::fs::read_to_string(&path).unwrap();
    let addresses = addresses(&output);

    let mut command = Command::new("addr2line");
    command.args(["-f", "-i", "-C", "-e"]).arg(&program).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let lines: String = addresses.iter().map(|address| format!("{address}\n")).collect();
    let writer = std::thread::spawn(move || input.write_all(lines.as_bytes()).unwrap());
    let said = child.wait_with_output().unwrap();
    writer.join().unwrap();
    let said = String::from_utf8_lossy(&said.stdout);
    let lines: Vec<&str> = said.lines().collect();
    let (mut functions, mut files) = (BTreeSet::new(), BTreeSet::new());
    for pair in lines.chunks_exact(2) {
        let Some((_, file)) = pair[1].split_once("crates/uzram/src/") else { continue };
        let file = file.split(':').next().unwrap();
        // A closure is inside the function that it belongs to.
        let function = pair[0].split("::{closure").next().unwrap();
        functions.insert(format!("{file} {function}"));
        files.insert(file);
    }
    println!("{} functions in {} files: {functions:#?}", functions.len(), files.len());
    assert!(functions.len() > 10, "{}", addresses.len());
    assert!(functions.len() <= MOST_FUNCTIONS && files.len() <= MOST_FILES);
}
