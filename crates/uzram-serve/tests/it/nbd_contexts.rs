//! Metadata contexts and block status, also after each command that changes the disk.

use std::sync::Arc;

use crate::common::{ALL_HEADERS, Client, Headers, Random, TestServer, cmd, device, option_bytes, seed};
use uzram::device::Device;
use uzram_serve::Exports;
use uzram_serve::nbd::proto::{allocation, command_flags, option, reply, state, transmission_flags};
use uzram_serve::nbd::{Server, ServerConfig};

const EINVAL: u32 = 22;
const BOTH: [&[u8]; 2] = [b"base:allocation", b"uzram:state"];
const HOLE: u64 = (allocation::HOLE | allocation::ZERO) as u64;

/// Returns a client that has set both contexts, and their ids.
fn ready(server: &TestServer, headers: Headers) -> (Client, u32, u32) {
    let mut client = server.client();
    client.agree(headers);
    let set = client.contexts(option::SET_META_CONTEXT, b"", &BOTH).unwrap();
    client.enter();
    (client, set[0].0, set[1].0)
}

#[test]
fn contexts_are_listed_and_set_by_query() {
    let server = TestServer::new("1M");
    for headers in [Headers::Structured, Headers::Extended] {
        let mut client = server.client();
        client.agree(headers);
        let both = [b"base:allocation".to_vec(), b"uzram:state".to_vec()];
        let too_long = [b"base:".to_vec(), vec![b'x'; 5000]].concat();
        for (queries, listed, set) in [
            (&[][..], &both[..], &[][..]),
            (&BOTH, &both, &both),
            (&[b"uzram:state", b"base:allocation", b"uzram:state"], &both, &both),
            (&[b"base:"], &both[..1], &[]),
            (&[b"uzram:"], &both[1..], &[]),
            (&[b"qemu:dirty-bitmap:x", b"x-y:", b"base:nonesuch", &too_long], &[], &[]),
            (&[b"base:", b"uzram:state"], &both, &both[1..]),
        ] {
            for name in [&b""[..], b"zram0"] {
                let names = |option| {
                    let contexts: Vec<(u32, String)> = client.contexts(option, name, queries).unwrap();
                    contexts.into_iter().map(|(id, name)| (id, name.into_bytes())).collect::<Vec<_>>()
                };
                let mut names = names;
                let in_list = names(option::LIST_META_CONTEXT);
                assert!(in_list.iter().all(|(id, _)| *id == 0), "numbers belong to contexts that are set");
                assert_eq!(
                    in_list.iter().map(|(_, name)| name).collect::<Vec<_>>(),
                    listed.iter().collect::<Vec<_>>()
                );
                let in_set = names(option::SET_META_CONTEXT);
                assert_eq!(
                    in_set.iter().map(|(_, name)| name).collect::<Vec<_>>(),
                    set.iter().collect::<Vec<_>>()
                );
                let [.., last] = &in_set[..] else { continue };
                assert!(in_set.len() == 1 || in_set[0].0 != last.0, "different numbers");
            }
        }
    }
}

#[test]
fn bad_context_options_are_refused_and_forget_what_was_set() {
    let server = TestServer::new("1M");
    let good = crate::common::context_request(b"", &BOTH);
    let bad: [(Vec<u8>, u32); 6] = [
        (good[..good.len() - 1].to_vec(), reply::ERR_INVALID),
        ([&good[..], b"x"].concat(), reply::ERR_INVALID),
        (vec![], reply::ERR_INVALID),
        ([&[0; 4][..], &u32::MAX.to_be_bytes()].concat(), reply::ERR_INVALID),
        (crate::common::context_request(b"", &[b"no colon"]), reply::ERR_INVALID),
        (crate::common::context_request(b"other", &BOTH), reply::ERR_UNKNOWN),
    ];
    for (data, error) in bad {
        let mut client = server.client();
        client.agree(Headers::Structured);
        assert_eq!(client.contexts(option::SET_META_CONTEXT, b"", &BOTH).unwrap().len(), 2);
        // Listing does not change the contexts that are set.
        assert_eq!(client.option(option::LIST_META_CONTEXT, &data).pop().unwrap().0, error);
        assert_eq!(client.option(option::SET_META_CONTEXT, &data).pop().unwrap().0, error, "{data:?}");
        client.enter();
        assert_eq!(client.call(0, cmd::BLOCK_STATUS, 0, 4096, &[]).error, EINVAL);
    }
    let mut client = server.client();
    for option in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        assert_eq!(client.contexts(option, b"", &BOTH), Err(reply::ERR_INVALID), "not with simple replies");
    }
}

