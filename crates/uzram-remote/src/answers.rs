//! What the answers of stores mean for reads and writes: the one table, which `docs/remote.md` shows.
//!
//! A client of a disk gets EIO for a read that fails, and ENOSPC for a write that finds no room, whatever a
//! store calls it.

use std::error::Error as _;
use std::io::ErrorKind as Io;
use std::ops::RangeInclusive;

use redis::{ErrorKind as Redis, RedisError};
use uzram::{Error, ErrorKind};

use crate::error;

/// What an answer, or that there is none, means for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The reason may pass: the request is tried again until its time is over, and then fails with EIO.
    Again,
    /// Nothing more can be stored. What is there can be read.
    Full,
    /// There is no such object: EIO, counted as lost.
    Lost,
    /// Asking again does not help: EIO at once.
    Refused,
}

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    meaning: Meaning,
    /// What whoever opens a store is told.
    error: Error,
}

/// A row of the table: an answer's name, its meaning, the error of whoever opens a store, and what is said of
/// the store.
type Row = (&'static str, Meaning, ErrorKind, &'static str);

use Meaning::{Again, Full, Lost, Refused};

/// What Redis begins an error with: a code, or more.
const REDIS: &[Row] = &[
    ("LOADING", Again, ErrorKind::Busy, "is loading its data. Try again later"),
    ("BUSY", Again, ErrorKind::Busy, "runs a script. Try again later"),
    ("CLUSTERDOWN", Again, ErrorKind::Io, "says that its cluster is down"),
    ("MASTERDOWN", Again, ErrorKind::Io, "has lost its master"),
    ("TRYAGAIN", Again, ErrorKind::Io, "is moving slots"),
    ("MOVED", Again, ErrorKind::Io, "sends requests elsewhere"),
    ("ASK", Again, ErrorKind::Io, "sends requests elsewhere"),
    ("READONLY", Again, ErrorKind::Unsupported, "is a replica. Name its master"),
    ("ERR max number of clients reached", Again, ErrorKind::Busy, "has too many clients"),
    ("NOREPLICAS", Again, ErrorKind::Io, "has too few replicas to be written to"),
    ("MISCONF", Again, ErrorKind::Io, "cannot save its data, and is not written to"),
    ("OOM", Full, ErrorKind::NoSpace, "is full: its maxmemory is reached"),
    ("NOAUTH", Refused, ErrorKind::Permission, "wants a password"),
    ("WRONGPASS", Refused, ErrorKind::Permission, "refuses the user or the password"),
    ("NOPERM", Refused, ErrorKind::Permission, "does not permit the user a command"),
];

/// S3's codes, where they say more than the status.
const S3: &[Row] = &[
    ("SlowDown", Again, ErrorKind::Io, "gets too many requests"),
    ("RequestTimeout", Again, ErrorKind::Io, "waited too long for a request"),
    ("OperationAborted", Again, ErrorKind::Io, "is changing the bucket"),
    ("QuotaExceeded", Full, ErrorKind::NoSpace, "is full"),
    ("XMinioStorageFull", Full, ErrorKind::NoSpace, "is full"),
    ("NoSuchKey", Lost, ErrorKind::NotFound, "has lost an object"),
    ("NoSuchBucket", Refused, ErrorKind::Invalid, "has no such bucket"),
    ("InvalidAccessKeyId", Refused, ErrorKind::Permission, "does not know the access key"),
    ("NotSignedUp", Refused, ErrorKind::Permission, "does not know the access key"),
    ("SignatureDoesNotMatch", Refused, ErrorKind::Permission, "refuses the secret key"),
    ("ExpiredToken", Refused, ErrorKind::Permission, "refuses the session's token: it is over"),
    ("InvalidToken", Refused, ErrorKind::Permission, "refuses the session's token"),
    (
        "RequestTimeTooSkewed",
        Refused,
        ErrorKind::Permission,
        "refuses the login, as this machine's clock is wrong",
    ),
    ("AuthorizationHeaderMalformed", Refused, ErrorKind::Invalid, "is in another region: set AWS_REGION"),
    ("PermanentRedirect", Refused, ErrorKind::Invalid, "is in another region: set AWS_REGION"),
    ("TemporaryRedirect", Refused, ErrorKind::Invalid, "is elsewhere, for now: set AWS_ENDPOINT_URL_S3"),
];

