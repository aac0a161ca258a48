//! This process and this machine, for the daemon and its clients.

pub mod process_status;
pub mod accounts;
pub mod descriptors;
pub mod find_program;
pub mod interrupts;
pub mod path_inside;
pub mod process_pages;
pub mod program;
pub mod program_file;
pub mod programs;
pub mod protect;
pub mod run_files;
pub mod runtime_dir;
pub mod state_dir;
