//! The control API: HTTP/1.1 with JSON on a Unix socket, one request per connection. docs/control.md
//! describes it, and `api::ROUTES` is the table of requests.
//!
//! It is only a view of a list of devices with their attribute table: [`uzram::device`] decides what an
//! attribute means, when it may be written and which errno it returns. `http` turns bytes into a
//! request, [`Api::handle`] turns that into a response and touches no socket,
//! [`exchange`] does both over any reader and writer, and [`Server`] runs `exchange` on a thread for each
//! connection, with bounds on time, size and number.

mod json;
mod http;
mod api;
mod server;
#[cfg(test)]
mod tests;

pub use api::{Admission, Api, Registrar, Uris, in_use_by_clients};
pub use http::Ending;
pub use json::{
    About, AttributeJson, ClientsJson, DeviceJson, DevicesJson, FilesJson, MeasureJson, SurvivalJson,
};
pub use server::{Exchanged, Server, exchange};
