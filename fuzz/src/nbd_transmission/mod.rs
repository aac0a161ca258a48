//! Fuzzes a client that chose an export and then sends requests made from the input: mostly valid ones, and a
//! last one that may be invalid.
//!
//! Promises: every request is answered once, in order, in the negotiated form; valid requests succeed
//! (without `mem_limit`) and invalid ones are refused; data, holes and block status agree with a naive model;
//! in a session that breaks the protocol the valid requests are answered, and it ends; `mem_charged` does not
//! grow beyond `mem_limit`.
//!
//! Devices, buffers and the model are kept from one input to the next, emptied: making them would take most
//! of the time.

mod script;

use std::cell::RefCell;
use std::sync::Arc;

use uzram::device::{Device, OpenDevice, PageState};
use uzram_serve::Exports;
use uzram_serve::nbd::proto::{NbdError, allocation, command, command_flags, state};
use uzram_serve::nbd::{Buffers, serve_stream};

use crate::input::Input;
use crate::model::Model;
use crate::nbd_client::{Client, Headers, Reply, extended_request_bytes};
use crate::wire::Wire;
use script::{DISK_BYTES, End, Header, Script};

/// Small, so that replies and payloads exceed it.
const BUFFER_BYTES: usize = 20 << 10;

struct Bench {
    /// Without and with checksums. Only lz4: the codecs have their own targets.
    disks: [(Exports, Arc<Device>, OpenDevice); 2],
    buffers: Buffers,
    model: Model,
}

impl Bench {
    fn new() -> Self {
        let disk = |checksum: &str| {
            let device = Device::new("zram0").expect("a good name");
            for (name, value) in [("checksum", checksum), ("disksize", DISK_BYTES.to_string().as_str())] {
                device.set(name, value).expect(name);
            }
            let open = device.open().expect("it has a size");
            (Exports::new([Arc::clone(&device)]), device, open)
        };
        Bench {
            disks: ["0", "1"].map(disk),
            buffers: Buffers::new(BUFFER_BYTES).expect("memory"),
            model: Model::new(DISK_BYTES, false),
        }
    }
}

thread_local! {
    static BENCH: RefCell<Bench> = RefCell::new(Bench::new());
}

pub(crate) fn run(bytes: &[u8]) {
    BENCH.with_borrow_mut(|bench| run_on(bench, bytes));
}

fn run_on(bench: &mut Bench, bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let settings = input.byte();
    let limit = match input.byte() {
        0xf0..0xf8 => "24K",
        0xf8.. => "32K",
        _ => "0",
    };
    let tear = input.byte();
    let Bench { disks, buffers, model } = bench;
    let (exports, device, disk) = &disks[usize::from(settings % 2)];
    let script = Script::new(&mut input, settings >> 2, tear);
    let limited = limit != "0";
    if limited {
        device.set("mem_limit", limit).expect("at any time");
    }
    let charged_before_bytes = if limited { device.stats().mem_charged_bytes } else { 0 };
    let mut wire = Wire::new(&script.said, tear);
    let result = serve_stream(&mut wire, exports, buffers, None);

    let mut heard = Client::on(&wire.heard[..]);
    let contexts = script.take_handshake(&mut heard);
    for (header, payload) in &script.requests {
        let reply = take_reply(&mut heard, header);
        judge(model, header, payload, &reply, &script, &contexts, limited);
    }
    script.check_end(&result, heard.stream);
    if let Some(range) = script.cut_write.and_then(|cut| model.range(cut.offset, cut.len_bytes)) {
        model.lose(range);
    }
    if !matches!(script.end, End::Garbage) {
        model.check_all(disk);
    }
    if limited {
        let stats = device.stats();
        let most_bytes = stats.mem_limit_bytes.max(charged_before_bytes);
        assert!(stats.mem_charged_bytes <= most_bytes, "{stats:?} is over the limit");
        if !matches!(script.end, End::Garbage) {
            model.check_stats(&stats);
        }
        device.set("mem_limit", "0").expect("at any time");
    }
    disk.discard(0, DISK_BYTES as u64).expect("in range");
    model.clear();
    assert_eq!(Arc::strong_count(device), 3, "nobody else has it open when the session is over");
}

