//! Compressed memory that outlives its process: writers are killed, and the next process goes on with their
//! pages.
//!
//! `cargo run --release -p uzram --example survive`
//!
//! The parent makes a [`Store`] in a memfd and keeps the descriptor. A child inherits it, attaches the store,
//! and writes all pages in order, round after round, until SIGKILL ends it, mostly in the middle of a write.
//! The parent attaches what is left: the pages before some page must be of one round, the others of the round
//! before. Then comes the next child.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write, stdout};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use uzram::Store;
use uzram::random::Random;
use uzram::store::{PageNo, StoreBuilder};
use uzram::units::{PAGE_SIZE, Page, fill_with_word};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Has this program write; the number of the memory's descriptor follows.
const WRITE: &str = "write-until-killed";
/// What a child prints before the number of each round that it has written.
const WROTE: &str = "wrote round";

/// What a page holds after a round: a word that names both, repeated, or before noise that compresses badly
/// or not at all. Round 0 is before all others: nothing was written.
fn contents(page: u64, round: u64) -> Page {
    let mut contents = [0; PAGE_SIZE];
    let word = round << u32::BITS | page;
    match page % 8 {
        _ if round == 0 => {}
        0 => fill_with_word(&mut contents, word),
        kind => {
            Random::new(word).fill(&mut contents[..PAGE_SIZE / 7 * kind as usize]);
            contents[..8].copy_from_slice(&word.to_ne_bytes());
        }
    }
    contents
}

/// Reads all pages; returns the round of the first, and how many pages are of that round.
fn check(store: &Store) -> Result<(u64, u64)> {
    let (mut first, mut pages, mut page) = (0, 0, [0; PAGE_SIZE]);
    for number in 0..store.pages() {
        store.read(PageNo::from_number(number), &mut page)?;
        let round = page.first_chunk().map_or(0, |word| u64::from_ne_bytes(*word) >> u32::BITS);
        if number == 0 {
            first = round;
        }
        // From some page on, all are of the round before.
        let is_of_first = round == first && pages == number;
        if page != contents(number, round) || !is_of_first && round + 1 != first {
            return Err(format!("page {number} does not hold what was written").into());
        }
        pages += u64::from(is_of_first);
    }
    Ok((first, pages))
}

/// Attaches a store whose memory no other process uses: it was waited for, or has dropped its store.
fn attach(memory: &OwnedFd) -> Result<Store> {
    // SAFETY: the process that had the memory has ended, or its store was dropped.
    let (store, attached) = unsafe { Store::attach(memory.try_clone()?, None, |_| ())? };
    if attached.pages_lost > 0 { Err(format!("{attached:?}").into()) } else { Ok(store) }
}

/// Goes on where the last writer was killed, for some rounds.
fn write(memory: &OwnedFd, rounds: usize) -> Result<()> {
    let store = attach(memory)?;
    for round in (check(&store)?.0 + 1..).take(rounds) {
        for page in 0..store.pages() {
            store.write(PageNo::from_number(page), &contents(page, round))?;
        }
        writeln!(stdout(), "{WROTE} {round}")?;
    }
    Ok(())
}

/// Writes until it is killed, if this process is a child; returns whether it is.
fn is_child() -> Result<bool> {
    let mut arguments = std::env::args().skip_while(|argument| argument != WRITE).skip(1);
    let Some(number) = arguments.next() else { return Ok(false) };
    let number: u32 = number.parse()?;
    // Opened anew, which needs no promise that the number is a descriptor's, and of nobody else here.
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{number}"))?;
    write(&memory.into(), usize::MAX)?;
    Ok(true)
}

/// Starts a child and kills it somewhere after its second round; returns the last round that it said it
/// wrote.
fn kill_a_writer(mut child: Command, memory: &OwnedFd, random: &mut Random) -> Result<u64> {
    // Unlike `try_clone`, dup(2) makes a descriptor that stays open on exec.
    let inherited = rustix::io::dup(memory)?;
    let number = inherited.as_raw_fd().to_string();
    let mut child = child.arg(WRITE).arg(number).stdout(Stdio::piped()).spawn()?;
    let lines = child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines);
    let mut rounds =
        lines.map_while(std::io::Result::ok).filter_map(|line| line.strip_prefix(WROTE)?.trim().parse().ok());
    let written = rounds.nth(1);
    std::thread::sleep(Duration::from_micros(random.below(20_000) as u64));
    // Whatever it said, it does not stay behind.
    child.kill()?;
    child.wait()?;
    written.ok_or_else(|| "the child ended by itself".into())
}

/// Makes a store, has children killed that write to it, and goes on itself.
fn run(pages: u64, kills: u64, child: impl Fn() -> Result<Command>) -> Result<()> {
    let store = Store::create_in(&StoreBuilder::new("survivor", pages).checksum(true))?;
    let memory = store.memory().ok_or("the store is in private memory")?.as_fd().try_clone_to_owned()?;
    // One process at a time has the store. Its memory is there as long as the descriptor is.
    drop(store);
    let mut random = Random::new(kills);
    for _ in 0..kills {
        let written = kill_a_writer(child()?, &memory, &mut random)?;
        let started = Instant::now();
        let store = attach(&memory)?;
        let took = started.elapsed();
        let (round, of_round) = check(&store)?;
        if round < written {
            return Err(format!("round {written} was written, and is lost").into());
        }
        println!("killed with {of_round} of {pages} pages of round {round}; attached in {took:.1?}");
    }
    write(&memory, 1)?;
    match check(&attach(&memory)?)? {
        (_, all) if all == pages => Ok(()),
        _ => Err("the parent could not go on".into()),
    }
}

fn main() -> Result<()> {
    if is_child()? { Ok(()) } else { run(4096, 5, || Ok(Command::new(std::env::current_exe()?))) }
}

/// In a child it is this test that writes: a test program knows its tests alone.
#[cfg(target_arch = "x86_64")]
#[test]
fn killed_writers_lose_nothing() {
    if is_child().expect("until it is killed") {
        return;
    }
    let child = || {
        let mut child = Command::new(std::env::current_exe()?);
        child.args(["--exact", "--nocapture", "killed_writers_lose_nothing"]);
        Ok(child)
    };
    run(256, 3, child).expect("all pages");
}
