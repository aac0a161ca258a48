//! The program `uzram-lab`, which `uzram lab` runs: its command line.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde::Serialize;
use uzram::{Error, ErrorKind, Result};
use uzram_bench::harness::rounds::RoundOptions;
use uzram_bench::harness::{Source, command, process, to_json};
use uzram_bench::user;
use uzram_lab::experiment::{self, Designs, LabOptions, Length, Series};
use uzram_lab::locks::{self, LocksArgs};
use uzram_lab::out_file::OutFile;
use uzram_lab::report::{self, ReportOptions};
use uzram_lab::scale;
use uzram_lab::tables::{self, TABLES};

/// Reproduce kernel patch series: measure their before against their after, in this process.
///
/// Each table measures the change of one patch series, with both designs alternating, beside its author's
/// published figures.
#[derive(Parser)]
#[command(
    name = "uzram-lab",
    bin_name = "uzram lab",
    version,
    after_help = "Example: uzram lab run streams --jobs 1,4 --case write,randwrite --json streams.json"
)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the tables
    List,
    /// Run tables and print them
    Run(RunArgs),
    /// Measure every table and write a page about them, as HTML and JSON
    Report(ReportOptions),
    /// Measure for how long one job holds a table's locks (slab-freeze, zs-free, lru-batch): how many CPUs
    /// saturate them
    #[command(after_help = "Example: uzram lab scale lru-batch --json lru-batch.json")]
    Scale(Measuring),
    /// Record the locks of a table's case, and print them in the columns of /proc/lock_stat
    Locks(LocksArgs),
    /// Do a design's work once, for a profiler
    #[command(hide = true)]
    Work { table: String, case: String, design: String, corpus: PathBuf },
    /// Be the program whose memory is measured: a table starts it
    #[command(hide = true, name = user::SUBCOMMAND)]
    MemoryUser { job: String },
}

#[derive(clap::Args)]
#[command(after_help = "Example: uzram lab run streams --seconds 0.05 --rounds 5 --jobs 1,2,4")]
struct RunArgs {
    #[command(flatten)]
    measuring: Measuring,
    /// Numbers of jobs: threads, or what the table says [default: the table's]
    #[arg(long, value_delimiter = ',', value_name = "N,…")]
    jobs: Vec<usize>,
}

/// Which tables are measured, and how.
#[derive(clap::Args)]
struct Measuring {
    /// Names of tables, as `uzram lab list` shows them
    #[arg(required = true, value_name = "TABLE", value_parser = tables::table)]
    tables: Vec<&'static Series>,
    /// About how many seconds one measurement takes
    #[arg(long, value_name = "S", default_value_t = RoundOptions::default().duration.as_secs_f64())]
    seconds: f64,
    /// Rounds; in each, every design is measured once
    #[arg(long, value_name = "N", default_value_t = RoundOptions::default().rounds)]
    rounds: usize,
    /// Cases [default: all]
    #[arg(long, value_delimiter = ',', value_name = "CASE,…")]
    case: Vec<String>,
    /// The pages that are stored, of tables that store some [default: mixed]
    #[arg(long, value_name = "FILE|NAME")]
    corpus: Option<Source>,
    /// Also write the figures to a file: a line of JSON for each table
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    command::main("uzram-lab", |args: &Args| match &args.command {
        Command::List => command::print(&list()?),
        Command::Run(args) => run_tables(args),
        Command::Report(args) => write_report(args),
        Command::Scale(args) => scale_tables(args),
        Command::Locks(args) => locks::run(args),
        Command::MemoryUser { job } => user::run(job),
        Command::Work { table, case, design, corpus } => {
            experiment::work(tables::table(table)?, case, design, corpus)
        }
    })
}

fn list() -> Result<String> {
    let mut text = String::new();
    for table in TABLES {
        let options = LabOptions::default();
        let estimate = options.estimate(table)?;
        let facts = [
            ("series", table.reference()),
            ("designs", designs(&(table.designs)())),
            ("cases", table.case_names().join(" ")),
            ("jobs", jobs(table)),
            (
                "takes",
                format!(
                    "about {} min: {} rounds{}, and one to warm up",
                    // Filling devices and starting threads takes a tenth more.
                    (estimate.as_secs_f64() * 1.1 / 60.0).ceil(),
                    options.rounds.rounds,
                    match table.length {
                        Length::Calibrated => {
                            format!(" of {} s a measurement", options.rounds.duration.as_secs_f64())
                        }
                        Length::Fixed { .. } => String::new(),
                    }
                ),
            ),
        ];
        text += &format!("{:<12} {}\n", table.name, table.about);
        facts.iter().for_each(|(name, fact)| text += &format!("{:<12} {name:<8} {fact}\n", ""));
    }
    Ok(text)
}

