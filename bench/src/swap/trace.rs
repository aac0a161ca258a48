//! The way of a fault, by the kernel's events: who ran when, and on which CPU, from the touch of a page that is swapped out to the next.
//!
//! The kernel records events in an instance of tracefs of its own, while a program touches pages in no order. That takes time, too: about
//! half a microsecond for each event.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::mount::{MountFlags, UnmountFlags};
use serde::Serialize;
use uzram::{Error, ErrorKind, Result};

use super::{Area, SIDES};
use crate::block::cgroup::Cgroup;
use crate::block::swap::user_command;
use crate::block::{PATIENCE, Programs, io_error};
use crate::harness::corpus::Saved;
use crate::harness::process::run_to_end;
use crate::harness::report::{Table, figure_cell};
use crate::harness::rounds::go_on;

/// The memory of the program, and the swap area.
const SIZE_BYTES: u64 = 64 << 20;
const AREA_BYTES: u64 = 256 << 20;
/// The buffer of each CPU.
const BUFFER_KIB: u32 = 64 << 10;
/// Threads of the daemon that serve the kernel have names that begin so.
const SERVES: &str = "fuse-";

/// Events that are recorded, and which of them.
const EVENTS: [(&str, &str); 8] = [
    ("exceptions/page_fault_user", ""),
    ("block/block_rq_issue", ""),
    ("fuse/fuse_request_send", ""),
    ("fuse/fuse_request_end", ""),
    ("sched/sched_waking", ""),
    ("sched/sched_switch", ""),
    ("syscalls/sys_exit_read", "comm ~ \"fuse-*\""),
    ("syscalls/sys_enter_writev", "comm ~ \"fuse-*\""),
];

/// One step on the way of a fault.
struct Step {
    name: &'static str,
    /// Whether an event ends it; the number is the program's thread.
    is_over: fn(&Event<'_>, u32) -> bool,
}

const STEPS: [Step; 10] = [
    Step {
        name: "touched: the block layer has a request",
        is_over: |event, _| event.name == "block_rq_issue",
    },
    Step { name: "the loop device's worker runs", is_over: |event, _| event.switches_to("kworker/") },
    Step { name: "FUSE has a request", is_over: |event, _| event.name == "fuse_request_send" },
    Step { name: "a thread of the daemon runs", is_over: |event, _| event.switches_to(SERVES) },
    Step { name: "it has the request", is_over: |event, _| event.is_of_daemon("sys_read ->") },
    Step { name: "it has the page, and replies", is_over: |event, _| event.is_of_daemon("sys_writev") },
    Step { name: "FUSE's request has ended", is_over: |event, _| event.name == "fuse_request_end" },
    Step {
        name: "the program is woken",
        is_over: |event, program| event.name == "sched_waking" && event.number("pid=") == Some(program),
    },
    Step {
        name: "the program runs",
        is_over: |event, program| event.name == "sched_switch" && event.number("next_pid=") == Some(program),
    },
    Step { name: "it touches the next page", is_over: is_touch },
];

fn is_touch(event: &Event<'_>, program: u32) -> bool {
    event.name == "page_fault_user" && event.task == program
}

/// An event, a line of the trace.
#[derive(Clone, Copy)]
struct Event<'a> {
    comm: &'a str,
    task: u32,
    cpu: u32,
    us: f64,
    name: &'a str,
    rest: &'a str,
}

