//! Handling of requests: a function from [`Request`] to [`Response`] over the devices, by one table of
//! routes, which `GET /v1` lists. docs/control.md describes each; a test holds that page against the table.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use uzram::device::{Attribute, Device, Reading};
use uzram::{Error, ErrorKind};

use super::http::{Body, Ending, Request, Response, refusal};
use super::json::{
    About, AttributeJson, ClientsJson, DeviceJson, DevicesJson, SurvivalJson, attributes, value_json,
};
use crate::loop_device::LoopAttachment;
use crate::nbd::{Clients, Kicked, Tls, reload_tls};
use crate::own_devices::way_out;
use crate::percent;
use crate::record::AttachedDevice;
use crate::{Export, ExportPolicy, Exports};

/// Returns the NBD URIs of a device, as in `nbd+unix:///zram0?socket=/run/uzram/nbd.sock`:
/// none if it is not exported now.
pub type Uris = Box<dyn Fn(&str) -> Vec<String> + Send + Sync>;

/// Checks whether the last of these devices, which is new, may be added; the error says why not.
pub type Admission = Box<dyn Fn(&[Arc<Device>]) -> uzram::Result<()> + Send + Sync>;

/// What else of a daemon hears of control clients' requests: the process that holds what outlives this one.
pub trait Registrar: Send + Sync {
    /// Called for a device that a client adds, before it has contents. Errors: why it cannot be added.
    fn added(&self, device: &Arc<Device>, policy: ExportPolicy) -> uzram::Result<()>;

    /// Called when a device was removed.
    fn removed(&self, name: &str);

    /// Called before a client is told that the daemon ends.
    fn will_end(&self, ending: Ending);

    /// Ends the daemon, and leaves everything to the service manager for its next start. Errors:
    /// `Unsupported` if no service manager keeps it.
    fn leave(&self) -> uzram::Result<()>;

    /// Has another program serve: the one at this path, or that of the running one. Errors: why it does not.
    fn upgrade(&self, program: Option<&str>) -> uzram::Result<()>;

    /// Shows the devices as new files, after those before failed. This process ends then, and the next one,
    /// when it is asked, has done that. Errors: why not.
    fn recover(&self) -> uzram::Result<()>;

    /// Describes the daemon's processes.
    fn survival(&self) -> SurvivalJson;
}

/// How long the file of a device that was just detached may take to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Advice for ending the use of a device by NBD clients.
const CLIENTS: &str =
    "disconnect them (`uzram clients`, `uzram kick`), or force it, and what they wrote is lost";
/// Advice for ending the use of its file.
const FILES: &str = "close what has it open, or force it, and its contents are lost";

#[derive(Default, Deserialize)]
struct NewProgram {
    program: Option<String>,
}

/// The devices of a daemon, as seen by control clients.
pub struct Api {
    /// The devices.
    pub exports: Exports,
    /// Their URIs.
    pub uris: Uris,
    /// The daemon.
    pub about: About,
    /// The TLS configuration that clients can reload.
    pub tls: Option<Tls>,
    /// The check for new devices.
    pub admission: Admission,
    /// The daemon's NBD clients.
    pub clients: Clients,
    /// What else hears of requests.
    pub registrar: Option<Arc<dyn Registrar>>,
}

#[derive(Default, Deserialize)]
struct Shutdown {
    force: bool,
}

#[derive(Deserialize)]
struct NewValue {
    value: String,
}

/// A device to create. Its attributes are set by their turn ([`Attribute::turn`]), in alphabetical order
/// within a turn.
#[derive(Deserialize)]
struct NewDevice {
    name: String,
    #[serde(default)]
    attributes: BTreeMap<String, String>,
    /// Whether NBD clients may open it: `true` for always, `false` for never; by default while it is not
    /// attached.
    #[serde(default)]
    export: Option<bool>,
    #[serde(default)]
    read_only: bool,
}

/// A request, as the handler of its route sees it.
pub struct Call<'a> {
    pub request: &'a Request,
    /// The segments of its path that stand for those in braces.
    pub parameters: Vec<&'a str>,
    /// A long operation ends early once this returns false.
    pub is_wanted: &'a dyn Fn() -> bool,
}

