//! Routing and handling of requests: a function from [`Request`] to [`Response`] over the devices.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use uzram::device::{Attribute, BackingState, Device};
use uzram::{Error, ErrorKind, slab};

use super::about::{About, SurvivalJson};
use super::clients::ClientJson;
use super::http::{Body, Ending, Request, Response, refusal};
use super::percent;
use super::slabinfo::CacheJson;
use super::stats::StatsJson;
use crate::loop_device::LoopAttachment;
use crate::nbd::{Clients, Kicked, Tls, reload_tls};
use crate::own_devices::way_out;
use crate::record::AttachedDevice;
use crate::{Export, ExportPolicy, Exports};

/// Returns the NBD URIs of a device, as in `nbd+unix:///zram0?socket=/run/uzram/nbd.sock`:
/// none if it is not exported now.
pub type Uris = Box<dyn Fn(&str) -> Vec<String> + Send + Sync>;

/// Checks whether the last of these devices, which is new, may be added; the error says why not.
pub type Admission = Box<dyn Fn(&[Arc<Device>]) -> uzram::Result<()> + Send + Sync>;

/// What else of a daemon hears of control clients' requests: the process that holds what outlives this one.
pub trait Registrar: Send + Sync {
    /// Called for a device that a client adds, before it has contents.
    ///
    /// # Errors
    /// Why it cannot be added.
    fn added(&self, device: &Arc<Device>, policy: ExportPolicy) -> uzram::Result<()>;

    /// Called when a device was removed.
    fn removed(&self, name: &str);

    /// Called before a client is told that the daemon ends.
    fn will_end(&self, ending: Ending);

    /// Ends the daemon, and leaves everything to the service manager for its next start.
    ///
    /// # Errors
    /// `Unsupported` if no service manager keeps it.
    fn leave(&self) -> uzram::Result<()>;

    /// Has another program serve: the one at this path, or that of the running one.
    ///
    /// # Errors
    /// Why it does not.
    fn upgrade(&self, program: Option<&str>) -> uzram::Result<()>;

    /// Shows the devices as new files, after those before failed. This process ends then, and the next one, when it is
    /// asked, has done that.
    ///
    /// # Errors
    /// Why not.
    fn recover(&self) -> uzram::Result<()>;

    /// Describes the daemon's processes.
    fn survival(&self) -> SurvivalJson;
}

/// A program to serve.
#[derive(Default, Deserialize)]
struct NewProgram {
    program: Option<String>,
}

/// The devices of a daemon, as seen by control clients.
pub struct Api {
    exports: Exports,
    uris: Uris,
    about: About,
    tls: Option<Tls>,
    admission: Admission,
    clients: Clients,
    registrar: Option<Arc<dyn Registrar>>,
}

#[derive(Default, Deserialize)]
struct Shutdown {
    /// End even if devices are in use.
    force: bool,
}

#[derive(Deserialize)]
struct NewValue {
    value: String,
}

/// A device to create. Its attributes are set by their turn ([`Attribute::turn`]), in alphabetical order within a turn.
#[derive(Deserialize)]
struct NewDevice {
    name: String,
    #[serde(default)]
    attributes: BTreeMap<String, String>,
    /// Whether NBD clients may open it: `true` for always, `false` for never; by default while it is not attached.
    #[serde(default)]
    export: Option<bool>,
    /// Whether it is exported read-only.
    #[serde(default)]
    read_only: bool,
}

impl NewDevice {
    fn export_policy(&self) -> ExportPolicy {
        ExportPolicy { export: Export::from(self.export), read_only: self.read_only }
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

    /// Sets the TLS configuration that clients can reload.
    #[must_use]
    pub fn with_tls(mut self, tls: Option<Tls>) -> Self {
        self.tls = tls;
        self
    }

    /// Sets the check for new devices.
    #[must_use]
    pub fn with_admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
        self
    }

    /// Sets the daemon's NBD clients.
    #[must_use]
    pub fn with_clients(self, clients: Clients) -> Self {
        Api { clients, ..self }
    }

    /// Sets what else hears of requests.
    #[must_use]
    pub fn with_registrar(self, registrar: Arc<dyn Registrar>) -> Self {
        Api { registrar: Some(registrar), ..self }
    }

    /// Returns the devices.
    pub const fn exports(&self) -> &Exports {
        &self.exports
    }

    /// Handles one request. A long operation ends early once `is_wanted` returns false.
    pub fn handle(&self, request: &Request, is_wanted: &dyn Fn() -> bool) -> Response {
        match self.route(request, is_wanted) {
            Ok(response) | Err(response) => response,
        }
    }

