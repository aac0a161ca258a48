//! An NBD server over [`uzram::device::Device`].
//!
//! NBD (Network Block Device) is how a disk is served from user space to qemu, libnbd, fio and the Linux
//! kernel's own client. This is the protocol in its fixed newstyle form, with structured replies, metadata
//! contexts and block status, and extended headers; all commands but the experimental `RESIZE`. The
//! specification: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>, and the branch
//! `extension-ext-header` of it.
//!
//! **Contents are memory.** `FLUSH` and `FUA` keep their meaning between connections (a write is visible to
//! every reader once it is answered), but nothing persists: the contents are lost when the server ends.
//!
//! One thread serves one connection and answers its requests in order. Requests that would wait for the
//! device are offloaded to a pool of threads and answered when they are done; without memory for that, the
//! connection's own thread waits. A client can harm only its own connection: every length is bounded before
//! it is used, and so are the memory that connections hold (`buffer`), their number (`registry`) and the time
//! for which they may delay others (`socket`). A connection that ends, even by a panic, does not affect the
//! others.

pub mod proto;
mod request;
mod meta_context;
mod address;
mod clients;
mod socket;
mod buffer;
mod tls;
mod tls_stream;
mod handshake;
mod replies;
mod offload;
mod connection;
mod session;
mod listener;
mod registry;
mod server;

pub use address::{Endpoint, Listen, ListenAddress, SocketAccess};
pub use buffer::{BUFFER_BYTES, Buffers, MIN_BUFFER_BYTES, SHARED_BYTES};
pub use clients::{Client, Kicked, TurnedAway};
pub use listener::Sockets;
pub use registry::Clients;
pub use server::{Server, ServerConfig, ServerThread};
pub use session::serve_stream;
pub use tls::{Tls, TlsFiles, reload_tls};
