//! Mean value analysis: the exact speed of a closed queueing network whose times are exponential.
//!
//! The cross-check of the simulation. It knows neither the cost of moving lines nor that of waiting, because a time
//! that depends on who held a lock before, or on how many wait, has no such closed form.
//!
//! M. Reiser and S. S. Lavenberg, "Mean-Value Analysis of Closed Multichain Queuing Networks", Journal of the ACM
//! 27(2), 1980.

use super::model::{Model, Spread};

/// Centres of a network at which one customer is served at a time, all alike.
struct Centres {
    count: f64,
    /// Nanoseconds that an operation spends at each of them, on average, without waiting.
    demand_ns: f64,
    /// Customers at each of them.
    queue: f64,
}

/// Returns the operations a second of `cores` cores on `nodes` nodes.
///
/// It is exact if locks are all of the cores' nodes, or none is. Otherwise it is approximate: the locks of nodes are
/// taken at random.
pub fn throughput(model: &Model, cores: usize, nodes: usize) -> f64 {
    let nodes = nodes.max(1);
    let is_shared =
        |at: usize, spread| matches!(spread, Spread::One | Spread::Random(_)) && model.demand_ns(at) > 0.0;
    let any_shared = model.locks.iter().enumerate().any(|(at, lock)| is_shared(at, lock.spread));
    if any_shared {
        return of_network(model, cores, nodes);
    }
    // Each node is a network of its own.
    (0..nodes).map(|node| of_network(model, (cores + nodes - 1 - node) / nodes, 1)).sum()
}

fn of_network(model: &Model, cores: usize, nodes: usize) -> f64 {
    let outside_ns: f64 = model
        .sections
        .iter()
        .filter(|section| section.lock.is_none())
        .map(|section| section.visits * section.ns)
        .sum();
    let mut delay_ns = outside_ns;
    let mut centres = Vec::new();
    for (at, lock) in model.locks.iter().enumerate() {
        let demand_ns = model.demand_ns(at);
        let count = match lock.spread {
            Spread::One => 1,
            Spread::Random(count) => count.max(1),
            Spread::PerNode => nodes,
            // There is one for each core, at least: nobody waits.
            Spread::Stack => {
                delay_ns += demand_ns;
                continue;
            }
        } as f64;
        centres.push(Centres { count, demand_ns: demand_ns / count, queue: 0.0 });
    }
    let mut per_ns = 0.0;
    for customers in 1..=cores {
        let residence_ns = |centre: &Centres| centre.demand_ns * (1.0 + centre.queue);
        let all_ns: f64 = centres.iter().map(|centre| centre.count * residence_ns(centre)).sum();
        per_ns = customers as f64 / (delay_ns + all_ns);
        centres.iter_mut().for_each(|centre| centre.queue = per_ns * residence_ns(centre));
    }
    per_ns * 1e9
}

/// Returns the bounds of the operations a second for any distribution of times, the lower one for queues in which the
/// times do not vary more than exponentially: P. J. Denning and J. P. Buzen, "The Operational Analysis of Queueing
/// Network Models", ACM Computing Surveys 10(3), 1978.
pub fn bounds(model: &Model, cores: usize, nodes: usize) -> (f64, f64) {
    let alone_ns = model.alone_ns();
    let of_each = |(at, lock): (usize, &super::model::Lock)| match lock.spread {
        Spread::One => model.demand_ns(at),
        Spread::Random(count) => model.demand_ns(at) / count.max(1) as f64,
        Spread::PerNode => model.demand_ns(at) / nodes.max(1) as f64,
        Spread::Stack => 0.0,
    };
    let busiest_ns = model.locks.iter().enumerate().map(of_each).fold(0.0, f64::max);
    let in_locks_ns: f64 = (0..model.locks.len())
        .filter(|at| model.locks[*at].spread != Spread::Stack)
        .map(|at| model.demand_ns(at))
        .sum();
    let cores = cores as f64;
    let most = (cores / alone_ns).min(1.0 / busiest_ns);
    let least = cores / (alone_ns + (cores - 1.0) * in_locks_ns);
    (1e9 * least, 1e9 * most)
}
