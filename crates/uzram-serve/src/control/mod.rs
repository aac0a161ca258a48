//! The control API: HTTP/1.1 with JSON on a Unix socket, under `/v1/`.
//!
//! It is only a view of a list of devices with their attribute table: [`uzram::device`] decides what an attribute means,
//! when it may be written and which errno it returns; the daemon's [`Admission`] decides whether there is room for one
//! more device.
//!
//! [`routes`] is the table of requests; docs/control.md describes each, with its response.
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
pub mod devices;
pub mod http;
pub mod percent;
pub mod routes;
mod server;
pub mod stats;

use std::io::{self, Read, Write};

pub use about::{About, FilesJson, MeasureJson, SurvivalJson};
pub use api::{Admission, Api, Registrar, Uris, in_use_by_clients};
pub use clients::{ClientJson, ClientsJson};
pub use devices::{AttributeJson, DeviceJson, DevicesJson};
pub use http::Ending;
pub use server::{Limits, Server};
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
