//! The process that waits for the death of the one that serves, and serves then.
//!
//! `docs/internals/take-over.md` describes each step.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use uzram::ErrorKind;
use uzram::device::{Device, Keeper, KeptPart, NamedBacking};
use uzram::store::{KeptMemory, StandBy};

use crate::daemon::attendant::Attendant;
use crate::daemon::confine::confine;
use crate::daemon::held::Held;
use crate::daemon::survive::home::Home;
use crate::daemon::survive::link::{Kept, KeptBacking, Link, Order, Request};
use crate::daemon::survive::lives::{Lives, Number, Watched, can_take_cpus, leave_cpus};
use crate::daemon::worker::{self, Exported, Start};
use crate::failure::{Context, Result};
use crate::system::protect::Expendable;

/// How often a stand-by looks for new memory, after it found some…
const FOLLOW_SOON: Duration = Duration::from_millis(50);

/// …and after it found none.
const FOLLOW_LATER: Duration = Duration::from_millis(500);

/// The share of its time that it looks, one in so many.
const FOLLOW_SHARE: u32 = 20;

/// Deaths running in the same request, no other answered in between, after which the files fail instead.
const MAX_STRIKES: u32 = 3;

/// Waits for the death of the process that serves, then serves until told to end; returns the exit status.
pub fn run(
    held: &mut Held,
    home: &Arc<Home>,
    orders: &Arc<Link>,
    attendant: Option<Attendant>,
    kept: Vec<Kept>,
) -> Result<u8> {
    let lives = Arc::clone(&held.lives);
    // Before it dies: nothing can be lacking then.
    let serving = u32::try_from(lives.get(Number::Worker)).unwrap_or(0);
    let serving = Watched::open(serving).context(|| "cannot watch the process that serves")?;
    // The holder's measures; locks are not inherited.
    Held::protect(&held.plan);
    let mut protection = held.protection.clone();
    // If memory is short, the kernel ends this process rather than another: the holder starts the next.
    let expendable = Expendable::new();
    let backings: Vec<_> =
        kept.iter().flat_map(|kept| &kept.device.backing).map(|backing| backing.name.clone()).collect();
    let mirror =
        Mirror::start(kept, Arc::clone(orders), Arc::clone(&lives)).context(|| "cannot start a thread")?;
    // The holder has the privileges that this process has until the next step.
    let leaves_cpus = can_take_cpus();
    protection.extend(confine(&worker::needs(held, backings.into_iter())));
    lives.take_seat().context(|| "cannot wait for the process that serves")?;
    let died = Instant::now();
    drop(expendable);
    lives.set(Number::StandBy, 0);
    let mut kept = mirror.stop();
    let dead = serving.as_ref().map(Watched::pid);
    if let Some(dying) = &serving {
        dying.wait_until_all_exit(|| {
            tracing::warn!(process = dead, "a thread of the process that died still waits for a device");
        });
        // Until this one serves: the holder takes it back then.
        if leaves_cpus {
            leave_cpus(dying.pid());
        }
    }
    // Not before: if this process dies, the next one looks at the threads of that one.
    lives.set(Number::Worker, u64::from(std::process::id()));
    let gone = died.elapsed();
    // What the holder sent before the process died.
    take_orders(&mut kept, orders);
    let devices = kept.into_iter().map(|mapped| mapped.attach(home)).collect();
    let attached = died.elapsed();
    let strikes = held.ledger.begin_life();
    if strikes.strikes >= MAX_STRIKES {
        give_up(held, home);
    }
    let start = Start {
        home: Arc::clone(home),
        attendant,
        devices,
        has_started: lives.get(Number::Started) != 0,
        protection,
        is_confined: true,
        on_files_served: Box::new(move || {
            lives.set(Number::OutageNs, died.elapsed().as_nanos() as u64);
            lives.set(Number::TakeOvers, lives.get(Number::TakeOvers) + 1);
            let ms = |time: Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
            let (outage_ms, gone_ms, attach_ms) = (ms(died.elapsed()), ms(gone), ms(attached - gone));
            if lives.take(Number::Replaced) != 0 {
                tracing::info!(
                    outage_ms,
                    gone_ms,
                    attach_ms,
                    "this process serves in the place of the one before"
                );
            } else {
                tracing::warn!(
                    died = dead,
                    outage_ms,
                    gone_ms,
                    attach_ms,
                    "the process that served has died; this one serves on"
                );
            }
        }),
    };
    worker::serve(held, start)
}

