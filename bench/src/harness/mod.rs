//! The base of every measurement here.

pub mod bound;
pub mod command;
pub mod corpus;
pub mod fio;
pub mod memory;
pub mod options;
pub mod process;
pub mod report;
pub mod rounds;
pub mod stats;
pub(crate) mod steps;
pub mod threads;
pub mod usage;

pub use corpus::{DEFAULT_CORPUS_PAGES, Source, read_back};
pub use memory::{lack_of_memory, proc_bytes};
pub use options::{Options, SEED, unsupported};
pub use report::{Report, to_json};
pub use rounds::go_on;
pub use threads::{Gate, Span, joined, run_together};
pub use usage::Usage;

/// Returns an error about a file or a device.
pub(crate) fn io_error(path: &std::path::Path, error: impl Into<std::io::Error>) -> uzram::Error {
    let error = error.into();
    let kind = match error.kind() {
        std::io::ErrorKind::PermissionDenied => uzram::ErrorKind::Permission,
        std::io::ErrorKind::NotFound => uzram::ErrorKind::NotFound,
        _ => uzram::ErrorKind::Io,
    };
    uzram::Error::new(kind, format!("{}: {error}", path.display()))
}
