//! Listen addresses as users write them, and the URIs for clients.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use uzram::Error;
use uzram::device::Device;

use crate::percent;

/// A place to listen on: `unix:PATH` or `tcp:ADDRESS:PORT`, an IPv6 address in brackets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// A socket file, to be created.
    Unix(PathBuf),
    /// A TCP port; 0 lets the system choose one.
    Tcp(SocketAddr),
}

/// A place to listen on, and the devices served there: all, or those named, as in
/// `zram0,logs@tcp:127.0.0.1:10809`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// The address.
    pub address: ListenAddress,
    /// The names of devices, which need not exist yet; `None` for all.
    pub devices: Option<Arc<[String]>>,
    /// Owner, group and mode of the socket file.
    pub access: SocketAccess,
}

/// Who may connect to a Unix socket: owner, group and mode of its file. Defaults: the server's user and
/// group, 0600.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// A user ID.
    pub owner: Option<u32>,
    /// A group ID.
    pub group: Option<u32>,
    /// Permissions, up to 0777.
    pub mode: Option<u32>,
}

impl From<ListenAddress> for Listen {
    /// All devices, for the server's user.
    fn from(address: ListenAddress) -> Self {
        Listen { address, devices: None, access: SocketAccess::default() }
    }
}

impl FromStr for Listen {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        // Device names contain neither ':' nor '@', so an `@` before the first colon ends a list of names.
        let kind = text.split(':').next().unwrap_or_default();
        let Some((names, _)) = kind.split_once('@') else {
            return Ok(Listen::from(text.parse::<ListenAddress>()?));
        };
        let names: Arc<[String]> = names.split(',').map(str::to_owned).collect();
        if let Some(error) = names.iter().find_map(|name| Device::check_name(name).err()) {
            return Err(Error::invalid(format!("'{text}': {error}")));
        }
        let address = text.split_once('@').map_or(text, |(_, place)| place).parse()?;
        Ok(Listen { address, devices: Some(names), access: SocketAccess::default() })
    }
}

/// The longest path of a socket file: `sun_path` without its final zero, unix(7).
const MAX_PATH_BYTES: usize = 107;

impl FromStr for ListenAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text.split_once(':') {
            Some(("unix", path)) => parse_path(path).map(ListenAddress::Unix),
            Some(("tcp", place)) => parse_tcp(place).map(ListenAddress::Tcp),
            _ => Err(Error::invalid(format!(
                "'{text}' is not a place to listen: write unix:PATH or tcp:ADDRESS:PORT"
            ))),
        }
    }
}

fn parse_path(path: &str) -> Result<PathBuf, Error> {
    if path.is_empty() {
        return Err(Error::invalid("unix: needs a path, as in unix:/run/zram0.sock"));
    }
    if path.contains('\0') {
        return Err(Error::invalid("the path of a socket cannot contain a zero byte"));
    }
    // A URI needs an absolute path. The only failures are an empty path and no current directory.
    let path = std::path::absolute(path)
        .map_err(|error| Error::invalid(format!("cannot make '{path}' an absolute path: {error}")))?;
    if path.as_os_str().len() > MAX_PATH_BYTES {
        let text = format!("the path '{}' is longer than the 107 bytes Linux allows", path.display());
        return Err(Error::invalid(text));
    }
    Ok(path)
}

fn parse_tcp(place: &str) -> Result<SocketAddr, Error> {
    let wrong = |why: String| Error::invalid(format!("'tcp:{place}': {why}"));
    let (address, port) = place
        .rsplit_once(':')
        .ok_or_else(|| wrong("write tcp:ADDRESS:PORT, as in tcp:127.0.0.1:10809".to_owned()))?;
    // `parse` would accept a sign.
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port: u16 = port
        .parse()
        .ok()
        .filter(|_| digits)
        .ok_or_else(|| wrong(format!("'{port}' is not a port: a number from 0 to 65535")))?;
    let bracketed = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let address = match bracketed {
        Some(v6) => {
            v6.parse().map(IpAddr::V6).map_err(|_| wrong(format!("'{v6}' is not an IPv6 address")))?
        }
        None if address.contains(':') => {
            return Err(wrong(format!("an IPv6 address needs brackets: tcp:[{address}]:{port}")));
        }
        None => address.parse().map(IpAddr::V4).map_err(|_| {
            wrong(format!("'{address}' is not an IP address (names are not looked up: write 127.0.0.1)"))
        })?,
    };
    // ::ffff:127.0.0.1 means 127.0.0.1, and our IPv6 sockets accept no IPv4 connections.
    Ok(SocketAddr::new(address.to_canonical(), port))
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            ListenAddress::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

/// An endpoint of a server: an address, with TLS or without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The devices served there; `None` for all.
    pub devices: Option<Arc<[String]>>,
    /// The address, with the actual port.
    pub address: ListenAddress,
    /// Whether clients use TLS.
    pub tls: bool,
}

impl Endpoint {
    /// Returns whether a device of that name is served there if it is exported.
    pub fn serves(&self, name: &str) -> bool {
        self.devices.as_ref().is_none_or(|devices| devices.iter().any(|device| device == name))
    }

    /// Returns the NBD URI of the export `name` (the NBD project's `doc/uri.md`).
    ///
    /// A wildcard address is replaced by the machine's name: other machines cannot connect to
    /// `0.0.0.0`, and no certificate names it.
    pub fn uri(&self, name: &str) -> String {
        let scheme = if self.tls { "nbds" } else { "nbd" };
        let name = percent::encode_segment(name);
        match &self.address {
            ListenAddress::Unix(path) => {
                let path = percent::encode(path.as_os_str().as_bytes());
                format!("{scheme}+unix:///{name}?socket={path}")
            }
            ListenAddress::Tcp(address) => {
                let own_name = if address.ip().is_unspecified() { machine_name() } else { None };
                match own_name {
                    Some(machine) => format!("{scheme}://{machine}:{}/{name}", address.port()),
                    None => format!("{scheme}://{address}/{name}"),
                }
            }
        }
    }
}

