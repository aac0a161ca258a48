//! The server's side of a TLS session over any stream.
//!
//! It uses rustls without rustls's buffers, which read 4 KiB at a time: here one read of the stream
//! takes all bytes that have arrived, decrypts all complete records, and one write sends a whole
//! batch as records of 16 KiB. Decrypted bytes go straight to the reader as far as they fit.
//!
//! Memory is bounded: received ciphertext by [`tls_receive_bytes`], unread plaintext by the same, and
//! encrypted data by [`tls_send_bytes`] (more in a handshake with a long certificate chain of the server's
//! own). It is small until the client has chosen an export, and then sized for the connection's buffers.
//!
//! Invariant: between calls, `received` holds no complete record.

use std::io::{self, Read, Write};

use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, InsufficientSizeError, UnbufferedStatus,
};

use super::buffer::{MIN_BUFFER_BYTES, Memory, ReceiveBuffer, tls_receive_bytes, tls_send_bytes};
use super::proto::violation;
use super::tls::Tls;

pub(super) struct TlsStream<'a, S> {
    stream: &'a mut S,
    connection: UnbufferedServerConnection,
    /// Ciphertext that is not decrypted yet.
    received: ReceiveBuffer,
    /// Plaintext that is not read yet: `contents[taken..]`.
    contents: Vec<u8>,
    taken: usize,
    /// Buffer for ciphertext to send; empty between calls.
    unsent: Memory,
    /// The most bytes encrypted at a time.
    batch_bytes: usize,
    /// No more contents will come.
    ended: bool,
    /// The session failed: the client broke the protocol (and got an alert), or cannot be reached.
    /// rustls must not be called again.
    broken: bool,
}

impl<'a, S: Read + Write> TlsStream<'a, S> {
    /// Runs the TLS handshake. Errors: the stream's; `UnexpectedEof` when the client left; `InvalidData` when
    /// the handshake failed, after an alert to the client.
    pub fn accept(stream: &'a mut S, tls: &Tls) -> io::Result<Self> {
        let connection = UnbufferedServerConnection::new(tls.config()).map_err(io::Error::other)?;
        let mut session = TlsStream {
            stream,
            connection,
            received: ReceiveBuffer::new(tls_receive_bytes(MIN_BUFFER_BYTES))?,
            contents: Vec::new(),
            taken: 0,
            unsent: Memory::new(tls_send_bytes(MIN_BUFFER_BYTES))?,
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

    pub fn stream(&mut self) -> &mut S {
        self.stream
    }

    /// Enlarges the buffers, so that whole batches of `buffer_bytes` are received and sent at once.
    pub fn enlarge(&mut self, buffer_bytes: usize) -> io::Result<()> {
        self.received.bytes.enlarge(tls_receive_bytes(buffer_bytes))?;
        self.unsent.enlarge(tls_send_bytes(buffer_bytes))?;
        self.batch_bytes = self.batch_bytes.max(buffer_bytes);
        Ok(())
    }

    /// Sends a close-notify alert. Ignores failures: the client may have left.
    pub fn close(mut self) {
        if self.broken {
            return;
        }
        let received = self.received.available_mut();
        if let Ok(ConnectionState::WriteTraffic(mut traffic)) =
            self.connection.process_tls_records(received).state
            && let Ok(len_bytes) = traffic.queue_close_notify(&mut self.unsent)
        {
            let _ = self.stream.write_all(&self.unsent[..len_bytes]);
        }
    }

    /// Waits for ciphertext; `false` at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        if self.received.available().len() == self.received.bytes.len() {
            return Err(violation("a TLS message that is too long"));
        }
        Ok(self.received.fill(self.stream)? > 0)
    }

    /// Processes all complete records, and sends the messages that they require. Their contents go to
    /// `out`, and what does not fit to `self.contents`. Returns the number of bytes in `out`.
    fn process(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let mut out_bytes = 0;
        let mut unsent_bytes = 0;
        loop {
            let received = self.received.available_mut();
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
                // Both sides have closed; or a state that this configuration cannot reach.
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
            self.received.consume(discard);
            if done {
                return Ok(out_bytes);
            }
        }
    }

    /// Sends the alert that ends the session, after `unsent_bytes` that wait in the buffer. Ignores failures.
    fn send_alert(&mut self, mut unsent_bytes: usize) {
        // rustls returns pending messages before it processes received records again.
        while self.connection.wants_write() {
            let received = self.received.available_mut();
            let state = self.connection.process_tls_records(received).state;
            let Ok(ConnectionState::EncodeTlsData(message)) = state else { break };
            let Ok(len_bytes) = encode(message, &mut self.unsent, unsent_bytes) else { break };
            unsent_bytes += len_bytes;
        }
        let _ = self.stream.write_all(&self.unsent[..unsent_bytes]);
    }
}

/// Encodes a handshake message into `unsent`, after `unsent_bytes`. Only a long certificate chain of the
/// server's own makes the buffer grow.
fn encode(
    mut message: EncodeTlsData<'_, ServerConnectionData>,
    unsent: &mut Memory,
    unsent_bytes: usize,
) -> io::Result<usize> {
    match message.encode(&mut unsent[unsent_bytes..]) {
        Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size, .. })) => {
            unsent.enlarge(unsent_bytes + required_size)?;
            message.encode(&mut unsent[unsent_bytes..])
        }
        result => result,
    }
    .map_err(io::Error::other)
}

/// Returns the error for a client that broke the TLS protocol, or has no acceptable certificate.
fn broken(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl<S: Read + Write> Read for TlsStream<'_, S> {
    /// Returns 0 at the end, with or without close-notify: NBD itself detects a truncated message.
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
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if self.broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let contents = &buf[..buf.len().min(self.batch_bytes)];
        let received = self.received.available_mut();
        let Ok(ConnectionState::WriteTraffic(mut traffic)) =
            self.connection.process_tls_records(received).state
        else {
            self.broken = true;
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let len_bytes = traffic.encrypt(contents, &mut self.unsent).map_err(io::Error::other)?;
        if let Err(error) = self.stream.write_all(&self.unsent[..len_bytes]) {
            // No record can follow one that was partly sent, so `close` sends no close-notify.
            self.broken = true;
            return Err(error);
        }
        Ok(contents.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