/// Receives a reply, and checks its form: this server sends contents in order and without gaps.
fn take_reply(heard: &mut Client<&[u8]>, request: &Header) -> Reply {
    let reads = request.command == command::READ;
    let reply = heard.reply(if reads { request.len_bytes as usize } else { 0 });
    assert_eq!(reply.cookie, request.cookie, "{request:?}");
    assert!(reply.offset.is_none_or(|offset| offset == request.offset), "{request:?}");
    let has_chunks = heard.headers != Headers::Simple;
    assert!(reply.error == 0 || !has_chunks || !reply.message.is_empty(), "{request:?}: no words");
    assert!(reads || reply.chunks.is_empty(), "{request:?} answered with data");
    assert!(request.command == command::BLOCK_STATUS || reply.statuses.is_empty(), "{request:?}");
    let mut next = if has_chunks { request.offset } else { 0 };
    let start = next;
    for (at, data) in &reply.chunks {
        assert_eq!(*at, next, "{request:?}");
        next += data.len() as u64;
    }
    assert!(reply.error != 0 || !reads || next - start == request.len_bytes, "{request:?}");
    let is_split = |holes: &[(u64, u64)]| holes[0].0 + holes[0].1 >= holes[1].0;
    assert!(!reply.holes.windows(2).any(is_split), "{request:?}: one hole in two");
    let whole = request.flags & command_flags::DF != 0;
    assert!(reply.chunks.len() <= 1 || !whole, "{request:?} in fragments");
    reply
}

fn judge(
    model: &mut Model,
    header: &Header,
    payload: &[u8],
    reply: &Reply,
    script: &Script,
    contexts: &[(u32, bool)],
    limited: bool,
) {
    use command::*;
    let asked = (header.command == BLOCK_STATUS).then(|| script.status_asked(header, payload, contexts));
    let len_bytes =
        asked.as_ref().map_or(header.len_bytes, |asked| asked.as_ref().map_or(0, |asked| asked.0));
    let range = model.range(header.offset, len_bytes);
    let is_valid = script.is_valid(header) && asked.as_ref().is_none_or(Option::is_some);
    let Some(range) = range.filter(|_| is_valid) else {
        let past_end =
            if matches!(header.command, WRITE | WRITE_ZEROES) { NbdError::NoSpc } else { NbdError::Inval };
        let refusals = [NbdError::Inval, past_end, NbdError::Overflow].map(|error| error as u32);
        assert!(refusals.contains(&reply.error), "{header:?} answered with {}", reply.error);
        return;
    };
    if reply.error != 0 {
        let full = limited && reply.error == NbdError::NoSpc as u32;
        assert!(full && matches!(header.command, WRITE | WRITE_ZEROES), "{header:?} failed: {}", reply.error);
        return model.lose(range);
    }
    match header.command {
        READ => {
            model.check_read(header.offset, &reply.data(), "a read");
            let whole = header.flags & command_flags::DF != 0;
            let may_have_holes = !whole && script.headers != Headers::Simple;
            check_holes(model, header, &reply.holes, may_have_holes);
        }
        WRITE => model.write(header.offset, payload),
        TRIM => model.discard(range),
        WRITE_ZEROES if header.flags & command_flags::NO_HOLE != 0 => model.write_zeroes_allocated(range),
        WRITE_ZEROES => model.write_zeroes(range),
        BLOCK_STATUS => {
            let asked = asked.flatten().map(|(_, contexts)| contexts).unwrap_or_default();
            let told: Vec<u32> = reply.statuses.iter().map(|(id, _)| *id).collect();
            assert_eq!(told, asked.iter().map(|(id, _)| *id).collect::<Vec<_>>(), "{header:?}");
            for ((_, is_own), (_, descriptors)) in asked.iter().zip(&reply.statuses) {
                check_status(model, header, len_bytes, *is_own, descriptors);
            }
        }
        _ => {}
    }
}

/// Checks that exactly the pages known to be zeros are in holes.
fn check_holes(model: &Model, header: &Header, holes: &[(u64, u64)], may_have_holes: bool) {
    assert!(may_have_holes || holes.is_empty(), "{header:?}: {holes:?}");
    let mut at = header.offset;
    let end = header.offset + header.len_bytes;
    while at < end && may_have_holes {
        let in_hole = holes.iter().any(|(from, len)| (*from..from + len).contains(&at));
        let states = model.states(at);
        assert!(
            states.iter().any(|state| state.is_zeros() == in_hole),
            "{header:?}: {at} is one of {states:?}"
        );
        at = (at | 4095) + 1;
    }
}