/// Returns the machine's name, if it needs no quoting in a URI.
fn machine_name() -> Option<String> {
    let system = rustix::system::uname();
    let name = system.nodename().to_str().ok()?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-.".contains(&byte);
    (!name.is_empty() && name.bytes().all(plain)).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn parse(text: &str) -> Result<ListenAddress, Error> {
        text.parse()
    }

    fn uri(address: &str, tls: bool) -> String {
        Endpoint { address: parse(address).unwrap(), devices: None, tls }.uri("a b/ü")
    }

    #[test]
    fn places_to_listen() {
        for (text, address) in [
            ("tcp:127.0.0.1:0", "tcp:127.0.0.1:0"),
            ("tcp:0.0.0.0:65535", "tcp:0.0.0.0:65535"),
            ("tcp:[::1]:10809", "tcp:[::1]:10809"),
            ("tcp:[0:0::1]:010809", "tcp:[::1]:10809"),
            ("tcp:[::ffff:127.0.0.1]:1", "tcp:127.0.0.1:1"),
            ("unix:/run/a b:c.sock", "unix:/run/a b:c.sock"),
            ("unix:/a/./b", "unix:/a/b"),
        ] {
            assert_eq!(parse(text).unwrap().to_string(), address);
        }
        let relative = parse("unix:nbd.sock").unwrap();
        assert_eq!(relative, ListenAddress::Unix(std::env::current_dir().unwrap().join("nbd.sock")));
        assert!(parse(&format!("unix:/{}", "x".repeat(106))).is_ok());
    }

    #[test]
    fn a_place_may_name_its_devices() {
        let listen = |text: &str| text.parse::<Listen>();
        for (text, names) in [
            ("tcp:127.0.0.1:1", None),
            ("a@tcp:127.0.0.1:1", Some(&["a"][..])),
            ("a,b-1,c.x@unix:/s@b", Some(&["a", "b-1", "c.x"])),
            ("unix:/run/a@b.sock", None),
        ] {
            let listen = listen(text).unwrap();
            assert_eq!(
                listen.devices.map(|all| all.to_vec()),
                names.map(|all| all.iter().map(|n| (*n).to_owned()).collect())
            );
            let at = if names.is_some() { text.find('@').unwrap() + 1 } else { 0 };
            assert_eq!(listen.address, parse(&text[at..]).unwrap(), "{text}");
        }
        let places =
            ["@tcp:1.2.3.4:1", "a,@tcp:1.2.3.4:1", "a b@tcp:1.2.3.4:1", "a@", "a@b@tcp:1.2.3.4:1", "a@x:1"];
        for text in places {
            let error = listen(text).expect_err(text).to_string();
            assert!(!error.contains('\n') && error.len() > 20, "{text}: {error}");
        }
    }

    #[test]
    fn what_is_no_place_is_refused_in_one_line() {
        let wrong = "tcp tcp: tcp:: : :: tcp:10809 tcp::10809 tcp:1.2.3.4 tcp:1.2.3.4: tcp:1.2.3.4:x
            tcp:1.2.3.4:65536 tcp:1.2.3.4:-1 tcp:1.2.3.4:+1 tcp:1.2.3:1 tcp:1.2.3.4.5:1 tcp:256.0.0.1:1
            tcp:01.2.3.4:1 tcp:localhost:1 tcp:::1:1 tcp:::1 tcp:[::1] tcp:[::1]1 tcp:[::1:1 tcp:::1]:1
            tcp:[]:1 tcp:[1.2.3.4]:1 tcp:[[::1]]:1 tcp:[::1%lo]:1 tcp:[::1]:1:1
            tcp:1.2.3.4:99999999999999999999 tcp:1.2.3.4:\u{661} TCP:1.2.3.4:1 unix unix: udp:1.2.3.4:1
            /run/nbd.sock nbd://1.2.3.4:1 1.2.3.4:1";
        let long = format!("unix:/{}", "x".repeat(107));
        let spaced = ["", "tcp:1.2.3.4: 1", "tcp:1.2.3.4:1 ", " tcp:1.2.3.4:1", "unix:a\0b", &long];
        for text in wrong.split_whitespace().chain(spaced) {
            let error = parse(text).expect_err(text).to_string();
            assert!(!error.contains('\n') && error.len() > 20, "{text}: {error}");
        }
    }

    #[test]
    fn a_uri_survives_odd_names_and_paths() {
        assert_eq!(uri("unix:/run/a b&c", false), "nbd+unix:///a%20b%2F%C3%BC?socket=/run/a%20b%26c");
        assert_eq!(uri("unix:/s", true), "nbds+unix:///a%20b%2F%C3%BC?socket=/s");
        assert_eq!(uri("tcp:127.0.0.1:10809", false), "nbd://127.0.0.1:10809/a%20b%2F%C3%BC");
        assert_eq!(uri("tcp:[::1]:1", true), "nbds://[::1]:1/a%20b%2F%C3%BC");
        // An address that stands for all has the machine's name.
        if let Some(machine) = machine_name() {
            for address in ["tcp:0.0.0.0:5", "tcp:[::]:5"] {
                assert_eq!(uri(address, true), format!("nbds://{machine}:5/a%20b%2F%C3%BC"));
            }
        }
    }
}
