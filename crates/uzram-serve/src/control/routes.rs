//! The routes of the control API: one table, by which requests are dispatched, and which `GET /v1` lists.
//! docs/control.md describes each; a test holds that page against the table.

use serde::Serialize;
use serde_json::json;

use super::api::{self, Api, Call};
use super::http::{Response, refusal};
use super::percent;

/// A route.
#[derive(Serialize)]
pub struct Route {
    /// The method.
    pub method: &'static str,
    /// The path; a segment in braces takes any value.
    pub path: &'static str,
    /// What the request does, in a line.
    pub about: &'static str,
    #[serde(skip)]
    handle: fn(&Api, &Call<'_>) -> Result<Response, Response>,
}

const fn route(
    method: &'static str,
    path: &'static str,
    about: &'static str,
    handle: fn(&Api, &Call<'_>) -> Result<Response, Response>,
) -> Route {
    Route { method, path, about, handle }
}

/// The table.
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
    route("GET", "/v1/devices/{name}/attributes/{attribute}", "Reads an attribute.", api::read_attribute),
    route("PUT", "/v1/devices/{name}/attributes/{attribute}", "Sets an attribute.", api::write_attribute),
    route("POST", "/v1/devices/{name}/reset", "Frees a device's contents and disk.", api::reset),
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
    route("POST", "/v1/leave", "Ends the daemon, and leaves everything to the service manager.", |api, _| {
        api.leave()
    }),
    route(
        "POST",
        "/v1/shutdown",
        "Ends the daemon; 409 while a device is in use, unless forced.",
        Api::shut_down,
    ),
];

/// Handles one request by the table.
///
/// # Errors
/// The response to a request that is refused.
pub fn dispatch(api: &Api, call: Call<'_>) -> Result<Response, Response> {
    let segments = segments(&call.request.path)?;
    let mut methods = Vec::new();
    for route in ROUTES {
        let Some(parameters) = parameters(route.path, &segments) else { continue };
        if route.method == call.request.method {
            return (route.handle)(api, &Call { parameters, ..call });
        }
        methods.push(route.method);
    }
    Err(if methods.is_empty() {
        refusal(404, "no such path; GET /v1 lists what there is")
    } else {
        not_allowed(&methods.join(", "))
    })
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

fn not_allowed(methods: &str) -> Response {
    let text = format!("this path takes only {methods}");
    Response { allow: Some(methods.to_owned()), ..refusal(405, &text) }
}