/// The statuses of S3's other answers; the first range counts that has one.
const S3_STATUSES: &[(RangeInclusive<u16>, Meaning, ErrorKind, &str)] = &[
    (404..=404, Lost, ErrorKind::NotFound, "has lost an object"),
    // An object has bytes wherever something is read that was written.
    (416..=416, Lost, ErrorKind::NotFound, "has lost an object"),
    (401..=403, Refused, ErrorKind::Permission, "does not permit it to this login"),
    (408..=408, Again, ErrorKind::Io, "waited too long for a request"),
    (429..=429, Again, ErrorKind::Io, "gets too many requests"),
    (507..=507, Full, ErrorKind::NoSpace, "is full"),
    (500..=599, Again, ErrorKind::Io, "has failed"),
    (300..=399, Refused, ErrorKind::Invalid, "is elsewhere: set AWS_REGION or AWS_ENDPOINT_URL_S3"),
    (0..=u16::MAX, Refused, ErrorKind::Io, "refuses the request"),
];

/// Connections that fail, by a part of what the system or TLS says; the first row counts.
const CONNECTIONS: &[Row] = &[
    (
        // ENOSYS is what a filter of system calls returns.
        "(os error 38)",
        Refused,
        ErrorKind::Unsupported,
        "cannot be reached: this daemon was started without such a backing device, and may make no connections now",
    ),
    (
        "invalid peer certificate",
        Refused,
        ErrorKind::Io,
        "has a certificate that this machine does not trust: set SSL_CERT_FILE",
    ),
];

/// The most characters of a store's own words that are shown.
const MAX_DETAILS: usize = 200;

/// An answer of an S3 server that is not what was asked for.
#[derive(Debug)]
pub(crate) struct Refusal {
    status: u16,
    /// S3's code; empty if there is none.
    code: String,
    message: String,
}

impl Refusal {
    /// Parses an answer. Its body is XML, or something else.
    pub(crate) fn parse(status: u16, body: &str) -> Refusal {
        let of = |name: &str| {
            let (_, rest) = body.split_once(&format!("<{name}>"))?;
            rest.split_once(&format!("</{name}>")).map(|(text, _)| text.to_owned())
        };
        let message = of("Message")
            .unwrap_or_else(|| if body.contains("<Code>") { String::new() } else { body.to_owned() });
        Refusal { status, code: of("Code").unwrap_or_default(), message }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Refusal { status, code, message } = self;
        let words = [code, message].map(String::as_str).into_iter().filter(|text| !text.is_empty());
        write!(f, "status {status}")?;
        words.into_iter().try_for_each(|text| write!(f, " {text}"))
    }
}

impl std::error::Error for Refusal {}

impl Failure {
    /// Makes one.
    pub fn new(meaning: Meaning, error: Error) -> Failure {
        Failure { meaning, error }
    }

    pub(crate) fn lost(store: impl std::fmt::Display) -> Failure {
        Failure::new(Lost, error(ErrorKind::NotFound, format!("{store} has lost an object")))
    }

    pub(crate) fn odd_answer(store: impl std::fmt::Display) -> Failure {
        let what = format!("{store} gave an answer that does not belong to the request");
        Failure::new(Again, error(ErrorKind::Io, what))
    }

    pub(crate) fn silent(store: impl std::fmt::Display) -> Failure {
        Failure::new(Again, error(ErrorKind::Io, format!("{store} does not answer")))
    }

    pub(crate) fn of_redis(store: &str, error: &RedisError) -> Failure {
        let details = error.to_string();
        let code = match error.kind() {
            Redis::AuthenticationFailed => "WRONGPASS",
            _ => error.code().unwrap_or_default(),
        };
        let answer = format!("{code} {}", error.detail().unwrap_or_default());
        let begins =
            |name| answer.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '));
        match REDIS.iter().find(|(name, ..)| begins(name)) {
            Some((_, meaning, kind, what)) => explain(*meaning, *kind, store, what, &details),
            None if !code.is_empty() => {
                explain(Refused, ErrorKind::Io, store, "refuses the request", &details)
            }
            None => {
                let kind = match () {
                    () if error.is_connection_refusal() => Io::ConnectionRefused,
                    () if error.is_timeout() => Io::TimedOut,
                    () if error.is_connection_dropped() => Io::ConnectionReset,
                    () => Io::Other,
                };
                of_connection(store, kind, &details)
            }
        }
    }

