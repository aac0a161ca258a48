//! A TLS session over any stream, from the server's side.
//!
//! It uses rustls without rustls's buffers, which take 4 KiB at a time: here one read of the stream
//! takes whatever has arrived, all complete records of it are decrypted before anything else happens,
//! and one write sends a whole batch as few records of 16 KiB. Decrypted bytes go straight to the
//! reader as far as they fit.
//!
//! Memory is bounded by [`memory_bytes`]: received ciphertext by [`receive_bytes`], what is decrypted and not
//! taken by the same, what is encrypted by [`send_bytes`] (a handshake sends as much as the server's own
//! certificates take). It is small until the client has chosen an export, and as large then as the
//! connection's buffers ask for.
//!
//! Invariant: between calls, `received` holds no complete record.

use std::io::{self, Read, Write};

use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, InsufficientSizeError, UnbufferedStatus,
};

use super::buffer::{MIN_BUFFER_BYTES, Memory};
use super::tls::Tls;
use super::violation;

/// What every record adds to its contents, at most, with room to spare.
const RECORD_OVERHEAD_BYTES: usize = 64;
/// Contents of a full record.
const RECORD_BYTES: usize = 16 << 10;
/// The least ciphertext that is held at once.
const MIN_RECEIVE_BYTES: usize = 64 << 10;

// A record, and a handshake message that is torn into several, must fit while they are incomplete. No certificate
// chain in use is as long.
const _: () = assert!(MIN_RECEIVE_BYTES >= 3 * (RECORD_BYTES + RECORD_OVERHEAD_BYTES));

/// Received ciphertext that is held at once, beside buffers of `buffer_bytes`: a whole batch of requests.
const fn receive_bytes(buffer_bytes: usize) -> usize {
    if buffer_bytes > MIN_RECEIVE_BYTES { buffer_bytes } else { MIN_RECEIVE_BYTES }
}

/// Ciphertext that is sent at once, beside buffers of `buffer_bytes`: a whole batch of replies, and a key update
/// before it.
const fn send_bytes(buffer_bytes: usize) -> usize {
    buffer_bytes + (buffer_bytes / RECORD_BYTES + 4) * RECORD_OVERHEAD_BYTES
}

/// What a session takes, beside buffers of `buffer_bytes`.
pub(super) const fn memory_bytes(buffer_bytes: usize) -> usize {
    2 * receive_bytes(buffer_bytes) + send_bytes(buffer_bytes)
}

/// A TLS session.
pub(super) struct TlsStream<'a, S> {
    stream: &'a mut S,
    connection: UnbufferedServerConnection,
    /// Ciphertext that is not decrypted: `received[start..end]`.
    received: Memory,
    start: usize,
    end: usize,
    /// Contents that no reader has taken: `contents[taken..]`.
    contents: Vec<u8>,
    taken: usize,
    /// Where ciphertext to be sent is put together; empty between calls.
    unsent: Memory,
    /// What is encrypted at once, at most.
    batch_bytes: usize,
    /// No more contents will come.
    ended: bool,
    /// The session failed: the client broke the protocol, of which it was told, or cannot be reached.
    /// rustls must not be asked again.
    broken: bool,
}

impl<'a, S: Read + Write> TlsStream<'a, S> {
    /// Lets the client begin a session, and returns when both sides have agreed on it.
    ///
    /// # Errors
    /// The stream's; `UnexpectedEof` when the client left; `InvalidData` when there is no agreement,
    /// of which the client was told.
    pub fn accept(stream: &'a mut S, tls: &Tls) -> io::Result<Self> {
        let connection = UnbufferedServerConnection::new(tls.config()).map_err(io::Error::other)?;
        let mut session = TlsStream {
            stream,
            connection,
            received: Memory::new(receive_bytes(MIN_BUFFER_BYTES))?,
            start: 0,
            end: 0,
            contents: Vec::new(),
            taken: 0,
            unsent: Memory::new(send_bytes(MIN_BUFFER_BYTES))?,
            batch_bytes: MIN_BUFFER_BYTES,
            ended: false,
            broken: false,
        };
        while session.connection.is_handshaking() {
            if session.ended || !session.receive()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            session.process(&mut [])?;
        }
        Ok(session)
    }

    /// What the session goes over.
    pub fn stream(&mut self) -> &mut S {
        self.stream
    }

    /// From now on, whole batches of `buffer_bytes` are received and sent at once.
    ///
    /// # Errors
    /// `OutOfMemory` when the system refuses.
    pub fn enlarge(&mut self, buffer_bytes: usize) -> io::Result<()> {
        enlarge(&mut self.received, receive_bytes(buffer_bytes))?;
        enlarge(&mut self.unsent, send_bytes(buffer_bytes))?;
        self.batch_bytes = self.batch_bytes.max(buffer_bytes);
        Ok(())
    }

    /// Says that nothing more comes. A client that has left need not hear it.
    pub fn close(mut self) {
        if self.broken {
            return;
        }
        let received = &mut self.received[self.start..self.end];
        if let Ok(ConnectionState::WriteTraffic(mut traffic)) =
            self.connection.process_tls_records(received).state
            && let Ok(len_bytes) = traffic.queue_close_notify(&mut self.unsent)
        {
            let _ = self.stream.write_all(&self.unsent[..len_bytes]);
        }
    }

