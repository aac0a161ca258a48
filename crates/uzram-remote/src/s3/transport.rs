//! HTTP/1.1, with or without TLS, on connections that are kept.
//!
//! Follows no redirection, since a request is signed for one host, and uses no proxy.

use std::time::Duration;

use futures_util::StreamExt;
use http::header::CONTENT_LENGTH;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use opendal::{Buffer, HttpBody, HttpTransport};
use rustls::crypto::ring;
use rustls::{ClientConfig, RootCertStore};
use uzram::{ErrorKind, Result};

use crate::answers::Refusal;
use crate::error;

const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// How long a connection is kept that is not used: less than servers keep it.
const KEPT_FOR: Duration = Duration::from_secs(15);

/// The most bytes of an answer: more than a page of a listing takes, which is longer than an object.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// The most bytes that are read of an answer which says why a request was refused.
const MAX_REFUSAL_BYTES: usize = 64 << 10;

pub(super) struct Transport(Client<HttpsConnector<HttpConnector>, Full<Buffer>>);

impl Transport {
    /// Returns one without connections. With `tls`, the system's certificates are read: they say whom to
    /// trust. Errors: `NotFound` if the system has none.
    pub(super) fn new(tls: bool) -> Result<Transport> {
        let mut roots = RootCertStore::empty();
        if tls {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                let what = "the system has no certificates, which say what servers to trust";
                return Err(error(ErrorKind::NotFound, what));
            }
        }
        let config = ClientConfig::builder_with_provider(ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .map_err(|why| error(ErrorKind::Io, why.to_string()))?;
        let config = config.with_root_certificates(roots).with_no_client_auth();
        let mut tcp = HttpConnector::new();
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_WITHIN));
        tcp.enforce_http(false);
        let connector = HttpsConnectorBuilder::new().with_tls_config(config).https_or_http().enable_http1();
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(KEPT_FOR)
            .pool_timer(TokioTimer::new())
            .build(connector.wrap_connector(tcp));
        Ok(Transport(client))
    }
}

impl HttpTransport for Transport {
    /// An answer that is not what was asked for is an error here, so that nobody else decides what it means.
    async fn fetch(&self, request: Request<Buffer>) -> opendal::Result<Response<HttpBody>> {
        let (is_head, is_delete) =
            [Method::HEAD, Method::DELETE].map(|method| request.method() == method).into();
        let answer = self.0.request(request.map(Full::new)).await.map_err(failed)?;
        // What is to be removed may be gone.
        let is_gone = is_delete && answer.status() == StatusCode::NOT_FOUND;
        if !answer.status().is_success() && !is_gone {
            let status = answer.status().as_u16();
            // Whatever can be read of it.
            let body = Limited::new(answer.into_body(), MAX_REFUSAL_BYTES).collect().await;
            let body = body.map(|body| body.to_bytes()).unwrap_or_default();
            let refusal = Refusal::parse(status, &String::from_utf8_lossy(&body));
            return Err(opendal::Error::new(opendal::ErrorKind::Unexpected, "refused").set_source(refusal));
        }
        let length = answer.headers().get(CONTENT_LENGTH).filter(|_| !is_head);
        let length = length.and_then(|text| text.to_str().ok()?.parse().ok());
        let mut received = 0;
        Ok(answer.map(|body| {
            let data = body.into_data_stream().map(move |data| {
                let data = data.map_err(failed)?;
                received += data.len();
                match received > MAX_ANSWER_BYTES {
                    true => Err(opendal::Error::new(opendal::ErrorKind::Unexpected, "too long an answer")),
                    false => Ok(Buffer::from(data)),
                }
            });
            HttpBody::new(data, length)
        }))
    }
}

/// Returns the error of a request that got no answer, or only a part of one.
fn failed(error: impl Into<anyhow::Error>) -> opendal::Error {
    opendal::Error::new(opendal::ErrorKind::Unexpected, "no answer").set_source(error).set_temporary()
}
