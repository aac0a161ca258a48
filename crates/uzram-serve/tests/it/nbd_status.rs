//! Block status, also after each command that changes the disk.

use crate::common::{Client, EINVAL, Headers, Random, TestServer, cmd, seed};
use uzram_serve::nbd::proto::{allocation, command_flags, state};

const CHUNKS: [Headers; 2] = [Headers::Structured, Headers::Extended];
const HOLE: u64 = (allocation::HOLE | allocation::ZERO) as u64;
const ZERO: u64 = allocation::ZERO as u64;

/// Returns a client that has set both contexts, and their ids.
fn ready(server: &TestServer, headers: Headers) -> (Client, u32, u32) {
    let (client, ids) = server.with_contexts(headers, &[b"base:allocation", b"uzram:state"]);
    (client, ids[0], ids[1])
}

/// Every command that changes a page's state, and the contexts after it.
#[test]
fn status_follows_the_commands() {
    use command_flags::{FAST_ZERO, FUA, NO_HOLE};
    let (noise, text) = (Random::new(seed()).bytes(4096), b"sixteen of text.".repeat(256));
    let hole = (HOLE, state::HOLE);
    let zero = (ZERO, state::ZERO);
    let compressed = (0, state::COMPRESSED);
    for headers in CHUNKS {
        let server = TestServer::new("1M");
        let (mut client, base, own) = ready(&server, headers);
        // Flags, command, the range's start and length, what is written, and the states of pages after it.
        for (flags, command, offset, len, data, states) in [
            (0, cmd::FLUSH, 0, 0, &[][..], &[(0, hole)][..]),
            (0, cmd::WRITE, 0, 4096, &noise, &[(0, (0, state::HUGE))]),
            (0, cmd::WRITE, 1 << 12, 4096, &text, &[(1, compressed)]),
            (0, cmd::WRITE, 2 << 12, 4096, &[7; 4096], &[(2, (0, state::SAME))]),
            (0, cmd::WRITE, 3 << 12, 4096, &[0; 4096], &[(3, zero)]),
            // Zeroing frees a page, unless NO_HOLE is set; for pages with and without contents.
            (NO_HOLE, cmd::WRITE_ZEROES, 4096, 8192, &[], &[(1, zero), (2, zero)]),
            (FAST_ZERO, cmd::WRITE_ZEROES, 4096, 8192, &[], &[(1, hole), (2, hole)]),
            (NO_HOLE | FAST_ZERO | FUA, cmd::WRITE_ZEROES, 4096, 8192, &[], &[(1, zero), (2, zero)]),
            (FAST_ZERO, cmd::WRITE_ZEROES, 4096, 4096, &[], &[(1, hole), (2, zero)]),
            // At the edges, 100 bytes of page 4 and of page 6 are unchanged.
            (0, cmd::WRITE, 4 << 12, 3 << 12, &text.repeat(3), &[(4, compressed), (6, compressed)]),
            (
                0,
                cmd::WRITE_ZEROES,
                (4 << 12) + 100,
                3 * 4096 - 200,
                &[],
                &[(4, compressed), (5, hole), (6, compressed)],
            ),
            // Zeroing a part of a hole keeps the hole, unless NO_HOLE is set.
            (0, cmd::WRITE_ZEROES, (8 << 12) + 1, 5, &[], &[(8, hole)]),
            (NO_HOLE, cmd::WRITE_ZEROES, (8 << 12) + 1, 5, &[], &[(8, zero)]),
            (0, cmd::TRIM, 8 << 12, 4096, &[], &[(8, hole)]),
            // Neither status requests nor CACHE change anything.
            (0, cmd::CACHE, 0, 1 << 20, &[], &[(8, hole), (0, (0, state::HUGE))]),
        ] {
            assert_eq!(client.call(flags, command, offset, len, data).error, 0);
            for (page, (allocated, page_state)) in states {
                let reply = client.call(0, cmd::BLOCK_STATUS, page << 12, 4096, &[]);
                assert_eq!(reply.offset, (headers == Headers::Extended).then_some(page << 12));
                let expected =
                    [(base, vec![(4096, *allocated)]), (own, vec![(4096, u64::from(*page_state))])];
                assert_eq!(reply.statuses, expected, "page {page} after {command} {flags} {offset}+{len}");
            }
        }
        let data = client.read(0, 4 << 12, 3 * 4096).data();
        assert!(data[..100] == text[..100] && data[3 * 4096 - 100..] == text[4096 - 100..]);
        assert!(data[100..3 * 4096 - 100].iter().all(|byte| *byte == 0));
        assert_eq!(client.read(0, 8 << 12, 4096).holes, [(8 << 12, 4096)]);
    }
}

