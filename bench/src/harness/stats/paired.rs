//! Compares two things that were measured in pairs: the median of the pairs' ratios, an interval for it, and
//! a rank test.
//!
//! Both are exact for the few pairs of a measurement; neither assumes a distribution.
//!
//! * The interval runs from the k-th smallest ratio to the k-th largest. The true median lies
//!   outside only if fewer than k of the pairs fell on one side of it, and how many do is
//!   binomial with one half: W. R. Thompson, "On confidence ranges for the median and other
//!   expectation distributions for populations of unknown distribution form", Annals of
//!   Mathematical Statistics 7 (1936); also W. J. Conover, "Practical Nonparametric Statistics",
//!   3rd edition, section 3.2.
//! * The test is the signed-rank test of F. Wilcoxon, "Individual comparisons by ranking methods", Biometrics
//!   Bulletin 1 (1945), two-sided, on the ratios' logarithms, so that exchanging the two things changes
//!   nothing. Pairs without a difference are left out and equal differences share their ranks, as in that
//!   paper; the distribution is counted over all signs, ties included.

use std::fmt;

use serde::Serialize;

use super::median;

/// The most pairs, which bounds the cost of the exact distributions.
pub const MAX_PAIRS: usize = 100;

/// The confidence level of an interval.
const WANTED_COVERAGE: f64 = 0.95;

/// Two things compared in pairs of measurements. `Display` prints the ratio and its interval, with 3 decimals
/// unless the format says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PairedRatio {
    /// The median of the pairs' ratios.
    pub ratio: f64,
    /// The lower end of the interval. It contains the true median with the probability [`coverage`]: 0.95 or
    /// a little more; less only with fewer than six pairs, of which it spans all.
    #[serde(rename = "ratio_low")]
    pub low: f64,
    /// The upper end.
    #[serde(rename = "ratio_high")]
    pub high: f64,
    /// The probability of signed ranks as uneven as these, or more, if the two were alike.
    pub p: f64,
}

impl PairedRatio {
    /// Compares `a[i]` with `b[i]`; a ratio is `a / b`. Returns `None` if there are no pairs, more than
    /// [`MAX_PAIRS`], or a measurement that is not above zero.
    pub fn new(a: &[f64], b: &[f64]) -> Option<PairedRatio> {
        let measured = |value: &f64| *value > 0.0 && value.is_finite();
        if a.len() != b.len() || !(1..=MAX_PAIRS).contains(&a.len()) || !a.iter().chain(b).all(measured) {
            return None;
        }
        let mut ratios: Vec<f64> = a.iter().zip(b).map(|(a, b)| a / b).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        let (k, _) = interval_of_median(ratios.len());
        let logarithms: Vec<f64> = ratios.iter().map(|ratio| ratio.ln()).collect();
        Some(PairedRatio {
            ratio: median(&ratios),
            low: ratios[k - 1],
            high: ratios[ratios.len() - k],
            p: signed_rank_p(&logarithms),
        })
    }
}

impl fmt::Display for PairedRatio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PairedRatio { ratio, low, high, .. } = self;
        let decimals = f.precision().unwrap_or(3);
        write!(f, "{ratio:.decimals$} [{low:.decimals$}, {high:.decimals$}]")
    }
}

/// Returns the probability that the interval of so many pairs contains the true median.
pub fn coverage(pairs: usize) -> f64 {
    interval_of_median(pairs).1
}

/// Returns whether so many pairs are enough to judge by their interval.
pub fn can_judge(pairs: usize) -> bool {
    // The interval of 5 pairs is.
    coverage(pairs) >= 0.93
}

/// Returns the probability that `k` or more of `n` independent events happen, each with probability `p`; for
/// `p` of a few percent and `n` of a few thousand at most.
pub fn at_least(k: usize, n: usize, p: f64) -> f64 {
    let mut exactly = (1.0 - p).powi(n as i32);
    let mut fewer = 0.0;
    for happened in 0..k.min(n + 1) {
        fewer += exactly;
        exactly *= (n - happened) as f64 / (happened + 1) as f64 * p / (1.0 - p);
    }
    (1.0 - fewer).clamp(0.0, 1.0)
}

