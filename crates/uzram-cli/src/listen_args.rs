//! Where and how `uzram up` serves NBD: the options that say so.

use std::path::PathBuf;

use uzram_serve::nbd::{Config, ListenAddress, Tls, TlsFiles};

use crate::failure::{Context, Result};

/// The options of the NBD server.
#[derive(clap::Args)]
pub struct ListenArgs {
    /// Serve at one more place, unix:PATH or tcp:ADDRESS:PORT, besides the socket in the runtime
    /// directory; may be repeated. Port 0 lets the system choose. Other machines need TLS
    #[arg(long, value_name = "PLACE")]
    listen: Vec<ListenAddress>,
    /// The certificate to speak TLS with (PEM, followed by its chain). TLS is then required over TCP
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The private key of that certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Serve over TLS only clients with a certificate that one of these authorities signed (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// The most clients served at once; more are refused. A sixteenth is kept for those who use the socket in the runtime
    /// directory, another is divided among the --listen places
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    max_connections: u32,
}

impl ListenArgs {
    /// What the server is told, beside what `config` says already.
    ///
    /// # Errors
    /// A file of TLS does not hold what it should.
    pub fn config(&self, mut config: Config) -> Result<Config> {
        config.listen.extend_from_slice(&self.listen);
        config.max_connections = self.max_connections as usize;
        if let (Some(cert), Some(key)) = (&self.tls_cert, &self.tls_key) {
            let files =
                TlsFiles { cert: cert.clone(), key: key.clone(), client_ca: self.tls_client_ca.clone() };
            config.tls = Some(Tls::load(&files).context(|| "cannot speak TLS".to_owned())?);
        }
        Ok(config)
    }
}
