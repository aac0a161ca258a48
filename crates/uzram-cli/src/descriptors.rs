//! File descriptors for as many clients as there may be: without one, nobody is let in any more, on no socket.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Lets this process open so many files, if it may not already and the system allows it; says so if it does not.
pub fn allow(wanted: u64) {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= wanted) {
        return;
    }
    let allowed = maximum.map_or(wanted, |maximum| maximum.min(wanted));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(allowed), maximum });
    if raised.is_err() || allowed < wanted {
        let allowed = getrlimit(Resource::Nofile).current.unwrap_or(allowed);
        tracing::warn!(
            "--max-connections may need {wanted} file descriptors, and {allowed} are allowed: clients wait when they \
             are used up, on every socket (ulimit -n, or LimitNOFILE= of systemd)"
        );
    }
}
