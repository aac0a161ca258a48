//! Requests that would wait for the device, offloaded to the device's pool of threads while the connection goes on.
//!
//! A task owns everything that it needs: the open device, a write's payload and a buffer for the reply. It waits for
//! the device, puts the reply into that buffer and completes, which wakes the connection's thread if that waits for its
//! client. Only that thread touches the stream, so replies never interleave.
//!
//! Invariant: every started task completes exactly once, even if it panics, and only after it has dropped its hold on
//! the device.
//!
//! Lock: `Completions::queue`, a leaf.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uzram::device::{OpenDevice, Wait};
use uzram::units::PAGE_SIZE;

use super::STOPPING;
use super::replies::{Replies, Rest};
use crate::device_pool::{DevicePool, DevicePools, TaskPermit};
use crate::nbd::buffer::{Memory, SendBuffer};
use crate::nbd::request::{Headers, Request};
use crate::nbd::wake::Wake;

/// The most requests of one connection offloaded at a time. Its own thread executes further ones.
const MAX_OFFLOADED: usize = 64;
/// The longest chunk without its data: a hole with extended headers, 32 + 12 bytes; rounded up.
const MAX_CHUNK_OVERHEAD_BYTES: usize = 48;

/// A request that would wait for the device, and the rest of it.
#[derive(Clone, Copy)]
pub(super) enum Blocked {
    Read(Rest),
    Write(Rest),
    WriteZeroes(Rest),
}

impl Blocked {
    pub fn rest(self) -> Rest {
        let (Blocked::Read(rest) | Blocked::Write(rest) | Blocked::WriteZeroes(rest)) = self;
        rest
    }
}

/// The target to which a connection offloads requests.
#[derive(Clone, Copy)]
pub(in crate::nbd) struct OffloadTarget<'a> {
    /// The threads that wait for devices.
    pub pools: &'a DevicePools,
    /// Wakes the connection's thread from its wait for the client.
    pub wake: &'a Arc<Wake>,
}

/// The pool of the connection's device.
#[derive(Clone)]
struct Pool<'a> {
    pool: Arc<DevicePool>,
    wake: &'a Arc<Wake>,
}

/// The requests that a connection has offloaded. Dropping this waits until started tasks are done.
pub(super) struct Offloaded<'a> {
    pool: Option<Pool<'a>>,
    device: &'a Arc<OpenDevice>,
    headers: Headers,
    stopping: &'a Arc<AtomicBool>,
    completions: Arc<Completions>,
    /// Tasks that were started and not yet collected.
    count: usize,
}

/// The memory and the permit needed to offload a request.
pub(super) struct OffloadBuffers<'a> {
    pool: Pool<'a>,
    permit: TaskPermit,
    payload: Memory,
    reply: SendBuffer,
}

impl OffloadBuffers<'_> {
    /// Returns room for the rest of a write's payload; empty for other commands.
    pub fn payload(&mut self) -> &mut [u8] {
        &mut self.payload
    }
}

/// The tasks of a connection that have completed and are not yet collected.
#[derive(Default)]
struct Completions {
    queue: Mutex<VecDeque<Completion>>,
    /// Set when the replies will not be sent: tasks that have not begun are skipped.
    abandoned: AtomicBool,
}

impl Completions {
    /// Nothing panics while the lock is held, so poisoning is ignored.
    fn lock(&self) -> MutexGuard<'_, VecDeque<Completion>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A task that has completed.
struct Completion {
    /// `None` when the task was skipped, or a panic ended it.
    reply: Option<SendBuffer>,
    /// Held until the reply is sent.
    permit: TaskPermit,
}

/// Completes a task when it is dropped.
struct CompletionGuard {
    completions: Arc<Completions>,
    wake: Arc<Wake>,
    completion: Option<Completion>,
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        if let Some(completion) = self.completion.take() {
            self.completions.lock().push_back(completion);
            self.wake.signal();
        }
    }
}

/// An offloaded request. Its fields are dropped in their order: the device first, the guard last.
struct Task {
    device: Arc<OpenDevice>,
    headers: Headers,
    stopping: Arc<AtomicBool>,
    request: Request,
    blocked: Blocked,
    payload: Memory,
    reply: Option<SendBuffer>,
    guard: CompletionGuard,
}

impl Task {
    /// Executes the rest of the request, waiting for the device.
    fn run(&mut self) {
        let Some(mut reply) = self.reply.take() else { return };
        if self.guard.completions.abandoned.load(Ordering::Relaxed) {
            return;
        }
        let request = &self.request;
        let mut replies = Replies {
            device: &self.device,
            headers: self.headers,
            stopping: &self.stopping,
            budget: None,
            unsent: &mut reply,
            stream: &mut NoStream,
        };
        let replied = if self.stopping.load(Ordering::Relaxed) {
            replies.fail(request, STOPPING)
        } else {
            match self.blocked {
                Blocked::Read(rest) => replies.read(request, rest, Wait::Yes).map(drop),
                Blocked::Write(rest) => replies.finish(request, self.device.write(rest.at, &self.payload)),
                Blocked::WriteZeroes(rest) => replies.write_zeroes(request, rest, Wait::Yes).map(drop),
            }
        };
        if let (Ok(()), Some(completion)) = (replied, &mut self.guard.completion) {
            completion.reply = Some(reply);
        }
    }
}

