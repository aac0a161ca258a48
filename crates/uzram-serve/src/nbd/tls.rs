//! A server's TLS configuration, read from files and checked, at the start and on reload.
//!
//! A user who can change a server's certificate, its key or its client CA can decide who reads and writes its
//! disks. So each file must be a regular file that belongs to the server's user or root and that no other
//! user may write; the key must not be world-readable either. [`read`] checks the open file, never its path,
//! which may change meanwhile.
//!
//! Two choices differ from rustls's defaults. Sessions are not resumed: NBD connections are long, and
//! without resumption the server stores nothing about past clients. And of TLS 1.2, only
//! ChaCha20-Poly1305 is offered: an AES-GCM key of TLS 1.2 is limited to 2^24 records and cannot be
//! changed, so a long transfer would lose its connection; TLS 1.3 updates keys.

use std::fmt;
use std::fs::{Metadata, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoClientAuth, NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, CipherSuite, InconsistentKeys, RootCertStore, ServerConfig};
use uzram::sync::Mutex;
use uzram::{Error, ErrorKind, Result};

/// The longest file accepted: four times a bundle of all public authorities.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The files of a TLS configuration, all in PEM form.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The server's certificate, followed by its chain, if any.
    pub cert: PathBuf,
    /// The private key of that certificate.
    pub key: PathBuf,
    /// The authorities of client certificates. If given, clients need a certificate.
    pub client_ca: Option<PathBuf>,
}

/// A server's TLS configuration: certificate, key and client CA. Clones share it: a reload applies to all of
/// them.
#[derive(Clone)]
pub struct Tls(Arc<Shared>);

struct Shared {
    files: TlsFiles,
    /// The configuration of new sessions.
    config: Mutex<Arc<ServerConfig>>,
    /// Held during a reload, so that the last reload wins.
    reload: Mutex<()>,
}

impl Tls {
    /// Loads and checks the files. Errors: `Io` when a file cannot be read; `Permission` when other users may
    /// write one, or the key is world-readable; `Invalid` when a file is malformed, the key does not match
    /// the certificate, or the certificate is not valid now. The error's setting is the option of the file.
    pub fn load(files: &TlsFiles) -> Result<Tls> {
        let config = Mutex::unordered(Arc::new(server_config(files)?));
        Ok(Tls(Arc::new(Shared { files: files.clone(), config, reload: Mutex::default() })))
    }

    /// Reads the files again. New sessions use them; existing sessions are not affected. Errors: as
    /// [`Tls::load`]; the old configuration then stays in force.
    pub fn reload(&self) -> Result<()> {
        let _one_at_a_time = self.0.reload.lock();
        let config = Arc::new(server_config(&self.0.files)?);
        *self.0.config.lock() = config;
        Ok(())
    }

    /// Returns whether clients need a certificate.
    pub fn asks_clients(&self) -> bool {
        self.0.files.client_ca.is_some()
    }

    pub(super) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.config.lock())
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.files.fmt(f)
    }
}

/// Reloads a server's TLS files, and logs the outcome. Errors: as [`Tls::reload`]; `Busy` when the server has
/// no TLS.
pub fn reload_tls(tls: Option<&Tls>) -> Result<()> {
    let Some(tls) = tls else {
        let what = "nothing to reload: this server speaks no TLS, so it has no certificate";
        let error = Error::new(ErrorKind::Busy, what).with_setting("tls-cert");
        tracing::warn!("{error}");
        return Err(error);
    };
    tls.reload().inspect(|()| tracing::info!("reloaded the TLS files: new connections use them")).inspect_err(
        |error| {
            tracing::error!("cannot reload the TLS files: {error}; the old configuration stays in force");
        },
    )
}

fn server_config(files: &TlsFiles) -> Result<ServerConfig> {
    let provider = Arc::new(provider());
    let chain = certificates(&files.cert, "tls-cert")?;
    check_validity(&chain[0], &provider)
        .map_err(|why| invalid("tls-cert", format!("{} cannot be used: {why}", files.cert.display())))?;
    let key = private_key(&files.key)?;
    let clients: Arc<dyn ClientCertVerifier> = match &files.client_ca {
        Some(path) => client_verifier(path, &provider)?,
        None => Arc::new(NoClientAuth),
    };
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::new(ErrorKind::Unsupported, error.to_string()))?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)
        .map_err(|error| pair_failure(files, &error))?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn provider() -> CryptoProvider {
    let mut provider = default_provider();
    provider.cipher_suites.retain(|suite| {
        use CipherSuite::*;
        let lasting =
            [TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256];
        suite.tls13().is_some() || lasting.contains(&suite.suite())
    });
    provider
}

fn pair_failure(files: &TlsFiles, error: &rustls::Error) -> Error {
    let (cert, key) = (files.cert.display(), files.key.display());
    match error {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            invalid("tls-key", format!("the key {key} does not belong to the certificate {cert}"))
        }
        rustls::Error::InvalidCertificate(why) => {
            invalid("tls-cert", format!("{cert} cannot be used: {why}"))
        }
        other => invalid("tls-key", format!("the key {key} cannot be used: {other}")),
    }
}

