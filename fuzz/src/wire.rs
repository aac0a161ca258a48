//! A client over memory: all it sends is known in advance, and all it receives is kept.

use std::io::{self, Read, Write};

pub(crate) struct Wire<'a> {
    said: &'a [u8],
    /// The most bytes that one read returns, so that messages are torn; at least 1.
    most_bytes: usize,
    pub heard: Vec<u8>,
}

impl<'a> Wire<'a> {
    /// Makes a client that sends `said`; `tear` 0 leaves its messages whole.
    pub fn new(said: &'a [u8], tear: u8) -> Self {
        let most_bytes = if tear == 0 { usize::MAX } else { usize::from(tear) };
        Wire { said, most_bytes, heard: Vec::new() }
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
