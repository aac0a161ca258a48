//! A discrete-event simulation of cores that do a model's operations and wait for its locks.
//!
//! Waiters of a lock form a queue; the lock goes to the first that still spins. Its hand-over moves the section's
//! lines if the last holder was another core, and takes longer with every spinning waiter. Where waiters sleep, each
//! release wakes the one that has slept longest; that one tries again after the time that waking takes, and by then
//! another may have the lock. The same seed gives the same run.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use uzram::Result;

use super::model::{Machine, Model, Service, Spread};

/// Picoseconds: integers order events without rounding.
type Ps = u64;

const PS_PER_NS: f64 = 1000.0;
/// One operation in this many warms up and is not counted.
const WARM_UP: usize = 5;

/// The result of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Operations a second, by all cores.
    pub per_s: f64,
    /// The waits for each lock of the model.
    pub waits: Vec<Waits>,
    /// The part of the cores' time in which they waited.
    pub waiting_share: f64,
}

/// The waits for a lock.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Waits {
    /// Visits.
    pub visits: u64,
    /// Those that found the lock taken.
    pub waited: u64,
    /// Nanoseconds waited, by all visits.
    pub ns: f64,
}

/// Simulates `cores` cores until they have done `operations` operations, after a fifth as many that warm up.
///
/// # Errors
/// Those of [`Model::check`].
pub fn simulate(
    model: &Model,
    machine: &Machine,
    cores: usize,
    seed: u64,
    operations: usize,
) -> Result<Outcome> {
    model.check()?;
    let (cores, operations) = (cores.max(1), operations.max(1));
    let mut run = Run::new(model, machine, cores, seed);
    run.until((operations / WARM_UP) as u64);
    let started = run.now;
    run.waits.fill(Waits::default());
    let done = run.done;
    run.until(done + operations as u64);
    let ns = (run.now - started).max(1) as f64 / PS_PER_NS;
    // Not a sum, which is -0 without locks.
    let waited_ns = run.waits.iter().fold(0.0, |ns, waits| ns + waits.ns);
    let per_s = (run.done - done) as f64 * 1e9 / ns;
    // Some waits began before the time that is counted.
    let waiting_share = (waited_ns / (ns * cores as f64)).min(1.0);
    Ok(Outcome { per_s, waits: run.waits, waiting_share })
}

/// A lock of a kind, or the stack of things.
struct Resource {
    /// Free tokens; a lock has one, a stack one for each core: it would never hand out more.
    free: Vec<usize>,
    /// The core that had each token last.
    last: Vec<Option<usize>>,
    waiters: VecDeque<Waiter>,
}

struct Waiter {
    core: usize,
    since: Ps,
}

/// What a core does next, when its event comes.
#[derive(Clone, Copy)]
enum Next {
    /// Goes on with the section's next visit.
    Go,
    /// Ends a visit outside of all locks.
    EndOutside,
    /// Releases a token of a resource.
    Release { resource: usize, token: usize },
    /// Was woken, and tries to take the lock again.
    Retry { resource: usize },
}

#[derive(Clone, Copy)]
struct Core {
    section: usize,
    visits_left: u32,
    next: Next,
    /// When it began to wait, of which waking is a part.
    asked: Ps,
}

struct Run<'a> {
    model: &'a Model,
    machine: &'a Machine,
    random: fastrand::Rng,
    now: Ps,
    done: u64,
    /// When the cores' next events are; the second number orders those of the same time.
    events: BinaryHeap<Reverse<(Ps, u64, usize)>>,
    scheduled: u64,
    cores: Vec<Core>,
    resources: Vec<Resource>,
    /// The index of each lock's first resource.
    first: Vec<usize>,
    waits: Vec<Waits>,
}

impl<'a> Run<'a> {
    fn new(model: &'a Model, machine: &'a Machine, cores: usize, seed: u64) -> Self {
        let mut resources = Vec::new();
        let mut first = Vec::new();
        for lock in &model.locks {
            first.push(resources.len());
            let (count, tokens) = match lock.spread {
                Spread::One => (1, 1),
                Spread::Random(count) => (count.max(1), 1),
                Spread::PerNode => (machine.nodes.max(1), 1),
                Spread::Stack => (1, cores),
            };
            resources.extend((0..count).map(|_| Resource {
                free: (0..tokens).collect(),
                last: vec![None; tokens],
                waiters: VecDeque::new(),
            }));
        }
        let core = Core { section: 0, visits_left: 0, next: Next::Go, asked: 0 };
        let mut run = Run {
            model,
            machine,
            random: fastrand::Rng::with_seed(seed),
            now: 0,
            done: 0,
            events: BinaryHeap::new(),
            scheduled: 0,
            cores: vec![core; cores],
            resources,
            first,
            waits: vec![Waits::default(); model.locks.len()],
        };
        for core in 0..cores {
            // They do not start in step.
            let at = ps(run.random.f64() * model.alone_ns());
            run.cores[core].visits_left = run.draw_visits(0);
            run.schedule(core, at, Next::Go);
        }
        run
    }