impl<'a> Event<'a> {
    /// Parses `   comm-123   [001] d..2.  12.345678: name: rest`.
    fn parse(line: &'a str) -> Option<Event<'a>> {
        let (task, line) = line.split_once(" [")?;
        let (comm, task) = task.trim().rsplit_once('-')?;
        let (cpu, line) = line.split_once("] ")?;
        let (_flags, line) = line.trim_start().split_once(' ')?;
        let (seconds, line) = line.trim_start().split_once(": ")?;
        let (name, rest) = line.split_once(':').unwrap_or((line, ""));
        // System calls are `sys_writev(…)` when they begin, and `sys_read -> …` when they end.
        let name =
            if line.starts_with("sys_read -> ") { "sys_read ->" } else { name.split(['(', ' ']).next()? };
        Some(Event {
            comm,
            task: task.trim().parse().ok()?,
            cpu: cpu.parse().ok()?,
            us: seconds.parse::<f64>().ok()? * 1e6,
            name,
            rest,
        })
    }

    fn number(&self, field: &str) -> Option<u32> {
        let (_, value) = self.rest.split_once(&format!(" {field}"))?;
        value.split(' ').next()?.parse().ok()
    }

    fn switches_to(&self, comm: &str) -> bool {
        self.name == "sched_switch" && self.rest.contains(&format!(" next_comm={comm}"))
    }

    fn is_of_daemon(&self, name: &str) -> bool {
        self.comm.starts_with(SERVES) && self.name == name
    }
}

/// The way of faults on each side.
#[derive(Clone, Debug, Serialize)]
pub struct TraceReport {
    /// In the order of [`SIDES`].
    pub sides: Vec<SideReport>,
}

/// The way of faults on one side.
#[derive(Clone, Debug, Serialize)]
pub struct SideReport {
    /// Its name.
    pub name: &'static str,
    /// How many faults were followed.
    pub faults: usize,
    /// From one touch to the next.
    pub total_us: f64,
    /// The steps, as far as there are any.
    pub steps: Vec<StepReport>,
}

/// The mean of one step.
#[derive(Clone, Debug, Serialize)]
pub struct StepReport {
    /// What ends it.
    pub name: &'static str,
    /// How long it takes, over all faults.
    pub us: f64,
    /// The share of faults that have it, in percent.
    pub percent: f64,
    /// The share of these that end it on another CPU than the step before, in percent.
    pub elsewhere_percent: f64,
}

/// Traces faults with a swap area of each kind.
///
/// # Errors
/// `Unsupported`: the kernel has no tracefs. `Io`, `Busy` after a stop.
pub fn run(programs: &Programs, stop: &Arc<AtomicBool>) -> Result<TraceReport> {
    let corpus = Saved::of(&crate::engine::Common::default().corpus, stop)?;
    let mut sides = Vec::new();
    for (side, name) in SIDES.into_iter().enumerate() {
        go_on(stop)?;
        let area = Area::on(&programs.uzram, side, AREA_BYTES)?;
        let trace = Trace::new()?;
        let cgroup = Cgroup::new()?;
        let mut command = user_command(programs, cgroup.dir(), corpus.path(), SIZE_BYTES);
        command.arg("--tracing-on").arg(trace.dir.join("tracing_on"));
        run_to_end(&mut command, PATIENCE)?;
        let text = trace.read()?;
        drop((trace, cgroup));
        area.off()?;
        sides.push(follow(name, &text)?);
    }
    Ok(TraceReport { sides })
}

/// Follows the faults of a trace.
fn follow(name: &'static str, text: &str) -> Result<SideReport> {
    let events: Vec<Event<'_>> = text.lines().filter_map(Event::parse).collect();
    let mut touches: BTreeMap<u32, usize> = BTreeMap::new();
    for event in events.iter().filter(|event| event.name == "page_fault_user") {
        *touches.entry(event.task).or_default() += 1;
    }
    let program = touches.into_iter().max_by_key(|(_, touches)| *touches).map(|(task, _)| task);
    let program =
        program.ok_or_else(|| Error::new(ErrorKind::Unsupported, "the kernel recorded no page fault"))?;
    let starts: Vec<usize> = (0..events.len()).filter(|at| is_touch(&events[*at], program)).collect();
    let mut sums = STEPS.each_ref().map(|_| (0.0, 0, 0));
    let (mut total_us, mut faults) = (0.0, 0);
    for fault in starts.windows(2) {
        let fault = &events[fault[0]..=fault[1]];
        // Those that found their page in the swap cache have none, on uzram's sides.
        let has_request = fault.iter().any(|event| event.name == "block_rq_issue");
        if !has_request && name != SIDES[2] {
            continue;
        }
        faults += 1;
        total_us += fault[fault.len() - 1].us - fault[0].us;
        let mut at = 0;
        for (step, sum) in STEPS.iter().zip(&mut sums) {
            let Some(further) = fault[at + 1..].iter().position(|event| (step.is_over)(event, program))
            else {
                continue;
            };
            let (before, now) = (fault[at], fault[at + 1 + further]);
            at += 1 + further;
            sum.0 += now.us - before.us;
            sum.1 += 1;
            sum.2 += usize::from(now.cpu != before.cpu);
            if at + 1 == fault.len() {
                break;
            }
        }
    }
    let share = |part: usize, of: usize| if of == 0 { 0.0 } else { 100.0 * part as f64 / of as f64 };
    let steps = STEPS.iter().zip(sums).filter(|(_, (_, times, _))| *times > 0);
    let steps = steps.map(|(step, (us, times, elsewhere))| StepReport {
        name: step.name,
        us: us / faults as f64,
        percent: share(times, faults),
        elsewhere_percent: share(elsewhere, times),
    });
    Ok(SideReport { name, faults, total_us: total_us / faults.max(1) as f64, steps: steps.collect() })
}

impl fmt::Display for TraceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for side in &self.sides {
            let mut table =
                Table::new([format!("<{}", side.name).as_str(), "us", "% of faults", "% on another CPU"]);
            for step in &side.steps {
                table.row([
                    step.name.to_owned(),
                    figure_cell(Some(step.us), 2),
                    figure_cell(Some(step.percent), 0),
                    figure_cell(Some(step.elsewhere_percent), 0),
                ]);
            }
            table.row([
                format!("from touch to touch, {} faults", side.faults),
                figure_cell(Some(side.total_us), 2),
                String::new(),
                String::new(),
            ]);
            writeln!(f, "{table}")?;
        }
        Ok(())
    }
}

