//! From measurements to models: the times inside and outside of each lock of a design, by the parameters.

use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

use super::costs::Costs;
use super::model::{Lock, Machine, Model, Section, Service, Sleep};
use super::parameters::{CaseParameters, SectionParameters};
use crate::experiment::Values;
use uzram_bench::harness::stats::{median, quantile};

/// Which measurements a model is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// The median of all rounds, quantity by quantity.
    Median,
    /// One round's.
    Round(usize),
}

impl Pick {
    fn of(self, rounds: &[f64]) -> Option<f64> {
        match self {
            _ if rounds.is_empty() => None,
            Pick::Median => Some(median(rounds)),
            Pick::Round(round) => rounds.get(round % rounds.len()).copied(),
        }
    }
}

/// The rows of one design with one job, and what this machine costs.
#[derive(Clone, Copy)]
pub struct Measured<'a> {
    /// The measurements of the table with one job.
    pub values: &'a Values,
    /// The machine's costs.
    pub costs: &'a Costs,
}

impl Measured<'_> {
    /// Returns the number of rounds.
    pub fn rounds(&self) -> usize {
        self.values.get("elapsed_s").map_or(0, Vec::len)
    }

    /// Returns the nanoseconds of a page or object.
    ///
    /// # Errors
    /// `Unsupported`: the quantity was not measured.
    pub fn unit_ns(&self, case: &CaseParameters, pick: Pick) -> Result<f64> {
        let value = self.quantity(&case.time, pick)?;
        Ok(if case.time == "mb_per_s" { PAGE_SIZE as f64 * 1000.0 / value } else { value })
    }

    /// Returns a quantity of the table, or a cost of the machine.
    fn quantity(&self, name: &str, pick: Pick) -> Result<f64> {
        let cost = match name {
            "stream_list_ns" => Some(&self.costs.stream_list_ns),
            "compress_ns" => Some(&self.costs.compress_ns),
            _ => None,
        };
        cost.or_else(|| self.values.get(name)).and_then(|rounds| pick.of(rounds)).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, format!("scale/parameters.json: '{name}' was not measured"))
        })
    }

    /// Returns the model of a design.
    ///
    /// # Errors
    /// `Unsupported`: a quantity was not measured. `Invalid`: the parameters name a lock that they do not have, or an
    /// operation takes no time.
    pub fn model(&self, case: &CaseParameters, sections: &[SectionParameters], pick: Pick) -> Result<Model> {
        let quantity = |name: &str| self.quantity(name, pick);
        let lock = |lock: &super::parameters::LockParameters| {
            Ok(Lock { name: lock.name.clone(), spread: lock.spread(lock.count.value(quantity)?) })
        };
        let locks = case.locks.iter().map(lock).collect::<Result<Vec<Lock>>>()?;
        let mut model = Model { locks, sections: Vec::new() };
        for section in sections {
            model.sections.push(self.section(&model.locks, section, pick)?);
        }
        let operation_ns = self.unit_ns(case, pick)? * case.units_per_operation;
        // Times are noisy: what is measured inside may exceed what is measured of all.
        let inside_ns = model.alone_ns();
        let rest_ns = operation_ns - inside_ns;
        let least_ns = operation_ns * LEAST_REST;
        if rest_ns < least_ns {
            let fitting = (operation_ns - least_ns) / inside_ns;
            model.sections.iter_mut().for_each(|section| section.ns *= fitting);
        }
        for (section, parameters) in model.sections.iter_mut().zip(sections) {
            if parameters.ns.is_rest() {
                section.ns = rest_ns.max(least_ns);
            }
        }
        model.check()?;
        Ok(model)
    }

    /// Returns a section, without the rest of the operation's time.
    fn section(&self, locks: &[Lock], section: &SectionParameters, pick: Pick) -> Result<Section> {
        let quantity = |name: &str| self.quantity(name, pick);
        let lock = match &section.lock {
            None => None,
            Some(name) => Some(locks.iter().position(|lock| lock.name == *name).ok_or_else(|| {
                Error::invalid(format!(
                    "scale/parameters.json: section '{}' takes no lock '{name}'",
                    section.name
                ))
            })?),
        };
        let visits = section.visits.value(quantity)?;
        let all_ns = if section.ns.is_rest() { 0.0 } else { section.ns.value(quantity)? };
        let clock_ns = match pick.of(&self.costs.clock_ns) {
            Some(clock_ns) if section.is_timed => clock_ns,
            _ => 0.0,
        };
        Ok(Section {
            name: section.name.clone(),
            lock,
            visits,
            ns: if visits > 0.0 { (all_ns / visits - clock_ns).max(0.0) } else { 0.0 },
            lines: section.lines.value(quantity)?,
            bulk_lines: section.bulk_lines.value(quantity)?,
        })
    }
}

/// The least part of an operation that is outside of what was measured.
const LEAST_REST: f64 = 0.01;

/// The least, the middle and the most of a cost.
#[derive(Clone, Copy, Debug)]
pub enum Level {
    /// The least.
    Low,
    /// The middle.
    Middle,
    /// The most.
    High,
}

impl Level {
    /// Returns that of the rounds.
    fn of(self, rounds: &[f64]) -> f64 {
        match self {
            Level::Low => quantile(rounds, 0.1),
            Level::Middle => median(rounds),
            Level::High => quantile(rounds, 0.9),
        }
    }

    /// Returns that of three.
    fn pick(self, of: [f64; 3]) -> f64 {
        of[self as usize]
    }
}

/// Returns this machine, as if it had more cores like these.
pub fn here(costs: &Costs, spin_lines_per_waiter: [f64; 3], level: Level) -> Machine {
    let line_ns = level.of(&costs.line_ns);
    Machine {
        line_ns,
        bulk_line_ns: level.of(&costs.bulk_line_ns),
        nodes: 1,
        spin_ns_per_waiter: level.pick(spin_lines_per_waiter) * line_ns,
        sleep: Some(Sleep {
            after_ns: median(&costs.spin_ns),
            wake_ns: median(&costs.wake_ns),
            call_ns: median(&costs.wake_call_ns),
        }),
        service: Service::Exponential,
    }
}

/// Returns another machine, of which only a range of the cost of a line is known, and whose kernel queues waiters, which
/// spin on a line each (Linux since 4.2). Many lines cost there as many times less as here.
pub fn elsewhere(costs: &Costs, line_ns: [f64; 2], nodes: usize, level: Level) -> Machine {
    let [low, high] = line_ns;
    let line_ns = level.pick([low, (low * high).sqrt(), high]);
    let of_one = median(&costs.bulk_line_ns) / median(&costs.line_ns);
    Machine {
        line_ns,
        bulk_line_ns: line_ns * of_one.min(1.0),
        nodes,
        spin_ns_per_waiter: 0.0,
        sleep: None,
        service: Service::Exponential,
    }
}