    fn route(&self, request: &Request, is_wanted: &dyn Fn() -> bool) -> Result<Response, Response> {
        let segments = segments(&request.path)?;
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        let method = request.method.as_str();
        match (segments.as_slice(), method) {
            (["v1", "devices"], "GET") => Ok(self.list()),
            (["v1", "devices"], "POST") => self.add(&request.body),
            (["v1", "devices"], _) => Err(not_allowed("GET, POST")),
            (["v1", "devices", name], "GET") => Ok(self.describe(200, &*self.named(name)?)),
            (["v1", "devices", name], "DELETE") => self.remove(name),
            (["v1", "devices", _], _) => Err(not_allowed("GET, DELETE")),
            (["v1", "devices", name, "attributes", attribute], "GET") => {
                read_attribute(&*self.named(name)?, attribute)
            }
            (["v1", "devices", name, "attributes", attribute], "PUT") => {
                let NewValue { value } = body(&request.body, r#"{"value": TEXT}"#)?;
                self.write_attribute(&*self.named(name)?, attribute, &value, is_wanted)
            }
            (["v1", "devices", _, "attributes", _], _) => Err(not_allowed("GET, PUT")),
            (["v1", "devices", name, "reset"], "POST") => {
                self.write_attribute(&*self.named(name)?, "reset", "1", is_wanted)
            }
            (["v1", "devices", _, "reset"], _) => Err(not_allowed("POST")),
            (["v1", "devices", name, "attachment"], "PUT") => self.record(name, &request.body),
            (["v1", "devices", _, "attachment"], _) => Err(not_allowed("PUT")),
            (["v1", "attachments"], "GET") => {
                Ok(Response::json(200, &json!({ "attachments": self.attached() })))
            }
            (["v1", "attachments"], _) => Err(not_allowed("GET")),
            (["v1", "devices", name, "clients"], "GET") => {
                let device = self.named(name)?;
                Ok(self.list_clients(Some(device.name())))
            }
            (["v1", "devices", _, "clients"], _) => Err(not_allowed("GET")),
            (["v1", "clients"], "GET") => Ok(self.list_clients(None)),
            (["v1", "clients"], _) => Err(not_allowed("GET")),
            (["v1", "clients", id], "DELETE") => self.kick(id),
            (["v1", "clients", _], _) => Err(not_allowed("DELETE")),
            (["v1", "daemon"], "GET") => {
                let survival = self.registrar.as_ref().map(|registrar| registrar.survival());
                Ok(Response::json(200, &json!(About { survival, ..self.about.clone() })))
            }
            (["v1", "daemon"], _) => Err(not_allowed("GET")),
            (["v1", "slabinfo"], "GET") => Ok(slabinfo()),
            (["v1", "slabinfo"], _) => Err(not_allowed("GET")),
            (["v1", "upgrade"], "POST") => {
                let NewProgram { program } = body(&request.body, r#"{"program": PATH or null}"#)?;
                self.registrar()?.upgrade(program.as_deref()).map_err(|error| failure(&error))?;
                Ok(Response::empty(202))
            }
            (["v1", "upgrade"], _) => Err(not_allowed("POST")),
            (["v1", "leave"], "POST") => {
                self.registrar()?.leave().map_err(|error| failure(&error))?;
                Ok(Response::empty(202))
            }
            (["v1", "leave"], _) => Err(not_allowed("POST")),
            (["v1", "recover"], "POST") => {
                self.registrar()?.recover().map_err(|error| failure(&error))?;
                let files = self.about.files.as_ref().map(|files| &files.dir);
                Ok(Response::json(200, &json!({ "files": files })))
            }
            (["v1", "recover"], _) => Err(not_allowed("POST")),
            (["v1", "reload"], "POST") => match reload_tls(self.tls.as_ref()) {
                Ok(()) => Ok(Response::empty(204)),
                Err(error) => Err(failure(&error)),
            },
            (["v1", "reload"], _) => Err(not_allowed("POST")),
            (["v1", "shutdown"], "POST") => self.shut_down(&request.body),
            (["v1", "shutdown"], _) => Err(not_allowed("POST")),
            _ => Err(refusal(404, "no such path; the control API begins at /v1/devices")),
        }
    }

    fn registrar(&self) -> Result<&Arc<dyn Registrar>, Response> {
        let none = || refusal(409, "this daemon has one process, and ends with it (--no-survive)");
        self.registrar.as_ref().ok_or_else(none)
    }

    /// Returns the attached devices.
    fn attached(&self) -> Vec<AttachedDevice> {
        self.exports.recorder().map(|recorder| recorder.attached()).unwrap_or_default()
    }

    /// Records that a client has attached a device's file.
    fn record(&self, name: &str, request: &[u8]) -> Result<Response, Response> {
        let attachment: LoopAttachment = body(request, r#"{"number": N, "diskseq": N}"#)?;
        let device = AttachedDevice { name: self.named(name)?.name().to_owned(), attachment };
        let no_files =
            || refusal(409, "this daemon does not show its devices as files, so none can be attached");
        let recorder = self.exports.recorder().ok_or_else(no_files)?;
        recorder.add(device).map_err(|error| failure(&error))?;
        Ok(Response::empty(204))
    }

    /// Ends the daemon, unless a device is in use.
    fn shut_down(&self, request: &[u8]) -> Result<Response, Response> {
        let Shutdown { force } =
            if request.is_empty() { Shutdown::default() } else { body(request, r#"{"force": BOOL}"#)? };
        if !force && let Some(why) = self.in_use() {
            return Err(refusal(409, &why));
        }
        let ending = if force { Ending::Forced } else { Ending::WhenFree };
        self.registrar.iter().for_each(|registrar| registrar.will_end(ending));
        Ok(Response { shutdown: Some(ending), ..Response::empty(202) })
    }

    /// Returns which device is in use and by what, if any is. An attached block device that is not in use does not
    /// count.
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
            let clients = || {
                let clients = self.exports.users(name).clients();
                (clients > 0).then(|| in_use_text(name, clients, "NBD client", CLIENTS))
            };
            let files = || {
                let files = self.exports.other_files(name, own.len(), CLOSE_TIMEOUT);
                (files > 0).then(|| in_use_text(name, files, "open file", FILES))
            };
            block.or_else(clients).or_else(files)
        };
        self.exports.devices().iter().find_map(device_users)
    }

    fn named(&self, name: &str) -> Result<Arc<Device>, Response> {
        self.exports.named(name).map_err(|error| failure(&error))
    }

    fn list(&self) -> Response {
        let devices = self.exports.devices();
        let devices: Vec<Value> = devices.iter().map(|device| self.summary(device)).collect();
        Response::json(200, &json!({ "devices": devices }))
    }

    fn summary(&self, device: &Device) -> Value {
        let uris = (self.uris)(device.name());
        let stats = StatsJson::from(device.stats());
        let file = self.about.files.as_ref().map(|files| files.disk(device.name()));
        let state = device.backing_state().filter(|state| *state != BackingState::Ok);
        let stopped = state.map(|state| state.to_string());
        json!({
            "name": device.name(), "uri": uris.first(), "uris": uris, "file": file, "stats": stats,
            "backing_stopped": stopped
        })
    }

    fn describe(&self, status: u16, device: &Device) -> Response {
        let attributes: Map<String, Value> = Device::attributes()
            .iter()
            .filter(|attribute| attribute.readable() && !attribute.is_long())
            // An attribute that cannot be read now (before disksize is set, say) is null.
            .map(|attribute| (attribute.name.to_owned(), device.get(attribute.name).ok().into()))
            .collect();
        let mut description = self.summary(device);
        description["attributes"] = attributes.into();
        Response::json(status, &description)
    }

    fn add(&self, request: &[u8]) -> Result<Response, Response> {
        let new: NewDevice = body(
            request,
            r#"{"name": TEXT, "attributes": {NAME: TEXT…}, "export": BOOL or null, "read_only": BOOL}"#,
        )?;
        let device = make(&new, self).map_err(|error| failure(&error))?;
        tracing::info!(device = new.name, "device added");
        Ok(self.describe(201, &device))
    }

    fn write_attribute(
        &self,
        device: &Device,
        attribute: &str,
        value: &str,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Response, Response> {
        let set = || {
            self.exports.check_setting(attribute, value)?;
            device.set_interruptible(attribute, value, is_wanted)
        };
        set().map_err(|error| {
            if error.kind() == ErrorKind::Interrupted {
                tracing::info!(device = device.name(), attribute, value, %error, "attribute not set");
            }
            failure(&error)
        })?;
        tracing::info!(device = device.name(), attribute, value, "attribute set");
        Ok(Response::empty(204))
    }

    fn remove_device(&self, name: &str) -> uzram::Result<()> {
        self.exports.remove(name)?;
        self.registrar.iter().for_each(|registrar| registrar.removed(name));
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<Response, Response> {
        self.remove_device(name).map_err(|error| failure(&error))?;
        tracing::info!(device = name, "device removed");
        Ok(Response::empty(204))
    }
}

/// How long the file of a device that was just detached may take to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Advice for ending the use of a device by NBD clients.
const CLIENTS: &str =
    "disconnect them (`uzram clients`, `uzram kick`), or force it, and what they wrote is lost";
/// Advice for ending the use of its file.
const FILES: &str = "close what has it open, or force it, and its contents are lost";

fn in_use_text(name: &str, count: usize, by: &str, way_out: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{name} is in use by {count} {by}{plural}: {way_out}")
}

impl Api {
    /// Lists all NBD clients, or those of one device.
    fn list_clients(&self, export: Option<&str>) -> Response {
        let mut clients = self.clients.list();
        clients.retain(|client| export.is_none() || client.export.as_deref() == export);
        let clients: Vec<ClientJson> = clients.into_iter().map(ClientJson::from).collect();
        Response::json(200, &json!({ "clients": clients }))
    }

    fn kick(&self, id: &str) -> Result<Response, Response> {
        // `parse` would accept a sign.
        let digits = id.bytes().all(|byte| byte.is_ascii_digit());
        let id: u64 = id
            .parse()
            .ok()
            .filter(|_| digits)
            .ok_or_else(|| refusal(400, "a client is named by its number; GET /v1/clients lists them"))?;
        match self.clients.kick(id) {
            Kicked::Gone => Ok(Response::empty(204)),
            Kicked::Ending => Ok(Response::empty(202)),
            Kicked::Unknown => Err(refusal(404, &format!("there is no client {id}"))),
        }
    }
}

/// Creates a device and adds it. It is added before it is initialised, so that no memory is allocated
/// for a name that is taken; clients that find it in between find it uninitialised.
fn make(new: &NewDevice, api: &Api) -> uzram::Result<Arc<Device>> {
    let device = Device::new(&new.name)?;
    let policy = new.export_policy();
    api.exports.add(Arc::clone(&device), policy)?;
    let registered = api.registrar.as_ref().map_or(Ok(()), |registrar| registrar.added(&device, policy));
    let mut attributes: Vec<_> = new.attributes.iter().collect();
    attributes.sort_by_key(|(name, _)| Attribute::turn(name));
    let set = || {
        attributes.into_iter().try_for_each(|(name, value)| {
            api.exports.check_setting(name, value)?;
            device.set(name, value)
        })
    };
    if let Err(error) = registered.and_then(|()| set()).and_then(|()| (api.admission)(&api.exports.devices()))
    {
        // Fails only if another client has removed it already.
        let _ = api.remove_device(&new.name);
        return Err(error);
    }
    Ok(device)
}

/// Returns the slab caches of this process.
fn slabinfo() -> Response {
    let caches: Vec<CacheJson> = slab::caches().into_iter().map(CacheJson::from).collect();
    Response::json(200, &json!({ "caches": caches }))
}

/// Returns the decoded segments of a path that begins with `/`.
fn segments(path: &str) -> Result<Vec<String>, Response> {
    let path = path.strip_prefix('/').ok_or_else(|| refusal(400, "the path does not begin with /"))?;
    path.split('/')
        .map(|segment| percent::decode(segment).ok_or_else(|| refusal(400, "the path is badly encoded")))
        .collect()
}

fn body<'a, T: Deserialize<'a>>(body: &'a [u8], wanted: &str) -> Result<T, Response> {
    serde_json::from_slice(body).map_err(|error| refusal(400, &format!("the body is not {wanted}: {error}")))
}

fn read_attribute(device: &Device, attribute: &str) -> Result<Response, Response> {
    let row = Device::attributes().iter().find(|row| row.name == attribute && row.is_long());
    if let Some(row) = row {
        let text = device.text(row.name).map_err(|error| failure(&error))?;
        return Ok(Response { body: Body::Attribute(row.name, text), ..Response::empty(200) });
    }
    let value = device.get(attribute).map_err(|error| failure(&error))?;
    Ok(Response::json(200, &json!({ "name": attribute, "value": value })))
}

fn not_allowed(methods: &'static str) -> Response {
    let text = format!("this path takes only {methods}");
    Response { allow: Some(methods), ..refusal(405, &text) }
}

/// Converts an engine error to a response.
fn failure(error: &Error) -> Response {
    let status = match error.kind() {
        ErrorKind::Invalid | ErrorKind::OutOfRange => 400,
        ErrorKind::Permission => 403,
        ErrorKind::NotFound => 404,
        ErrorKind::Busy | ErrorKind::Interrupted => 409,
        ErrorKind::Unsupported => 501,
        ErrorKind::NoMemory | ErrorKind::WouldBlock => 503,
        ErrorKind::NoSpace => 507,
        ErrorKind::Corrupt | ErrorKind::Io | _ => 500,
    };
    Response::error(status, &error.to_string(), error.errno(), error.setting())
}