/// Fails all requests for files: the process that served died of the same one again and again. The contents
/// stay, for NBD clients and `uzram recover`.
fn give_up(held: &mut Held, home: &Home) {
    let wait = held.plan.give_up_after;
    tracing::error!(
        "{MAX_STRIKES} processes died of the same request for a file: files fail in {} s, and their contents stay \
         until `uzram down`; `uzram recover` shows them as new files",
        wait.as_secs()
    );
    thread::sleep(wait);
    held.lives.set(Number::GaveUp, 1);
    // Here first: the kernel fails them when the last process has closed the connection.
    if let Err(failure) = held.fail_files() {
        tracing::error!("{}", failure.into_line());
    }
    if let Err(error) = home.ask(&Request::FailFiles, &[]) {
        tracing::error!(%error, "cannot fail the requests for files");
    }
}

/// A device whose memory is mapped ahead, where the system allows that.
struct Mapped {
    kept: Kept,
    ahead: Option<StandBy>,
}

impl Mapped {
    fn new(kept: Kept) -> Mapped {
        let memory = kept.memory.as_ref().and_then(|memory| memory.try_clone().ok());
        let ahead = memory.map(StandBy::new).transpose().inspect_err(|error| {
            let device = &kept.device.name;
            tracing::warn!(device, "memory is not mapped ahead, outages will be longer: {error}");
        });
        Mapped { ahead: ahead.unwrap_or_default(), kept }
    }

    /// Maps what is new until `stops` is set; returns whether there was any.
    fn follow(&self, stops: &AtomicBool) -> bool {
        let Some(ahead) = &self.ahead else { return false };
        let mapped = ahead.catch_up_while(&|| !stops.load(Ordering::Relaxed));
        let mapped = mapped.inspect_err(|error| {
            tracing::warn!(device = self.kept.device.name, %error, "memory cannot be mapped ahead");
        });
        mapped.is_ok_and(|bytes| bytes > 0)
    }

    /// Restores the device. If its memory is damaged beyond pages, it is there without contents, and requests
    /// for it fail; others go on.
    fn attach(self, home: &Arc<Home>) -> Exported {
        let Kept { device: kept, memory, backing } = self.kept;
        let keeper = Arc::clone(home) as Arc<dyn Keeper>;
        let mut opened = None;
        let attach = || {
            let parts =
                kept.backing.iter().zip(backing).map(|(KeptBacking { name, len_bytes }, descriptor)| {
                    KeptPart { name: name.clone(), len_bytes: *len_bytes, descriptor }
                });
            let backing = (!kept.backing.is_empty()).then(|| NamedBacking::from_parts(parts)).transpose()?;
            opened.clone_from(&backing);
            let memory = match (self.ahead, memory) {
                (Some(ahead), _) => KeptMemory::from(ahead),
                (None, Some(memory)) => KeptMemory::from(memory),
                (None, None) => return Ok(None),
            };
            // SAFETY: no other process uses the memory: all threads of the one that did have ended, and this
            // process has the seat, so that no other becomes the next.
            unsafe { Device::attach(&kept.name, memory, backing, Arc::clone(&keeper), |_| ()) }.map(Some)
        };
        let device = match attach() {
            Ok(Some((device, found))) => {
                if found.pages_lost > 0 {
                    tracing::error!(device = kept.name, pages = found.pages_lost, "pages are damaged");
                }
                device
            }
            Ok(None) => empty(&kept.name, keeper),
            Err(error) if matches!(error.kind(), ErrorKind::NoMemory | ErrorKind::Io) => {
                tracing::error!(
                    device = kept.name,
                    "its contents cannot be used: {error}; they stay for the next process that serves, until `uzram remove`"
                );
                empty(&kept.name, keeper)
            }
            Err(error) => {
                tracing::error!(device = kept.name, "its contents cannot be used any more: {error}");
                // Nobody will: its memory goes back to the system, and nobody locks its backing device,
                // though the next stand-by may have the descriptor for a moment.
                opened.iter().for_each(NamedBacking::unlock_when_dropped);
                keeper.give_up(&kept.name);
                empty(&kept.name, keeper)
            }
        };
        (device, kept.policy)
    }
}

