//! What errors of the client mean for a backing.

use redis::{ErrorKind as Kind, RedisError, ServerErrorKind};
use uzram::{Error, ErrorKind};

use crate::{Address, NO_CALL, NO_CONNECTIONS, SETTING};

/// Returns the error of an answer that is none to what was asked.
pub(super) fn odd_answer(address: &Address) -> Error {
    let what = format!("{address} gave an answer that does not belong to the request");
    Error::new(ErrorKind::Io, what).with_setting(SETTING)
}

/// Returns the error of a request to a server of `address`.
pub(super) fn explain(address: &Address, error: &RedisError) -> Error {
    let code = error.code().unwrap_or_default();
    let (kind, what) = match error.kind() {
        Kind::AuthenticationFailed => (ErrorKind::Permission, "refuses the user or the password"),
        Kind::Server(ServerErrorKind::NoPerm) => {
            (ErrorKind::Permission, "does not permit the user a command")
        }
        Kind::Server(ServerErrorKind::BusyLoading) => {
            (ErrorKind::Busy, "is loading its data. Try again later")
        }
        Kind::Server(ServerErrorKind::ReadOnly) => (ErrorKind::Unsupported, "is a replica. Name its master"),
        Kind::Server(ServerErrorKind::ClusterDown) => (ErrorKind::Io, "says that its cluster is down"),
        Kind::Server(ServerErrorKind::MasterDown) => (ErrorKind::Io, "has lost its master"),
        _ if code == "NOAUTH" => (ErrorKind::Permission, "wants a password"),
        _ if code == "WRONGPASS" => (ErrorKind::Permission, "refuses the user or the password"),
        _ if code == "OOM" => (ErrorKind::NoSpace, "is full: its maxmemory is reached"),
        _ if error.to_string().contains(NO_CALL) => (ErrorKind::Unsupported, NO_CONNECTIONS),
        _ if error.is_connection_refusal() => (ErrorKind::Io, "is not there: the connection was refused"),
        _ if error.is_timeout() => (ErrorKind::Io, "does not answer"),
        _ if error.is_connection_dropped() => (ErrorKind::Io, "closed the connection"),
        _ => (ErrorKind::Io, "failed"),
    };
    // A server chose the text of the details.
    let details: String = error.to_string().chars().filter(|c| !c.is_control()).take(200).collect();
    Error::new(kind, format!("{address} {what} ({details})")).with_setting(SETTING)
}
