//! Requests that would wait for the device, offloaded to the device's pool of threads while the connection
//! goes on.
//!
//! A task owns everything that it needs: the open device, a write's payload and a buffer for the reply. It
//! waits for the device, puts the reply into that buffer and completes, which wakes the connection's thread
//! if that waits for its client. Only that thread touches the stream, so replies never interleave.
//!
//! Invariant: every started task completes exactly once, even if it panics, and only after it has dropped its
//! hold on the device.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use uzram::device::{Device, OpenDevice, Wait};
use uzram::units::PAGE_SIZE;

use super::buffer::{Memory, SendBuffer};
use super::proto::command;
use super::replies::{Replies, STOPPING};
use super::request::{Headers, Request};
use super::socket::Wake;
use crate::device_pool::{DevicePool, DevicePools, TaskPermit};

/// The most requests of one connection offloaded at a time. Its own thread executes further ones.
const MAX_OFFLOADED: usize = 64;
/// The longest chunk without its data: a hole with extended headers, 32 + 12 bytes; rounded up.
const MAX_CHUNK_OVERHEAD_BYTES: usize = 48;

/// The requests that a connection has offloaded. Dropping this waits until started tasks are done.
pub(super) struct Offloaded<'a> {
    pool: Option<(Arc<DevicePool>, &'a Arc<Wake>)>,
    done: Sender<Completion>,
    completed: Receiver<Completion>,
    /// Set when the replies will not be sent: tasks that have not begun are skipped.
    abandoned: Arc<AtomicBool>,
    count: usize,
}

pub(super) struct OffloadBuffers {
    permit: TaskPermit,
    /// Room for the rest of a write's payload; empty for other commands.
    pub payload: Memory,
    reply: SendBuffer,
}

struct Completion {
    /// `None` when the task was skipped, or a panic ended it.
    reply: Option<SendBuffer>,
    /// Held until the reply is sent.
    permit: TaskPermit,
}

/// Completes a task when it is dropped.
struct CompletionGuard {
    completion: Option<Completion>,
    done: Sender<Completion>,
    wake: Arc<Wake>,
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        if let Some(completion) = self.completion.take() {
            // Fails only when the connection could not wait for this.
            let _ = self.done.send(completion);
            self.wake.signal();
        }
    }
}

/// An offloaded request. Its fields are dropped in their order: the device first, the guard last.
struct Task {
    device: Arc<OpenDevice>,
    headers: Headers,
    stopping: Arc<AtomicBool>,
    abandoned: Arc<AtomicBool>,
    request: Request,
    at: u64,
    payload: Memory,
    reply: SendBuffer,
    guard: CompletionGuard,
}

