//! Where and how a daemon serves NBD: options of `uzram up`, and top-level keys of a configuration file with
//! the same names and meaning.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use uzram_serve::nbd::{Listen, ListenAddress, ServerConfig, SocketAccess, Tls, TlsFiles};

use crate::failure::{Context, Failure, Result};
use crate::system::accounts::{parse_group, parse_mode, parse_user};

pub const MAX_CONNECTIONS: RangeInclusive<i64> = 1..=65536;

/// Settings of the NBD server from one source: the command line or a file.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct ListenArgs {
    /// Serve at one more place, unix:PATH or tcp:ADDRESS:PORT, besides the socket in the runtime directory;
    /// may be repeated. With NAME,NAME@ before it, the place serves only these devices. Port 0 lets the
    /// system choose. Access from other machines needs TLS and --tls-client-ca. Root's daemon does not remove
    /// a socket in another user's directory when it ends: it has given up the privilege
    #[arg(long, value_name = "PLACE")]
    pub listen: Vec<Listen>,
    /// Owner of the sockets of unix: places, a name or number [default: the daemon's user]
    #[arg(long, value_name = "USER", value_parser = parse_user)]
    pub socket_owner: Option<u32>,
    /// Group of these sockets [default: the daemon's]
    #[arg(long, value_name = "GROUP", value_parser = parse_group)]
    pub socket_group: Option<u32>,
    /// Permissions of these sockets: write permission gives read and write access to the disks served there
    /// [default: 0600]
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    pub socket_mode: Option<u32>,
    /// The server's certificate (PEM, followed by its chain). It turns TLS on, and requires it over TCP
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// The private key of that certificate (PEM); refused if every user can read it
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Accept over TLS only clients with a certificate signed by one of these authorities (PEM)
    #[arg(long, value_name = "FILE")]
    pub tls_client_ca: Option<PathBuf>,
    /// Accept clients on other machines without a client certificate: everyone who can connect can read and
    /// write the disks; TLS then only encrypts
    #[arg(long, num_args = 0, default_missing_value = "true", value_name = "BOOL")]
    pub tls_anyone: Option<bool>,
    /// The most clients served at once; more are refused. A sixteenth is reserved for clients of the socket
    /// in the runtime directory, another is divided among the --listen places [default: 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(MAX_CONNECTIONS))]
    pub max_connections: Option<u32>,
}

impl ListenArgs {
    /// Adds the settings of a configuration file. Places to listen at add up; every other setting may be
    /// given only once.
    pub fn with_file(mut self, file: ListenArgs, path: &Path) -> Result<ListenArgs> {
        self.listen.extend(file.listen);
        Ok(ListenArgs {
            listen: self.listen,
            socket_owner: once("socket-owner", self.socket_owner, file.socket_owner, path)?,
            socket_group: once("socket-group", self.socket_group, file.socket_group, path)?,
            socket_mode: once("socket-mode", self.socket_mode, file.socket_mode, path)?,
            tls_cert: once("tls-cert", self.tls_cert, file.tls_cert, path)?,
            tls_key: once("tls-key", self.tls_key, file.tls_key, path)?,
            tls_client_ca: once("tls-client-ca", self.tls_client_ca, file.tls_client_ca, path)?,
            tls_anyone: once("tls-anyone", self.tls_anyone, file.tls_anyone, path)?,
            max_connections: once("max-connections", self.max_connections, file.max_connections, path)?,
        })
    }

    /// Adds these settings to the server's configuration.
    pub fn config(self, mut config: ServerConfig) -> Result<ServerConfig> {
        let access =
            SocketAccess { owner: self.socket_owner, group: self.socket_group, mode: self.socket_mode };
        let is_unix = |listen: &Listen| matches!(listen.address, ListenAddress::Unix(_));
        if access != SocketAccess::default() && !self.listen.iter().any(is_unix) {
            let why = "socket-owner, socket-group and socket-mode are for the sockets of listen, and there is none: give \
                       listen a unix:PATH";
            return Err(Failure::usage(why));
        }
        config.listen.extend(self.listen.into_iter().map(|listen| Listen { access, ..listen }));
        config.tls_anyone = self.tls_anyone.unwrap_or(false);
        if let Some(most) = self.max_connections {
            config.max_connections = most as usize;
        }
        let files = match (self.tls_cert, self.tls_key) {
            (Some(cert), Some(key)) => TlsFiles { cert, key, client_ca: self.tls_client_ca },
            (Some(_), None) => return Err(lacks("tls-cert", "tls-key")),
            (None, Some(_)) => return Err(lacks("tls-key", "tls-cert")),
            (None, None) if self.tls_client_ca.is_some() => return Err(lacks("tls-client-ca", "tls-cert")),
            (None, None) => return Ok(config),
        };
        config.tls = Some(Tls::load(&files).context(|| "cannot speak TLS")?);
        Ok(config)
    }
}

/// Returns the value of a setting that may come from the command line or the file, but not from both.
fn once<T>(name: &str, option: Option<T>, key: Option<T>, file: &Path) -> Result<Option<T>> {
    let file = file.display();
    match option.is_some() && key.is_some() {
        true => Err(Failure::usage(format!("--{name}: {file} sets {name} already: give it in one of them"))),
        false => Ok(option.or(key)),
    }
}

fn lacks(name: &str, needed: &str) -> Failure {
    Failure::usage(format!(
        "{name} is given without {needed}: give --{needed}, or {needed} in the file of --config"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_and_keys_are_said_once_and_places_add_up() {
        let place = |text: &str| text.parse::<Listen>().unwrap();
        let whole = || ListenArgs {
            listen: vec![place("unix:/a")],
            socket_owner: Some(1),
            socket_group: Some(2),
            socket_mode: Some(0o660),
            tls_cert: Some("c".into()),
            tls_key: Some("k".into()),
            tls_client_ca: Some("a".into()),
            tls_anyone: Some(true),
            max_connections: Some(3),
        };
        let path = Path::new("u.toml");
        let nothing = ListenArgs::default;
        assert_eq!(whole().with_file(nothing(), path).unwrap(), whole());
        assert_eq!(nothing().with_file(whole(), path).unwrap(), whole());
        let listen = || ListenArgs { listen: vec![place("unix:/a")], ..nothing() };
        let places = |args: ListenArgs| args.with_file(listen(), path).unwrap().listen.len();
        assert_eq!((places(nothing()), places(listen())), (1, 2));
        for (name, option) in [
            ("socket-owner", ListenArgs { socket_owner: Some(0), ..nothing() }),
            ("socket-group", ListenArgs { socket_group: Some(2), ..nothing() }),
            ("socket-mode", ListenArgs { socket_mode: Some(0), ..nothing() }),
            ("tls-cert", ListenArgs { tls_cert: Some("d".into()), ..nothing() }),
            ("tls-key", ListenArgs { tls_key: Some("k".into()), ..nothing() }),
            ("tls-client-ca", ListenArgs { tls_client_ca: Some("d".into()), ..nothing() }),
            ("tls-anyone", ListenArgs { tls_anyone: Some(true), ..nothing() }),
            ("max-connections", ListenArgs { max_connections: Some(3), ..nothing() }),
        ] {
            let said = option.with_file(whole(), path).unwrap_err().into_line();
            assert_eq!(said, format!("--{name}: u.toml sets {name} already: give it in one of them"));
        }
    }
}
