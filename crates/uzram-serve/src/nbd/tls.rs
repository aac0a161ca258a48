//! What a server needs to speak TLS, loaded from files and checked.
//!
//! Two choices differ from rustls's defaults. Sessions are not resumed: NBD clients stay for long, and
//! a server that keeps nothing about clients who left needs no bound on it. And of TLS 1.2, only
//! ChaCha20-Poly1305 is offered: an AES-GCM key of TLS 1.2 is good for 2^24 records and cannot be
//! changed, so a disk that is read for long enough would lose its connection; TLS 1.3 changes keys.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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

/// A server's side of TLS: certificate, key, and whom it lets in.
#[derive(Clone, Debug)]
pub struct Tls(pub(super) Arc<ServerConfig>);

impl Tls {
    /// Loads and checks the files. Warns when others can read the key.
    ///
    /// # Errors
    /// `Io` when a file cannot be read; `Invalid` when one does not hold what it should, the key is
    /// another certificate's, or the certificate is not valid now. The setting is the name of the
    /// option that gave the file.
    pub fn load(files: &TlsFiles) -> Result<Tls> {
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
        Ok(Tls(Arc::new(config)))
    }
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

/// The contents of a file that must not be longer than [`MAX_FILE_BYTES`].
fn read(path: &Path, setting: &'static str) -> Result<(File, Vec<u8>)> {
    let shown = path.display();
    let fail =
        |error| Error::new(ErrorKind::Io, format!("cannot read {shown}: {error}")).with_setting(setting);
    let file = File::open(path).map_err(fail)?;
    let mut bytes = Vec::new();
    (&file).take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(Error::invalid(format!("{shown} has more than 1 MiB")).with_setting(setting));
    }
    Ok((file, bytes))
}

/// The certificates in a file: at least one.
fn certificates(path: &Path, setting: &'static str) -> Result<Vec<CertificateDer<'static>>> {
    let (_, bytes) = read(path, setting)?;
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
    let (file, bytes) = read(path, "tls-key")?;
    if file.metadata().is_ok_and(|metadata| metadata.mode() & 0o004 != 0) {
        tracing::warn!(path = %path.display(), "every user of this machine can read the TLS key: chmod o-r it");
    }
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
