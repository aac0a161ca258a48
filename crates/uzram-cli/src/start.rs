//! A daemon's start, up to where it begins to do something: what a file or a command line comes to, checked as `uzram up`
//! checks it. No file is made, and no socket; files that are named are read, but for backing files.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::config_file;
use crate::failure::Result;
use crate::plan::Plan;
use crate::up::Args;

/// A runtime directory that is not looked at.
const ANY_DIR: &str = "/run/uzram";

/// What `uzram up --config` would serve.
///
/// # Errors
/// What is wrong with the file.
pub fn plan_file(path: &Path) -> Result<Plan> {
    let mut word = OsString::from("--config=");
    word.push(path);
    let args = Args::from_words([word])?;
    checked(&args, Some(config_file::read(path)?))
}

fn checked(args: &Args, config: Option<config_file::ConfigFile>) -> Result<Plan> {
    let plan = args.plan_with(config, PathBuf::from(ANY_DIR))?;
    plan.check()?;
    Ok(plan)
}
