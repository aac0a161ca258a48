//! The end of a disk: a range that reaches past it is refused as a whole, whatever the operation.

use super::tests::device;
use super::*;
use crate::base::units::PAGE_SIZE;
use crate::store::{PageState, Wait};

/// Bytes before the end of which the contents are checked.
const TAIL_BYTES: usize = 4 * PAGE_SIZE;

/// Returns ranges about the end of a disk, and some that have no end.
fn ranges(end: u64) -> impl Iterator<Item = (u64, usize)> {
    let lens = [0, 1, 2, 4095, 4096, 4097, 8192];
    let offsets = [8192, 4097, 4096, 4095, 1, 0].map(|before| end.checked_sub(before));
    let beyond = [end + 1, end + 4095, end + 4096, u64::MAX - 4096, u64::MAX - 1, u64::MAX];
    let offsets: Vec<u64> = offsets.into_iter().flatten().chain(beyond).collect();
    offsets.into_iter().flat_map(move |offset| lens.map(|len| (offset, len)))
}

#[test]
fn a_range_past_the_end_is_refused_as_a_whole_and_counted() {
    for (size, end) in [("4097", 8192), ("5000K", 5000 << 10), ("4M", 4 << 20)] {
        let device = device(&[("disksize", size)]);
        let disk = device.open().expect("initialised");
        assert_eq!(disk.size_bytes(), end, "whole pages");
        let tail_bytes = TAIL_BYTES.min(end as usize);
        let start = end - tail_bytes as u64;
        let mut model: Vec<u8> = (0..tail_bytes).map(|at| (at / 3) as u8 | 1).collect();
        disk.write(start, &model).expect("memory");
        let (mut failed_reads, mut failed_writes) = (0, 0);
        for (offset, len) in ranges(end) {
            let (what, bytes) = (format!("{size}: {len} bytes at {offset}"), len as u64);
            let is_inside = offset.checked_add(bytes).is_some_and(|range_end| range_end <= end);
            let check = |done: Result<()>| {
                let wanted = is_inside.then_some(()).ok_or(ErrorKind::OutOfRange);
                assert_eq!(done.map_err(|error| error.kind()), wanted, "{what}");
            };
            let at = (offset.saturating_sub(start) as usize).min(tail_bytes);
            let range = at..if is_inside { at + len } else { at };

            let mut read = vec![0xee; len];
            check(disk.read(offset, &mut read));
            assert!(if is_inside { read == model[range.clone()] } else { read == vec![0xee; len] }, "{what}");
            check(disk.read_some(offset, &mut read, Wait::No).map(drop));
            check(disk.read_until_zeros(offset, &mut read, Wait::Yes).map(drop));
            check(disk.zero_bytes(offset, bytes).map(drop));
            // The kernel's 894913e2d35c and 391f057f44a5: reading the states of pages went beyond the last
            // one.
            if len > 0 {
                check(disk.extent(offset, bytes).map(drop));
            }
            failed_reads += if is_inside { 0 } else { 4 + u64::from(len > 0) };

            let whole = range.start.next_multiple_of(PAGE_SIZE)..range.end & !(PAGE_SIZE - 1);
            let writes: [(&dyn Fn() -> Result<()>, u8, _); 6] = [
                (&|| disk.write(offset, &vec![7; len]), 7, range.clone()),
                (&|| disk.write_some(offset, &vec![9; len], Wait::No).map(drop), 9, range.clone()),
                (&|| disk.zero_some(offset, bytes, true, Wait::Yes).map(drop), 0, range.clone()),
                (&|| disk.write(offset, &vec![7; len]), 7, range.clone()),
                (&|| disk.discard(offset, bytes), 0, whole),
                (&|| disk.write_zeroes(offset, bytes), 0, range),
            ];
            for (write, byte, changed) in writes {
                check(write());
                model.get_mut(changed).unwrap_or_default().fill(byte);
                let mut tail = vec![0; tail_bytes];
                disk.read(start, &mut tail).expect("in range");
                assert!(tail == model, "{what}");
            }
            failed_writes += if is_inside { 0 } else { 6 };
        }
        let last = Extent { len_bytes: 1, state: PageState::Hole };
        disk.discard(0, end).expect("in range");
        assert_eq!((disk.extent(end - 1, 1), disk.zero_bytes(end - 1, 1)), (Ok(last), Ok(1)));
        let counts = device.counts();
        assert_eq!((counts.failed_reads, counts.failed_writes), (failed_reads, failed_writes), "{size}");
    }
}
