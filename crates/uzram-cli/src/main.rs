//! The `uzram` program; its code is in this crate's library.

use std::process::ExitCode;

fn main() -> ExitCode {
    uzram_cli::main()
}
