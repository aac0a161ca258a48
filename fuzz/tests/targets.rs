//! Runs every target on its seeds and seeded random mutations of them: a replacement for the fuzzers that
//! needs neither them nor more than seconds.
//!
//! `UZRAM_TEST_SEED` repeats a run, `UZRAM_FUZZ_ROUNDS` multiplies its length. An input that fails is
//! kept in a file whose path is printed.
#![allow(clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use uzram::random::Random;
use uzram_fuzz::{TARGETS, Target};

/// The longest input that mutations make.
const MAX_INPUT_BYTES: usize = 4096;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

fn run(target: &Target, input: &[u8]) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (target.run)(input))) {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.crash", target.name));
        std::fs::write(&path, input).unwrap();
        println!("the input is {}; fuzz/run {} {0} runs it again", path.display(), target.name);
        resume_unwind(panic);
    }
}

/// Runs the seeds, then mutations of them, for `rounds` or, on a slow machine, a bounded time.
fn run_mutations(name: &str, rounds: u64) {
    let target = uzram_fuzz::target(name).unwrap();
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = variable("UZRAM_TEST_SEED").unwrap_or_else(now);
    println!("UZRAM_TEST_SEED={seed}");
    let (mut random, seeds) = (Random::new(seed), (target.seeds)());
    seeds.iter().for_each(|input| run(target, input));
    let multiple = variable("UZRAM_FUZZ_ROUNDS").unwrap_or(1);
    let deadline = Instant::now() + Duration::from_secs(10 * multiple);
    let mut done = 0;
    while done < rounds * multiple && Instant::now() < deadline {
        let mut input = seeds[random.below(seeds.len())].clone();
        for _ in 0..1 + random.below(8) {
            mutate(&mut input, &seeds, &mut random);
        }
        run(target, &input);
        done += 1;
    }
    println!("{name}: {} seeds, {done} mutations", seeds.len());
}

fn mutate(input: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    let (at, len) = (random.below(input.len() + 1), 1 + random.below(16));
    let end = (at + len).min(input.len());
    match random.below(8) {
        0 if at < input.len() => input[at] ^= 1 << random.below(8),
        1 if at < input.len() => input[at] = random.next() as u8,
        2 if at < input.len() => input[at] = [0, 1, 0x7f, 0x80, 0xfe, 0xff][random.below(6)],
        3 => input.insert(at, random.next() as u8),
        4 => drop(input.drain(at..end)),
        5 => input.extend_from_within(at..end),
        6 => input[at..end].fill_with(|| random.next() as u8),
        _ => {
            let other = &seeds[random.below(seeds.len())];
            input.truncate(at);
            input.extend_from_slice(&other[random.below(other.len() + 1)..]);
        }
    }
    input.truncate(MAX_INPUT_BYTES);
}

/// Makes a test of each of these targets, which runs so many mutations.
macro_rules! tests {
    ($($target:ident: $rounds:expr,)*) => {
        $(
            #[test]
            fn $target() {
                run_mutations(stringify!($target), $rounds);
            }
        )*
    };
}

tests! {
    // A third of the seeds have TLS.
    nbd_handshake: 30_000,
    nbd_transmission: 20_000,
    fuse_requests: 3000,
    control_http: 6000,
    codec_decode: 6000,
    codec_round_trip: 3000,
    device_ops: 1500,
    attach: 1000,
    attributes: 1500,
    backing_mark: 20_000,
    remote: 5_000,
    run_figures: 20_000,
    start: 3000,
}

#[test]
fn dull_inputs() {
    for target in TARGETS {
        run(target, &[]);
        for byte in [0, 1, b'\n', 0x7f, 0x80, 0xff] {
            run(target, &[byte]);
            run(target, &[byte; 3000]);
        }
    }
}
