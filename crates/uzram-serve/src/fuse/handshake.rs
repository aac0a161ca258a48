//! The first request of a connection, `FUSE_INIT`, and reading requests at all.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use super::proto::*;

/// Requests that the kernel has in flight at once: more than a loop device's queue holds.
const MAX_BACKGROUND: u16 = 256;

/// What is asked of the kernel, as far as it can it.
const WANTED: u64 = FUSE_ASYNC_READ
    | FUSE_BIG_WRITES
    | FUSE_ASYNC_DIO
    | FUSE_PARALLEL_DIROPS
    | FUSE_MAX_PAGES
    | FUSE_INIT_EXT
    // Allows shared mappings of a file. They use the page cache, which the kernel keeps coherent with direct
    // reads and writes (Linux 6.6; before that such a mapping is refused).
    | FUSE_DIRECT_IO_ALLOW_MMAP
    | FUSE_HAS_RESEND;

/// Reads the kernel's first request and answers it; returns what was negotiated. `max_io_bytes` is the
/// longest read or write; the flags `unwanted` are not asked of the kernel.
pub(super) fn answer_init(device: BorrowedFd<'_>, max_io_bytes: u32, unwanted: u64) -> io::Result<u64> {
    let mut buffer = vec![0; FUSE_MIN_READ_BUFFER];
    let len = read_request(device, &mut buffer)?.ok_or_else(|| io::Error::from(Errno::NOTCONN))?;
    let request = Request::parse(&buffer[..len]);
    let init = request.as_ref().filter(|request| request.header.opcode == opcode::FUSE_INIT);
    let Some((request, init)) = init.and_then(|request| Some((request, request.message::<fuse_init_in>()?)))
    else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the kernel's first request is not FUSE_INIT",
        ));
    };
    let unique = request.header.unique;
    if init.major != FUSE_KERNEL_VERSION || init.minor < OLDEST_MINOR_VERSION {
        write(device, fuse_out_header { error: -libc::EPROTO, unique, ..Default::default() }, &[])?;
        let what = format!(
            "the kernel's FUSE protocol is {}.{}, not {FUSE_KERNEL_VERSION}.{OLDEST_MINOR_VERSION} or later (Linux 5.4)",
            init.major, init.minor
        );
        return Err(io::Error::new(io::ErrorKind::Unsupported, what));
    }
    let (flags, reply) = negotiate(&init, offered(request) & !unwanted, max_io_bytes);
    write(device, fuse_out_header { unique, ..Default::default() }, bytes_of(&reply))?;
    Ok(flags)
}

fn offered(request: &Request<'_>) -> u64 {
    let mut rest = request.body;
    let init = take::<fuse_init_in>(&mut rest).unwrap_or_default();
    // The field is not sent by kernels before Linux 5.17, which do not set the flag.
    let more = rest.first_chunk().filter(|_| u64::from(init.flags) & FUSE_INIT_EXT != 0);
    u64::from(init.flags) | u64::from(more.map_or(0, |bytes| u32::from_ne_bytes(*bytes))) << 32
}

fn negotiate(init: &fuse_init_in, offered: u64, max_io_bytes: u32) -> (u64, fuse_init_out) {
    let flags = offered & WANTED;
    let pages = max_io_bytes.div_ceil(rustix::param::page_size() as u32);
    let reply = fuse_init_out {
        major: FUSE_KERNEL_VERSION,
        minor: FUSE_KERNEL_MINOR_VERSION,
        max_readahead: init.max_readahead,
        flags: flags as u32,
        max_background: MAX_BACKGROUND,
        congestion_threshold: MAX_BACKGROUND,
        max_write: max_io_bytes,
        time_gran: 1,
        max_pages: u16::try_from(pages).unwrap_or(u16::MAX),
        flags2: (flags >> 32) as u32,
        ..Default::default()
    };
    (flags, reply)
}

pub(super) fn notify_resend(device: BorrowedFd<'_>) -> io::Result<()> {
    // A notification is a reply to no request.
    write(device, fuse_out_header { error: FUSE_NOTIFY_RESEND, ..Default::default() }, &[])
}

fn write(device: BorrowedFd<'_>, header: fuse_out_header, body: &[u8]) -> io::Result<()> {
    let len = (size_of::<fuse_out_header>() + body.len()) as u32;
    let message = [bytes_of(&fuse_out_header { len, ..header }), body].concat();
    rustix::io::write(device, &message)?;
    Ok(())
}

/// Reads the next request; returns its length, or `None` when the connection has ended.
pub(super) fn read_request(channel: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        match rustix::io::read(channel, &mut *buffer) {
            Ok(len) => return Ok(Some(len)),
            // `ENOENT`: the request was aborted while it was read.
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
            Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuse::proto::fuse_in_header;

    #[test]
    fn only_what_the_kernel_offers_is_negotiated() {
        let init = fuse_init_in { major: 7, minor: 31, max_readahead: 5, flags: !0 };
        let more = [(FUSE_HAS_RESEND >> 32) as u32, 1];
        let body = [bytes_of(&init), &more.map(u32::to_ne_bytes).concat()].concat();
        let request = |body| Request { header: fuse_in_header::default(), body };
        let (flags, reply) = negotiate(&init, offered(&request(&body)), 128 << 10);
        assert_eq!(flags, WANTED & !FUSE_DIRECT_IO_ALLOW_MMAP);
        assert_eq!(
            (u64::from(reply.flags2) << 32 | u64::from(reply.flags), reply.max_write),
            (flags, 128 << 10)
        );
        // Without the second field, and with one that is not announced.
        let short = offered(&request(&body[..16]));
        assert_eq!(short, u64::from(u32::MAX));
        let old = fuse_init_in { flags: FUSE_MAX_PAGES as u32, ..init };
        let body = [bytes_of(&old), &[0xff; 48]].concat();
        assert_eq!(offered(&request(&body)), FUSE_MAX_PAGES);
        assert_eq!(offered(&request(&[])), 0);
    }
}