    pub(crate) fn of_s3(store: &str, error: &opendal::Error) -> Failure {
        let mut cause: &(dyn std::error::Error + 'static) = error;
        while let Some(next) = cause.source() {
            cause = next;
        }
        let details = if error.source().is_some() { cause.to_string() } else { error.message().to_owned() };
        if let Some(Refusal { status, code, .. }) = cause.downcast_ref() {
            if let Some((_, meaning, kind, what)) = S3.iter().find(|(name, ..)| name == code) {
                return explain(*meaning, *kind, store, what, &details);
            }
            let of_status = S3_STATUSES.iter().find(|(statuses, ..)| statuses.contains(status));
            if let Some((_, meaning, kind, what)) = of_status {
                return explain(*meaning, *kind, store, what, &details);
            }
        }
        let kind = cause.downcast_ref().map_or(Io::Other, std::io::Error::kind);
        match error.is_temporary() {
            true => of_connection(store, kind, &details),
            // A single object of several.
            false => explain(Refused, ErrorKind::Io, store, "refuses the request", &details),
        }
    }

    pub(crate) fn passes(&self) -> bool {
        self.meaning == Again
    }

    pub(crate) fn is_full(&self) -> bool {
        self.meaning == Full
    }

    pub(crate) fn is_unsupported(&self) -> bool {
        self.error.kind() == ErrorKind::Unsupported
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.meaning == Lost
    }

    /// Returns the same for a request that is not to be tried again.
    pub(crate) fn given_up(mut self) -> Failure {
        if self.passes() {
            self.meaning = Refused;
        }
        self
    }

    /// Returns the error of a transfer: no other kinds reach a disk.
    pub(crate) fn into_io(self) -> Error {
        self.error.with_kind(match self.meaning {
            Full => ErrorKind::NoSpace,
            Lost => ErrorKind::NotFound,
            Again | Refused => ErrorKind::Io,
        })
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        failure.error
    }
}

/// What a check of a store found that asks for another setting.
impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let meaning = match error.kind() {
            ErrorKind::NoSpace => Full,
            ErrorKind::NotFound => Lost,
            ErrorKind::Busy => Again,
            _ => Refused,
        };
        Failure::new(meaning, error)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

/// Returns the failure of a connection: by what the system or TLS says, else by the kind of the error.
fn of_connection(store: &str, kind: Io, details: &str) -> Failure {
    if let Some((_, meaning, kind, what)) = CONNECTIONS.iter().find(|(said, ..)| details.contains(said)) {
        return explain(*meaning, *kind, store, what, details);
    }
    let what = match kind {
        Io::ConnectionRefused => "is not there: the connection was refused",
        Io::TimedOut => "does not answer",
        Io::ConnectionReset | Io::ConnectionAborted | Io::BrokenPipe | Io::UnexpectedEof => {
            "closed the connection"
        }
        _ => "cannot be reached",
    };
    explain(Again, ErrorKind::Io, store, what, details)
}

fn explain(meaning: Meaning, kind: ErrorKind, store: &str, what: &str, details: &str) -> Failure {
    // A server chose the text of the details.
    let details: String = details.chars().filter(|c| !c.is_control()).take(MAX_DETAILS).collect();
    Failure::new(meaning, error(kind, format!("{store} {what} ({details})")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn of_redis(answer: &str) -> Failure {
        let error = redis::parse_redis_value(format!("-{answer}\r\n").as_bytes())
            .and_then(redis::Value::extract_error);
        Failure::of_redis("redis://a:1", &error.unwrap_err())
    }

    fn of_s3(status: u16, code: &str) -> Failure {
        let body =
            format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>words</Message></Error>");
        let refusal = Refusal::parse(status, if code.is_empty() { "" } else { &body });
        let error = opendal::Error::new(opendal::ErrorKind::Unexpected, "refused").set_source(refusal);
        Failure::of_s3("s3://cold", &error)
    }

    fn of_system(errno: i32) -> [Failure; 2] {
        let error = || std::io::Error::from_raw_os_error(errno);
        let of_s3 = opendal::Error::new(opendal::ErrorKind::Unexpected, "no answer")
            .set_source(error())
            .set_temporary();
        [Failure::of_redis("a", &error().into()), Failure::of_s3("a", &of_s3)]
    }

    #[test]
    fn a_disk_gets_no_other_errors_than_those_of_the_table() {
        let every = REDIS.iter().map(|(code, meaning, ..)| (of_redis(&format!("{code} words")), meaning));
        let every = every.chain(S3.iter().map(|(code, meaning, ..)| (of_s3(400, code), meaning)));
        for (failure, meaning) in every {
            assert_eq!(failure.meaning, *meaning, "{failure}");
            let errno = failure.clone().into_io().errno();
            let expected = match meaning {
                Full => 28,
                // The store above counts it, and makes it 5.
                Lost => 2,
                Again | Refused => 5,
            };
            assert_eq!(errno, expected, "{failure}");
            assert!(!failure.given_up().passes());
        }
    }

    #[test]
    fn other_answers_mean_what_their_status_says() {
        let statuses: [(_, &[u16]); 4] = [
            (Refused, &[301, 307, 400, 401, 403]),
            (Lost, &[404, 416]),
            (Again, &[408, 429, 500, 503, 520]),
            (Full, &[507]),
        ];
        for (meaning, status) in statuses.iter().flat_map(|(meaning, of)| of.iter().map(|of| (*meaning, *of)))
        {
            for code in ["", "SomethingNew"] {
                let failure = of_s3(status, code);
                assert_eq!(failure.meaning, meaning, "{failure}");
                assert!(failure.to_string().contains(&format!("status {status}")), "{failure}");
            }
        }
        assert_eq!(of_redis("ERR unknown command").meaning, Refused);
        assert_eq!(of_redis("ERR max number of clients reached").meaning, Again);
        assert_eq!(of_redis("ASKED words").meaning, Refused);
        assert_eq!(of_redis("NEWCODE words").meaning, Refused);
        for (errno, meaning, kind, hint) in [
            (111, Again, ErrorKind::Io, "refused"),
            (110, Again, ErrorKind::Io, "does not answer"),
            (104, Again, ErrorKind::Io, "closed the connection"),
            (38, Refused, ErrorKind::Unsupported, "was started without"),
            (113, Again, ErrorKind::Io, "cannot be reached"),
        ] {
            for failure in of_system(errno) {
                let (found, error) = (failure.meaning, Error::from(failure));
                assert!(
                    (found, error.kind()) == (meaning, kind) && error.to_string().contains(hint),
                    "{error}"
                );
            }
        }
        let untrusted = std::io::Error::other("invalid peer certificate: UnknownIssuer");
        assert_eq!(Failure::of_redis("a", &untrusted.into()).meaning, Refused);
    }

    #[test]
    fn words_of_a_server_are_short_and_harmless() {
        let refusal = Refusal::parse(500, &format!("a\n\u{1b}{}", "b".repeat(1000)));
        let error = opendal::Error::new(opendal::ErrorKind::Unexpected, "refused").set_source(refusal);
        let what = Failure::of_s3("s3://cold", &error).to_string();
        assert!(what.len() < 400 && !what.contains(char::is_control), "{what}");
    }

    /// Each row of the table is in the row of the documentation that has its meaning.
    #[test]
    fn the_documentation_has_the_table() {
        let page =
            std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/remote.md")).unwrap();
        let row_of = |meaning| {
            let name = match meaning {
                Again => "| **may pass**",
                Full => "| **full**",
                Lost => "| **lost**",
                Refused => "| **refused**",
            };
            page.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}"))
        };
        for (code, meaning, ..) in REDIS.iter().chain(S3) {
            assert!(row_of(*meaning).contains(&format!("`{code}`")), "{code} means {meaning:?}");
        }
    }
}
