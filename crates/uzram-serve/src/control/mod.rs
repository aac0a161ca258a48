//! The control API: HTTP/1.1 with JSON on a Unix socket, under `/v1/`.
//!
//! It is only a view of a list of devices with their attribute table: [`uzram::device`] decides what an
//! attribute means, when it may be written and which errno it returns; the daemon's [`Admission`] decides
//! whether there is room for one more device.
//!
//! [`api::ROUTES`] is the table of requests; docs/control.md describes each, with its response.
//!
//! `GET /v1/devices/NAME` omits attributes whose text grows with the disk. Such a text is generated while it
//! is sent, and ends with the connection, without a `Content-Length`; if the device is reset meanwhile, it
//! ends there.
//!
//! Setting an attribute that processes all pages (`recompress`, `writeback`, `compact`, `idle`) responds when
//! that is done; the attribute `progress` shows its progress. If the client closes the connection, or its
//! sending half, before the response, the operation ends, as by `reset` and `DELETE`; the response is then
//! 409, `interrupted`, and the pages processed so far stay processed.
//!
//! A failure is a 4xx or 5xx status with `{"error": TEXT, "errno": N, "setting": TEXT or null}`.
//!
//! One request per connection. Each layer is a plain function of the one below: [`http`] turns bytes
//! into a [`http::Request`], [`Api::handle`] turns that into a [`http::Response`] and touches no
//! socket, [`exchange`] does both over any reader and writer, and [`Server`] runs `exchange` on a
//! thread for each connection, with bounds on time, size and number.

mod json;
pub mod http;
pub mod api;
mod server;
#[cfg(test)]
mod tests;

pub use crate::percent;
pub use api::{Admission, Api, Registrar, Uris, in_use_by_clients};
pub use http::Ending;
pub use json::{
    About, AttributeJson, ClientJson, ClientsJson, DeviceJson, DevicesJson, FilesJson, MeasureJson,
    StatsJson, SurvivalJson,
};
pub use server::{Exchanged, Limits, Server, exchange};
