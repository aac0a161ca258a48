//! The requests in flight of a server, of all its connections: one slab cache, `nbd_request`.
//!
//! A request is in flight from when its header has been read until its reply stands in the send
//! buffer. A connection has one at a time, and those that it has handed over because they would wait;
//! `uzram slabinfo` shows them.
//!
//! Locks: none here. The cache has its own, which are leaves to all of this crate's.

use std::sync::Arc;

use uzram::mem::{Arena, Gfp};
use uzram::slab::{CacheConfig, Owned, TypedCache};

use super::proto::NbdError;
use super::request::{Refusal, Request};
use crate::waiters::MAX_JOBS;

/// Requests in flight for which there is room, whatever the number of connections: each of these has one beside
/// those that were handed over, and a thread, and no system runs so many.
const MAX_IN_FLIGHT: u64 = 1 << 20;
/// A cache line each: other threads are busy with the neighbours.
const REQUEST_BYTES: usize = 64;

const _: () = assert!(size_of::<Request>() <= REQUEST_BYTES);

/// What a request is told that finds no room.
const NO_MEMORY: Refusal = Refusal { error: NbdError::NoMem, message: "no memory for another request" };

/// A request in flight; it is no longer when this is dropped.
pub(super) type InFlight<'a> = Owned<'a, Request>;

/// Where the requests of a server are while they are in flight.
pub struct RequestCache(TypedCache<Request>);

impl RequestCache {
    /// Room for the requests of so many connections, and those they may have handed over, in memory of its
    /// own: pages of 64 requests, once they are there.
    ///
    /// # Errors
    /// `NoMemory` when the system gives no address space.
    pub fn new(max_connections: usize) -> uzram::Result<Self> {
        let in_flight = (max_connections as u64).saturating_add(MAX_JOBS as u64).min(MAX_IN_FLIGHT);
        let options = CacheConfig {
            align_bytes: REQUEST_BYTES,
            max_objects_setting: "max-connections",
            ..TypedCache::<Request>::options("nbd_request", in_flight)
        };
        let arena = Arena::new(options.reserve_bytes()?)?;
        TypedCache::new(Arc::new(arena), options).map(RequestCache)
    }

    /// Keeps a request for as long as it is in flight.
    ///
    /// # Errors
    /// What to answer when there is no room.
    pub(super) fn hold(&self, request: Request) -> Result<InFlight<'_>, Refusal> {
        self.0.own(request, Gfp::MayWait).map_err(|error| {
            tracing::debug!(%error, "no room for a request");
            NO_MEMORY
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{self, Cursor, Read, Write};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use uzram::device::Device;
    use uzram::random::Random;

    use super::*;
    use crate::Exports;
    use crate::nbd::clients::TrafficCounters;
    use crate::nbd::handshake::Session;
    use crate::nbd::meta_context::Contexts;
    use crate::nbd::proto::{NBD_REQUEST_MAGIC, command};
    use crate::nbd::request::{Command, Headers};
    use crate::nbd::session::Terms;
    use crate::nbd::{Buffers, transmission};

    /// A client that has said all of `input`, and hears.
    struct Script {
        input: Cursor<Vec<u8>>,
        heard: Vec<u8>,
    }

    impl Read for Script {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.input.read(buf)
        }
    }

    impl Write for Script {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            self.heard.write(buf)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const ANY: Request =
        Request { flags: 0, command: Command::Flush, cookie: 0, offset: 0, len_bytes: 0, payload_bytes: 0 };

    fn request(command: u16, cookie: u64, offset: u64, len_bytes: u32) -> Vec<u8> {
        let mut bytes = NBD_REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend([0, 0, 0, command as u8]);
        bytes.extend([cookie, offset].map(u64::to_be_bytes).concat());
        bytes.extend(len_bytes.to_be_bytes());
        bytes
    }

    /// Cookie and error of each simple reply to these requests, none of which has data.
    fn converse(device: &Arc<Device>, requests: &RequestCache, input: Vec<u8>) -> Vec<(u64, u32)> {
        let mut script = Script { input: Cursor::new(input), heard: Vec::new() };
        let exports = Exports::new([Arc::clone(device)]);
        let session = Session {
            export: exports.find(b"").unwrap().connect().unwrap(),
            headers: Headers::Simple,
            contexts: Contexts::default(),
        };
        let stopping = Arc::default();
        let terms = Terms {
            exports: &exports,
            requests,
            tls: None,
            tls_required: false,
            stopping: &stopping,
            handover: None,
            traffic: &TrafficCounters::default(),
        };
        transmission::run(&mut script, session, terms, &mut Buffers::new(0).unwrap()).unwrap();
        let number = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
        script.heard.chunks(16).map(|reply| (number(&reply[8..]), number(&reply[4..8]) as u32)).collect()
    }

    #[test]
    fn a_request_of_each_connection_finds_room_whoever_frees_the_others() {
        const CONNECTIONS: usize = 100;
        let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
        println!("seed {seed}");
        let requests = RequestCache::new(CONNECTIONS).unwrap();
        let (started, held) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (requests, started, held) = (&requests, &started, &held);
                scope.spawn(move || {
                    let mut random = Random::new(seed ^ thread);
                    for _ in 0..20_000 {
                        if random.below(2) == 0 {
                            let ended = held.lock().unwrap().pop();
                            if ended.is_some() {
                                drop(ended);
                                started.fetch_sub(1, Relaxed);
                            }
                        } else if started.fetch_add(1, Relaxed) < CONNECTIONS {
                            let request = requests.hold(ANY).unwrap();
                            let mut held = held.lock().unwrap();
                            let at = random.below(held.len() + 1);
                            held.insert(at, request);
                        } else {
                            started.fetch_sub(1, Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(requests.0.info().active_objs, held.lock().unwrap().len() as u64);
    }

    #[test]
    fn without_room_requests_are_refused_and_the_connection_goes_on() {
        const ENOMEM: u32 = 12;
        let device = Device::new("zram0").unwrap();
        device.set("disksize", "1M").unwrap();
        let input = [
            request(command::WRITE, 1, 0, 20_000),
            vec![7; 20_000],
            request(command::TRIM, 2, 0, 4096),
            request(command::WRITE, 3, 0, 3),
            vec![8; 3],
            request(command::FLUSH, 4, 0, 0),
            request(command::DISC, 5, 0, 0),
        ]
        .concat();
        let requests = RequestCache::new(1).unwrap();
        let mut held: Vec<_> = std::iter::from_fn(|| requests.hold(ANY).ok()).take(1 << 20).collect();
        assert!((1..1 << 20).contains(&held.len()), "bounded: {}", held.len());
        assert!(RequestCache::new(usize::MAX).is_ok());
        let refused = [1, 2, 3, 4].map(|cookie| (cookie, ENOMEM));
        assert_eq!(converse(&device, &requests, input.clone()), refused);
        let mut first = [1];
        device.open().unwrap().read(0, &mut first).unwrap();
        assert_eq!(first, [0], "nothing was written");

        // One place is enough, again and again.
        held.pop();
        assert_eq!(converse(&device, &requests, input), refused.map(|(cookie, _)| (cookie, 0)));
        device.open().unwrap().read(0, &mut first).unwrap();
        assert_eq!(first, [8]);
        assert_eq!(requests.0.info().active_objs, held.len() as u64);
        held.clear();
        assert_eq!(requests.0.info().active_objs, 0);
    }
}
