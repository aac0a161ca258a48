//! A server and clients with TLS.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion};
use uzram::device::Device;
use uzram_serve::nbd::proto::{option, reply};
use uzram_serve::nbd::{ServerConfig, Tls, TlsFiles};

use super::pki::Authority;
use super::{Client, TestServer, device};

pub type Encrypted<S> = Client<StreamOwned<ClientConnection, S>>;

/// A server with a Unix socket and a TCP port, and TLS for both.
pub struct Secure {
    pub server: TestServer,
    pub port: SocketAddr,
    pub authority: Authority,
}

impl Secure {
    pub fn new() -> Self {
        Self::with(device("32M"), |_| {})
    }

    pub fn with(device: Arc<Device>, configure: impl FnOnce(&mut ServerConfig)) -> Self {
        let authority = Authority::new("authority");
        let dir = tempfile::tempdir().unwrap();
        authority.write_all(dir.path());
        let tls = Tls::load(&files(dir.path(), false)).unwrap();
        let server = TestServer::with(device, |config| {
            config.listen.push("tcp:127.0.0.1:0".parse().unwrap());
            config.tls = Some(tls);
            configure(config);
        });
        let port = server.tcp_address();
        Secure { server, port, authority }
    }

    /// Returns the second client, which uses the Unix socket without TLS.
    pub fn steady(&self) -> Client {
        self.server.ready(true)
    }

    pub fn tcp(&self) -> Client<TcpStream> {
        let mut client = self.server.tcp();
        client.greet();
        client
    }

    pub fn over(&self, version: &'static SupportedProtocolVersion) -> Encrypted<TcpStream> {
        start_tls(self.tcp(), client_config(&self.authority, None, version))
    }

    pub fn ready(&self) -> Encrypted<TcpStream> {
        let mut client = self.over(&TLS13);
        client.go(true);
        client
    }
}

pub fn files(dir: &Path, client_ca: bool) -> TlsFiles {
    TlsFiles {
        cert: dir.join("server-cert.pem"),
        key: dir.join("server-key.pem"),
        client_ca: client_ca.then(|| dir.join("ca-cert.pem")),
    }
}

pub fn client_config(
    trusted: &Authority,
    identity: Option<(String, String)>,
    version: &'static SupportedProtocolVersion,
) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(trusted.pem().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots);
    match identity {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => {
            let chain = vec![CertificateDer::from_pem_slice(cert.as_bytes()).unwrap()];
            builder
                .with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap())
                .unwrap()
        }
    }
}

/// Starts TLS on a client that has answered the greeting.
pub fn start_tls<S: Read + Write>(mut client: Client<S>, config: ClientConfig) -> Encrypted<S> {
    assert_eq!(client.option(option::STARTTLS, &[]), [(reply::ACK, vec![])]);
    Client::on(encrypt(client.stream, config))
}

/// Speaks TLS over a stream from the next byte on.
pub fn encrypt<S: Read + Write>(stream: S, config: ClientConfig) -> StreamOwned<ClientConnection, S> {
    let name = ServerName::try_from("localhost").unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), stream)
}
