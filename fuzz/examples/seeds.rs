//! Writes the seeds of every target into `DIRECTORY/TARGET/`, for libFuzzer to start from.

use std::path::PathBuf;
use std::process::ExitCode;
use std::{env, fs, io};

fn main() -> ExitCode {
    let Some(directory) = env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: seeds DIRECTORY");
        return ExitCode::from(2);
    };
    match write_all(&directory) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("seeds: {}: {error}", directory.display());
            ExitCode::FAILURE
        }
    }
}

fn write_all(directory: &std::path::Path) -> io::Result<()> {
    for target in uzram_fuzz::TARGETS {
        let directory = directory.join(target.name);
        fs::create_dir_all(&directory)?;
        for (index, seed) in (target.seeds)().iter().enumerate() {
            fs::write(directory.join(format!("seed-{index}")), seed)?;
        }
    }
    Ok(())
}