/// Returns the largest k for which the interval from the k-th smallest to the k-th largest of `n` values
/// covers the median with the wanted probability, else 1; and that probability.
fn interval_of_median(n: usize) -> (usize, f64) {
    // The probabilities that exactly, and that at most, `below` of n values are below the median.
    let mut exactly = 0.5f64.powi(n as i32);
    let mut at_most = exactly;
    let (mut k, mut coverage) = (1, 1.0 - 2.0 * at_most);
    for below in 1..n.div_ceil(2) {
        exactly *= (n - below + 1) as f64 / below as f64;
        at_most += exactly;
        if 1.0 - 2.0 * at_most < WANTED_COVERAGE {
            break;
        }
        (k, coverage) = (below + 1, 1.0 - 2.0 * at_most);
    }
    (k, coverage.max(0.0))
}

/// Returns the two-sided p of the signed-rank test on differences; 1 if there is none.
fn signed_rank_p(differences: &[f64]) -> f64 {
    let mut differences: Vec<f64> = differences.iter().copied().filter(|d| *d != 0.0).collect();
    differences.sort_unstable_by(|a, b| a.abs().total_cmp(&b.abs()));
    let ranks = doubled_ranks(&differences);
    let positive: usize = ranks
        .iter()
        .zip(&differences)
        .filter(|(_, difference)| **difference > 0.0)
        .map(|(rank, _)| rank)
        .sum();
    // chances[s]: the probability that the positive ranks add up to s, each being positive with probability
    // one half.
    let total: usize = ranks.iter().sum();
    let mut chances = vec![0.0; total + 1];
    chances[0] = 1.0;
    let mut reached = 0;
    for rank in ranks {
        reached += rank;
        for sum in (0..=reached).rev() {
            let with = if sum >= rank { chances[sum - rank] } else { 0.0 };
            chances[sum] = 0.5 * (chances[sum] + with);
        }
    }
    let at_most: f64 = chances[..=positive].iter().sum();
    let at_least: f64 = chances[positive..].iter().sum();
    (2.0 * at_most.min(at_least)).min(1.0)
}

