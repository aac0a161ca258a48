//! The end of an export: the protocol's errors for every command whose range reaches past it.
//!
//! Nothing is done of such a request, and the connection goes on. The specification has ENOSPC for writes and EINVAL for
//! the rest.

use crate::common::{ALL_HEADERS, TestServer, cmd};

const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const END: u64 = 5000 << 10;
const TAIL: usize = 4 * 4096;

#[test]
fn a_range_past_the_end_gets_the_specified_error_and_changes_nothing() {
    let server = TestServer::new("5000K");
    let start = END - TAIL as u64;
    for headers in ALL_HEADERS {
        let mut client = server.ready_with(headers);
        let mut model: Vec<u8> = (0..TAIL).map(|at| (at / 3) as u8 | 1).collect();
        assert_eq!(client.write(start, &model).error, 0);
        for offset in [END - 4097, END - 4096, END - 1, END, END + 1, END + 4096, u64::MAX - 1, u64::MAX] {
            for len in [0, 1, 2, 4096, 4097, 3 << 20] {
                let is_inside = offset.checked_add(len.into()).is_some_and(|end| end <= END);
                let at = offset.saturating_sub(start) as usize;
                for (command, error) in [
                    (cmd::READ, EINVAL),
                    (cmd::WRITE, ENOSPC),
                    (cmd::WRITE_ZEROES, ENOSPC),
                    (cmd::TRIM, EINVAL),
                    (cmd::CACHE, EINVAL),
                    // No metadata context was set.
                    (cmd::BLOCK_STATUS, EINVAL),
                ] {
                    let payload = if command == cmd::WRITE { vec![7; len as usize] } else { vec![] };
                    let cookie = client.request(0, command, offset, len, &payload);
                    let reply = client.reply(if command == cmd::READ { len as usize } else { 0 });
                    let is_done = is_inside && command != cmd::BLOCK_STATUS;
                    let wanted = if is_done { 0 } else { error };
                    assert_eq!((reply.cookie, reply.error), (cookie, wanted), "{command}: {len} at {offset}");
                    match command {
                        cmd::WRITE if is_done => model[at..at + len as usize].fill(7),
                        cmd::WRITE_ZEROES if is_done => model[at..at + len as usize].fill(0),
                        cmd::TRIM if is_done => {
                            let first = at.next_multiple_of(4096);
                            model[first..(at + len as usize).max(first) & !4095].fill(0);
                        }
                        _ => {}
                    }
                    assert!(
                        client.read(0, start, TAIL as u32).data() == model,
                        "{command}: {len} at {offset}"
                    );
                }
            }
        }
        // Lengths of 64 bits.
        for command in [cmd::WRITE_ZEROES, cmd::TRIM].into_iter().filter(|_| headers == ALL_HEADERS[2]) {
            assert_ne!(client.long_call(0, command, 0, END + 1).error, 0);
            assert_ne!(client.long_call(0, command, 4096, u64::MAX - 4095).error, 0);
            assert!(client.read(0, start, TAIL as u32).data() == model);
        }
    }
}
