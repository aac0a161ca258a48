//! What a server needs to speak TLS, read from files and checked, at the start and when it is told to read them again.
//!
//! Who may change a server's certificate, its key or the authorities of its clients decides who reads and changes its
//! disks. So each file must be a regular file that belongs to the server's user or root and that nobody else may write;
//! nor may every user read the key. [`read`] judges the file that is open, never its path, which may lead elsewhere later.
//!
//! Two choices differ from rustls's defaults. Sessions are not resumed: NBD clients stay for long, and
//! a server that keeps nothing about clients who left needs no bound on it. And of TLS 1.2, only
//! ChaCha20-Poly1305 is offered: an AES-GCM key of TLS 1.2 is good for 2^24 records and cannot be
//! changed, so a disk that is read for long enough would lose its connection; TLS 1.3 changes keys.

use std::fs::{Metadata, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use rustix::fs::OFlags;
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoClientAuth, NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, CipherSuite, InconsistentKeys, RootCertStore, ServerConfig};
use uzram::{Error, ErrorKind, Result};

/// The longest file that is read: a bundle of all public authorities has a quarter of it.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The files that TLS is configured with, PEM all of them.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The server's certificate, followed by those that lead to its authority, if any.
    pub cert: PathBuf,
    /// The private key of that certificate.
    pub key: PathBuf,
    /// The authorities that may have signed a client's certificate. Given them, clients need one.
    pub client_ca: Option<PathBuf>,
}

/// A server's side of TLS: certificate, key, and whom it lets in. Clones are the same: one that reads its files again
/// does so for all.
#[derive(Clone, Debug)]
pub struct Tls(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    files: TlsFiles,
    /// What new sessions begin with.
    config: RwLock<Arc<ServerConfig>>,
    /// Held by whoever reads the files again, so that what is read last stays.
    reload: Mutex<()>,
}

impl Tls {
    /// Loads and checks the files.
    ///
    /// # Errors
    /// `Io` when a file cannot be read; `Permission` when others may change one, or all may read the key; `Invalid` when
    /// one does not hold what it should, the key is another certificate's, or the certificate is not valid now. The
    /// setting is the name of the option that gave the file.
    pub fn load(files: &TlsFiles) -> Result<Tls> {
        let config = RwLock::new(Arc::new(server_config(files)?));
        Ok(Tls(Arc::new(Shared { files: files.clone(), config, reload: Mutex::default() })))
    }