impl Call<'_> {
    fn parameter(&self, index: usize) -> &str {
        self.parameters.get(index).copied().unwrap_or_default()
    }

    fn device(&self, api: &Api) -> Result<Arc<Device>, Response> {
        Ok(api.exports.named(self.parameter(0))?)
    }

    fn body<T: DeserializeOwned>(&self, wanted: &str) -> Result<T, Response> {
        serde_json::from_slice(&self.request.body)
            .map_err(|error| refusal(400, &format!("the body is not {wanted}: {error}")))
    }
}

impl Api {
    /// Creates an API over these devices, of the daemon that `about` describes. It has no NBD clients.
    pub fn new(exports: Exports, uris: Uris, about: About) -> Self {
        Api {
            exports,
            uris,
            about,
            tls: None,
            admission: Box::new(|_| Ok(())),
            clients: Clients::default(),
            registrar: None,
        }
    }

    /// Handles one request. A long operation ends early once `is_wanted` returns false.
    pub fn handle(&self, request: &Request, is_wanted: &dyn Fn() -> bool) -> Response {
        let call = Call { request, parameters: Vec::new(), is_wanted };
        match dispatch(self, call) {
            Ok(response) | Err(response) => response,
        }
    }

    fn daemon(&self) -> Response {
        let survival = self.registrar.as_ref().map(|registrar| registrar.survival());
        Response::json(200, &About { survival, ..self.about.clone() })
    }

