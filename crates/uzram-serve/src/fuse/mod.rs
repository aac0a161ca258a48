//! The devices as files: `DIR/zram0/disk` has the contents of `zram0`, next to a file for each attribute.
//!
//! The kernel reads and writes the disk through FUSE, without its page cache. A loop device on the file is an
//! ordinary disk, for file systems and swap. Discards punch holes into the file. A write is stored before its
//! reply; flush and fsync make nothing durable.
//!
//! Several threads serve the kernel, each with its own channel (`FUSE_DEV_IOC_CLONE`).
//!
//! A mount can outlive the process that serves it: another process that has the connection's descriptors and
//! the [`Ledger`], with the devices' contents, goes on with the same open files, and has the kernel send all
//! unanswered requests again. A kernel that cannot (before Linux 6.9) copies requests to memory that outlives
//! the process, where they are found again (`received`). So no program sees an error, only a delay.
//!
//! Code map: `connection` mounts, by `open_device` and `handshake`; `proto` has the protocol's messages,
//! `channel` the way of replies; `ledger` and `received` have what outlives the process. `tree` names and
//! numbers the files, `handles` has the open ones, `filesystem` carries out requests, by `disk` for disks and
//! attributes; `thread_buffer` has the memory of the threads and prepares them for swap, `cpu_latency` makes
//! CPUs wake fast for requests.

mod proto;
mod received;
mod ledger;
mod cpu_latency;
mod tree;
mod open_device;
mod handshake;
mod connection;
mod channel;
mod thread_buffer;
mod disk;
mod handles;
mod filesystem;
mod loopback;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use uzram::{Error, ErrorKind, Result};

use crate::Exports;
use crate::device_pool::{Budget, DevicePools, MAX_TASKS, TASK_BYTES};
use channel::{Channel, Sink};
use connection::{CLEARS_THEM, END_TIMEOUT};
use cpu_latency::CpuLatency;
use filesystem::Files;
use received::Received;
use thread_buffer::{RequestBuffer, ThreadBuffers};

pub use connection::{Connection, ConnectionRecord, MAX_IO_BYTES, MountOptions};
pub use cpu_latency::CpuLatencyLimit;
pub use ledger::{Ledger, Strikes};
pub use loopback::Loopback;
pub use tree::{DISK, warm_up_file};

/// The mounted files of a daemon's devices, and the threads that serve them.
pub struct Mount {
    connection: Arc<Connection>,
    threads: Vec<JoinHandle<()>>,
}