    /// Reads the files again. Sessions from now on begin with what they hold; those that there are go on as they began.
    ///
    /// # Errors
    /// As [`Tls::load`]; what was in force then stays so.
    pub fn reload(&self) -> Result<()> {
        // It guards nothing that a panic could have left half done; neither does the other.
        let _one_at_a_time = self.0.reload.lock().unwrap_or_else(PoisonError::into_inner);
        let new = Arc::new(server_config(&self.0.files)?);
        *self.0.config.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// Whether clients need a certificate.
    pub fn asks_clients(&self) -> bool {
        self.0.files.client_ca.is_some()
    }

    /// What a new session begins with.
    pub(super) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.config.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Reads the files of a server's TLS again, if it speaks TLS, and logs what came of it.
///
/// # Errors
/// As [`Tls::reload`]; `Busy` when it speaks no TLS.
pub fn reload_tls(tls: Option<&Tls>) -> Result<()> {
    let reloaded = match tls {
        Some(tls) => tls.reload(),
        None => {
            let what = "nothing to read again: this server speaks no TLS, so it has no certificate";
            Err(Error::new(ErrorKind::Busy, what).with_setting("tls-cert"))
        }
    };
    match (&reloaded, tls) {
        (Ok(()), _) => tracing::info!("the files of TLS were read again: new clients get what they hold now"),
        (Err(error), Some(_)) => {
            tracing::error!(
                "cannot read the files of TLS again: {error}; what they held before stays in force"
            );
        }
        (Err(error), None) => tracing::warn!("{error}"),
    }
    reloaded
}

fn server_config(files: &TlsFiles) -> Result<ServerConfig> {
    let provider = Arc::new(provider());
    let chain = certificates(&files.cert, "tls-cert")?;
    check_validity(&chain[0], &provider).map_err(|why| {
        let text = format!("{} cannot be used: {why}", files.cert.display());
        Error::invalid(text).with_setting("tls-cert")
    })?;
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

/// What is wrong with a certificate and key that were read well.
fn pair_failure(files: &TlsFiles, error: &rustls::Error) -> Error {
    let (cert, key) = (files.cert.display(), files.key.display());
    match error {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            let text = format!("the key {key} does not belong to the certificate {cert}");
            Error::invalid(text).with_setting("tls-key")
        }
        rustls::Error::InvalidCertificate(why) => {
            Error::invalid(format!("{cert} cannot be used: {why}")).with_setting("tls-cert")
        }
        other => Error::invalid(format!("the key {key} cannot be used: {other}")).with_setting("tls-key"),
    }
}

/// Permission bits of those who are neither the owner nor root.
const OTHERS_WRITE: u32 = 0o022;
const ALL_READ: u32 = 0o004;

/// The contents of a file that must not be longer than [`MAX_FILE_BYTES`], and must be safe from others: with the bits
/// `denied` in its mode it is refused.
fn read(path: &Path, setting: &'static str, denied: u32) -> Result<Vec<u8>> {
    let shown = path.display();
    let fail =
        |error| Error::new(ErrorKind::Io, format!("cannot read {shown}: {error}")).with_setting(setting);
    // A pipe would have us wait for its other end.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(fail)?;
    check_safe(&file.metadata().map_err(fail)?, denied).map_err(|(kind, why)| {
        Error::new(kind, format!("{shown} cannot be used: {why}")).with_setting(setting)
    })?;
    let mut bytes = Vec::new();
    (&file).take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(Error::invalid(format!("{shown} has more than 1 MiB")).with_setting(setting));
    }
    Ok(bytes)
}

/// What is wrong with an open file, if others may change it, or read it where they must not.
fn check_safe(file: &Metadata, denied: u32) -> std::result::Result<(), (ErrorKind, String)> {
    let (owner, user) = (file.uid(), rustix::process::geteuid().as_raw());
    let mode = file.mode() & 0o7777;
    if !file.is_file() {
        Err((ErrorKind::Invalid, "it is not a regular file".to_owned()))
    } else if owner != user && owner != 0 {
        let why = format!("it belongs to user {owner}, not to user {user} or root: chown it");
        Err((ErrorKind::Permission, why))
    } else if mode & denied & OTHERS_WRITE != 0 {
        let why = format!("others than its owner may write it (mode {mode:04o}): run chmod go-w on it");
        Err((ErrorKind::Permission, why))
    } else if mode & denied & ALL_READ != 0 {
        let why =
            format!("every user of this machine may read this key (mode {mode:04o}): run chmod o-r on it");
        Err((ErrorKind::Permission, why))
    } else {
        Ok(())
    }
}

/// The certificates in a file: at least one.
fn certificates(path: &Path, setting: &'static str) -> Result<Vec<CertificateDer<'static>>> {
    let bytes = read(path, setting, OTHERS_WRITE)?;
    let invalid = |why: String| Error::invalid(format!("{}: {why}", path.display())).with_setting(setting);
    let all: Vec<_> = CertificateDer::pem_slice_iter(&bytes)
        .collect::<std::result::Result<_, pem::Error>>()
        .map_err(|error| invalid(not_pem(error)))?;
    if all.is_empty() {
        return Err(invalid("no certificate in PEM form (BEGIN CERTIFICATE) in this file".to_owned()));
    }
    Ok(all)
}

/// What is wrong with a file's form. The library's own words show names as lists of bytes.
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
        Error::invalid(format!("{}: {why}", path.display())).with_setting("tls-key")
    })
}

fn client_verifier(path: &Path, provider: &Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>> {
    let invalid = |why: String| {
        Error::invalid(format!("{} cannot be used: {why}", path.display())).with_setting("tls-client-ca")
    };
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

/// Checks that a certificate is one and that its time has come and not passed.
///
/// It is verified as a client would that trusts nobody: what does not concern its issuer is checked
/// first, so the one question left in the end must be who that is.
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
        // Whether it suits its purpose in other ways is for the clients to say.
        _ => Ok(()),
    }
}
