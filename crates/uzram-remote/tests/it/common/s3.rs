//! An S3 server on loopback, in a thread of the test and ended with it. Its objects are files.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use hyper_util::rt::TokioIo;
use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s::{S3Error, S3ErrorCode, S3Result, s3_error};
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;

/// The login, and the bucket.
pub const KEY_ID: &str = "KEYID";
pub const SECRET: &str = "se/cret+=";
pub const BUCKET: &str = "cold";

const CERTIFICATE: &str = "certificate.pem";

/// What the login may do: no other bucket is made for it, and it may not write to `read-only/`.
#[derive(Clone, Default)]
struct Access(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// The requests and their objects.
    requests: Mutex<Vec<(String, String)>>,
    /// The status and the code with which objects are refused to be read.
    refusal: Mutex<Option<(u16, &'static str)>>,
}

fn refused(status: u16, code: &str) -> S3Error {
    let mut error = S3Error::new(S3ErrorCode::from_bytes(code.as_bytes()).unwrap());
    error.set_status_code(hyper::StatusCode::from_u16(status).unwrap());
    error
}

#[async_trait::async_trait]
impl S3Access for Access {
    async fn check(&self, request: &mut S3AccessContext<'_>) -> S3Result<()> {
        let (name, key) = (request.s3_op().name(), request.s3_path().get_object_key().unwrap_or_default());
        self.0.requests.lock().unwrap().push((name.to_owned(), key.to_owned()));
        match (request.s3_path().get_bucket_name(), *self.0.refusal.lock().unwrap()) {
            _ if request.credentials().is_none() => Err(s3_error!(AccessDenied)),
            (Some(BUCKET), _) if name == "PutObject" && key.starts_with("read-only/") => {
                Err(s3_error!(AccessDenied))
            }
            (Some(BUCKET), Some((status, code))) if name == "GetObject" => Err(refused(status, code)),
            (Some(BUCKET), _) => Ok(()),
            _ => Err(s3_error!(NoSuchBucket)),
        }
    }
}

/// A server, ended when this is dropped.
pub struct Server {
    pub port: u16,
    has_tls: bool,
    access: Access,
    root: tempfile::TempDir,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a server that has one bucket, [`BUCKET`].
    pub fn start() -> Server {
        Server::start_at(0, tempfile::tempdir().unwrap(), None)
    }

    /// The same with TLS. Its certificate is in the file [`Server::certificate`].
    pub fn start_with_tls() -> Server {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let key = rustls::pki_types::PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()).into();
        let ring = rustls::crypto::ring::default_provider().into();
        let config = rustls::ServerConfig::builder_with_provider(ring);
        let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        let config = config.with_single_cert(vec![made.cert.der().clone()], key).unwrap();
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join(CERTIFICATE), made.cert.pem()).unwrap();
        Server::start_at(0, root, Some(TlsAcceptor::from(Arc::new(config))))
    }

    fn start_at(port: u16, root: tempfile::TempDir, tls: Option<TlsAcceptor>) -> Server {
        let has_tls = tls.is_some();
        std::fs::create_dir_all(root.path().join(BUCKET)).unwrap();
        let mut service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root.path()).unwrap());
        service.set_auth(SimpleAuth::from_single(KEY_ID, SECRET));
        let access = Access::default();
        service.set_access(access.clone());
        let service = service.build();
        let listener = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (end, mut ended) = oneshot::channel();
        let serve = async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            loop {
                tokio::select! {
                    _ = &mut ended => return,
                    accepted = listener.accept() => {
                        let Ok((socket, _)) = accepted else { continue };
                        // An answer is sent in several parts.
                        socket.set_nodelay(true).unwrap();
                        let http = hyper::server::conn::http1::Builder::new();
                        let (service, tls) = (service.clone(), tls.clone());
                        tokio::spawn(async move {
                            match tls {
                                Some(tls) => {
                                    let Ok(socket) = tls.accept(socket).await else { return };
                                    let _ = http.serve_connection(TokioIo::new(socket), service).await;
                                }
                                None => _ = http.serve_connection(TokioIo::new(socket), service).await,
                            }
                        });
                    }
                }
            }
        };
        let thread = std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(serve);
        });
        Server { port, has_tls, access, root, end: Some(end), thread: Some(thread) }
    }

    pub fn url(&self) -> String {
        format!("http{}://127.0.0.1:{}", if self.has_tls { "s" } else { "" }, self.port)
    }

    /// Returns the file that says whom to trust, if it has TLS, for the tests of the program.
    #[allow(dead_code)]
    pub fn certificate(&self) -> PathBuf {
        self.root.path().join(CERTIFICATE)
    }

    /// Returns the names of the requests since the last time.
    pub fn requests(&self) -> Vec<String> {
        let requests = std::mem::take(&mut *self.access.0.requests.lock().unwrap());
        requests.into_iter().map(|(name, _)| name).collect()
    }

    /// Returns how often an object whose name ends so was to be read since the last time.
    #[allow(dead_code)]
    pub fn reads_of(&self, end: &str) -> usize {
        let requests = std::mem::take(&mut *self.access.0.requests.lock().unwrap());
        requests.iter().filter(|(name, key)| name == "GetObject" && key.ends_with(end)).count()
    }

    /// From now on reads get this answer; `None` for bytes.
    #[allow(dead_code)]
    pub fn refuse(&self, refusal: Option<(u16, &'static str)>) {
        *self.access.0.refusal.lock().unwrap() = refusal;
    }

    pub fn objects(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        add_files(&self.root.path().join(BUCKET), &mut files);
        files
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(BUCKET).join(name)
    }

    pub fn make(&self, name: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "x").unwrap();
    }

    /// Ends a server without TLS, as if its machine were away, while `away` runs.
    pub fn without(mut self, away: impl FnOnce()) -> Server {
        let root = std::mem::replace(&mut self.root, tempfile::tempdir().unwrap());
        let port = self.port;
        drop(self);
        away();
        Server::start_at(port, root, None)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.end.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Says that a file was written so long ago.
pub fn age(file: &Path, ago: Duration) {
    let file = std::fs::File::options().append(true).open(file).unwrap();
    file.set_modified(SystemTime::now() - ago).unwrap();
}

fn add_files(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        // One may be removed meanwhile.
        let Ok(entry) = entry else { continue };
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => add_files(&entry.path(), files),
            _ => files.push(entry.path()),
        }
    }
}
