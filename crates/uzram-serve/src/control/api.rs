//! What each request means: a pure function from [`Request`] to [`Response`] over the devices.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use uzram::device::Device;
use uzram::{Error, ErrorKind};

use super::http::{Request, Response, refusal};
use super::percent;
use super::stats::StatsJson;

/// A device and where it is served.
pub struct Export {
    /// The device.
    pub device: Arc<Device>,
    /// Where clients find its contents, as in `nbd+unix:///zram0?socket=/run/uzram/nbd.sock`.
    pub uri: String,
}

/// The devices of a daemon, as seen by control clients.
pub struct Api {
    exports: Vec<Export>,
}

#[derive(Deserialize)]
struct NewValue {
    value: String,
}

impl Api {
    /// An API over these devices.
    pub const fn new(exports: Vec<Export>) -> Self {
        Api { exports }
    }

    /// Answers one request.
    pub fn handle(&self, request: &Request) -> Response {
        match self.route(request) {
            Ok(response) | Err(response) => response,
        }
    }

    fn route(&self, request: &Request) -> Result<Response, Response> {
        let segments = segments(&request.path)?;
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        let method = request.method.as_str();
        match (segments.as_slice(), method) {
            (["v1", "devices"], "GET") => Ok(self.list()),
            (["v1", "devices"], _) => Err(not_allowed("GET")),
            (["v1", "devices", name], "GET") => Ok(describe(self.export(name)?)),
            (["v1", "devices", _], _) => Err(not_allowed("GET")),
            (["v1", "devices", name, "attributes", attribute], "GET") => {
                read_attribute(&self.export(name)?.device, attribute)
            }
            (["v1", "devices", name, "attributes", attribute], "PUT") => {
                let value = new_value(&request.body)?;
                write_attribute(&self.export(name)?.device, attribute, &value)
            }
            (["v1", "devices", _, "attributes", _], _) => Err(not_allowed("GET, PUT")),
            (["v1", "devices", name, "reset"], "POST") => {
                write_attribute(&self.export(name)?.device, "reset", "1")
            }
            (["v1", "devices", _, "reset"], _) => Err(not_allowed("POST")),
            (["v1", "shutdown"], "POST") => Ok(Response { shutdown: true, ..Response::empty(202) }),
            (["v1", "shutdown"], _) => Err(not_allowed("POST")),
            _ => Err(refusal(404, "no such path; the control API begins at /v1/devices")),
        }
    }

    fn export(&self, name: &str) -> Result<&Export, Response> {
        self.exports.iter().find(|export| export.device.name() == name).ok_or_else(|| {
            let names: Vec<&str> = self.exports.iter().map(|export| export.device.name()).collect();
            refusal(404, &format!("no device '{name}'; this daemon has {}", names.join(", ")))
        })
    }

    fn list(&self) -> Response {
        let devices: Vec<Value> = self
            .exports
            .iter()
            .map(|export| {
                json!({
                    "name": export.device.name(),
                    "uri": export.uri,
                    "stats": StatsJson::from(export.device.stats()),
                })
            })
            .collect();
        Response::json(200, &json!({ "devices": devices }))
    }
}

/// The decoded segments of a path that begins with `/`.
fn segments(path: &str) -> Result<Vec<String>, Response> {
    let path = path.strip_prefix('/').ok_or_else(|| refusal(400, "the path does not begin with /"))?;
    path.split('/')
        .map(|segment| percent::decode(segment).ok_or_else(|| refusal(400, "the path is badly encoded")))
        .collect()
}

fn new_value(body: &[u8]) -> Result<String, Response> {
    serde_json::from_slice::<NewValue>(body)
        .map(|new| new.value)
        .map_err(|error| refusal(400, &format!("the body is not {{\"value\": \"TEXT\"}}: {error}")))
}

fn describe(export: &Export) -> Response {
    let device = &export.device;
    let attributes: Map<String, Value> = Device::attributes()
        .iter()
        .filter(|attribute| attribute.readable())
        // One that can't be read now (before disksize is set, say) is null; the rest still show.
        .map(|attribute| (attribute.name.to_owned(), device.get(attribute.name).ok().into()))
        .collect();
    let body = json!({
        "name": device.name(),
        "uri": export.uri,
        "attributes": attributes,
        "stats": StatsJson::from(device.stats()),
    });
    Response::json(200, &body)
}

fn read_attribute(device: &Device, attribute: &str) -> Result<Response, Response> {
    let value = device.get(attribute).map_err(|error| failure(&error))?;
    Ok(Response::json(200, &json!({ "name": attribute, "value": value })))
}

fn write_attribute(device: &Device, attribute: &str, value: &str) -> Result<Response, Response> {
    device.set(attribute, value).map_err(|error| failure(&error))?;
    tracing::info!(device = device.name(), attribute, value, "attribute set");
    Ok(Response::empty(204))
}

fn not_allowed(methods: &'static str) -> Response {
    let text = format!("this path takes only {methods}");
    Response { allow: Some(methods), ..refusal(405, &text) }
}

/// The engine's error as a response.
fn failure(error: &Error) -> Response {
    let status = match error.kind() {
        ErrorKind::Invalid | ErrorKind::OutOfRange => 400,
        ErrorKind::Permission => 403,
        ErrorKind::NotFound => 404,
        ErrorKind::Busy => 409,
        ErrorKind::Unsupported => 501,
        ErrorKind::NoMemory => 503,
        ErrorKind::NoSpace => 507,
        ErrorKind::Corrupt | ErrorKind::Io => 500,
    };
    Response::error(status, &error.to_string(), error.errno(), error.setting())
}
