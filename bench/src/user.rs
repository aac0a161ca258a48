//! The program whose memory is measured: what `uzram-bench memory-user JOB` does.

use serde::Deserialize;
use uzram::{Error, Result};

use crate::block::swap_user::SwapUser;
pub use crate::harness::steps::SUBCOMMAND;
use crate::harness::steps::Steps;
use crate::pager::settings::Touched;
use crate::pager::{fault, fitting, unmap, zipf};

#[derive(Deserialize)]
enum Job {
    Unmap(unmap::Job),
    Fault(Touched),
    Fitting(Touched),
    Zipf(zipf::Job),
    Swap(SwapUser),
}

/// Is the process: does what the argument of [`SUBCOMMAND`] says.
pub fn run(job: &str) -> Result<()> {
    let job: Job = serde_json::from_str(job)
        .map_err(|error| Error::invalid(format!("this is for the benchmark itself: {error}")))?;
    match job {
        Job::Unmap(job) => job.run(&mut Steps),
        Job::Fault(job) => fault::run(&job, &mut Steps),
        Job::Fitting(job) => fitting::run(&job, &mut Steps),
        Job::Zipf(job) => job.run(&mut Steps),
        Job::Swap(user) => Steps.answer(&user.run()?),
    }
}
