//! Certificates made on the spot, in files named as libnbd and qemu look for them.
#![allow(dead_code, clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

/// A certificate authority.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// When a certificate is valid.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Validity {
    Now,
    Past,
    Future,
}

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    /// A certificate for this machine, and its key.
    pub fn issue(&self, validity: Validity) -> (String, String) {
        let names = ["localhost", "127.0.0.1", "::1"].map(String::from);
        let mut params = CertificateParams::new(names).unwrap();
        match validity {
            Validity::Now => {}
            Validity::Past => params.not_after = rcgen::date_time_ymd(2001, 1, 1),
            Validity::Future => params.not_before = rcgen::date_time_ymd(3001, 1, 1),
        }
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Writes the authority's certificate to `dir`, and certificates and keys for a server and a client.
    pub fn write_all(&self, dir: &Path) {
        write(dir, "ca-cert.pem", &self.pem());
        for who in ["server", "client"] {
            let (cert, key) = self.issue(Validity::Now);
            write(dir, &format!("{who}-cert.pem"), &cert);
            write(dir, &format!("{who}-key.pem"), &key);
        }
    }
}

/// Writes a file that only its owner can read.
pub fn write(dir: &Path, name: &str, text: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}
