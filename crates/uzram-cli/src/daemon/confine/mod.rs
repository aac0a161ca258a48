//! What a daemon gives up once it serves: who makes it run code of theirs can then do little with it.
//!
//! - [`hide`]: no core file of it, and its user does not trace it. What is swapped out is other programs' memory, and
//!   keys of TLS are nobody else's.
//! - [`confine`]: capabilities but those that are still needed (`capabilities`), new ones by running something
//!   (`no_new_privs`), and system calls but those that serving takes (`calls`).
//!
//! What is started for `--exec` was started before, and has all of that. Block devices are attached and detached by a
//! process that was, too ([`attendant`](crate::daemon::attendant)).

mod calls;
mod capabilities;

use std::io;

use rustix::process::DumpableBehavior;
use uzram_serve::control::MeasureJson;

pub use calls::Needs;

/// Has no core file be written of this process, and only root trace it.
pub fn hide() -> MeasureJson {
    // The limit of core files' size would not do: a program that takes them (core_pattern) is not asked for it.
    let refused = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).err();
    measure("kept out of core files", refused.map(|error| error.to_string()))
}

/// Gives up what serving does not take; says what could not be given up. From here on this process runs no other program,
/// unless it is one of those that need to: then nothing is given up.
pub fn confine(needs: &Needs) -> Vec<MeasureJson> {
    if needs.runs_programs {
        return Vec::new();
    }
    let lowered = capabilities::keep(needs.capabilities());
    // The filter takes it, where CAP_SYS_ADMIN was given up.
    let filtered =
        rustix::thread::set_no_new_privs(true).map_err(io::Error::from).and_then(|()| calls::filter(needs));
    vec![
        measure("capabilities given up", lowered.err().map(|error| error.to_string())),
        measure("system calls filtered", filtered.err().map(|error| error.to_string())),
    ]
}

fn measure(what: &str, refused: Option<String>) -> MeasureJson {
    MeasureJson { what: what.to_owned(), refused }
}
