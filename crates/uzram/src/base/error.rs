//! The engine's error type: the kind of failure, the errno that a kernel device would return, a
//! message, and the setting to change.
//!
//! Errors on the I/O paths are built from static strings, so that failing allocates nothing.

use std::borrow::Cow;
use std::fmt;

/// The kind of a failure, as far as a caller can act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A value that cannot be accepted (EINVAL).
    Invalid,
    /// An offset or length beyond the end of the device (EINVAL).
    OutOfRange,
    /// A configured limit is reached (ENOSPC).
    NoSpace,
    /// The system gave no memory (ENOMEM).
    NoMemory,
    /// In use, or in the wrong state for this request (EBUSY).
    Busy,
    /// No such device or attribute (ENOENT).
    NotFound,
    /// Not available in this build or on this machine (EOPNOTSUPP).
    Unsupported,
    /// Stored bytes that do not decode to what was written (EIO).
    Corrupt,
    /// A system call failed (EIO).
    Io,
    /// The operation would have to wait, and the caller forbade it (EAGAIN).
    WouldBlock,
    /// Not allowed (EACCES).
    Permission,
    /// The operation was cancelled before it was done (EINTR).
    Interrupted,
}

impl ErrorKind {
    /// Returns the Linux errno that a kernel device would return.
    pub const fn errno(self) -> i32 {
        match self {
            ErrorKind::Invalid | ErrorKind::OutOfRange => 22,
            ErrorKind::NoSpace => 28,
            ErrorKind::NoMemory => 12,
            ErrorKind::Busy => 16,
            ErrorKind::NotFound => 2,
            ErrorKind::Unsupported => 95,
            ErrorKind::Corrupt | ErrorKind::Io => 5,
            ErrorKind::WouldBlock => 11,
            ErrorKind::Permission => 13,
            ErrorKind::Interrupted => 4,
        }
    }
}

/// A failure: its kind, what happened, and, where one helps, the setting to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    context: Cow<'static, str>,
    setting: Option<&'static str>,
}

/// The engine's result type.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Makes an error of `kind`; `context` is a clause that says what happened.
    pub fn new(kind: ErrorKind, context: impl Into<Cow<'static, str>>) -> Self {
        Error { kind, context: context.into(), setting: None }
    }

    /// Makes an error of kind [`ErrorKind::Invalid`].
    pub fn invalid(context: impl Into<Cow<'static, str>>) -> Self {
        Error::new(ErrorKind::Invalid, context)
    }

    /// Returns the same failure as one of another kind.
    #[must_use]
    pub const fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.kind = kind;
        self
    }

    /// Names the setting that would make the request succeed.
    #[must_use]
    pub const fn with_setting(mut self, setting: &'static str) -> Self {
        self.setting = Some(setting);
        self
    }

    /// Returns the kind of the failure.
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the Linux errno that a kernel device would return.
    pub const fn errno(&self) -> i32 {
        self.kind.errno()
    }

    /// Returns the setting to change, if there is one.
    pub const fn setting(&self) -> Option<&'static str> {
        self.setting
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)?;
        match self.setting {
            Some(setting) => write!(f, " (setting: {setting})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_what_happened_and_the_setting() {
        let error = Error::new(ErrorKind::NoSpace, "the device is full").with_setting("mem_limit");
        assert_eq!(error.to_string(), "the device is full (setting: mem_limit)");
        assert_eq!((error.errno(), error.setting()), (28, Some("mem_limit")));
    }
}
