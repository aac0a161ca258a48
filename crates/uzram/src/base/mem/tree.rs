//! A tournament tree: finds the lowest (or highest) leaf whose value is large enough.

use crate::base::error::{Error, ErrorKind, Result};

/// A tournament tree of small values. Leaves that were never set are 0.
#[derive(Default)]
pub(super) struct Tree {
    /// `nodes[leaves + n]` is leaf `n`; a parent holds the larger of its children; the root is at 1.
    nodes: Vec<u8>,
    leaves: usize,
}

impl Tree {
    /// Makes room for the leaves below `len`. Fails with `NoMemory`, and changes nothing, when there is none.
    pub(super) fn grow(&mut self, len: usize) -> Result<()> {
        if len <= self.leaves {
            return Ok(());
        }
        let leaves = len.next_power_of_two();
        let mut nodes = Vec::new();
        let reserved = nodes.try_reserve_exact(2 * leaves);
        reserved.map_err(|_| Error::new(ErrorKind::NoMemory, "no memory for the arena's tree"))?;
        nodes.resize(2 * leaves, 0);
        nodes[leaves..leaves + self.leaves].copy_from_slice(&self.nodes[self.leaves..]);
        for node in (1..leaves).rev() {
            nodes[node] = nodes[2 * node].max(nodes[2 * node + 1]);
        }
        (self.nodes, self.leaves) = (nodes, leaves);
        Ok(())
    }

    /// Returns the lowest leaf of at least `least` (more than 0).
    #[inline]
    pub(super) fn first(&self, least: u8) -> Option<usize> {
        self.find::<0>(least)
    }

    /// Returns the highest leaf of at least `least` (more than 0).
    pub(super) fn last(&self, least: u8) -> Option<usize> {
        self.find::<1>(least)
    }

    /// `SIDE` is 0 to prefer lower leaves, 1 to prefer higher ones.
    #[inline]
    fn find<const SIDE: usize>(&self, least: u8) -> Option<usize> {
        if self.leaves == 0 || self.nodes[1] < least {
            return None;
        }
        let mut node = 1;
        while node < self.leaves {
            node = 2 * node + SIDE;
            if self.nodes[node] < least {
                node ^= 1;
            }
        }
        Some(node - self.leaves)
    }

    #[inline]
    pub(super) fn get(&self, leaf: usize) -> u8 {
        self.nodes[self.leaves + leaf]
    }

    pub(super) fn bytes(&self) -> usize {
        self.nodes.len()
    }

    #[inline]
    pub(super) fn set(&mut self, leaf: usize, value: u8) {
        let mut node = self.leaves + leaf;
        if self.nodes[node] == value {
            return;
        }
        self.nodes[node] = value;
        while node > 1 {
            let larger = self.nodes[node].max(self.nodes[node ^ 1]);
            node /= 2;
            if self.nodes[node] == larger {
                break;
            }
            self.nodes[node] = larger;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::Random;

    #[test]
    fn finds_what_a_scan_finds() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let (mut tree, mut model) = (Tree::default(), Vec::<u8>::new());
            for _ in 0..1000 {
                if random.below(20) == 0 {
                    model.resize(model.len() + 1 + random.below(3), 0);
                    tree.grow(model.len()).expect("memory");
                } else if !model.is_empty() {
                    let leaf = random.below(model.len());
                    model[leaf] = random.below(18) as u8;
                    tree.set(leaf, model[leaf]);
                }
                let least = 1 + random.below(17) as u8;
                assert_eq!(tree.first(least), model.iter().position(|value| *value >= least), "seed {seed}");
                assert_eq!(tree.last(least), model.iter().rposition(|value| *value >= least), "seed {seed}");
            }
        }
    }
}
