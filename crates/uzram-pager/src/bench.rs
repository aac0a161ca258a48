//! What a thread moves pages with.

use uzram::units::{PAGE_SIZE, Page};

use crate::trap::MOST_PAGES;

/// What a thread moves pages with.
pub(crate) struct Bench<S> {
    /// Where pages lie that it takes.
    pub(crate) shelf: S,
    /// Contents on their way.
    pub(crate) buffer: Box<[Page; MOST_PAGES]>,
}

impl<S> Bench<S> {
    pub(crate) fn new(shelf: S) -> Bench<S> {
        let Ok(buffer) = vec![[0; PAGE_SIZE]; MOST_PAGES].try_into() else {
            unreachable!("it has this length")
        };
        Bench { shelf, buffer }
    }
}