#[test]
fn contexts_belong_to_the_export_they_were_set_for() {
    let first = device("1M");
    let second = Device::new("zram1").unwrap();
    second.set("disksize", "2M").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let exports = Exports::new([Arc::clone(&first), second]);
    let _server = Server::bind(ServerConfig::new(&path), exports).unwrap().spawn().unwrap();
    let payload = transmission_flags::BLOCK_STATUS_PAYLOAD;
    for (set_for, entered, kept) in [
        ("", "zram0", true),
        ("zram0", "", true),
        ("zram1", "zram1", true),
        ("zram1", "zram0", false),
        ("", "zram1", false),
    ] {
        let mut client = Client::connect(&path);
        client.agree(Headers::Extended);
        client.contexts(option::SET_META_CONTEXT, set_for.as_bytes(), &BOTH[..1]).unwrap();
        let flags = client.enter_export(entered.as_bytes()).1;
        assert_eq!(flags & payload != 0, kept, "{set_for} {entered}");
        let reply = client.call(0, cmd::BLOCK_STATUS, 0, 4096, &[]);
        assert_eq!(reply.error, if kept { 0 } else { EINVAL }, "{set_for} {entered}");
    }
    // The old way to choose an export keeps them, too.
    let mut client = Client::connect(&path);
    client.agree(Headers::Structured);
    client.contexts(option::SET_META_CONTEXT, b"zram1", &BOTH).unwrap();
    client.send(&option_bytes(option::EXPORT_NAME, b"zram1"));
    client.take::<10>();
    assert_eq!(client.call(0, cmd::BLOCK_STATUS, 0, 4096, &[]).statuses.len(), 2);
    // The last set counts, even if it is empty.
    let mut client = Client::connect(&path);
    client.agree(Headers::Structured);
    client.contexts(option::SET_META_CONTEXT, b"", &BOTH).unwrap();
    let set = client.contexts(option::SET_META_CONTEXT, b"", &BOTH[1..]).unwrap();
    client.enter();
    let reply = client.call(0, cmd::BLOCK_STATUS, 0, 4096, &[]);
    assert_eq!(reply.statuses, [(set[0].0, vec![(4096, 0)])]);
    let mut client = Client::connect(&path);
    client.agree(Headers::Structured);
    client.contexts(option::SET_META_CONTEXT, b"", &BOTH).unwrap();
    assert_eq!(client.contexts(option::SET_META_CONTEXT, b"", &[]), Ok(vec![]));
    client.enter();
    assert_eq!(client.call(0, cmd::BLOCK_STATUS, 0, 4096, &[]).error, EINVAL);
}

