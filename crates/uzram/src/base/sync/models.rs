//! What loom models share.

use super::Arc;
use loom::thread::{self, JoinHandle};

/// Checks `f` in every interleaving of at most so many preemptions, or of `LOOM_MAX_PREEMPTIONS`.
pub(crate) fn model(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    // A pool's operations have many branches.
    builder.max_branches = 10_000;
    builder.check(f);
}

pub(crate) fn beside<T: 'static, R: 'static>(
    shared: &Arc<T>,
    f: impl FnOnce(&T) -> R + 'static,
) -> JoinHandle<R> {
    let shared = Arc::clone(shared);
    thread::spawn(move || f(&shared))
}

/// Runs `f` in `threads` threads, of which this is one.
pub(crate) fn together<T: 'static>(threads: u32, shared: &Arc<T>, f: impl Fn(&T) + Clone + 'static) {
    let others: Vec<_> = (1..threads).map(|_| beside(shared, f.clone())).collect();
    f(shared);
    others.into_iter().for_each(|other| other.join().expect("no panic"));
}