/// Random disks and random requests against a state for each page.
#[test]
fn descriptors_agree_with_a_model() {
    const PAGES: u64 = 64;
    let mut random = Random::new(seed());
    for headers in CHUNKS {
        let server = TestServer::new("256K");
        let (mut client, base, own) = ready(&server, headers);
        let mut states = [state::HOLE; PAGES as usize];
        for page in 0..PAGES as usize {
            // Prefer long runs.
            let goes_on = random.below(3) > 0 && page > 0;
            states[page] = if goes_on { states[page - 1] } else { random.below(5) as u32 };
            let data = match states[page] {
                state::HOLE => continue,
                state::ZERO => vec![0; 4096],
                state::SAME => vec![9; 4096],
                state::COMPRESSED => b"sixteen of text.".repeat(256),
                _ => random.bytes(4096),
            };
            assert_eq!(client.write((page as u64) << 12, &data).error, 0);
        }
        let allocated = |page_state| match page_state {
            state::HOLE => HOLE,
            state::ZERO => ZERO,
            _ => 0,
        };
        for _ in 0..300 {
            let offset = random.below_u64(PAGES << 12);
            let len = 1 + random.below_u64((PAGES << 12) - offset);
            let runs = |status: &dyn Fn(u32) -> u64| {
                let mut runs: Vec<(u64, u64)> = Vec::new();
                for byte in offset..offset + len {
                    let now = status(states[(byte >> 12) as usize]);
                    match runs.last_mut() {
                        Some((run, same)) if *same == now => *run += 1,
                        _ => runs.push((1, now)),
                    }
                }
                runs
            };
            let expected = [(base, runs(&allocated)), (own, runs(&u64::from))];
            let reply = client.call(0, cmd::BLOCK_STATUS, offset, len as u32, &[]);
            assert_eq!(reply.statuses, expected, "{offset}+{len}");
            let one = client.call(command_flags::REQ_ONE, cmd::BLOCK_STATUS, offset, len as u32, &[]);
            let first = expected.map(|(id, runs)| (id, runs[..1].to_vec()));
            assert_eq!(one.statuses, first, "{offset}+{len}");
            // Reads agree: holes and zeros carry no data, and the reply is complete.
            let read = client.read(0, offset, len as u32);
            let (mut at, mut zeros) = (offset, Vec::new());
            for (run, zero) in runs(&|page_state| u64::from(page_state <= state::ZERO)) {
                zeros.extend((zero == 1).then_some((at, run)));
                at += run;
            }
            assert_eq!(read.holes, zeros, "{offset}+{len}");
            let mut at = offset;
            for (from, data) in &read.chunks {
                assert_eq!(*from, at);
                at += data.len() as u64;
            }
            assert_eq!(at, offset + len);
            let whole = client.read(command_flags::DF, offset, len as u32);
            assert!((whole.chunks.len(), whole.holes.len()) == (1, 0) && whole.data() == read.data());
        }
    }
}

#[test]
fn long_answers_are_cut_and_go_on() {
    // Every other page is written: one descriptor each.
    let server = TestServer::new("4G");
    let open = server.device.open().unwrap();
    for page in 0..10_000u64 {
        open.write(page << 13, &[1; 4096]).unwrap();
    }
    for headers in CHUNKS {
        let (mut client, _, _) = ready(&server, headers);
        let (mut at, mut answers, mut descriptors) = (0u64, 0, 0);
        while at < 4 << 30 {
            let left = ((4u64 << 30) - at).min(u32::MAX.into());
            let reply = client.long_call(0, cmd::BLOCK_STATUS, at, left);
            assert_eq!(reply.error, 0);
            let told = &reply.statuses[0].1;
            let told_bytes: u64 = told.iter().map(|(len, _)| len).sum();
            assert!(told.len() <= 1 << 20 && told_bytes > 0 && told_bytes <= left);
            at += told_bytes;
            descriptors += told.len();
            answers += 1;
        }
        assert!((20_000..20_020).contains(&descriptors) && answers < 20, "{descriptors} in {answers}");
    }
}

#[test]
fn bad_status_requests_are_refused() {
    let server = TestServer::new("1M");
    for headers in CHUNKS {
        let (mut client, _, _) = ready(&server, headers);
        for (flags, offset, len) in [
            (0, 0, (1 << 20) + 1),
            (0, 1 << 20, 1),
            (0, u64::MAX, 2),
            (0, 0, 0),
            (command_flags::DF, 0, 4096),
            (1 << 9, 0, 4096),
        ] {
            let reply = client.call(flags, cmd::BLOCK_STATUS, offset, len, &[]);
            assert_eq!((reply.error, reply.statuses.len()), (EINVAL, 0), "{flags} {offset}+{len}");
        }
        assert_eq!(client.call(command_flags::FUA, cmd::BLOCK_STATUS, 0, 1 << 20, &[]).error, 0);
    }
}
