//! The control API: HTTP/1.1 with JSON on a Unix socket, under `/v1/`.
//!
//! It is only a view of a list of devices with their attribute table, and of the process's slab caches:
//! [`uzram::device`] decides what an attribute means, when it may be written and which errno it returns;
//! the daemon's [`Admission`] decides whether there is room for one more device.
//!
//! | request | response |
//! |---|---|
//! | `GET /v1/devices` | `{"devices": [{"name", "uri", "uris", "file": PATH or null, "stats", "backing_stopped": WHY or null}…]}` |
//! | `POST /v1/devices` with `{"name": TEXT, "attributes": {NAME: TEXT…}, "export": BOOL or null, "read_only": BOOL}` | 201 and the new device, as below |
//! | `GET /v1/devices/NAME` | `{"name", "uri", "uris", "file", "attributes": {NAME: TEXT or null…}, "stats", "backing_stopped"}` |
//! | `DELETE /v1/devices/NAME` | 204; 409 while it is in use |
//! | `GET /v1/devices/NAME/attributes/ATTR` | `{"name", "value"}` |
//! | `PUT /v1/devices/NAME/attributes/ATTR` with `{"value": TEXT}` | 204 |
//! | `POST /v1/devices/NAME/reset` | 204 |
//! | `PUT /v1/devices/NAME/attachment` with `{"number", "diskseq"}` | 204; records an attached device |
//! | `GET /v1/attachments` | `{"attachments": [{"name", "attachment": {"number", "diskseq"}}…]}` |
//! | `GET /v1/devices/NAME/clients` | the NBD clients of one device, as below |
//! | `GET /v1/clients` | `{"clients": [{"id", "listener", "peer", "pid", "uid", "export": TEXT or null, "since", "requests", "read_bytes", "written_bytes"}…]}` |
//! | `DELETE /v1/clients/ID` | 204 once the connection has ended; 202 if it ends only when the device has finished a request |
//! | `GET /v1/daemon` | `{"pid", "files": {"dir", "device": [MAJOR, MINOR], "threads", "cpu_latency": TEXT} or null, "ends_with_swap", "protection": [{"what", "refused": TEXT or null}…], "survival": {"holder_pid", "worker_pid", "standby_pid": N or null, "standby_ready", "take_overs", "last_outage_ms": N or null, "gave_up": TEXT or null} or null}` |
//! | `GET /v1/slabinfo` | `{"caches": [{"name", "policy", "active_objs", …, "stats": {COUNTER: {"total", "cpus": {CPU: N…}}…}}…]}` |
//! | `POST /v1/reload` | 204 when the TLS files have been reloaded; 409 without TLS |
//! | `POST /v1/shutdown` with nothing or `{"force": BOOL}` | 202, and the daemon ends; 409 while a device is in use |
//!
//! `GET /v1/devices/NAME` omits attributes whose text grows with the disk. Such a text is generated while it is sent,
//! and ends with the connection, without a `Content-Length`; if the device is reset meanwhile, it ends there.
//!
//! Setting an attribute that processes all pages (`recompress`, `writeback`, `compact`, `idle`) responds when that is
//! done; the attribute `progress` shows its progress. If the client closes the connection, or its sending half, before
//! the response, the operation ends, as by `reset` and `DELETE`; the response is then 409, `interrupted`, and the pages
//! processed so far stay processed.
//!
//! A failure is a 4xx or 5xx status with `{"error": TEXT, "errno": N, "setting": TEXT or null}`.
//!
//! One request per connection. Each layer is a plain function of the one below: [`http`] turns bytes
//! into a [`http::Request`], [`Api::handle`] turns that into a [`http::Response`] and touches no
//! socket, [`exchange`] does both over any reader and writer, and [`Server`] runs `exchange` on a
//! thread for each connection, with bounds on time, size and number.

pub mod about;
pub mod api;
pub mod clients;
pub mod http;
pub mod percent;
mod server;
pub mod slabinfo;
pub mod stats;

use std::io::{self, Read, Write};

pub use about::{About, FilesJson, MeasureJson, SurvivalJson};
pub use api::{Admission, Api, Registrar, Uris};
pub use clients::ClientJson;
pub use http::Ending;
pub use server::{Limits, Server};
pub use slabinfo::{CacheJson, CounterJson};
pub use stats::StatsJson;

/// How an [`exchange`] ended.
#[derive(Debug)]
pub struct Exchanged {
    /// How the daemon is to end, if the request asked for that.
    pub shutdown: Option<Ending>,
    /// The request was refused before all of it was read.
    pub unread_input: bool,
    /// Whether the response was sent; if not, the client disconnected or was too slow.
    pub sent: io::Result<()>,
}

/// Reads one request from `input`, and writes the response to `output`. `input` is written to only for
/// `100 Continue`. A long operation ends early once `is_wanted` returns false.
pub fn exchange(
    api: &Api,
    input: &mut (impl Read + Write),
    output: &mut impl Write,
    is_wanted: &dyn Fn() -> bool,
) -> Exchanged {
    let (response, unread_input) = match http::read_request(input) {
        Ok(request) => (api.handle(&request, is_wanted), false),
        Err(refusal) => (refusal, true),
    };
    Exchanged { shutdown: response.shutdown, unread_input, sent: response.write_to(output) }
}

#[cfg(test)]
mod tests;
