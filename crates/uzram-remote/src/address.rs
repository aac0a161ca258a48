//! Texts that name a store: `redis://HOST:PORT[,HOST:PORT...][/DATABASE][:SIZE]`, or `rediss://` for TLS.

use uzram::units::parse_size;
use uzram::{ErrorKind, Result};

use crate::error;

/// The port of a server whose text has none.
const DEFAULT_PORT: u16 = 6379;
const MAX_TEXT_BYTES: usize = 4096;
/// The most servers that a text can name; a cluster tells the others.
pub(crate) const MAX_SERVERS: usize = 64;
/// The most bytes of a host's name, as in DNS.
const MAX_HOST_BYTES: usize = 255;

/// A Redis or Valkey server, or some servers of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The servers, at least one. Of single servers, the first one that answers is used.
    pub servers: Vec<Server>,
    /// Whether connections are encrypted.
    pub tls: bool,
    /// The number of the database; a cluster has only 0.
    pub database: u16,
    /// How many bytes to use there; `None` for as many as the device has.
    pub size_bytes: Option<u64>,
}

/// A server's host, without brackets, and its port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// A name, or the text of an IP address.
    pub host: String,
    /// The TCP port.
    pub port: u16,
}

impl Address {
    /// Parses a text. What follows the last colon is a size if a port is before it, or a database:
    /// `redis://cache:6379:2G`, `redis://cache/1:2G`. Errors: `Invalid`, also for a text with a password,
    /// which other users of the machine could read.
    pub fn parse(text: &str) -> Result<Address> {
        let refused = |why: &str| Err(error(ErrorKind::Invalid, format!("no address of a store: {why}")));
        if text.len() > MAX_TEXT_BYTES || text.contains(|c: char| c.is_control() || c.is_whitespace()) {
            return refused("it is too long, or contains a space or a control character");
        }
        let (tls, rest) = match text.split_once("://") {
            Some(("redis", rest)) => (false, rest),
            Some(("rediss", rest)) => (true, rest),
            _ => return refused("it begins neither with redis:// or rediss:// nor with s3://"),
        };
        if rest.contains('@') {
            return refused(
                "it contains '@'. Give the user and the password in a file or in the environment, where other users do \
                 not see them",
            );
        }
        if rest.contains(['?', '#']) {
            return refused("it contains '?' or '#'");
        }
        let (rest, size_bytes) = split_size(rest);
        if size_bytes == Some(0) {
            return refused("its size is 0");
        }
        let (servers, database) = match rest.split_once('/') {
            Some((servers, "")) => (servers, 0),
            Some((servers, number)) => match number.parse() {
                Ok(number) => (servers, number),
                Err(_) => return refused("what follows the '/' is not the number of a database"),
            },
            None => (rest, 0),
        };
        let servers: Vec<_> = servers.split(',').take(MAX_SERVERS + 1).map(Server::parse).collect();
        if servers.len() > MAX_SERVERS {
            return refused("it names too many servers; a cluster tells the others");
        }
        match servers.into_iter().collect::<Option<Vec<_>>>() {
            Some(servers) => Ok(Address { servers, tls, database, size_bytes }),
            None => refused("a server is not HOST:PORT or [IPV6]:PORT"),
        }
    }
}

fn split_size(text: &str) -> (&str, Option<u64>) {
    let sized = text.rsplit_once(':').filter(|(before, _)| {
        let (servers, database) = before.split_once('/').unzip();
        let last = servers.unwrap_or(before).rsplit(',').next().unwrap_or_default();
        let has_port = match last.rsplit_once(']') {
            Some((_, port)) => port.starts_with(':'),
            None => !last.starts_with('[') && last.contains(':'),
        };
        database.is_some() || has_port
    });
    let sized = sized.and_then(|(before, size)| Some((before, parse_size(size).ok()?)));
    sized.map_or((text, None), |(before, size_bytes)| (before, Some(size_bytes)))
}

impl Server {
    pub(crate) fn parse(text: &str) -> Option<Server> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']')?;
                host.parse::<std::net::Ipv6Addr>().ok()?;
                (host, if port.is_empty() { None } else { Some(port.strip_prefix(':')?) })
            }
            None => match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let is_named = host.chars().all(|c| c.is_ascii_alphanumeric() || "-._:".contains(c));
        let port = match port {
            Some(digits) if digits.chars().all(|c| c.is_ascii_digit()) => digits.parse().ok()?,
            Some(_) => return None,
            None => DEFAULT_PORT,
        };
        (!host.is_empty() && host.len() <= MAX_HOST_BYTES && is_named && port > 0)
            .then(|| Server { host: host.to_owned(), port })
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl std::fmt::Display for Address {
    /// Shows the text that parses as this address, without the size.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.tls { "rediss://" } else { "redis://" })?;
        for (at, server) in self.servers.iter().enumerate() {
            write!(f, "{}{server}", if at > 0 { "," } else { "" })?;
        }
        if self.database > 0 { write!(f, "/{}", self.database) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn shown(text: &str) -> Option<(String, Option<u64>)> {
        let address = Address::parse(text).ok()?;
        // What is shown parses as the same.
        assert_eq!(
            Address::parse(&address.to_string()).unwrap(),
            Address { size_bytes: None, ..address.clone() }
        );
        Some((address.to_string(), address.size_bytes))
    }

    #[test]
    fn addresses_have_servers_and_perhaps_a_database_and_a_size() {
        for (text, address, size_bytes) in [
            ("redis://127.0.0.1:7001", "redis://127.0.0.1:7001", None),
            ("redis://127.0.0.1:7001:2G", "redis://127.0.0.1:7001", Some(2 << 30)),
            ("redis://cache", "redis://cache:6379", None),
            ("redis://cache:6379:7001", "redis://cache:6379", Some(7001)),
            ("rediss://a.b-c:1,[::1]:2,d/3:64M", "rediss://a.b-c:1,[::1]:2,d:6379/3", Some(64 << 20)),
            ("redis://[::1]", "redis://[::1]:6379", None),
            ("redis://[::1]:2G", "", None),
            ("redis://[::1]:7:2G", "redis://[::1]:7", Some(2 << 30)),
            ("redis://cache/", "redis://cache:6379", None),
            ("redis://cache/1", "redis://cache:6379/1", None),
            ("redis://user@cache", "", None),
            ("redis://:secret@cache:1", "", None),
            ("redis://cache:1?password=secret", "", None),
            ("redis://cache:0", "", None),
            ("redis://cache:1:0", "", None),
            ("redis://cache:65536", "", None),
            ("redis://cache:+1", "", None),
            ("redis://cache:2G", "", None),
            ("redis://", "", None),
            ("redis://a,,b", "", None),
            ("redis://[1.2.3.4]:1", "", None),
            ("redis://a b", "", None),
            ("redis://a/x", "", None),
            ("http://a", "", None),
        ] {
            let expected = (!address.is_empty()).then(|| (address.to_owned(), size_bytes));
            assert_eq!(shown(text), expected, "{text}");
        }
        assert!(Address::parse(&format!("redis://{}", "a".repeat(5000))).is_err());
        assert!(Address::parse(&format!("redis://{}", vec!["a"; 65].join(","))).is_err());
        let secret = Address::parse("redis://:secret@cache:1").unwrap_err().to_string();
        assert!(!secret.contains("secret") && secret.contains("in a file"), "{secret}");
    }
}