fn designs(designs: &Designs) -> String {
    let mut text = format!("{} against {}", designs.after, designs.before.join(", "));
    if !designs.beyond.is_empty() {
        text += &format!("; {} against {}", designs.beyond.join(", "), designs.after);
    }
    text
}

/// Describes the numbers of jobs, of each case if they differ.
fn jobs(table: &Series) -> String {
    let text = |jobs: &[usize]| jobs.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
    match table.cases {
        [(_, first), others @ ..] if others.iter().all(|(_, jobs)| jobs == first) => text(first),
        cases => {
            let named: Vec<_> = cases.iter().map(|(case, jobs)| format!("{case}: {}", text(jobs))).collect();
            named.join("; ")
        }
    }
}

fn run_tables(args: &RunArgs) -> Result<()> {
    let options = LabOptions { jobs: args.jobs.clone(), ..args.measuring.options()? };
    // Report invalid options before minutes of measuring.
    let check = |table: &Series| options.estimate(table).map(drop);
    args.measuring.report(check, |table| experiment::run(table, &options))
}

fn scale_tables(measuring: &Measuring) -> Result<()> {
    let options = measuring.options()?;
    let check = |table: &Series| scale::check(table, &options).map(drop);
    measuring.report(check, |table| scale::measure(table, &options))
}

impl Measuring {
    fn options(&self) -> Result<LabOptions> {
        let (duration, progress) = (command::seconds(self.seconds)?, command::show_progress);
        let stop = process::stop_flag()?;
        let default = LabOptions::default();
        Ok(LabOptions {
            cases: self.case.clone(),
            rounds: RoundOptions { rounds: self.rounds, duration, stop, progress },
            corpus: self.corpus.clone().unwrap_or(default.corpus),
            ..default
        })
    }

    /// Checks the tables, then prints the report on each and writes all to the file.
    fn report<R: Display + Serialize>(
        &self,
        check: impl Fn(&Series) -> Result<()>,
        report: impl Fn(&Series) -> Result<R>,
    ) -> Result<()> {
        self.tables.iter().try_for_each(|table| check(table))?;
        let named = |error: Error| error.with_setting("--json");
        let json = self.json.as_deref().map(OutFile::create).transpose().map_err(named)?;
        let mut lines = String::new();
        // The file is written even if standard output is closed.
        let mut printed = Ok(());
        for (i, table) in self.tables.iter().enumerate() {
            let outcome = report(table);
            command::show_progress("");
            let report = outcome.map_err(|error| of_run(table.name, &error))?;
            printed =
                printed.and_then(|()| command::print(&format!("{}{report}", if i > 0 { "\n" } else { "" })));
            lines += &format!("{}\n", to_json(&report));
        }
        json.map_or(Ok(()), |json| json.write(&lines)).map_err(named)?;
        printed
    }
}

fn write_report(options: &ReportOptions) -> Result<()> {
    let (text, outcome) = report::run(options, command_line(&options.dir), &process::stop_flag()?)?;
    command::print(&text)?;
    outcome
}

/// Returns the command of a report as it is typed into a shell, without the place of the report.
fn command_line(dir: &Path) -> String {
    let is_plain = |char: char| char.is_alphanumeric() || "-_./,:=+".contains(char);
    let args: Vec<_> = std::env::args_os().skip(2).collect();
    let place = args.iter().position(|word| Path::new(word) == dir);
    let words = args.iter().enumerate().map(|(at, word)| match word.to_string_lossy() {
        _ if Some(at) == place => "DIR".to_owned(),
        text if !text.is_empty() && text.chars().all(is_plain) => text.into_owned(),
        text => format!("'{}'", text.replace('\'', r"'\''")),
    });
    words.fold("uzram lab report".to_owned(), |line, word| line + " " + &word)
}

/// Returns the error of a run: it names the table, and blames no option of the command line.
fn of_run(table: &str, error: &Error) -> Error {
    let kind = match error.kind() {
        ErrorKind::Invalid => ErrorKind::Io,
        kind => kind,
    };
    Error::new(kind, format!("{table}: {error}"))
}
