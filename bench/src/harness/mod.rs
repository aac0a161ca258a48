//! The base of every measurement here.
//!
//! * [`rounds`]: variants measured in interleaved rounds; `Experiment`, whose work is calibrated.
//! * [`threads`] starts jobs together; [`usage`] reads a thread's resource usage.
//! * [`corpus`]: pages of this machine's files and programs.
//! * [`stats`]: medians, quantiles, and confidence intervals of ratios of paired measurements.
//! * [`bound`]: bounds of figures.
//! * [`memory`]: whether there is enough of it.
//! * [`process`] runs other programs; [`fio`] runs fio and reads its report.
//! * `steps`: a process whose memory is measured.
//! * [`options`]: what every benchmark is asked for; [`report`]: the figures that it returns, their tables
//!   and JSON.
//! * [`command`]: shared by the programs `uzram-bench` and `uzram-lab`.

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
