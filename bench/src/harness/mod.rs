//! What every measurement here stands on.
//!
//! * [`rounds`]: variants measured in turn, round by round; `Experiment`, whose work is calibrated.
//! * [`threads`] starts jobs together; [`usage`] reads what a thread has cost.
//! * [`corpus`]: pages taken from what the machine has.
//! * [`stats`]: medians, quantiles, and how sure a ratio of paired measurements is.
//! * [`bound`]: where a figure should lie.
//! * [`process`] runs other programs; [`fio`] runs fio and reads its report.
//! * [`report`]: columns of figures, JSON, lines of a paragraph.
//! * [`command`]: what the programs `uzram-bench` and `uzram-lab` share.

pub mod bound;
pub mod command;
pub mod corpus;
pub mod fio;
pub mod process;
pub mod report;
pub mod rounds;
pub mod stats;
pub mod threads;
pub mod usage;

pub use corpus::{DEFAULT_CORPUS_PAGES, Source, read_back};
pub use report::to_json;
pub use rounds::go_on;
pub use threads::{Gate, Span, joined, run_together};
pub use usage::Usage;
