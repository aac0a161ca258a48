//! A store of objects on loopback that answers reads as a test wants it to.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A server; its threads end with the program.
pub struct Server {
    pub port: u16,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// The status and the code with which it refuses to read; `None` if it does not.
    refusal: Mutex<Option<(u16, &'static str)>>,
    /// The paths of what was to be read.
    reads: Mutex<Vec<String>>,
    /// By path.
    objects: Mutex<HashMap<String, Vec<u8>>>,
}

impl Server {
    pub fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, shared) = (listener.local_addr().unwrap().port(), Arc::<Shared>::default());
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let serving = Arc::clone(&accepting);
                std::thread::spawn(move || serving.serve(client));
            }
        });
        Server { port, shared }
    }

    /// From now on reads get this answer; `None` for bytes.
    pub fn refuse(&self, refusal: Option<(u16, &'static str)>) {
        *self.shared.refusal.lock().unwrap() = refusal;
    }

    /// Returns how often a path that ends so was to be read since the last time.
    pub fn reads_of(&self, end: &str) -> usize {
        let reads = std::mem::take(&mut *self.shared.reads.lock().unwrap());
        reads.iter().filter(|path| path.ends_with(end)).count()
    }
}

impl Shared {
    /// Answers until the connection is closed.
    fn serve(&self, mut client: TcpStream) -> Option<()> {
        client.set_nodelay(true).ok()?;
        let mut reader = BufReader::new(client.try_clone().ok()?);
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
            let mut words = line.split(' ').map(str::to_owned);
            let (method, path) = (words.next()?, words.next()?);
            let (mut body_bytes, mut range) = (0, None);
            loop {
                let mut header = String::new();
                reader.read_line(&mut header).ok()?;
                let Some((name, value)) = header.trim().split_once(": ") else { break };
                match name.to_ascii_lowercase().as_str() {
                    "content-length" => body_bytes = value.parse().ok()?,
                    "range" => range = value.strip_prefix("bytes=").map(str::to_owned),
                    _ => {}
                }
            }
            let mut body = vec![0; body_bytes];
            reader.read_exact(&mut body).ok()?;
            let (path, query) = path.split_once('?').unwrap_or((&path, ""));
            let (status, body) = match method.as_str() {
                "PUT" => {
                    self.objects.lock().unwrap().insert(path.to_owned(), body);
                    (200, Vec::new())
                }
                "GET" => self.read(path, range.as_deref()?)?,
                "POST" if query.contains("delete") => (200, b"<DeleteResult></DeleteResult>".to_vec()),
                _ => {
                    self.objects.lock().unwrap().remove(path);
                    (204, Vec::new())
                }
            };
            let head = format!("HTTP/1.1 {status} Words\r\nContent-Length: {}\r\n\r\n", body.len());
            client.write_all(&[head.as_bytes(), &body].concat()).ok()?;
        }
    }

    /// Returns the status and the body of the answer to a read.
    fn read(&self, path: &str, range: &str) -> Option<(u16, Vec<u8>)> {
        self.reads.lock().unwrap().push(path.to_owned());
        let refused =
            |status, code| Some((status, format!("<Error><Code>{code}</Code></Error>").into_bytes()));
        if let Some((status, code)) = *self.refusal.lock().unwrap() {
            return refused(status, code);
        }
        let objects = self.objects.lock().unwrap();
        let Some(object) = objects.get(path) else { return refused(404, "NoSuchKey") };
        let (first, last) = range.split_once('-')?;
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        match object.get(first..object.len().min(last + 1)) {
            Some(bytes) if !bytes.is_empty() => Some((206, bytes.to_vec())),
            _ => refused(416, "InvalidRange"),
        }
    }
}
