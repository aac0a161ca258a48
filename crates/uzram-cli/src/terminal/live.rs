//! Output on standard error: a daemon's log and, on a terminal, one live line below it, which shows
//! statistics or a command's progress.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing_subscriber::filter::LevelFilter;
use uzram::device::DeviceStats;
use uzram::units::format_size;

use crate::failure::{Context, Failure, PREFIX, Result};
use crate::output;
use crate::terminal::show::{per_second, ratio};

/// Whether the live line is on the screen. Written and read with standard error locked.
static SHOWN: AtomicBool = AtomicBool::new(false);

/// Clears the line (ECMA-48 EL).
const ERASE: &str = "\r\x1b[K";

/// How much to log.
#[derive(Clone, Copy, ValueEnum)]
pub enum LogLevel {
    /// Failures only.
    Error,
    /// Also warnings.
    Warn,
    /// Also what users request.
    Info,
    /// Also what clients do.
    Debug,
    /// Everything.
    Trace,
}

pub fn start_log(level: LogLevel) -> Result<()> {
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_target(false)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(|| LogWriter)
        // Otherwise it would report a failed write to standard error on standard error, and panic.
        .log_internal_errors(false)
        .try_init()
        .context(|| "cannot start the log")
}

/// Prints on standard error, in place of the live line.
pub fn note(text: &str) {
    // A closed standard error is no reason to stop.
    let _ = write_above(text.as_bytes());
}

/// Prints a failure's message on one line: control characters that it quotes become spaces.
pub fn error_line(line: &str) {
    let line: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    note(&format!("{PREFIX}{line}\n"));
}

pub fn report_failure(failure: &Failure) {
    match (failure.is_reported(), output::is_json()) {
        (false, _) => {}
        (true, true) => note(&format!("{}\n", failure.to_json())),
        (true, false) => error_line(failure.message()),
    }
}

/// Writes whole lines to standard error, and erases the live line first.
fn write_above(lines: &[u8]) -> io::Result<()> {
    let mut stderr = io::stderr().lock();
    if !SHOWN.swap(false, Ordering::Relaxed) {
        return stderr.write_all(lines);
    }
    // In one write, so that a terminal shows both or neither.
    stderr.write_all(&[ERASE.as_bytes(), lines].concat())
}

/// Writer of a log's lines. It drops those that nobody takes: a daemon must not wait for who reads its log.
struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let stderr = io::stderr();
        let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
        // A failure says nothing about the reader.
        match poll(&mut fds, Some(&Timespec::default())) {
            Ok(0) => Ok(buf.len()),
            _ => write_above(buf).map(|()| buf.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// A line on a terminal that is redrawn in place. Dropping it erases it.
pub struct StatusLine(());

impl StatusLine {
    /// Redraw period while waiting for an operation.
    pub const PERIOD: Duration = Duration::from_millis(250);

    pub fn new() -> Option<StatusLine> {
        io::stderr().is_terminal().then_some(StatusLine(()))
    }

    /// Draws the line in place of the last one. `text` must be ASCII.
    pub fn draw(&mut self, mut text: String) {
        let mut stderr = io::stderr().lock();
        // A line that wraps cannot be erased. In ASCII, bytes are columns.
        if let Ok(size) = rustix::termios::tcgetwinsize(&stderr)
            && size.ws_col > 0
        {
            text.truncate(usize::from(size.ws_col) - 1);
        }
        if stderr.write_all(format!("{ERASE}{text}").as_bytes()).is_ok() {
            SHOWN.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        let _ = write_above(b"");
    }
}

/// Runs `work` while another thread shows its progress, `text`, if standard error is a terminal.
pub fn while_showing<R>(text: impl Fn() -> Option<String> + Send, work: impl FnOnce() -> R) -> R {
    let Some(mut line) = StatusLine::new() else { return work() };
    let (working, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let show = move || {
            while ended.recv_timeout(StatusLine::PERIOD) == Err(RecvTimeoutError::Timeout) {
                text().into_iter().for_each(|text| line.draw(text));
            }
        };
        // If no thread starts, no progress is shown.
        let _ = thread::Builder::new().spawn_scoped(scope, show);
        let done = work();
        drop(working);
        done
    })
}

/// The live line of a daemon: bytes stored, memory used, and IOPS. Dropping it erases it.
pub struct LiveLine {
    line: StatusLine,
    last: DeviceStats,
    last_at: Instant,
}

impl LiveLine {
    pub const PERIOD: Duration = Duration::from_secs(1);

    pub fn new(now: DeviceStats) -> Option<LiveLine> {
        StatusLine::new().map(|line| LiveLine { line, last: now, last_at: Instant::now() })
    }

    pub fn draw(&mut self, now: DeviceStats) {
        let at = Instant::now();
        self.line.draw(line(&self.last, &now, at - self.last_at));
        (self.last, self.last_at) = (now, at);
    }
}

fn line(last: &DeviceStats, now: &DeviceStats, elapsed: Duration) -> String {
    let since = |now: u64, last: u64| per_second(now.saturating_sub(last), elapsed);
    format!(
        "stored {}  used {}  ratio {}  IOPS {:.0} read {:.0} write",
        format_size(now.orig_data_bytes),
        format_size(now.memory_bytes()),
        ratio(now.orig_data_bytes, now.memory_bytes()),
        since(now.pages_read, last.pages_read),
        since(now.pages_written, last.pages_written),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_live_line_counts_what_happened_since() {
        let mut last = DeviceStats::default();
        (last.pages_read, last.pages_written) = (100, 50);
        let mut now = last;
        now.orig_data_bytes = 3 << 20;
        (now.mem_charged_bytes, now.mem_tables_bytes) = (1 << 20, 1 << 20);
        // A reset device counts from zero again.
        (now.pages_read, now.pages_written) = (300, 10);
        let text = line(&last, &now, Duration::from_secs(2));
        assert_eq!(text, "stored 3 MiB  used 2 MiB  ratio 1.50  IOPS 100 read 0 write");
    }
}
