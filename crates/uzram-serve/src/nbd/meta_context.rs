//! Metadata contexts of `NBD_CMD_BLOCK_STATUS`: their names, ids and statuses.

use uzram::device::PageState;

use super::proto::{allocation, state};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// `base:allocation`, the specification's: see [`allocation`].
    Allocation = 1,
    /// `uzram:state`: see [`state`].
    State = 2,
}

impl Context {
    pub const ALL: [Context; 2] = [Context::Allocation, Context::State];

    pub const fn name(self) -> &'static str {
        match self {
            Context::Allocation => "base:allocation",
            Context::State => "uzram:state",
        }
    }

    pub const fn id(self) -> u32 {
        self as u32
    }

    pub const fn status(self, page: PageState) -> u32 {
        match (self, page) {
            (Context::Allocation, PageState::Hole) => allocation::HOLE | allocation::ZERO,
            (Context::Allocation, PageState::Zero) => allocation::ZERO,
            // What is lost is data, of which reads fail.
            (Context::Allocation, _) => 0,
            (Context::State, PageState::Hole) => state::HOLE,
            (Context::State, PageState::Zero) => state::ZERO,
            (Context::State, PageState::Same) => state::SAME,
            (Context::State, PageState::Compressed) => state::COMPRESSED,
            (Context::State, PageState::Huge) => state::HUGE,
            (Context::State, PageState::Backed) => state::BACKING,
            (Context::State, PageState::Lost) => state::LOST,
        }
    }
}

/// A set of contexts: a bit for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contexts(u32);

impl Contexts {
    /// Adds a context; returns false if the set has it already.
    pub fn insert(&mut self, context: Context) -> bool {
        let added = !self.contains(context);
        self.0 |= 1 << context.id();
        added
    }

    pub const fn contains(self, context: Context) -> bool {
        self.0 & 1 << context.id() != 0
    }

    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the contexts of the set, in the order of their ids.
    pub fn iter(self) -> impl Iterator<Item = Context> {
        Context::ALL.into_iter().filter(move |context| self.contains(*context))
    }

    /// Adds what a client's query selects: the context of that name or, with `wildcards`, all contexts
    /// of a namespace if the query is only its name and a colon. An unknown name selects nothing.
    /// Returns false if the query has no namespace.
    pub fn select(&mut self, query: &[u8], wildcards: bool) -> bool {
        let Some(colon) = query.iter().position(|byte| *byte == b':') else { return false };
        let names_all = wildcards && colon + 1 == query.len();
        for context in Context::ALL {
            let name = context.name().as_bytes();
            if name == query || names_all && name.starts_with(query) {
                self.insert(context);
            }
        }
        true
    }
}
