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
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
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
/// Rounds that a child writes at least.
const ROUNDS: u64 = 2;
const SIGKILL: i32 = 9;

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

fn write_round(store: &Store, round: u64) -> Result<()> {
    let mut pages = (0..store.pages()).map(|page| (PageNo::from_number(page), contents(page, round)));
    Ok(pages.try_for_each(|(page, contents)| store.write(page, &contents))?)
}

/// What a writer has left: this many pages of a round, and the others of the round before.
struct Left {
    round: u64,
    pages: u64,
}

/// Reads all pages.
fn check(store: &Store) -> Result<Left> {
    let (mut left, mut page) = (Left { round: 0, pages: 0 }, [0; PAGE_SIZE]);
    for number in 0..store.pages() {
        store.read(PageNo::from_number(number), &mut page)?;
        let round = page.first_chunk().map_or(0, |word| u64::from_ne_bytes(*word) >> u32::BITS);
        if page != contents(number, round) {
            return Err(format!("page {number} does not hold what was written").into());
        }
        if number == 0 {
            left.round = round;
        }
        if round == left.round && number == left.pages {
            left.pages += 1;
        } else if round + 1 != left.round {
            return Err(format!("page {number} is of round {round}, the first of {}", left.round).into());
        }
    }
    Ok(left)
}

/// The child: goes on where the last one was killed.
fn write_until_killed(memory: OwnedFd) -> Result<()> {
    // SAFETY: the process that had the memory has ended, or its store was dropped.
    let (store, _) = unsafe { Store::attach(memory, None)? };
    let last = check(&store)?.round;
    for round in last + 1.. {
        write_round(&store, round)?;
        writeln!(stdout(), "{WROTE} {round}")?;
    }
    Ok(())
}

/// The memory that this process is to write to, if it is a child.
fn inherited_memory() -> Result<Option<OwnedFd>> {
    let mut arguments = std::env::args().skip_while(|argument| argument != WRITE).skip(1);
    let Some(number) = arguments.next() else { return Ok(None) };
    let number: u32 = number.parse()?;
    // Opened anew, which needs no promise that the number is a descriptor's, and of nobody else here.
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{number}"))?;
    Ok(Some(memory.into()))
}

/// Starts a child.
fn start_child(mut child: Command, memory: &OwnedFd) -> Result<Child> {
    // Unlike `try_clone`, dup(2) makes a descriptor that stays open on exec.
    let inherited = rustix::io::dup(memory)?;
    let number = inherited.as_raw_fd().to_string();
    Ok(child.arg(WRITE).arg(number).stdout(Stdio::piped()).spawn()?)
}

/// Waits until a child has written some rounds, and returns the last of them.
fn wait_for_rounds(out: &mut BufReader<ChildStdout>) -> Result<u64> {
    let lines = out.lines().map_while(std::io::Result::ok);
    let mut rounds = lines.filter_map(|line| line.strip_prefix(WROTE)?.trim().parse().ok());
    rounds.nth(ROUNDS as usize - 1).ok_or_else(|| "the child ended by itself".into())
}

/// Starts a child and kills it somewhere in a later round; returns the last round that it said it wrote
/// before, and how it ended.
fn kill_a_writer(child: Command, memory: &OwnedFd, random: &mut Random) -> Result<(u64, ExitStatus)> {
    let mut child = start_child(child, memory)?;
    let mut out = child.stdout.take().map(BufReader::new);
    let written = out.as_mut().ok_or_else(|| "no pipe".into()).and_then(wait_for_rounds);
    std::thread::sleep(Duration::from_micros(random.below(20_000) as u64));
    // Whatever it said, it does not stay behind.
    child.kill()?;
    let status = child.wait()?;
    Ok((written?, status))
}

/// Makes a store, has children killed that write to it, and goes on itself.
fn run(pages: u64, kills: u64, child: impl Fn() -> Result<Command>) -> Result<()> {
    let store = Store::create_in(&StoreBuilder::new("survivor", pages).checksum(true))?;
    let memory = store.memory().ok_or("the store is in private memory")?.as_fd().try_clone_to_owned()?;
    // One process at a time has the store. Its memory is there as long as the descriptor is.
    drop(store);
    let mut random = Random::new(kills);
    for _ in 0..kills {
        let (written, status) = kill_a_writer(child()?, &memory, &mut random)?;
        if status.signal() != Some(SIGKILL) {
            return Err(format!("the child was not killed: {status}").into());
        }
        let started = Instant::now();
        // SAFETY: the process that had the memory has ended, or its store was dropped.
        let (store, attached) = unsafe { Store::attach(memory.try_clone()?, None)? };
        let took = started.elapsed();
        let left = check(&store)?;
        if attached.pages_lost > 0 || left.round < written {
            return Err(format!("round {written} was written, and is lost: {attached:?}").into());
        }
        println!(
            "killed in round {}, after {} of {pages} pages; attached in {took:.1?}, all pages as they were written",
            if left.pages == pages { left.round + 1 } else { left.round },
            left.pages % pages,
        );
    }
    // SAFETY: the process that had the memory has ended, or its store was dropped.
    let (store, _) = unsafe { Store::attach(memory, None)? };
    let next = check(&store)?.round + 1;
    write_round(&store, next)?;
    let left = check(&store)?;
    if (left.round, left.pages) != (next, pages) {
        return Err("the parent could not go on".into());
    }
    println!("wrote round {next} in the process that is left, to the memory of {kills} killed ones");
    Ok(())
}

fn main() -> Result<()> {
    if let Some(memory) = inherited_memory()? {
        return write_until_killed(memory);
    }
    run(4096, 5, || Ok(Command::new(std::env::current_exe()?)))
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// In a child it is this test that writes: a test program knows its tests alone.
    #[test]
    fn killed_writers_lose_nothing() {
        if let Some(memory) = inherited_memory().expect("the parent's descriptor") {
            write_until_killed(memory).expect("until it is killed");
        }
        let child = || {
            let mut child = Command::new(std::env::current_exe()?);
            child.args(["--exact", "--nocapture", "tests::killed_writers_lose_nothing"]);
            Ok(child)
        };
        run(256, 3, child).expect("all pages");
    }
}