/// Every command that changes a page's state, and the contexts after it.
#[test]
fn status_follows_the_commands() {
    for headers in [Headers::Structured, Headers::Extended] {
        let server = TestServer::new("1M");
        let (mut client, base, own) = ready(&server, headers);
        let expect = |client: &mut Client, page: u64, allocated: u64, page_state: u32| {
            let reply = client.call(0, cmd::BLOCK_STATUS, page << 12, 4096, &[]);
            assert_eq!(reply.error, 0);
            assert_eq!(reply.offset, (headers == Headers::Extended).then_some(page << 12));
            let expected = [(base, vec![(4096, allocated)]), (own, vec![(4096, page_state.into())])];
            assert_eq!(reply.statuses, expected, "page {page}");
        };
        let zero = u64::from(allocation::ZERO);
        let (noise, text) = (Random::new(seed()).bytes(4096), b"sixteen of text.".repeat(256));
        expect(&mut client, 0, HOLE, state::HOLE);
        for (page, data, page_state) in
            [(0, &noise, state::HUGE), (1, &text, state::COMPRESSED), (2, &vec![7; 4096], state::SAME)]
        {
            assert_eq!(client.write(page << 12, data).error, 0);
            expect(&mut client, page, 0, page_state);
        }
        assert_eq!(client.write(3 << 12, &[0; 4096]).error, 0);
        expect(&mut client, 3, zero, state::ZERO);
        // Zeroing frees a page, unless NO_HOLE is set; for pages with and without contents.
        let no_hole = command_flags::NO_HOLE;
        for flags in [no_hole, no_hole | command_flags::FAST_ZERO | command_flags::FUA] {
            assert_eq!(client.call(flags, cmd::WRITE_ZEROES, 4096, 8192, &[]).error, 0);
            expect(&mut client, 1, zero, state::ZERO);
            expect(&mut client, 2, zero, state::ZERO);
            assert_eq!(client.call(command_flags::FAST_ZERO, cmd::WRITE_ZEROES, 4096, 8192, &[]).error, 0);
            expect(&mut client, 1, HOLE, state::HOLE);
        }
        // At the edges, 100 bytes of page 4 and of page 6 are unchanged.
        assert_eq!(client.write(4 << 12, &text.repeat(3)).error, 0);
        assert_eq!(client.call(0, cmd::WRITE_ZEROES, (4 << 12) + 100, 3 * 4096 - 200, &[]).error, 0);
        expect(&mut client, 4, 0, state::COMPRESSED);
        expect(&mut client, 5, HOLE, state::HOLE);
        expect(&mut client, 6, 0, state::COMPRESSED);
        let data = client.read(0, 4 << 12, 3 * 4096).data();
        assert!(data[..100] == text[..100] && data[3 * 4096 - 100..] == text[4096 - 100..]);
        assert!(data[100..3 * 4096 - 100].iter().all(|byte| *byte == 0));
        // Zeroing a part of a hole keeps the hole, unless NO_HOLE is set.
        assert_eq!(client.call(0, cmd::WRITE_ZEROES, (8 << 12) + 1, 5, &[]).error, 0);
        expect(&mut client, 8, HOLE, state::HOLE);
        assert_eq!(client.call(no_hole, cmd::WRITE_ZEROES, (8 << 12) + 1, 5, &[]).error, 0);
        expect(&mut client, 8, zero, state::ZERO);
        assert_eq!(client.call(0, cmd::TRIM, 8 << 12, 4096, &[]).error, 0);
        expect(&mut client, 8, HOLE, state::HOLE);
        // Neither status requests nor CACHE change anything.
        assert_eq!(client.call(0, cmd::CACHE, 0, 1 << 20, &[]).error, 0);
        assert_eq!(client.read(0, 8 << 12, 4096).holes, [(8 << 12, 4096)]);
        expect(&mut client, 8, HOLE, state::HOLE);
        expect(&mut client, 0, 0, state::HUGE);
    }
}

/// Random disks and random requests against a state for each page.
#[test]
fn descriptors_agree_with_a_model() {
    const PAGES: u64 = 64;
    let mut random = Random::new(seed());
    for headers in [Headers::Structured, Headers::Extended] {
        let server = TestServer::new("256K");
        let (mut client, base, own) = ready(&server, headers);
        let mut states = [state::HOLE; PAGES as usize];
        for page in 0..PAGES {
            if random.below_u64(3) > 0 && page > 0 {
                // Prefer long runs.
                states[page as usize] = states[page as usize - 1];
            } else {
                states[page as usize] = random.below_u64(5) as u32;
            }
            let data = match states[page as usize] {
                state::HOLE => continue,
                state::ZERO => vec![0; 4096],
                state::SAME => vec![9; 4096],
                state::COMPRESSED => b"sixteen of text.".repeat(256),
                _ => random.bytes(4096),
            };
            assert_eq!(client.write(page << 12, &data).error, 0);
        }
        let allocated = |page_state| match page_state {
            state::HOLE => HOLE,
            state::ZERO => u64::from(allocation::ZERO),
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
            let mut at = offset;
            for (from, data) in &read.chunks {
                assert_eq!(*from, at);
                at += data.len() as u64;
            }
            assert_eq!(at, offset + len);
            let zeros: Vec<(u64, u64)> = runs(&|page_state| u64::from(page_state <= state::ZERO))
                .into_iter()
                .scan(offset, |at, (run, zero)| {
                    *at += run;
                    Some((*at - run, run, zero))
                })
                .filter_map(|(from, run, zero)| (zero == 1).then_some((from, run)))
                .collect();
            assert_eq!(read.holes, zeros, "{offset}+{len}");
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
    for headers in [Headers::Structured, Headers::Extended] {
        let (mut client, _, _) = ready(&server, headers);
        let (mut at, mut answers, mut descriptors) = (0u64, 0, 0);
        while at < 4 << 30 {
            let left = ((4u64 << 30) - at).min(u32::MAX.into());
            let reply = client.long_call(0, cmd::BLOCK_STATUS, at, left);
            assert_eq!(reply.error, 0);
            let told = &reply.statuses[0].1;
            assert!(told.len() <= 1 << 20);
            let told_bytes: u64 = told.iter().map(|(len, _)| len).sum();
            assert!(told_bytes > 0 && told_bytes <= left);
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
    for headers in ALL_HEADERS.into_iter().skip(1) {
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
