//! What errors of requests mean for a backing.

use std::error::Error as _;
use std::io;

use opendal::ErrorKind as Kind;
use uzram::{Error, ErrorKind};

use crate::{NO_CALL, NO_CONNECTIONS, S3Address, SETTING};

/// The most characters of a store's own words that are shown.
const MAX_DETAILS: usize = 200;

/// What S3's codes of errors mean.
const CODES: &[(&str, ErrorKind, &str)] = &[
    ("NoSuchBucket", ErrorKind::Invalid, "has no such bucket"),
    ("InvalidAccessKeyId", ErrorKind::Permission, "does not know the access key"),
    ("NotSignedUp", ErrorKind::Permission, "does not know the access key"),
    ("SignatureDoesNotMatch", ErrorKind::Permission, "refuses the secret key"),
    ("ExpiredToken", ErrorKind::Permission, "refuses the session's token: it is over"),
    ("InvalidToken", ErrorKind::Permission, "refuses the session's token"),
    ("RequestTimeTooSkewed", ErrorKind::Permission, "refuses the login, as this machine's clock is wrong"),
    ("AuthorizationHeaderMalformed", ErrorKind::Invalid, "is in another region: set AWS_REGION"),
    ("PermanentRedirect", ErrorKind::Invalid, "is in another region: set AWS_REGION"),
    ("TemporaryRedirect", ErrorKind::Invalid, "is elsewhere, for now: set AWS_ENDPOINT_URL_S3"),
    ("QuotaExceeded", ErrorKind::NoSpace, "is full"),
    ("XMinioStorageFull", ErrorKind::NoSpace, "is full"),
    ("SlowDown", ErrorKind::Io, "gets too many requests"),
];

/// Returns the error of a request.
pub(super) fn explain(address: &S3Address, error: &opendal::Error) -> Error {
    let message = error.message();
    let cause = deepest(error);
    let is =
        |kind: io::ErrorKind| cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == kind);
    let of_code = CODES.iter().find(|(code, _, _)| message.contains(&format!("\"{code}\"")));
    let (kind, what) = match error.kind() {
        _ if of_code.is_some() => of_code.map_or((ErrorKind::Io, ""), |(_, kind, what)| (*kind, *what)),
        // An object has bytes wherever something is read that was written.
        Kind::NotFound | Kind::RangeNotSatisfied => (ErrorKind::NotFound, "has lost an object"),
        Kind::PermissionDenied => (ErrorKind::Permission, "does not permit it to this login"),
        Kind::RateLimited => (ErrorKind::Io, "gets too many requests"),
        _ if cause.to_string().contains(NO_CALL) => (ErrorKind::Unsupported, NO_CONNECTIONS),
        _ if is(io::ErrorKind::ConnectionRefused) => {
            (ErrorKind::Io, "is not there: the connection was refused")
        }
        _ if is(io::ErrorKind::TimedOut) => (ErrorKind::Io, "does not answer"),
        _ => (ErrorKind::Io, "failed"),
    };
    // A server chose the text of the details.
    let details = if error.source().is_some() { cause.to_string() } else { message.to_owned() };
    let details: String = details.chars().filter(|c| !c.is_control()).take(MAX_DETAILS).collect();
    Error::new(kind, format!("{address} {what} ({details})")).with_setting(SETTING)
}

/// Returns the error that the others were caused by.
fn deepest(error: &opendal::Error) -> &(dyn std::error::Error + 'static) {
    let mut cause: &(dyn std::error::Error + 'static) = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn errors_say_what_to_do() {
        let address = S3Address::parse("s3://cold/a").unwrap();
        let of = |kind, message: &str| {
            let error = explain(&address, &opendal::Error::new(kind, message));
            (error.kind(), error.to_string())
        };
        let (kind, what) = of(Kind::ConfigInvalid, "S3Error { code: \"NoSuchBucket\", message: \"\" }");
        assert!(kind == ErrorKind::Invalid && what.contains("s3://cold/a has no such bucket"), "{what}");
        assert_eq!(of(Kind::NotFound, "S3Error { code: \"NoSuchKey\" }").0, ErrorKind::NotFound);
        assert_eq!(of(Kind::PermissionDenied, "").0, ErrorKind::Permission);
        let (_, what) = of(Kind::Unexpected, &format!("a\n\u{1b}{}", "b".repeat(1000)));
        assert!(what.len() < 400 && !what.contains(char::is_control), "{what}");
        for (os, kind, hint) in [
            (111, ErrorKind::Io, "refused"),
            (110, ErrorKind::Io, "does not answer"),
            (38, ErrorKind::Unsupported, "was started without"),
            (5, ErrorKind::Io, "failed"),
        ] {
            let cause = io::Error::from_raw_os_error(os);
            let error = opendal::Error::new(Kind::Unexpected, "no answer").set_source(cause);
            let error = explain(&address, &error);
            assert!(error.kind() == kind && error.to_string().contains(hint), "{error}");
        }
    }
}
