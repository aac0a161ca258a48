//! A client over memory: all it sends is known in advance, and all it receives is kept. And the messages of
//! an NBD client.

use std::io::{self, Read, Write};

use uzram_serve::nbd::proto;

/// Both directions of a connection.
pub(crate) struct Wire<'a> {
    said: &'a [u8],
    /// The most bytes that one read returns, so that messages are torn; at least 1.
    most_bytes: usize,
    /// What the server sent.
    pub heard: Vec<u8>,
}

impl<'a> Wire<'a> {
    /// Makes a client that sends `said`; `tear` 0 leaves its messages whole.
    pub fn new(said: &'a [u8], tear: u8) -> Self {
        Self::hearing(said, tear, Vec::new())
    }

    /// As [`Wire::new`], keeping what is received in `heard`, emptied first.
    pub fn hearing(said: &'a [u8], tear: u8, mut heard: Vec<u8>) -> Self {
        let most_bytes = if tear == 0 { usize::MAX } else { usize::from(tear) };
        heard.clear();
        Wire { said, most_bytes, heard }
    }
}

impl Read for Wire<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = self.said.len().min(buf.len()).min(self.most_bytes);
        let (now, later) = self.said.split_at(len);
        buf[..len].copy_from_slice(now);
        self.said = later;
        Ok(len)
    }
}

impl Write for Wire<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.heard.extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The received bytes, taken piece by piece; running out of them is a broken promise.
pub(crate) struct Heard<'a>(pub &'a [u8]);

impl<'a> Heard<'a> {
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at_checked(len).expect("the server sends whole messages");
        self.0 = rest;
        head
    }

    pub fn u16(&mut self) -> u16 {
        self.number(2) as u16
    }

    pub fn u32(&mut self) -> u32 {
        self.number(4) as u32
    }

    pub fn u64(&mut self) -> u64 {
        self.number(8)
    }

    fn number(&mut self, len: usize) -> u64 {
        self.take(len).iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}

/// Returns an option as a client sends it.
pub(crate) fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let header = [&proto::IHAVEOPT.to_be_bytes()[..], &option.to_be_bytes(), &len(data).to_be_bytes()];
    [&header.concat(), data].concat()
}

/// Returns the data of `INFO` and `GO`.
pub(crate) fn info_request(name: &[u8], kinds: &[u16]) -> Vec<u8> {
    let mut data = [&len(name).to_be_bytes(), name, &(kinds.len() as u16).to_be_bytes()].concat();
    kinds.iter().for_each(|kind| data.extend_from_slice(&kind.to_be_bytes()));
    data
}

fn len(data: &[u8]) -> u32 {
    data.len() as u32
}

/// Returns the data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
pub(crate) fn context_request(name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
    let mut data = [&len(name).to_be_bytes(), name, &(queries.len() as u32).to_be_bytes()].concat();
    queries.iter().for_each(|query| data.extend([&len(query).to_be_bytes(), *query].concat()));
    data
}

/// A request's header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    /// Only 32 bits in the compact form.
    pub len_bytes: u64,
}

impl Header {
    /// Returns the header as a client sends it.
    pub fn bytes(&self, extended: bool) -> Vec<u8> {
        let magic = if extended { proto::NBD_EXTENDED_REQUEST_MAGIC } else { proto::NBD_REQUEST_MAGIC };
        let len_bytes = self.len_bytes.to_be_bytes();
        [
            &magic.to_be_bytes()[..],
            &self.flags.to_be_bytes(),
            &self.command.to_be_bytes(),
            &self.cookie.to_be_bytes(),
            &self.offset.to_be_bytes(),
            if extended { &len_bytes } else { &len_bytes[4..] },
        ]
        .concat()
    }
}
