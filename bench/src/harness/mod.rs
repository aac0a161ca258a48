//! The base of every measurement here.
//!
//! * [`rounds`]: variants measured in interleaved rounds; `Experiment`, whose work is calibrated.
//! * [`threads`] starts jobs together; [`usage`] reads a thread's resource usage.
//! * [`corpus`]: pages of this machine's files and programs.
//! * [`stats`]: medians, quantiles, and confidence intervals of ratios of paired measurements.
//! * [`bound`]: bounds of figures.
//! * [`memory`]: whether there is enough of it.
//! * [`process`] runs other programs; [`fio`] runs fio and reads its report.
//! * [`report`]: columns of figures, JSON, lines of a paragraph.
//! * [`command`]: shared by the programs `uzram-bench` and `uzram-lab`.

pub mod bound;
pub mod command;
pub mod corpus;
pub mod fio;
pub mod memory;
pub mod process;
pub mod report;
pub mod rounds;
pub mod stats;
pub mod threads;
pub mod usage;

pub use corpus::{DEFAULT_CORPUS_PAGES, Source, read_back};
pub use memory::{lack_of_memory, status_bytes};
pub use report::to_json;
pub use rounds::go_on;
pub use threads::{Gate, Span, joined, run_together};
pub use usage::Usage;