    /// Waits for ciphertext; `false` at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        self.received.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        if self.end == self.received.len() {
            return Err(violation("a TLS message that is too long"));
        }
        loop {
            match self.stream.read(&mut self.received[self.end..]) {
                Ok(len_bytes) => {
                    self.end += len_bytes;
                    return Ok(len_bytes > 0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Works off all complete records, and sends what they make necessary. Their contents go to
    /// `out`, and what does not fit to `self.contents`. Returns how much `out` got.
    fn process(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let mut out_bytes = 0;
        let mut unsent_bytes = 0;
        loop {
            let received = &mut self.received[self.start..self.end];
            let UnbufferedStatus { discard, state } = self.connection.process_tls_records(received);
            let mut done = false;
            match state {
                Ok(ConnectionState::ReadTraffic(mut traffic)) => {
                    while let Some(record) = traffic.next_record() {
                        let contents = record.map_err(broken)?.payload;
                        let fits_bytes = contents.len().min(out.len() - out_bytes);
                        out[out_bytes..out_bytes + fits_bytes].copy_from_slice(&contents[..fits_bytes]);
                        out_bytes += fits_bytes;
                        self.contents.extend_from_slice(&contents[fits_bytes..]);
                    }
                }
                Ok(ConnectionState::EncodeTlsData(message)) => {
                    unsent_bytes += encode(message, &mut self.unsent, unsent_bytes)?;
                }
                Ok(ConnectionState::TransmitTlsData(transmission)) => {
                    if let Err(error) = self.stream.write_all(&self.unsent[..unsent_bytes]) {
                        self.broken = true;
                        return Err(error);
                    }
                    unsent_bytes = 0;
                    transmission.done();
                }
                Ok(ConnectionState::PeerClosed) => self.ended = true,
                Ok(ConnectionState::WriteTraffic(_) | ConnectionState::BlockedHandshake) => done = true,
                // Both sides have closed; or a state that this configuration does not lead to.
                Ok(_) => {
                    self.ended = true;
                    done = true;
                }
                Err(error) => {
                    self.broken = true;
                    self.ended = true;
                    self.send_alert(unsent_bytes);
                    return Err(broken(error));
                }
            }
            self.start += discard;
            if done {
                return Ok(out_bytes);
            }
        }
    }

    /// Tells the client why the session is over, if it still listens. `unsent_bytes` are waiting.
    fn send_alert(&mut self, mut unsent_bytes: usize) {
        // What waits to be sent is given out before anything received is looked at again.
        while self.connection.wants_write() {
            let received = &mut self.received[self.start..self.end];
            let state = self.connection.process_tls_records(received).state;
            let Ok(ConnectionState::EncodeTlsData(message)) = state else { break };
            let Ok(len_bytes) = encode(message, &mut self.unsent, unsent_bytes) else { break };
            unsent_bytes += len_bytes;
        }
        let _ = self.stream.write_all(&self.unsent[..unsent_bytes]);
    }
}

/// Gives memory at least this length. What it holds stays.
fn enlarge(memory: &mut Memory, len_bytes: usize) -> io::Result<()> {
    if memory.len() < len_bytes {
        let mut larger = Memory::new(len_bytes)?;
        larger[..memory.len()].copy_from_slice(memory);
        *memory = larger;
    }
    Ok(())
}

/// Puts one of the handshake's messages into `unsent`, behind `unsent_bytes`. Only a certificate chain
/// of the server's own makes it grow.
fn encode(
    mut message: EncodeTlsData<'_, ServerConnectionData>,
    unsent: &mut Memory,
    unsent_bytes: usize,
) -> io::Result<usize> {
    match message.encode(&mut unsent[unsent_bytes..]) {
        Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size, .. })) => {
            enlarge(unsent, unsent_bytes + required_size)?;
            message.encode(&mut unsent[unsent_bytes..])
        }
        result => result,
    }
    .map_err(io::Error::other)
}

/// The client broke the TLS protocol, or did not show what is asked of it.
fn broken(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl<S: Read + Write> Read for TlsStream<'_, S> {
    /// 0 at the end, whether the client announced it or vanished: NBD's own messages tell whether one
    /// was cut short.
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        loop {
            let waiting = &self.contents[self.taken..];
            if !waiting.is_empty() {
                let len_bytes = waiting.len().min(buf.len());
                buf[..len_bytes].copy_from_slice(&waiting[..len_bytes]);
                self.taken += len_bytes;
                return Ok(len_bytes);
            }
            self.contents.clear();
            self.taken = 0;
            if self.ended || !self.receive()? {
                self.ended = true;
                return Ok(0);
            }
            let len_bytes = self.process(buf)?;
            if len_bytes > 0 {
                return Ok(len_bytes);
            }
        }
    }
}

impl<S: Read + Write> Write for TlsStream<'_, S> {
    /// Encrypts and sends one batch at most.
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if self.broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let contents = &buf[..buf.len().min(self.batch_bytes)];
        let received = &mut self.received[self.start..self.end];
        let Ok(ConnectionState::WriteTraffic(mut traffic)) =
            self.connection.process_tls_records(received).state
        else {
            self.broken = true;
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let len_bytes = traffic.encrypt(contents, &mut self.unsent).map_err(io::Error::other)?;
        if let Err(error) = self.stream.write_all(&self.unsent[..len_bytes]) {
            // A record that was cut cannot be followed by another: the end of the session is not announced.
            self.broken = true;
            return Err(error);
        }
        Ok(contents.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
