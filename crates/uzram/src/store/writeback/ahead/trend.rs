//! Which pages are read next: a vote over the steps between the numbers of those read last (H. A. Maruf and
//! M. Chowdhury, "Effectively Prefetching Remote Memory with Leap", USENIX ATC 2020, algorithm 1). A step
//! that more than half of the last reads took is the trend; the votes of the last few are counted first, then
//! of twice as many, and so on. The majority is found by R. S. Boyer and J S. Moore's algorithm.

const STEPS: usize = 32;
/// The last steps that are counted first.
const LEAST_STEPS: usize = 4;

/// The last reads.
#[derive(Default)]
pub(super) struct Trend {
    last_page: u64,
    /// A ring.
    steps: [i64; STEPS],
    /// How many steps there were.
    count: usize,
    has_read: bool,
}

impl Trend {
    pub(super) fn note(&mut self, page: u64) {
        let step = page.wrapping_sub(self.last_page) as i64;
        if self.has_read && step == 0 {
            return;
        }
        if self.has_read {
            self.steps[self.count % STEPS] = step;
            self.count += 1;
        }
        (self.last_page, self.has_read) = (page, true);
    }

    /// Returns the step of most of the last reads, if there is one.
    pub(super) fn step(&self) -> Option<i64> {
        let mut counted = LEAST_STEPS;
        while counted <= self.count.min(STEPS) {
            if let Some(step) = self.majority(counted) {
                return Some(step);
            }
            counted *= 2;
        }
        None
    }

    pub(super) fn forget(&mut self) {
        *self = Trend::default();
    }

    /// Returns the step that more than half of the last `counted` were.
    fn majority(&self, counted: usize) -> Option<i64> {
        let last = || (1..=counted).map(|back| self.steps[(self.count - back) % STEPS]);
        let (mut candidate, mut lead) = (0, 0);
        for step in last() {
            match lead {
                0 => (candidate, lead) = (step, 1),
                _ if step == candidate => lead += 1,
                _ => lead -= 1,
            }
        }
        (last().filter(|step| *step == candidate).count() > counted / 2).then_some(candidate)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::base::random::Random;

    fn of(pages: impl IntoIterator<Item = u64>) -> Option<i64> {
        let mut trend = Trend::default();
        pages.into_iter().for_each(|page| trend.note(page));
        trend.step()
    }

    #[test]
    fn most_of_the_last_steps_are_the_trend() {
        assert_eq!(of([]), None);
        assert_eq!(of(5..9), None, "three steps");
        assert_eq!(of(5..10), Some(1));
        assert_eq!(of((0..10).rev()), Some(-1));
        assert_eq!(of((0..10).map(|page| page * 7)), Some(7));
        // One jump in four is outvoted; so are repeated reads.
        assert_eq!(of([10, 11, 12, 12, 12, 500, 501]), Some(1));
        assert_eq!(of([0, 1, 50, 51, 100, 101, 150, 151]), None);
        // An old trend yields to a new one.
        assert_eq!(of((0..100).chain((200..206).rev())), Some(-1));
        assert_eq!(of([u64::MAX, 0, 1, 2, 3]), Some(1));
    }

    /// A naive count finds the same.
    #[test]
    fn the_vote_agrees_with_a_count() {
        for seed in 0..2000 {
            let mut random = Random::new(seed);
            let (mut page, mut pages) = (1 << 20, Vec::new());
            for _ in 0..random.below(80) {
                page += random.below(3) as u64;
                pages.push(page);
            }
            let mut all: Vec<i64> = pages.windows(2).map(|two| (two[1] - two[0]) as i64).collect();
            all.retain(|step| *step != 0);
            let voted = [4, 8, 16, 32].into_iter().filter(|counted| *counted <= all.len());
            let expected = voted.into_iter().find_map(|counted| {
                let last = &all[all.len() - counted..];
                [1, 2]
                    .into_iter()
                    .find(|step| last.iter().filter(|other| *other == step).count() > counted / 2)
            });
            assert_eq!(of(pages), expected, "seed {seed}");
        }
    }
}