/// Checks that descriptors are maximal runs of pages, in states that the pages can be in.
fn check_status(model: &Model, header: &Header, len_bytes: u64, is_own: bool, descriptors: &[(u64, u64)]) {
    let status = |page| {
        u64::from(match (is_own, page) {
            (false, PageState::Hole) => allocation::HOLE | allocation::ZERO,
            (false, PageState::Zero) => allocation::ZERO,
            (false, _) => 0,
            (true, PageState::Hole) => state::HOLE,
            (true, PageState::Zero) => state::ZERO,
            (true, PageState::Same) => state::SAME,
            (true, PageState::Compressed) => state::COMPRESSED,
            (true, PageState::Huge) => state::HUGE,
            (true, PageState::Backed) => state::BACKING,
            (true, PageState::Lost) => state::LOST,
        })
    };
    let mut at = header.offset;
    for (index, (run_bytes, told)) in descriptors.iter().enumerate() {
        assert!(*run_bytes > 0, "{header:?}: {descriptors:?}");
        assert!(
            index == 0 || descriptors[index - 1].1 != *told,
            "{header:?}: {descriptors:?} could be fewer"
        );
        let end = at + run_bytes;
        while at < end {
            let states = model.states(at);
            assert!(
                states.iter().any(|page| status(*page) == *told),
                "{header:?}: {told} at {at}, not {states:?}"
            );
            at = ((at | 4095) + 1).min(end);
        }
    }
    let told_bytes = at - header.offset;
    if header.flags & command_flags::REQ_ONE != 0 {
        assert!(descriptors.len() == 1 && told_bytes <= len_bytes, "{header:?}: {descriptors:?}");
    } else {
        assert_eq!(told_bytes, len_bytes, "{header:?}: {descriptors:?}");
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    // A request's kind and flags; its page; its offset from the page's edge; its number of pages; its other
    // parameters.
    let request = |kind: u8, flags: u8, page: u8, pages: u8| [kind, flags, page, 0, pages];
    let read = |page, pages| request(0, 0, page, pages);
    let status = |page, pages| request(9, 0, page, pages);
    let write = |page, contents: &[u8]| [&request(2, 0, page, 1)[..], &[0], contents].concat();
    let (same, text, noise) = (&[0, 0x77][..], b"\x01\x0bcompressible", &[2, 9][..]);
    let (flush, cache, trim) = (request(5, 0, 0, 0), request(8, 0, 1, 3), request(6, 0, 4, 3));
    let (zeroes, no_hole, fast) = (request(7, 0, 3, 2), request(7, 200, 9, 2), request(7, 180, 2, 1));
    let written = [write(3, text), write(5, noise), write(9, same)].concat();
    let all =
        [&written[..], &status(0, 7), &trim, &zeroes, &no_hole, &fast, &flush, &cache, &read(0, 7)].concat();
    let statuses =
        [&written[..], &status(2, 5), &request(10, 150, 3, 7), &request(9, 230, 0, 7), &[0b1001]].concat();
    let filters: Vec<u8> = [0b01, 0b10, 0b0101, 0b11_0001, 0xc1, 0xf1]
        .iter()
        .flat_map(|ids| [9, 230, 0, 0, 3, *ids, 9])
        .collect();
    // Two bytes off the page's edge, and a length in bytes.
    let unaligned =
        [&[2, 0, 7, 150, 2, 0, 100, 0x70, 0x17, 0], noise, &[0, 0, 7, 150, 0, 0, 100, 0x28, 0x23]].concat();
    let filling: Vec<u8> = (0..12).flat_map(|index| write(index, &[2, index])).collect();
    let long_reads = [0, 170].map(|flags| [0, flags, 0, 0, 240, 0, 0x10]).concat();
    let bad_magic = [244, 0, 0, 0, 1, 2, 3];
    let cut_write = [2, 0, 1, 0, 4, 0xff, 0, 0x20, 2, 1];
    let bad_flags = [0, 0xff, 0, 0, 1, 0, 0, 0, 255, 0, 0, 0, 0, 0, 0, 0, 0x80, 1];
    let flush_header = extended_request_bytes(0, command::FLUSH, 1, 0, 0);
    // A bit of checksum, headers, how the export is chosen, contexts; the limit; how messages are torn.
    let (extended, simple, structured, old, no_contexts) = (0, 1 << 2, 2 << 2, 1 << 4, 3 << 5);
    let with =
        |settings: u8, limit: u8, tear: u8, requests: &[u8]| [&[settings, limit, tear], requests].concat();
    vec![
        with(simple, 0, 0, &all),
        with(structured, 0, 0, &all),
        with(extended, 0, 0, &all),
        with(structured | old | 3, 0, 0, &[&all[..], &[240, 0]].concat()),
        with(extended | 1, 0, 0, &statuses),
        with(structured | 1 << 5, 0, 0, &statuses),
        with(extended | no_contexts, 0, 0, &statuses),
        with(extended, 0, 0, &filters),
        with(extended, 0, 100, &unaligned),
        with(structured, 0xf0, 0, &filling),
        with(simple | 1, 0xff, 0, &filling),
        with(structured, 0, 0, &[&written[..], &long_reads].concat()),
        with(simple, 0, 0, &[&all[..], &long_reads].concat()),
        with(simple | 2, 0, 33, &[&all[..], &bad_magic].concat()),
        with(extended, 0, 7, &[&all[..], &cut_write].concat()),
        with(structured | 1, 0xf0, 0, &[&bad_flags[..], &all[..]].concat()),
        with(extended, 0, 0, &[&[252], &flush_header[..]].concat()),
    ]
}
