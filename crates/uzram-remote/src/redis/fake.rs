//! For tests: a server that gives the same answer to each command, perhaps late.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::{Address, Server};

pub(super) struct Fake {
    pub(super) server: Server,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    delay_ms: AtomicU64,
    connections: AtomicU64,
}

impl Fake {
    pub(super) async fn start(answer: &str) -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Server { host: "127.0.0.1".to_owned(), port: listener.local_addr().unwrap().port() };
        let (state, answer) = (Arc::<State>::default(), answer.to_owned());
        let shared = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                shared.connections.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(serve(connection, answer.clone(), Arc::clone(&shared)));
            }
        });
        Fake { server, state }
    }

    pub(super) fn answers_after(&self, delay: Duration) {
        self.state.delay_ms.store(delay.as_millis() as u64, Ordering::Relaxed);
    }

    pub(super) fn connections(&self) -> u64 {
        self.state.connections.load(Ordering::Relaxed)
    }
}

pub(super) fn address_of<'a>(fakes: impl IntoIterator<Item = &'a Fake>) -> Address {
    let servers = fakes.into_iter().map(|fake| fake.server.clone()).collect();
    Address { servers, tls: false, database: 0, size_bytes: None }
}

async fn serve(mut connection: TcpStream, answer: String, state: Arc<State>) -> std::io::Result<()> {
    let (reader, mut writer) = connection.split();
    let mut reader = BufReader::new(reader);
    loop {
        // A command is a list of texts, each with its length before it.
        for _ in 0..read_number(&mut reader).await? {
            let mut text = vec![0; read_number(&mut reader).await? + 2];
            reader.read_exact(&mut text).await?;
        }
        tokio::time::sleep(Duration::from_millis(state.delay_ms.load(Ordering::Relaxed))).await;
        writer.write_all(answer.as_bytes()).await?;
    }
}

async fn read_number(reader: &mut (impl AsyncBufReadExt + Unpin)) -> std::io::Result<usize> {
    let mut line = String::new();
    reader.read_line(&mut line).await?;
    line.get(1..)
        .and_then(|digits| digits.trim().parse().ok())
        .ok_or(std::io::ErrorKind::UnexpectedEof.into())
}