/// Returns twice the rank of each value's size, of values sorted by it: equal sizes share the mean of their
/// ranks, of which twice is whole.
fn doubled_ranks(sorted: &[f64]) -> Vec<usize> {
    let mut ranks = Vec::with_capacity(sorted.len());
    for tied in sorted.chunk_by(|a, b| a.abs() == b.abs()) {
        let (first, last) = (ranks.len() + 1, ranks.len() + tied.len());
        ranks.resize(last, first + last);
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Enumerates every combination of signs of the differences.
    fn p_by_enumeration(differences: &[f64]) -> f64 {
        let kept: Vec<f64> = differences.iter().copied().filter(|d| *d != 0.0).collect();
        let rank = |value: f64| {
            let smaller = kept.iter().filter(|other| other.abs() < value.abs()).count();
            let equal = kept.iter().filter(|other| other.abs() == value.abs()).count();
            smaller as f64 + (equal as f64 + 1.0) / 2.0
        };
        let sum = |is_positive: &dyn Fn(usize) -> bool| -> f64 {
            (0..kept.len()).filter(|i| is_positive(*i)).map(|i| rank(kept[i])).sum()
        };
        let seen = sum(&|i| kept[i] > 0.0);
        let all: Vec<f64> = (0..1usize << kept.len()).map(|signs| sum(&|i| signs >> i & 1 == 1)).collect();
        let share = |count: usize| count as f64 / all.len() as f64;
        let at_most = share(all.iter().filter(|sum| **sum <= seen).count());
        let at_least = share(all.iter().filter(|sum| **sum >= seen).count());
        (2.0 * at_most.min(at_least)).min(1.0)
    }

    #[test]
    fn the_signed_rank_test_is_exact_with_ties_and_zeros() {
        let mut rng = fastrand::Rng::with_seed(7);
        for round in 0..300 {
            let n = rng.usize(0..=9);
            let differences: Vec<f64> = (0..n).map(|_| f64::from(rng.i8(-4..=6))).collect();
            let (p, naive) = (signed_rank_p(&differences), p_by_enumeration(&differences));
            assert!((p - naive).abs() < 1e-12, "seed 7, round {round}: {differences:?}: {p}, not {naive}");
        }
    }

    /// Each value is below or above the median with probability one half: all combinations, enumerated.
    #[test]
    fn the_interval_covers_as_often_as_it_says() {
        for n in 1..=14usize {
            let (k, coverage) = interval_of_median(n);
            let covered = |k| {
                let holds = |sides: &u32| (k..=n - k).contains(&(sides.count_ones() as usize));
                (0..1u32 << n).filter(holds).count() as f64 / f64::from(1u32 << n)
            };
            assert!((covered(k) - coverage).abs() < 1e-12, "{n}: {}, not {coverage}", covered(k));
            assert!(coverage >= WANTED_COVERAGE || k == 1, "{n}");
            assert!(2 * (k + 1) > n || covered(k + 1) < WANTED_COVERAGE, "{n}: a shorter one would do");
        }
        // Printed tables of the sign test.
        assert_eq!([17, 25, 50].map(|n| interval_of_median(n).0), [5, 8, 18]);
    }

    #[test]
    fn events_are_counted_like_all_their_ways() {
        for (k, n, p) in [(0, 5, 0.1f64), (1, 5, 0.1), (3, 9, 0.04), (9, 9, 0.3), (2, 1, 0.5), (4, 12, 0.02)]
        {
            let naive: f64 = (0..1u32 << n)
                .map(u32::count_ones)
                .filter(|happened| *happened as usize >= k)
                .map(|happened| p.powi(happened as i32) * (1.0 - p).powi(n as i32 - happened as i32))
                .sum();
            assert!((at_least(k, n, p) - naive).abs() < 1e-12, "{k} of {n}, {p}: {}", at_least(k, n, p));
        }
    }

    #[test]
    fn a_comparison_is_the_same_from_either_side() {
        let before = [2.0, 2.2, 1.9, 2.1, 2.4, 2.0, 2.3, 1.8, 2.05];
        let after = [1.0, 1.0, 1.0, 1.1, 1.2, 2.5, 1.1, 1.0, 1.0];
        let one = PairedRatio::new(&before, &after).unwrap();
        let other = PairedRatio::new(&after, &before).unwrap();
        assert_eq!((one.ratio, one.low, one.high), (2.0, 1.8, 2.3 / 1.1));
        assert_eq!(format!("{one:.1}, {one}"), "2.0 [1.8, 2.1], 2.000 [1.800, 2.091]");
        assert!((one.ratio * other.ratio - 1.0).abs() < 1e-12 && (one.low * other.high - 1.0).abs() < 1e-12);
        assert!((one.p - other.p).abs() < 1e-12 && one.p < 0.05, "{one:?}");
        let same = PairedRatio::new(&before, &before).unwrap();
        assert_eq!((same.ratio, same.low, same.high, same.p), (1.0, 1.0, 1.0, 1.0));
    }

    #[test]
    fn what_is_no_measurement_is_not_compared() {
        let many = vec![1.0; MAX_PAIRS];
        assert!(PairedRatio::new(&many, &many).is_some());
        let too_many = vec![1.0; MAX_PAIRS + 1];
        for (a, b) in [(&[][..], &[][..]), (&[1.0], &[]), (&[0.0], &[1.0]), (&[1.0], &[f64::NAN])] {
            assert_eq!(PairedRatio::new(a, b), None);
        }
        assert_eq!(PairedRatio::new(&too_many, &too_many), None);
    }
}
