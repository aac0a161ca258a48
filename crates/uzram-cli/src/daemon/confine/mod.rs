//! Privileges that a daemon gives up once it serves, so that code execution in it gains an attacker little.
//!
//! [`hide`] forbids core files, and tracing by its own user: the memory holds swapped-out pages and TLS keys.
//! [`confine`] drops capabilities (`capabilities`), forbids gaining new ones by execve(2), and filters system
//! calls (`calls`).
//!
//! The process that attaches and detaches block devices ([`attendant`](crate::daemon::attendant)) is started
//! before that, and the command of `--exec` by the holder: neither is confined.

mod calls;
mod capabilities;

use std::io;

use rustix::process::DumpableBehavior;
use uzram_serve::control::MeasureJson;

use crate::system::protect::measure;

pub use calls::Needs;

/// Disables core files of this process, and tracing by anyone but root.
pub fn hide() -> MeasureJson {
    // RLIMIT_CORE is not enough: it does not apply to a program that receives core files (core_pattern).
    let refused = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).err();
    measure("kept out of core files", refused.map(|error| error.to_string()))
}

/// Gives up all privileges that serving does not need, and returns the outcome of each measure. Afterwards
/// this process can run no program; a daemon that must run programs gives up nothing.
pub fn confine(needs: &Needs) -> Vec<MeasureJson> {
    if needs.runs_programs {
        return Vec::new();
    }
    let lowered = capabilities::keep(needs.capabilities());
    // Without CAP_SYS_ADMIN, a filter needs no_new_privs.
    let filtered =
        rustix::thread::set_no_new_privs(true).map_err(io::Error::from).and_then(|()| calls::filter(needs));
    vec![
        measure("capabilities given up", lowered.err().map(|error| error.to_string())),
        measure("system calls filtered", filtered.err().map(|error| error.to_string())),
    ]
}