/// An instance of tracefs, removed when it is dropped.
struct Trace {
    /// The instance's folder.
    dir: PathBuf,
    mounted: PathBuf,
    _folder: tempfile::TempDir,
}

impl Trace {
    fn new() -> Result<Trace> {
        let folder = tempfile::tempdir().map_err(|error| io_error(&std::env::temp_dir(), error))?;
        let mounted = folder.path().to_owned();
        rustix::mount::mount("none", &mounted, "tracefs", MountFlags::empty(), None).map_err(|errno| {
            Error::new(ErrorKind::Unsupported, format!("cannot mount the kernel's tracefs: {errno}"))
        })?;
        let dir = mounted.join("instances").join(format!("uzram-bench-{}", std::process::id()));
        let trace = Trace { dir, mounted, _folder: folder };
        fs::create_dir(&trace.dir).map_err(|error| io_error(&trace.dir, error))?;
        trace.set("tracing_on", "0")?;
        trace.set("trace_clock", "mono")?;
        trace.set("buffer_size_kb", &BUFFER_KIB.to_string())?;
        for (event, filter) in EVENTS {
            // An older kernel may not have all.
            if trace.dir.join("events").join(event).exists() {
                if !filter.is_empty() {
                    trace.set(&format!("events/{event}/filter"), filter)?;
                }
                trace.set(&format!("events/{event}/enable"), "1")?;
            }
        }
        Ok(trace)
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        let path = self.dir.join(name);
        fs::write(&path, value).map_err(|error| io_error(&path, error))
    }

    fn read(&self) -> Result<String> {
        let path = self.dir.join("trace");
        let bytes = fs::read(&path).map_err(|error| io_error(&path, error))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.dir)
            && Path::exists(&self.dir)
        {
            eprintln!("the kernel's instance of tracing stays: {}: {error}", self.dir.display());
        }
        if let Err(errno) = rustix::mount::unmount(&self.mounted, UnmountFlags::empty()) {
            eprintln!("{} stays mounted: {errno}", self.mounted.display());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const TRACE: &str = "\
# tracer: nop
     swap-user-77      [001] d....  10.000000: page_fault_user: address=0x7f ip=0x7f error_code=0x4
     swap-user-77      [001] d....  10.000002: block_rq_issue: 7,0 R 4096 () 8 + 8 none,0,0 [swap-user]
     swap-user-77      [001] d..2.  10.000003: sched_switch: prev_comm=swap-user prev_pid=77 prev_prio=120 prev_state=D ==> next_comm=kworker/u8:1 next_pid=9 next_prio=120
  kworker/u8:1-9       [001] .....  10.000005: fuse_request_send: connection 1 req 2 opcode 15 (FUSE_READ) len 80
          <idle>-0     [000] d..2.  10.000009: sched_switch: prev_comm=swapper/0 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=fuse-0 next_pid=5 next_prio=120
          fuse-0-5     [000] .....  10.000011: sys_read -> 0x50
          fuse-0-5     [000] .....  10.000014: sys_writev(fd: 5, vec: 7f, vlen: 2)
          fuse-0-5     [000] .....  10.000016: fuse_request_end: connection 1 req 2 len 4112 error 0
          fuse-0-5     [000] d..4.  10.000017: sched_waking: comm=swap-user pid=77 prio=120 target_cpu=001
  kworker/u8:1-9       [001] d..2.  10.000019: sched_switch: prev_comm=kworker/u8:1 prev_pid=9 prev_prio=120 prev_state=I ==> next_comm=swap-user next_pid=77 next_prio=120
     swap-user-77      [001] d....  10.000020: page_fault_user: address=0x7f ip=0x7f error_code=0x4
";

    #[test]
    fn a_fault_is_followed_from_step_to_step() {
        let side = follow(SIDES[0], TRACE).unwrap();
        assert_eq!(side.faults, 1);
        assert!((side.total_us - 20.0).abs() < 1e-3, "{side:?}");
        let us: Vec<u32> = side.steps.iter().map(|step| step.us.round() as u32).collect();
        assert_eq!(us, [2, 1, 2, 4, 2, 3, 2, 1, 2, 1]);
        let elsewhere: Vec<u32> = side.steps.iter().map(|step| step.elsewhere_percent as u32).collect();
        assert_eq!(elsewhere, [0, 0, 0, 100, 0, 0, 0, 0, 100, 0]);
        let text = TraceReport { sides: vec![side] }.to_string();
        assert!(text.contains("a thread of the daemon runs") && text.contains("20.00"), "{text}");
    }

    #[test]
    fn a_trace_without_faults_is_an_error() {
        let error = follow(SIDES[0], "# tracer: nop\n").unwrap_err();
        assert!(error.to_string().contains("no page fault"), "{error}");
    }
}