impl Task {
    /// Executes the rest of the request, waiting for the device.
    fn run(mut self) {
        if self.abandoned.load(Ordering::Relaxed) {
            return;
        }
        let request = &self.request;
        let mut replies = Replies {
            device: &self.device,
            headers: self.headers,
            stopping: &self.stopping,
            budget: None,
            unsent: &mut self.reply,
            stream: &mut NoStream,
        };
        let replied = if self.stopping.load(Ordering::Relaxed) {
            replies.fail(request, STOPPING)
        } else if request.command == command::WRITE {
            match self.device.write(self.at, &self.payload) {
                Ok(()) => replies.succeed(request),
                Err(error) => replies.fail(request, error),
            }
        } else {
            replies.execute(request, self.at, Wait::Yes).map(drop)
        };
        drop(self.device);
        if let (Ok(()), Some(completion)) = (replied, &mut self.guard.completion) {
            completion.reply = Some(self.reply);
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

impl<'a> Offloaded<'a> {
    /// Creates an empty set for a connection to `device`; it stays empty if `target` is `None`.
    pub fn new(target: Option<(&DevicePools, &'a Arc<Wake>)>, device: &Arc<Device>) -> Self {
        let (done, completed) = channel();
        let pool = target.map(|(pools, wake)| (pools.pool(device), wake));
        Offloaded { pool, done, completed, abandoned: Arc::default(), count: 0 }
    }

    /// Returns whether the connection's own thread may wait before it has tried to offload a request.
    #[inline(always)]
    pub fn wait(&self) -> Wait {
        if self.pool.is_some() { Wait::No } else { Wait::Yes }
    }

    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Takes the memory and the permit to offload the rest of a request, from `at` on; `None` when too many
    /// are offloaded already, or memory is short.
    pub fn buffers(&self, request: &Request, at: u64) -> Option<OffloadBuffers> {
        let (pool, wake) = self.pool.as_ref()?;
        let left_bytes = usize::try_from(request.end() - at).ok()?;
        let (payload_bytes, data_bytes) = match request.command {
            command::WRITE => (left_bytes, 0),
            command::READ => (0, left_bytes),
            _ => (0, 0),
        };
        if self.count == MAX_OFFLOADED || wake.prepare().is_err() {
            return None;
        }
        // Every chunk but the first and the last has at least a page. One more page is for an error that ends
        // the reply, and keeps `Replies` from splitting data that fits into one chunk.
        let reply_bytes = data_bytes + (data_bytes / PAGE_SIZE + 2) * MAX_CHUNK_OVERHEAD_BYTES + PAGE_SIZE;
        Some(OffloadBuffers {
            permit: pool.try_acquire(payload_bytes + reply_bytes)?,
            payload: Memory::new(payload_bytes).ok()?,
            reply: SendBuffer::new(reply_bytes).ok()?,
        })
    }

    /// Sets whether the client owes a payload for which memory is held; then it must not be slow.
    pub fn expect_payload(&self, expected: bool) {
        if let Some((_, wake)) = &self.pool {
            wake.expect_payload(expected);
        }
    }

    /// Offloads the rest of a request, from `at` on; its payload has been received.
    pub fn start<S>(
        &mut self,
        replies: &Replies<'_, S>,
        request: &Request,
        at: u64,
        buffers: OffloadBuffers,
    ) {
        let Some((pool, wake)) = &self.pool else { return };
        self.count += 1;
        wake.arm(true);
        let OffloadBuffers { permit, payload, reply } = buffers;
        let completion = Some(Completion { reply: None, permit });
        let task = Task {
            device: Arc::clone(replies.device),
            headers: replies.headers,
            stopping: Arc::clone(replies.stopping),
            abandoned: Arc::clone(&self.abandoned),
            request: *request,
            at,
            payload,
            reply,
            guard: CompletionGuard { completion, done: self.done.clone(), wake: Arc::clone(wake) },
        };
        pool.start(Box::new(move || task.run()));
    }

    /// Puts the replies of completed tasks into `unsent`. Errors: the stream's; `Other` when a task has no
    /// reply, because a panic ended it or the reply did not fit.
    pub fn collect(&mut self, unsent: &mut SendBuffer, stream: &mut impl Write) -> io::Result<()> {
        while let Ok(Completion { reply, permit: _until_sent }) = self.completed.try_recv() {
            self.count -= 1;
            let reply = reply.ok_or_else(|| io::Error::other("a request ended without a reply"))?;
            unsent.put(stream, reply.filled())?;
        }
        if let Some((_, wake)) = &self.pool {
            wake.arm(self.count > 0);
        }
        Ok(())
    }

    /// Waits until a task may have completed; returns false at once if there is none.
    pub fn wait_for_one(&self) -> io::Result<bool> {
        match &self.pool {
            Some((_, wake)) if self.count > 0 => wake.wait().map(|()| true),
            _ => Ok(false),
        }
    }
}

impl Drop for Offloaded<'_> {
    fn drop(&mut self) {
        self.abandoned.store(true, Ordering::Relaxed);
        self.completed.iter().take(self.count).for_each(drop);
        if let Some((_, wake)) = &self.pool {
            wake.arm(false);
        }
    }
}
