//! Where and how a daemon serves NBD: options of `uzram up`, and top-level keys of a configuration file with
//! the same names and meaning.

use std::ops::RangeInclusive;
use std::path::PathBuf;

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

fn lacks(name: &str, needed: &str) -> Failure {
    Failure::usage(format!(
        "{name} is given without {needed}: give --{needed}, or {needed} in the file of --config"
    ))
}