    fn upgrade(&self, call: &Call<'_>) -> Result<Response, Response> {
        let NewProgram { program } = call.body(r#"{"program": PATH or null}"#)?;
        self.registrar()?.upgrade(program.as_deref())?;
        Ok(Response::empty(202))
    }

    fn leave(&self, _: &Call<'_>) -> Result<Response, Response> {
        self.registrar()?.leave()?;
        Ok(Response::empty(202))
    }

    fn recover(&self) -> Result<Response, Response> {
        self.registrar()?.recover()?;
        let files = self.about.files.as_ref().map(|files| &files.dir);
        Ok(Response::json(200, &json!({ "files": files })))
    }

    fn reload(&self) -> Result<Response, Response> {
        reload_tls(self.tls.as_ref())?;
        Ok(Response::empty(204))
    }

    fn registrar(&self) -> Result<&Arc<dyn Registrar>, Response> {
        // A daemon has one: this is for servers of the API alone.
        let none = || refusal(409, "no process holds this daemon");
        self.registrar.as_ref().ok_or_else(none)
    }

    fn attached(&self) -> Vec<AttachedDevice> {
        self.exports.recorder().map(|recorder| recorder.attached()).unwrap_or_default()
    }

    fn attachments(&self) -> Response {
        Response::json(200, &json!({ "attachments": self.attached() }))
    }

    /// Records that a client has attached a device's file.
    fn record(&self, call: &Call<'_>) -> Result<Response, Response> {
        let attachment: LoopAttachment = call.body(r#"{"number": N, "diskseq": N}"#)?;
        let device = AttachedDevice { name: call.device(self)?.name().to_owned(), attachment };
        let no_files =
            || refusal(409, "this daemon does not show its devices as files, so none can be attached");
        let recorder = self.exports.recorder().ok_or_else(no_files)?;
        recorder.add(device)?;
        Ok(Response::empty(204))
    }

    fn shut_down(&self, call: &Call<'_>) -> Result<Response, Response> {
        let Shutdown { force } = match call.request.body.as_slice() {
            [] => Shutdown::default(),
            _ => call.body(r#"{"force": BOOL}"#)?,
        };
        if !force && let Some(why) = self.in_use() {
            return Err(refusal(409, &why));
        }
        let ending = if force { Ending::Forced } else { Ending::WhenFree };
        self.registrar.iter().for_each(|registrar| registrar.will_end(ending));
        Ok(Response { shutdown: Some(ending), ..Response::empty(202) })
    }

    /// Returns which device is in use and by what, if any is. An attached block device that is not in use
    /// does not count.
    fn in_use(&self) -> Option<String> {
        let device_users = |device: &Arc<Device>| {
            let name = device.name();
            let mut own = self.attached();
            own.retain(|other| other.name == name);
            let block = own.iter().find_map(|own| {
                let by = own.attachment.in_use().ok()??;
                let way_out = way_out(&self.exports.devices(), own.attachment);
                Some(format!("{name} is in use: {} is {by}{way_out}", own.attachment.path().display()))
            });
            let clients = || Some(format!("{}: {CLIENTS}", in_use_by_clients(&self.exports, name)?));
            let files = || {
                let files = self.exports.other_files(name, own.len(), CLOSE_TIMEOUT);
                Some(format!("{}: {FILES}", in_use_text(name, files, "open file")?))
            };
            block.or_else(clients).or_else(files)
        };
        self.exports.devices().iter().find_map(device_users)
    }

    fn list(&self) -> Response {
        let devices = self.exports.devices();
        let devices = devices.iter().map(|device| self.summary(device)).collect();
        Response::json(200, &DevicesJson { devices })
    }

    fn summary(&self, device: &Device) -> DeviceJson {
        let uris = (self.uris)(device.name());
        DeviceJson {
            name: device.name().to_owned(),
            uri: uris.first().cloned(),
            uris,
            file: self.about.files.as_ref().map(|files| files.disk(device.name())),
            stats: device.stats(),
            backing_state: device.backing_state().map(|state| state.to_string()),
            attributes: None,
        }
    }

    fn description(&self, device: &Device) -> DeviceJson {
        DeviceJson { attributes: Some(attributes(device)), ..self.summary(device) }
    }

    fn describe(&self, call: &Call<'_>) -> Result<Response, Response> {
        Ok(Response::json(200, &self.description(&*call.device(self)?)))
    }

    fn add(&self, call: &Call<'_>) -> Result<Response, Response> {
        let new: NewDevice = call.body(
            r#"{"name": TEXT, "attributes": {NAME: TEXT…}, "export": BOOL or null, "read_only": BOOL}"#,
        )?;
        let device = make(&new, self)?;
        tracing::info!(device = new.name, "device added");
        Ok(Response::json(201, &self.description(&device)))
    }

    fn remove_device(&self, name: &str) -> uzram::Result<()> {
        self.exports.remove(name)?;
        self.registrar.iter().for_each(|registrar| registrar.removed(name));
        Ok(())
    }

    fn remove(&self, call: &Call<'_>) -> Result<Response, Response> {
        let name = call.parameter(0);
        self.remove_device(name)?;
        tracing::info!(device = name, "device removed");
        Ok(Response::empty(204))
    }

    /// Lists all NBD clients, or those of one device.
    fn list_clients(&self, export: Option<&str>) -> Response {
        let mut clients = self.clients.list();
        clients.retain(|client| export.is_none() || client.export.as_deref() == export);
        Response::json(200, &ClientsJson { clients })
    }

    fn list_clients_of(&self, call: &Call<'_>) -> Result<Response, Response> {
        Ok(self.list_clients(Some(call.device(self)?.name())))
    }

    fn kick(&self, call: &Call<'_>) -> Result<Response, Response> {
        let id = call.parameter(0);
        let no_number = || refusal(400, "a client is named by its number; GET /v1/clients lists them");
        // `parse` would accept a sign.
        let digits = Some(id).filter(|id| id.bytes().all(|byte| byte.is_ascii_digit()));
        let id = digits.and_then(|id| id.parse().ok()).ok_or_else(no_number)?;
        match self.clients.kick(id) {
            Kicked::Gone => Ok(Response::empty(204)),
            Kicked::Ending => Ok(Response::empty(202)),
            Kicked::Unknown => Err(refusal(404, &format!("there is no client {id}"))),
        }
    }
}

/// Returns the text that NBD clients use a device; `None` if none does.
pub fn in_use_by_clients(exports: &Exports, name: &str) -> Option<String> {
    in_use_text(name, exports.users(name).clients(), "NBD client")
}

fn in_use_text(name: &str, count: usize, by: &str) -> Option<String> {
    let plural = if count == 1 { "" } else { "s" };
    (count > 0).then(|| format!("{name} is in use by {count} {by}{plural}"))
}

/// Creates a device and adds it. It is added before it is initialised, so that no memory is allocated
/// for a name that is taken; clients that find it in between find it uninitialised.
fn make(new: &NewDevice, api: &Api) -> uzram::Result<Arc<Device>> {
    let device = Device::new(&new.name)?;
    let policy = ExportPolicy { export: Export::from(new.export), read_only: new.read_only };
    api.exports.add(Arc::clone(&device), policy)?;
    let registered = api.registrar.as_ref().map_or(Ok(()), |registrar| registrar.added(&device, policy));
    let mut attributes: Vec<_> = new.attributes.iter().collect();
    attributes.sort_by_key(|(name, _)| Attribute::turn(name));
    let set = || {
        attributes.into_iter().try_for_each(|(name, value)| api.exports.set(&device, name, value, &|| true))
    };
    if let Err(error) = registered.and_then(|()| set()).and_then(|()| (api.admission)(&api.exports.devices()))
    {
        // Fails only if another client has removed it already.
        let _ = api.remove_device(&new.name);
        return Err(error);
    }
    Ok(device)
}

fn read_attribute(api: &Api, call: &Call<'_>) -> Result<Response, Response> {
    let (device, name) = (call.device(api)?, call.parameter(1));
    let long = Device::attributes().iter().find(|row| row.name == name && row.is_long());
    if let Some(row) = long {
        let text = device.text(row.name)?;
        return Ok(Response { body: Body::Attribute(row.name, text), ..Response::empty(200) });
    }
    let Reading { text, value } = device.reading(name)?;
    let value = Some(value_json(value));
    Ok(Response::json(200, &AttributeJson { name: name.to_owned(), value, text }))
}

fn write_attribute(api: &Api, call: &Call<'_>) -> Result<Response, Response> {
    let NewValue { value } = call.body(r#"{"value": TEXT}"#)?;
    set_attribute(api, call, call.parameter(1), &value)
}

fn reset(api: &Api, call: &Call<'_>) -> Result<Response, Response> {
    set_attribute(api, call, "reset", "1")
}

fn set_attribute(api: &Api, call: &Call<'_>, attribute: &str, value: &str) -> Result<Response, Response> {
    let device = call.device(api)?;
    api.exports.set(&device, attribute, value, call.is_wanted).map_err(|error| {
        if error.kind() == ErrorKind::Interrupted {
            tracing::info!(device = device.name(), attribute, value, %error, "attribute not set");
        }
        let is_value = error.kind() == ErrorKind::Invalid;
        refused(&error, error.setting().or(is_value.then_some(attribute)))
    })?;
    tracing::info!(device = device.name(), attribute, value, "attribute set");
    Ok(Response::empty(204))
}

impl From<Error> for Response {
    fn from(error: Error) -> Self {
        refused(&error, error.setting())
    }
}

fn refused(error: &Error, setting: Option<&str>) -> Response {
    let status = match error.kind() {
        ErrorKind::Invalid | ErrorKind::OutOfRange => 400,
        ErrorKind::Permission => 403,
        ErrorKind::NotFound => 404,
        ErrorKind::Busy | ErrorKind::Interrupted => 409,
        ErrorKind::Unsupported => 501,
        ErrorKind::NoMemory | ErrorKind::WouldBlock => 503,
        ErrorKind::NoSpace => 507,
        _ => 500,
    };
    Response::error(status, &error.to_string(), error.errno(), setting)
}

type Handler = fn(&Api, &Call<'_>) -> Result<Response, Response>;

#[derive(Serialize)]
pub struct Route {
    pub method: &'static str,
    /// The path; a segment in braces takes any value.
    pub path: &'static str,
    /// What the request does, in a line.
    pub about: &'static str,
    #[serde(skip)]
    handle: Handler,
}

const fn route(method: &'static str, path: &'static str, about: &'static str, handle: Handler) -> Route {
    Route { method, path, about, handle }
}

pub static ROUTES: &[Route] = &[
    route("GET", "/v1", "Lists the routes.", |_, _| Ok(Response::json(200, &json!({ "routes": ROUTES })))),
    route("GET", "/v1/devices", "Lists the devices.", |api, _| Ok(api.list())),
    route("POST", "/v1/devices", "Adds a device.", Api::add),
    route("GET", "/v1/devices/{name}", "Describes a device, with its attributes.", Api::describe),
    route(
        "DELETE",
        "/v1/devices/{name}",
        "Removes a device and its contents; 409 while it is in use.",
        Api::remove,
    ),
    route("GET", "/v1/devices/{name}/attributes/{attribute}", "Reads an attribute.", read_attribute),
    route("PUT", "/v1/devices/{name}/attributes/{attribute}", "Sets an attribute.", write_attribute),
    route("POST", "/v1/devices/{name}/reset", "Frees a device's contents and disk.", reset),
    route(
        "PUT",
        "/v1/devices/{name}/attachment",
        "Records the block device that a device is attached to.",
        Api::record,
    ),
    route("GET", "/v1/devices/{name}/clients", "Lists the NBD clients of a device.", Api::list_clients_of),
    route("GET", "/v1/attachments", "Lists the block devices that devices are attached to.", |api, _| {
        Ok(api.attachments())
    }),
    route("GET", "/v1/clients", "Lists all NBD clients.", |api, _| Ok(api.list_clients(None))),
    route(
        "DELETE",
        "/v1/clients/{id}",
        "Disconnects an NBD client; 202 if it ends only with its request.",
        Api::kick,
    ),
    route("GET", "/v1/daemon", "Describes the daemon and its processes.", |api, _| Ok(api.daemon())),
    route("POST", "/v1/reload", "Reads the TLS files again; 409 without TLS.", |api, _| api.reload()),
    route("POST", "/v1/upgrade", "Has another program serve.", Api::upgrade),
    route("POST", "/v1/recover", "Serves again after the daemon gave up.", |api, _| api.recover()),
    route("POST", "/v1/leave", "Ends the daemon, and leaves everything to the service manager.", Api::leave),
    route(
        "POST",
        "/v1/shutdown",
        "Ends the daemon; 409 while a device is in use, unless forced.",
        Api::shut_down,
    ),
];

fn dispatch(api: &Api, call: Call<'_>) -> Result<Response, Response> {
    let segments = segments(&call.request.path)?;
    let mut methods = Vec::new();
    for route in ROUTES {
        let Some(parameters) = parameters(route.path, &segments) else { continue };
        if route.method == call.request.method {
            return (route.handle)(api, &Call { parameters, ..call });
        }
        methods.push(route.method);
    }
    if methods.is_empty() {
        return Err(refusal(404, "no such path; GET /v1 lists what there is"));
    }
    let methods = methods.join(", ");
    let text = format!("this path takes only {methods}");
    Err(Response { allow: Some(methods), ..refusal(405, &text) })
}

/// Returns the segments that stand for those in braces; `None` if the path is another one.
fn parameters<'a>(path: &str, segments: &'a [String]) -> Option<Vec<&'a str>> {
    let wanted: Vec<_> = path.split('/').skip(1).collect();
    if wanted.len() != segments.len() {
        return None;
    }
    let mut parameters = Vec::new();
    for (wanted, segment) in wanted.into_iter().zip(segments) {
        match wanted.starts_with('{') {
            true => parameters.push(segment.as_str()),
            false if wanted == segment => {}
            false => return None,
        }
    }
    Some(parameters)
}

/// Returns the decoded segments of a path that begins with `/`.
fn segments(path: &str) -> Result<Vec<String>, Response> {
    let path = path.strip_prefix('/').ok_or_else(|| refusal(400, "the path does not begin with /"))?;
    path.split('/')
        .map(|segment| percent::decode(segment).ok_or_else(|| refusal(400, "the path is badly encoded")))
        .collect()
}
