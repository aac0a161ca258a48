//! The time slice of a connection's thread.
//!
//! A request takes microseconds, but the scheduler's default time slice is about 3 ms, and determines a thread's
//! virtual deadline. When more clients are busy than there are CPUs, some wait far longer than others: of 1,000 fio
//! clients on 2 CPUs, the slowest got a quarter of the mean. With a slice close to the time of a request, a thread runs
//! soon after its client has sent, so clients share more evenly, and the total throughput is higher. While every client
//! has a CPU threads keep the default slice; they get the short one when the first surplus client comes, and keep it.
//!
//! `sched_setattr(2)` with a runtime for `SCHED_OTHER` sets the slice since Linux 6.12; the minimum is 100 µs. Older
//! kernels ignore it.

use std::io;

use rustix::thread::Pid;
use uzram::thread::{scheduling, set_scheduling};

/// The shortest slice that the kernel accepts (`sched_setattr(2)`).
const SLICE_NS: u64 = 100_000;

/// Gives a thread of this process a short time slice. Its policy and niceness stay as they are; a thread with a real-time
/// policy has no slice, and nothing is changed.
///
/// # Errors
/// The system's, for example when a sandbox forbids the call.
pub(super) fn shorten(thread: Pid) -> io::Result<()> {
    let id = id(thread);
    let mut attr = scheduling(id)?;
    if ![libc::SCHED_OTHER, libc::SCHED_BATCH].contains(&attr.sched_policy.cast_signed()) {
        return Ok(());
    }
    attr.sched_runtime = SLICE_NS;
    set_scheduling(id, &attr)
}

/// Returns a thread's time slice in nanoseconds; 0 if the kernel has one slice for all.
#[cfg(test)]
pub(super) fn slice_ns(thread: Pid) -> io::Result<u64> {
    scheduling(id(thread)).map(|attr| attr.sched_runtime)
}

fn id(thread: Pid) -> u32 {
    thread.as_raw_nonzero().get().unsigned_abs()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::thread;

    use super::*;

    #[test]
    fn a_thread_gets_the_slice_and_keeps_policy_and_niceness() {
        thread::spawn(|| {
            let thread = rustix::thread::gettid();
            let before = scheduling(id(thread)).unwrap();
            shorten(thread).unwrap();
            let after = scheduling(id(thread)).unwrap();
            assert_eq!((after.sched_policy, after.sched_nice), (before.sched_policy, before.sched_nice));
            // A kernel that supports slices reports the new one.
            if ![0, before.sched_runtime].contains(&after.sched_runtime) {
                assert_eq!(after.sched_runtime, SLICE_NS);
            } else {
                println!("skipped: this kernel has one time slice for all (Linux 6.12 has others)");
            }
        })
        .join()
        .unwrap();
    }
}