    /// Handles events until that many operations are done.
    fn until(&mut self, done: u64) {
        while self.done < done {
            let Some(Reverse((at, _, core))) = self.events.pop() else { return };
            self.now = at;
            match self.cores[core].next {
                Next::Go => self.go_on(core, at),
                Next::EndOutside => self.end_visit(core, at),
                Next::Release { resource, token } => {
                    let at = self.release(resource, token);
                    self.end_visit(core, at);
                }
                Next::Retry { resource } => self.take(core, resource, at),
            }
        }
    }

    fn schedule(&mut self, core: usize, at: Ps, next: Next) {
        self.cores[core].next = next;
        self.events.push(Reverse((at, self.scheduled, core)));
        self.scheduled += 1;
    }

    fn end_visit(&mut self, core: usize, at: Ps) {
        self.cores[core].visits_left -= 1;
        if at > self.now {
            self.schedule(core, at, Next::Go);
        } else {
            self.go_on(core, at);
        }
    }

    /// Starts the next visit of a core, in this section or a later one.
    fn go_on(&mut self, core: usize, at: Ps) {
        while self.cores[core].visits_left == 0 {
            let mut section = self.cores[core].section + 1;
            if section == self.model.sections.len() {
                section = 0;
                self.done += 1;
            }
            self.cores[core].section = section;
            self.cores[core].visits_left = self.draw_visits(section);
        }
        let model = self.model;
        let section = &model.sections[self.cores[core].section];
        let Some(lock) = section.lock else {
            let moved_ns = if self.cores.len() > 1 { section.moved_ns(self.machine) } else { 0.0 };
            let ns = self.draw_ns(section.ns) + moved_ns;
            return self.schedule(core, at + ps(ns), Next::EndOutside);
        };
        let of_kind = match model.locks[lock].spread {
            Spread::One | Spread::Stack => 0,
            Spread::Random(count) => self.random.usize(..count.max(1)),
            Spread::PerNode => core % self.machine.nodes.max(1),
        };
        let resource = self.first[lock] + of_kind;
        self.cores[core].asked = at;
        self.waits[lock].visits += 1;
        self.waits[lock].waited += u64::from(self.resources[resource].free.is_empty());
        self.take(core, resource, at);
    }

    /// Takes a token, or waits for one.
    fn take(&mut self, core: usize, resource: usize, at: Ps) {
        match self.resources[resource].free.pop() {
            Some(token) => self.hold(core, resource, token, at, 0),
            None => self.resources[resource].waiters.push_back(Waiter { core, since: at }),
        }
    }

    /// Holds a token for the time of a visit.
    fn hold(&mut self, core: usize, resource: usize, token: usize, at: Ps, spinning: usize) {
        let model = self.model;
        let section = &model.sections[self.cores[core].section];
        if let Some(lock) = section.lock {
            self.waits[lock].ns += at.saturating_sub(self.cores[core].asked) as f64 / PS_PER_NS;
        }
        let last = self.resources[resource].last[token].replace(core);
        let is_elsewhere = last.is_some_and(|last| last != core);
        let moved_ns = if is_elsewhere { section.moved_ns(self.machine) } else { 0.0 };
        let spun_ns = spinning as f64 * self.machine.spin_ns_per_waiter;
        let ns = self.draw_ns(section.ns) + moved_ns + spun_ns;
        self.schedule(core, at + ps(ns), Next::Release { resource, token });
    }

    /// Releases a token; returns when the core goes on.
    fn release(&mut self, resource: usize, token: usize) -> Ps {
        let now = self.now;
        let after = self.machine.sleep.map(|sleep| ps(sleep.after_ns));
        let is_asleep = |waiter: &Waiter| after.is_some_and(|after| now - waiter.since >= after);
        let waiters = &mut self.resources[resource].waiters;
        // The queue is in the order of arrival: those who sleep are in front.
        let asleep = waiters.iter().take_while(|waiter| is_asleep(waiter)).count();
        let spinner = waiters.remove(asleep);
        let spinning = waiters.len() - asleep;
        let woken = if asleep > 0 { waiters.pop_front() } else { None };
        match spinner {
            Some(waiter) => self.hold(waiter.core, resource, token, now, spinning),
            None => self.resources[resource].free.push(token),
        }
        let Some((waiter, sleep)) = woken.zip(self.machine.sleep) else { return now };
        self.schedule(waiter.core, now + ps(sleep.wake_ns), Next::Retry { resource });
        now + ps(sleep.call_ns)
    }

    fn draw_visits(&mut self, section: usize) -> u32 {
        let visits = self.model.sections[section].visits;
        let whole = visits.floor();
        whole as u32 + u32::from(self.random.f64() < visits - whole)
    }

    fn draw_ns(&mut self, mean_ns: f64) -> f64 {
        match self.machine.service {
            Service::Deterministic => mean_ns,
            // 1 - f64() is never 0.
            Service::Exponential => -mean_ns * (1.0 - self.random.f64()).ln(),
        }
    }
}

fn ps(ns: f64) -> Ps {
    (ns * PS_PER_NS).round() as Ps
}
