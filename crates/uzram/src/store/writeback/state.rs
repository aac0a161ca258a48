//! What keeps pages from leaving memory for the backing device, for those who ask or warn.

use std::fmt;

use crate::backing::Backing;

/// Whether pages can leave memory for the backing device. Prints as a line that says so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BackingState {
    /// They can.
    #[default]
    Ok,
    /// It is full: pages leave again when enough of those on it were overwritten or discarded, without a restart.
    Full,
    /// It is not written to, for this reason.
    Failing(String),
}

impl BackingState {
    /// Returns what a backing knows of itself.
    pub(crate) fn of(backing: &dyn Backing) -> Self {
        let stopped = backing.health().and_then(|health| health.stopped);
        stopped.map_or(BackingState::Ok, BackingState::Failing)
    }

    /// Returns the name of the state.
    pub const fn name(&self) -> &'static str {
        match self {
            BackingState::Ok => "ok",
            BackingState::Full => "full",
            BackingState::Failing(_) => "failing",
        }
    }
}

impl fmt::Display for BackingState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackingState::Ok => f.write_str("ok"),
            BackingState::Full => f.write_str(
                "full: no more pages leave memory until some on it are overwritten or discarded; a larger one has room",
            ),
            BackingState::Failing(why) => write!(f, "not written to: {why}"),
        }
    }
}