/// Makes a device without contents, whose next ones are kept again.
fn empty(name: &str, keeper: Arc<dyn Keeper>) -> Arc<Device> {
    let device = Device::new(name).unwrap_or_else(|error| {
        // The name was a device's in the process before.
        tracing::error!("{error}");
        std::process::exit(1)
    });
    if let Err(error) = device.set_keeper(keeper) {
        tracing::error!(device = name, %error, "its contents will not survive");
    }
    device
}

/// Tells the mirror's thread to end.
struct Stop {
    is_set: AtomicBool,
    /// Readable then, which ends a wait.
    event: OwnedFd,
}

struct Mirror {
    thread: JoinHandle<Vec<Mapped>>,
    stop: Arc<Stop>,
}

impl Mirror {
    fn start(kept: Vec<Kept>, orders: Arc<Link>, lives: Arc<Lives>) -> io::Result<Mirror> {
        let event = eventfd(0, EventfdFlags::CLOEXEC)?;
        let stop = Arc::new(Stop { is_set: AtomicBool::new(false), event });
        let stops = Arc::clone(&stop);
        let run = move || {
            let mut mapped: Vec<_> = kept.into_iter().map(Mapped::new).collect();
            while !follow(&mut mapped, &orders, &stops, &lives) {}
            mapped
        };
        Ok(Mirror { thread: thread::Builder::new().name("mirror".to_owned()).spawn(run)?, stop })
    }

    fn stop(self) -> Vec<Mapped> {
        self.stop.is_set.store(true, Ordering::Relaxed);
        // An eventfd takes a number of 8 bytes.
        let _ = rustix::io::write(&self.stop.event, &1u64.to_ne_bytes());
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Maps what is new, and waits for a while, or for an order. Returns whether the thread is to end.
fn follow(mapped: &mut Vec<Mapped>, orders: &Link, stop: &Stop, lives: &Lives) -> bool {
    let began = Instant::now();
    let found = mapped.iter().filter(|mapped| mapped.follow(&stop.is_set)).count() > 0;
    lives.set(Number::StandByReady, u64::from(std::process::id()));
    let wait = if found { FOLLOW_SOON } else { FOLLOW_LATER };
    // Most of the time this process leaves the CPU to others.
    let wait = wait.max(began.elapsed() * FOLLOW_SHARE);
    let mut fds = [PollFd::new(&stop.event, PollFlags::IN), PollFd::new(orders, PollFlags::IN)];
    // Interrupted, or without a time that fits, it looks once more.
    let _ = Timespec::try_from(wait).map(|wait| poll(&mut fds, Some(&wait)));
    let (is_over, has_order) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
    if has_order && !is_over {
        match orders.receive() {
            Ok(Some((order, descriptors))) => carry_out(mapped, order, descriptors),
            // Nobody holds anything any more: the process that serves goes on alone.
            Ok(None) => std::process::exit(0),
            Err(error) => tracing::error!(%error, "an order of the holder cannot be read"),
        }
    }
    is_over
}

fn take_orders(mapped: &mut Vec<Mapped>, orders: &Link) {
    let has_order = || {
        let mut fds = [PollFd::new(orders, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok() && fds[0].revents().contains(PollFlags::IN)
    };
    while has_order()
        && let Ok(Some((order, descriptors))) = orders.receive()
    {
        carry_out(mapped, order, descriptors);
    }
}

fn carry_out(mapped: &mut Vec<Mapped>, order: Order, descriptors: Vec<OwnedFd>) {
    match order {
        Order::Device(device) => match Kept::received(device, descriptors) {
            Ok(kept) => {
                let new = Mapped::new(kept);
                match mapped.iter_mut().find(|other| other.kept.device.name == new.kept.device.name) {
                    Some(place) => *place = new,
                    None => mapped.push(new),
                }
            }
            Err(error) => tracing::error!(%error, "a device is not mapped ahead"),
        },
        Order::Forget { name } => mapped.retain(|other| other.kept.device.name != name),
        // The holder repeats what concerns the process that serves, and a user who is not answered presses ^C
        // again.
        Order::End(_) | Order::Interrupt | Order::CommandEnded | Order::Reload => {}
    }
}