impl Mount {
    /// Serves the files of `exports` by a connection. Files that were open in an earlier life of the ledger
    /// are open again, if their devices are there, and have the same numbers; unanswered requests come again,
    /// from the kernel or from where they were received ([`Connection::outlives`]). The caller has begun a
    /// life in the ledger, and the process of the one before is dead. Errors: `NoMemory`; `Io` when the
    /// system refuses a thread, or the kernel to send requests again.
    pub fn serve(connection: Arc<Connection>, exports: Exports, ledger: Arc<Ledger>) -> Result<Mount> {
        let options = *connection.options();
        let max_io_bytes = options.max_io_bytes as usize;
        let outcomes = connection.received().map(Received::outcomes).transpose()?.map(Arc::new);
        let buffers = (0..options.threads).map(|thread| match connection.received().zip(outcomes.clone()) {
            // SAFETY: no other process serves the connection (the caller's promise), and this one serves it
            // once.
            Some((received, outcomes)) => unsafe {
                ThreadBuffers::kept(received, outcomes, thread, max_io_bytes)
            },
            None => ThreadBuffers::new(max_io_bytes),
        });
        let buffers = buffers.collect::<std::result::Result<Vec<_>, _>>();
        let buffers =
            buffers.map_err(|_| Error::new(ErrorKind::NoMemory, "no memory for threads' buffers"))?;
        // The connection's text says why there is none.
        let cpu_latency = CpuLatency::new(options.cpu_latency).ok().flatten();
        // A request that outlives the process stays in the buffer of the thread that received it.
        let has_tasks = outcomes.is_none() && !options.starts_no_threads;
        let pools = DevicePools::new(if has_tasks { MAX_TASKS } else { 0 }, Budget::new(TASK_BYTES));
        let files = Arc::new(Files::new(exports, &options, cpu_latency, &ledger, pools));
        if ledger.life().life > 1 && connection.can_resend() {
            connection.resend().map_err(|error| {
                let what = format!("cannot serve '{}': {error}", connection.dir().display());
                Error::new(ErrorKind::Io, what)
            })?;
        }
        let mut mount = Mount { connection, threads: Vec::with_capacity(options.threads) };
        for (thread, buffers) in buffers.into_iter().enumerate() {
            let (connection, ledger) = (Arc::clone(&mount.connection), Arc::clone(&ledger));
            let sink = Sink::Kernel(Arc::clone(&connection));
            let channel = Arc::new(Channel { sink, ledger, outcomes: outcomes.clone(), thread });
            let files = Arc::clone(&files);
            let run = move || run(&files, &connection, &channel, buffers.enter());
            match thread::Builder::new().name(format!("fuse-{thread}")).spawn(run) {
                Ok(handle) => mount.threads.push(handle),
                // Requests go to any channel, so the others can serve them, but for one that is in this
                // thread's buffer.
                Err(error) if thread > 0 && outcomes.is_none() => {
                    tracing::warn!(%error, "only {thread} of {} threads serve the files", options.threads);
                    break;
                }
                Err(error) => {
                    // Only the caller may unmount.
                    return Err(Error::new(ErrorKind::Io, format!("cannot start a thread: {error}")));
                }
            }
        }
        Ok(mount)
    }

    /// Returns the connection.
    pub fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Waits until all threads have ended.
    pub fn join(&mut self) {
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a panic ended a thread that served files; please report it");
            }
        }
    }

    /// Unmounts the files, unless they were unmounted already, and waits for the threads. Errors: `Busy` if a
    /// file stays open.
    fn unmount(&mut self) -> Result<()> {
        self.connection.unmount()?;
        // The threads end when the last file is closed; one may stay open after the mount itself is gone.
        let deadline = Instant::now() + END_TIMEOUT;
        while !self.threads.iter().all(JoinHandle::is_finished) {
            if Instant::now() >= deadline {
                let what = format!("files of '{}' are still in use", self.connection.dir().display());
                return Err(Error::new(ErrorKind::Busy, what));
            }
            thread::sleep(Duration::from_millis(1));
        }
        self.join();
        Ok(())
    }
}

impl Drop for Mount {
    /// Unmounts. If a file is still open, the mount stays, and its files fail once this process has ended.
    fn drop(&mut self) {
        if self.threads.is_empty() {
            return;
        }
        if let Err(error) = self.unmount() {
            // The threads serve open files until the process ends.
            tracing::warn!("{error}; they fail from now on: {CLEARS_THEM}");
        }
    }
}

fn run(files: &Files, connection: &Connection, channel: &Arc<Channel>, mut buffer: RequestBuffer) {
    thread_buffer::touch_stack();
    // A panic ends the request with an error, and nothing else: locks are taken even if poisoned.
    let caught = |request: &dyn Fn()| {
        if catch_unwind(AssertUnwindSafe(request)).is_err() {
            tracing::error!("a panic ended a request for a file; please report it");
        }
    };
    if let Some((request, outcome)) = buffer.left() {
        caught(&|| files.finish(request, outcome, channel));
    }
    loop {
        let room = buffer.room();
        match handshake::read_request(connection.channel(channel.thread), room) {
            Ok(Some(len)) => caught(&|| files.carry_out(&room[..len], channel)),
            Ok(None) => return,
            Err(error) => return tracing::warn!(%error, "a thread that served files ended with an error"),
        }
    }
}