fn invalid(setting: &'static str, what: String) -> Error {
    Error::invalid(what).with_setting(setting)
}

/// Write permission for users other than the owner.
const OTHERS_WRITE: u32 = 0o022;
const ALL_READ: u32 = 0o004;

/// Reads a file of at most [`MAX_FILE_BYTES`] that must be safe from other users: its mode must have none of
/// the bits `denied`.
fn read(path: &Path, setting: &'static str, denied: u32) -> Result<Vec<u8>> {
    let shown = path.display();
    let fail =
        |error| Error::new(ErrorKind::Io, format!("cannot read {shown}: {error}")).with_setting(setting);
    // Opening a pipe must not wait for its other end.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(fail)?;
    check_safe(&file.metadata().map_err(fail)?, denied).map_err(|(kind, why)| {
        Error::new(kind, format!("{shown} cannot be used: {why}")).with_setting(setting)
    })?;
    let mut bytes = Vec::new();
    (&file).take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(invalid(setting, format!("{shown} has more than 1 MiB")));
    }
    Ok(bytes)
}

fn check_safe(file: &Metadata, denied: u32) -> std::result::Result<(), (ErrorKind, String)> {
    let (owner, user) = (file.uid(), rustix::process::geteuid().as_raw());
    let mode = file.mode() & 0o7777;
    if !file.is_file() {
        Err((ErrorKind::Invalid, "it is not a regular file".to_owned()))
    } else if owner != user && owner != 0 {
        let why = format!("it belongs to user {owner}, not to user {user} or root: chown it");
        Err((ErrorKind::Permission, why))
    } else if mode & denied & OTHERS_WRITE != 0 {
        let why = format!("users other than its owner may write it (mode {mode:04o}): run chmod go-w on it");
        Err((ErrorKind::Permission, why))
    } else if mode & denied & ALL_READ != 0 {
        let why =
            format!("every user of this machine may read this key (mode {mode:04o}): run chmod o-r on it");
        Err((ErrorKind::Permission, why))
    } else {
        Ok(())
    }
}

/// Reads the certificates in a file: at least one.
fn certificates(path: &Path, setting: &'static str) -> Result<Vec<CertificateDer<'static>>> {
    let bytes = read(path, setting, OTHERS_WRITE)?;
    let invalid = |why: String| invalid(setting, format!("{}: {why}", path.display()));
    let all: Vec<_> = CertificateDer::pem_slice_iter(&bytes)
        .collect::<std::result::Result<_, pem::Error>>()
        .map_err(|error| invalid(not_pem(error)))?;
    if all.is_empty() {
        return Err(invalid("no certificate in PEM form (BEGIN CERTIFICATE) in this file".to_owned()));
    }
    Ok(all)
}

/// Returns why a file is not PEM. The library's own messages show names as lists of bytes.
fn not_pem(error: pem::Error) -> String {
    match error {
        pem::Error::MissingSectionEnd { .. } => "a section of it has no END line".to_owned(),
        pem::Error::IllegalSectionStart { .. } => "a BEGIN line of it is malformed".to_owned(),
        other => other.to_string(),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    let bytes = read(path, "tls-key", OTHERS_WRITE | ALL_READ)?;
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| {
        let why = match error {
            pem::Error::NoItemsFound => {
                "no private key in PEM form without a password (BEGIN PRIVATE KEY) in this file".to_owned()
            }
            other => not_pem(other),
        };
        invalid("tls-key", format!("{}: {why}", path.display()))
    })
}

fn client_verifier(path: &Path, provider: &Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>> {
    let invalid = |why: String| invalid("tls-client-ca", format!("{} cannot be used: {why}", path.display()));
    let mut roots = RootCertStore::empty();
    for authority in certificates(path, "tls-client-ca")? {
        check_validity(&authority, provider).map_err(|why| invalid(why.to_string()))?;
        roots.add(authority).map_err(|error| invalid(error.to_string()))?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .build()
        .map_err(|error| invalid(error.to_string()))?;
    Ok(verifier)
}

/// Checks that a certificate is well-formed and valid now. It is verified as by a client that trusts no
/// authority: everything but the issuer is checked first, so the only remaining error must be an unknown
/// issuer.
fn check_validity(
    certificate: &CertificateDer<'_>,
    provider: &CryptoProvider,
) -> std::result::Result<(), CertificateError> {
    let nobody = RootCertStore::empty();
    let algorithms = provider.signature_verification_algorithms.all;
    let verified = ParsedCertificate::try_from(certificate).and_then(|parsed| {
        verify_server_cert_signed_by_trust_anchor(&parsed, &nobody, &[], UnixTime::now(), algorithms)
    });
    match verified {
        Err(rustls::Error::InvalidCertificate(
            why @ (CertificateError::BadEncoding
            | CertificateError::Expired
            | CertificateError::ExpiredContext { .. }
            | CertificateError::NotValidYet
            | CertificateError::NotValidYetContext { .. }),
        )) => Err(why),
        // Other requirements are for the clients to check.
        _ => Ok(()),
    }
}
