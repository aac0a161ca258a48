//! What is simulated: an operation as a sequence of sections, each in a lock or outside of all, and the costs of the
//! machine that runs it.

use uzram::{Error, Result};

/// The operations of a design. Every core does one after the other.
#[derive(Clone, Debug)]
pub struct Model {
    /// The locks that the sections take, by index.
    pub locks: Vec<Lock>,
    /// The sections of one operation, in order.
    pub sections: Vec<Section>,
}

/// A lock, or as many of a kind.
#[derive(Clone, Debug)]
pub struct Lock {
    /// Its name in reports.
    pub name: String,
    /// Which of a kind a core takes.
    pub spread: Spread,
}

/// Which of several locks of a kind a core takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// There is one.
    One,
    /// One of so many, each with the same probability.
    Random(usize),
    /// That of the core's node.
    PerNode,
    /// No lock but a stack of things, one for each core or more: whoever needs one takes that which was returned last,
    /// so that no more of them are used than there are cores. Nobody waits, but the thing may come from another core.
    Stack,
}

/// A part of an operation.
#[derive(Clone, Debug)]
pub struct Section {
    /// Its name in reports.
    pub name: String,
    /// The lock that is held for all of it; `None` outside of all locks.
    pub lock: Option<usize>,
    /// How often an operation has it, on average. The part after the point is a probability.
    pub visits: f64,
    /// Nanoseconds that a visit takes, on average, with all lines in the core's cache.
    pub ns: f64,
    /// Cache lines, each fetched after the one before, that a visit moves here from another core: in a lock if the last
    /// holder was another one, outside whenever there are several cores.
    pub lines: f64,
    /// Further lines, which are fetched side by side.
    pub bulk_lines: f64,
}

/// The costs of a machine.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Nanoseconds until a line that another core has written is here.
    pub line_ns: f64,
    /// The same for each of many lines that are fetched side by side.
    pub bulk_line_ns: f64,
    /// The cores are spread over so many nodes, in turn.
    pub nodes: usize,
    /// Nanoseconds by which each thread that spins for a lock delays its hand-over.
    pub spin_ns_per_waiter: f64,
    /// How waiters sleep; `None` if they spin for as long as it takes.
    pub sleep: Option<Sleep>,
    /// How times are distributed.
    pub service: Service,
}

/// How waiters of a lock sleep.
#[derive(Clone, Copy, Debug)]
pub struct Sleep {
    /// Nanoseconds after which a waiter stops spinning.
    pub after_ns: f64,
    /// Nanoseconds from the release until the woken waiter tries again.
    pub wake_ns: f64,
    /// Nanoseconds that waking it takes the releasing core.
    pub call_ns: f64,
}

/// How the times of a section are distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Every visit takes the average.
    Deterministic,
    /// Exponentially: the standard deviation is the average.
    Exponential,
}

impl Machine {
    /// Returns a machine on which moving lines and waiting costs nothing by itself.
    pub const fn ideal(service: Service) -> Machine {
        Machine { line_ns: 0.0, bulk_line_ns: 0.0, nodes: 1, spin_ns_per_waiter: 0.0, sleep: None, service }
    }
}

impl Section {
    /// Returns the nanoseconds that a visit takes longer if its lines come from another core.
    pub(super) fn moved_ns(&self, machine: &Machine) -> f64 {
        self.lines * machine.line_ns + self.bulk_lines * machine.bulk_line_ns
    }
}

impl Model {
    /// Returns the nanoseconds of an operation on one core.
    pub fn alone_ns(&self) -> f64 {
        self.sections.iter().map(|section| section.visits * section.ns).sum()
    }

    /// Returns the nanoseconds for which an operation holds the lock at an index, lines in the cache.
    pub fn demand_ns(&self, lock: usize) -> f64 {
        let of_lock = self.sections.iter().filter(|section| section.lock == Some(lock));
        of_lock.map(|section| section.visits * section.ns).sum()
    }

    /// Multiplies the times of all sections: the same operation on a faster or slower core.
    #[must_use]
    pub fn scaled(&self, factor: f64) -> Model {
        let mut model = self.clone();
        model.sections.iter_mut().for_each(|section| section.ns *= factor);
        model
    }

    /// Checks that the model can be simulated.
    ///
    /// # Errors
    /// `Invalid`: a number is negative or none, a lock does not exist, or an operation takes no time.
    pub fn check(&self) -> Result<()> {
        for section in &self.sections {
            let numbers = [section.visits, section.ns, section.lines, section.bulk_lines];
            let is_number = numbers.iter().all(|number| number.is_finite() && *number >= 0.0);
            if !is_number || section.lock.is_some_and(|lock| lock >= self.locks.len()) {
                return Err(Error::invalid(format!("section '{}' of a model: {section:?}", section.name)));
            }
        }
        if self.alone_ns() <= 0.0 {
            return Err(Error::invalid("an operation of a model takes no time"));
        }
        Ok(())
    }
}
