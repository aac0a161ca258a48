//! Reports what is wrong with devices, and clients that are turned away: warnings in the log.
//!
//! A thread reads all conditions when a failure is noted ([`uzram::failures`]), and as long as
//! an episode is open ([`crate::daemon::episodes`]), at most once a second. Requests do not wait for it, so
//! it may wait for memory, and for who reads the log.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use uzram::device::{BackingState, Device};
use uzram::failures;
use uzram::units::format_size;
use uzram_serve::Exports;
use uzram_serve::nbd::{Clients, ListenAddress, TurnedAway};

use crate::daemon::episodes::{Condition, Episodes, Level, Reading};
use crate::daemon::survive::lives::Lives;

/// The shortest time between two looks while an episode is open.
const PERIOD: Duration = Duration::from_secs(1);

/// The thread. Dropping this ends it.
pub struct Reporter {
    ends: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Reporter {
    /// Starts the thread for these devices and clients. It goes on with the episodes of the process before.
    pub fn start(exports: Exports, clients: Clients, lives: Arc<Lives>) -> io::Result<Self> {
        let (ends, end) = mpsc::channel();
        let run = move || {
            let mut episodes = Episodes::new(lives.episodes());
            loop {
                failures::watch();
                // Checked after `watch`: an end after this ends the wait.
                if end.try_recv() == Err(TryRecvError::Disconnected) {
                    return;
                }
                let (lines, next) = episodes.look(&read(&exports, &clients), now_ms());
                lines.iter().for_each(|line| tracing::warn!("{line}"));
                if next.is_some() && end.recv_timeout(PERIOD) == Err(RecvTimeoutError::Disconnected) {
                    return;
                }
                failures::wait(next.map(|next| next.saturating_sub(PERIOD)));
            }
        };
        let thread = thread::Builder::new().name("conditions".to_owned()).spawn(run)?;
        Ok(Reporter { ends: Some(ends), thread: Some(thread) })
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.ends = None;
        failures::note();
        // A panic of the thread needs no handling.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Returns the time since boot, which is the same in all processes.
fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000
}

static WRITES: Condition = Condition::of("writes", "writes are accepted again", "refused");
static BACKING: Condition = Condition::of("backing", "the backing device is ok again", "failed writes");
static DAMAGE: Condition = Condition::of("damage", "no more pages were found damaged", "found");
static PLACES: Condition = Condition::of("places", "clients find a place again", "refused");
static HANDSHAKES: Condition = Condition::of("handshakes", "handshakes end in time again", "cut off");
static NO_TLS: Condition = Condition::of("no-tls", "no more clients without TLS", "turned away");
static TLS: Condition = Condition::of("tls", "TLS handshakes do not fail any more", "failed");

fn read(exports: &Exports, clients: &Clients) -> Vec<Reading> {
    let devices = exports.devices();
    let of_devices = devices.iter().flat_map(|device| of_device(device));
    let listeners = clients.turned_away();
    let of_listeners =
        listeners.iter().flat_map(|(address, counts)| of_listener(address, counts, clients.max_clients()));
    of_devices.chain(of_listeners).collect()
}

fn of_device(device: &Device) -> [Reading; 3] {
    let (counts, backing) = (device.counts(), device.backing_stats());
    let reading = |condition, text, count, level| {
        let subject = device.name().to_owned();
        Reading { subject, condition, text, count, level }
    };
    let is_drained = counts.reserve_drained > 0 && counts.limit_refused == 0;
    let state = device.backing_state();
    let wrong = state.as_ref().filter(|state| **state != BackingState::Ok);
    let backing_text = match wrong {
        Some(state) => format!("the backing device is {state:#}"),
        // It was so for a moment.
        None => "writes to the backing device fail".to_owned(),
    };
    let refused = if is_drained {
        format!("the reserve of {} is drained: raise reserve", format_size(counts.reserve_bytes))
    } else {
        let limit = format_size(counts.mem_limit_bytes);
        let (why, add) = match state {
            None => ("", ", or add a backing device (backing_dev)"),
            Some(_) => (", and no more pages leave it", ""),
        };
        format!("memory is at mem_limit ({limit}){why}: raise mem_limit{add}")
    };
    let level = if device.has_room() { Level::Clear } else { Level::Lingering };
    let damaged = counts.corrupted_objects + backing.corrupted + backing.lost_reads;
    let writes_text = format!("writes are refused: {refused}");
    let backing_level = if wrong.is_some() { Level::Active } else { Level::Clear };
    let damage_text = format!(
        "pages are damaged or lost, and reads of them fail: {} objects in memory, {} on the backing device, {} missing \
         there",
        counts.corrupted_objects, backing.corrupted, backing.lost_reads
    );
    [
        reading(&WRITES, writes_text, counts.limit_refused + counts.reserve_drained, level),
        reading(&BACKING, backing_text, backing.failed_writes, backing_level),
        reading(&DAMAGE, damage_text, damaged, Level::Clear),
    ]
}

fn of_listener(address: &ListenAddress, counts: &TurnedAway, max_clients: usize) -> [Reading; 4] {
    let reading = |condition, text, count| {
        let (subject, level) = (format!("NBD at {address}"), Level::Clear);
        Reading { subject, condition, text, count, level }
    };
    let places = format!(
        "clients were refused: all places are taken (max-connections is {max_clients}; `uzram clients` lists them)"
    );
    let tls = format!(
        "clients are turned away, as TLS fails ({}): check their certificate and tls-client-ca",
        counts.why
    );
    let handshakes = "handshakes that took over a second gave way to new connections, or did not end in time";
    let no_tls = "clients without TLS are turned away, which is required here: they need an nbds:// address";
    [
        reading(&PLACES, places, counts.refused),
        reading(&HANDSHAKES, handshakes.to_owned(), counts.gave_way + counts.too_slow),
        reading(&NO_TLS, no_tls.to_owned(), counts.without_tls),
        reading(&TLS, tls, counts.failed_tls),
    ]
}