/// The stream of a reply that must fit its buffer: refuses every byte.
struct NoStream;

impl Write for NoStream {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::StorageFull.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the most bytes of the reply to a read of `data_bytes`.
fn max_reply_bytes(data_bytes: usize) -> usize {
    // Every chunk but the first and the last has at least a page. One more page is for an error that ends the reply,
    // and keeps `Replies` from splitting data that fits into one chunk.
    data_bytes + (data_bytes / PAGE_SIZE + 2) * MAX_CHUNK_OVERHEAD_BYTES + PAGE_SIZE
}

impl<'a> Offloaded<'a> {
    /// Creates an empty set; it stays empty if `target` is `None`.
    pub fn new(
        target: Option<OffloadTarget<'a>>,
        device: &'a Arc<OpenDevice>,
        headers: Headers,
        stopping: &'a Arc<AtomicBool>,
    ) -> Self {
        let pool =
            target.map(|OffloadTarget { pools, wake }| Pool { pool: pools.pool(device.device()), wake });
        Offloaded { pool, device, headers, stopping, completions: Arc::default(), count: 0 }
    }

    /// Returns whether the connection's own thread may wait for the device before it has tried to offload a request.
    pub fn wait(&self) -> Wait {
        if self.pool.is_some() { Wait::No } else { Wait::Yes }
    }

    /// Returns whether no replies are outstanding.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Takes the memory and the permit to offload a request; `None` when too many are offloaded already, or memory is
    /// short.
    pub fn buffers(&self, blocked: Blocked) -> Option<OffloadBuffers<'a>> {
        let pool = self.pool.as_ref()?;
        let left_bytes = usize::try_from(blocked.rest().left_bytes).ok()?;
        let (payload_bytes, data_bytes) = match blocked {
            Blocked::Write(_) => (left_bytes, 0),
            Blocked::Read(_) => (0, left_bytes),
            Blocked::WriteZeroes(_) => (0, 0),
        };
        if self.count == MAX_OFFLOADED || pool.wake.prepare().is_err() {
            return None;
        }
        let reply_bytes = max_reply_bytes(data_bytes);
        Some(OffloadBuffers {
            pool: pool.clone(),
            permit: pool.pool.try_acquire(payload_bytes + reply_bytes)?,
            payload: Memory::new(payload_bytes).ok()?,
            reply: SendBuffer::new(reply_bytes).ok()?,
        })
    }

    /// Sets whether the client owes a payload for which memory is held; then it must not be slow.
    pub fn expect_payload(&self, expected: bool) {
        if let Some(Pool { wake, .. }) = &self.pool {
            wake.expect_payload(expected);
        }
    }

    /// Offloads a request, whose payload has been received.
    pub fn start(&mut self, request: &Request, blocked: Blocked, buffers: OffloadBuffers<'a>) {
        let OffloadBuffers { pool: Pool { pool, wake }, permit, payload, reply } = buffers;
        self.count += 1;
        wake.arm(true);
        let mut task = Task {
            device: Arc::clone(self.device),
            headers: self.headers,
            stopping: Arc::clone(self.stopping),
            request: *request,
            blocked,
            payload,
            reply: Some(reply),
            guard: CompletionGuard {
                completions: Arc::clone(&self.completions),
                wake: Arc::clone(wake),
                completion: Some(Completion { reply: None, permit }),
            },
        };
        pool.start(Box::new(move || task.run()));
    }

    /// Puts the replies of completed tasks into `unsent`.
    ///
    /// # Errors
    /// The stream's; `Other` when a task has no reply, because a panic ended it or the reply did not fit.
    pub fn collect(&mut self, unsent: &mut SendBuffer, stream: &mut impl Write) -> io::Result<()> {
        if self.count == 0 {
            return Ok(());
        }
        loop {
            let Some(completion) = self.completions.lock().pop_front() else { break };
            let Completion { reply, permit: _until_sent } = completion;
            self.count -= 1;
            let reply = reply.ok_or_else(|| io::Error::other("a request ended without a reply"))?;
            unsent.put(stream, reply.filled())?;
        }
        if let Some(Pool { wake, .. }) = &self.pool {
            wake.arm(self.count > 0);
        }
        Ok(())
    }

    /// Waits until a task may have completed; returns at once if there is none.
    pub fn wait_for_one(&self) -> io::Result<()> {
        match &self.pool {
            Some(Pool { wake, .. }) if self.count > 0 => wake.wait(),
            _ => Ok(()),
        }
    }
}

impl Drop for Offloaded<'_> {
    fn drop(&mut self) {
        self.completions.abandoned.store(true, Ordering::Relaxed);
        loop {
            let completed = std::mem::take(&mut *self.completions.lock());
            self.count -= completed.len();
            drop(completed);
            if self.count == 0 || self.wait_for_one().is_err() {
                break;
            }
        }
        if let Some(Pool { wake, .. }) = &self.pool {
            wake.arm(false);
        }
    }
}
