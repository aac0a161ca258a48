//! An S3 server on loopback, in a thread of the test and ended with it. Its objects are files.

#![allow(dead_code, clippy::unwrap_used)]

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use hyper_util::rt::TokioIo;
use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s::{S3Result, s3_error};
use tokio::sync::oneshot;

/// The login, and the bucket.
pub const KEY_ID: &str = "KEYID";
pub const SECRET: &str = "se/cret+=";
pub const BUCKET: &str = "cold";

/// What the login may do: no other bucket is made for it, and it may not write to `read-only/`.
struct Access;

impl S3Access for Access {
    fn check<'a, 'b, 'c, 'd>(
        &'a self,
        request: &'b mut S3AccessContext<'c>,
    ) -> Pin<Box<dyn Future<Output = S3Result<()>> + Send + 'd>>
    where
        'a: 'd,
        'b: 'd,
        'c: 'd,
    {
        let answer = match request.s3_path().get_bucket_name() {
            _ if request.credentials().is_none() => Err(s3_error!(AccessDenied)),
            Some(BUCKET) if request.s3_op().name() == "PutObject" => {
                let key = request.s3_path().get_object_key().unwrap_or_default();
                if key.starts_with("read-only/") { Err(s3_error!(AccessDenied)) } else { Ok(()) }
            }
            Some(BUCKET) => Ok(()),
            _ => Err(s3_error!(NoSuchBucket)),
        };
        Box::pin(std::future::ready(answer))
    }
}

/// A server, ended when this is dropped.
pub struct Server {
    pub port: u16,
    root: tempfile::TempDir,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a server that has one bucket, [`BUCKET`].
    pub fn start() -> Server {
        Server::start_at(0, tempfile::tempdir().unwrap())
    }

    fn start_at(port: u16, root: tempfile::TempDir) -> Server {
        std::fs::create_dir_all(root.path().join(BUCKET)).unwrap();
        let mut service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root.path()).unwrap());
        service.set_auth(SimpleAuth::from_single(KEY_ID, SECRET));
        service.set_access(Access);
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
                        tokio::spawn(http.serve_connection(TokioIo::new(socket), service.clone()));
                    }
                }
            }
        };
        let thread = std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(serve);
        });
        Server { port, root, end: Some(end), thread: Some(thread) }
    }

    /// Returns the server's URL.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Returns the files of all objects.
    pub fn objects(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        add_files(&self.root.path().join(BUCKET), &mut files);
        files
    }

    /// Returns the path of an object's file.
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(BUCKET).join(name)
    }

    /// Makes an object.
    pub fn make(&self, name: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "x").unwrap();
    }

    /// Ends the server, as if its machine were away, while `away` runs.
    pub fn without(mut self, away: impl FnOnce()) -> Server {
        let root = std::mem::replace(&mut self.root, tempfile::tempdir().unwrap());
        let port = self.port;
        drop(self);
        away();
        Server::start_at(port, root)
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
