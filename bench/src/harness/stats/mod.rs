//! The statistics that measurements need: medians, a histogram of durations, and confidence intervals of
//! ratios ([`PairedRatio`]).

mod paired;

use std::time::Duration;

pub use paired::{MAX_PAIRS, PairedRatio, at_least, can_judge, coverage};

/// Returns the median, the mean of the middle two for an even count; NaN for no values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
    }
}

/// Returns the smallest of the values that `fraction` of them do not exceed; NaN for no values.
pub fn quantile(values: &[f64], fraction: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let rank = (fraction * sorted.len() as f64).ceil().max(1.0) as usize;
    sorted.get(rank.min(sorted.len()).wrapping_sub(1)).copied().unwrap_or(f64::NAN)
}

/// Returns the median of `a[i] / b[i]`. Measurements of one round see the machine in the same state, so that
/// their ratio is steadier than the ratio of two medians.
pub fn median_ratio(a: &[f64], b: &[f64]) -> f64 {
    let ratios: Vec<_> = a.iter().zip(b).map(|(a, b)| a / b).collect();
    median(&ratios)
}

/// A bucket has all numbers of ns with the same exponent and the same five first bits behind it: 32 buckets
/// to each power of two, each at most 1/32 of its value wide.
const BUCKET_SHIFT: u32 = f32::MANTISSA_DIGITS - 1 - 5;
/// The bucket of 1 ns.
const FIRST_BUCKET: usize = (1f32.to_bits() >> BUCKET_SHIFT) as usize;
/// The longest time that is resolved is 2^40 ns, 18 minutes.
const MAX_BITS: u32 = 40;
const BUCKETS: usize = MAX_BITS as usize * 32 + 1;

/// Counts durations in buckets of about 3 %.
pub struct Histogram(Vec<u64>);

impl Default for Histogram {
    fn default() -> Self {
        Histogram(vec![0; BUCKETS])
    }
}

impl Histogram {
    /// Counts one duration.
    #[inline]
    pub fn record(&mut self, duration: Duration) {
        let nanos = duration.as_nanos().clamp(1, 1 << MAX_BITS) as u64;
        self.0[bucket_of(nanos)] += 1;
    }

    /// Adds another thread's counts.
    pub fn merge(&mut self, other: &Histogram) {
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| *mine += theirs);
    }

    /// Returns the duration in microseconds that `fraction` of those counted do not exceed (the middle of its
    /// bucket); NaN if none was counted.
    pub fn quantile_us(&self, fraction: f64) -> f64 {
        let total: u64 = self.0.iter().sum();
        let rank = (fraction * total as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.0.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return middle_of(bucket) / 1000.0;
            }
        }
        f64::NAN
    }
}

#[inline]
fn bucket_of(nanos: u64) -> usize {
    ((nanos as f32).to_bits() >> BUCKET_SHIFT) as usize - FIRST_BUCKET
}

fn middle_of(bucket: usize) -> f64 {
    let low = ((bucket + FIRST_BUCKET) as u32) << BUCKET_SHIFT;
    f32::from_bits(low + (1 << BUCKET_SHIFT) / 2).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_few_values() {
        assert!(median(&[]).is_nan());
        assert_eq!(median(&[3.0]), 3.0);
        assert_eq!(median(&[9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median(&[1.0, 2.0, 4.0, 100.0]), 3.0);
        assert_eq!(median_ratio(&[2.0, 30.0, 4.0], &[1.0, 10.0, 4.0]), 2.0);
    }

    #[test]
    fn quantiles_of_few_values() {
        assert!(quantile(&[], 0.99).is_nan());
        for (fraction, wanted) in [(0.0, 1.0), (0.25, 1.0), (0.5, 2.0), (0.51, 5.0), (0.99, 9.0), (1.0, 9.0)]
        {
            assert_eq!(quantile(&[9.0, 1.0, 5.0, 2.0], fraction), wanted, "{fraction}");
        }
    }

    #[test]
    fn buckets_are_in_order_and_narrow() {
        let mut last = 0;
        for nanos in (1..200_000u64).chain((18..MAX_BITS).map(|bits| (1 << bits) + 12345)) {
            let bucket = bucket_of(nanos);
            assert!(bucket >= last && bucket < BUCKETS, "{nanos}");
            assert!((middle_of(bucket) - nanos as f64).abs() <= 1.0 + nanos as f64 / 32.0, "{nanos}");
            last = bucket;
        }
        assert_eq!((bucket_of(1), bucket_of(1 << MAX_BITS)), (0, BUCKETS - 1));
    }

    #[test]
    fn quantiles_are_within_a_bucket() {
        let mut histogram = Histogram::default();
        assert!(histogram.quantile_us(0.5).is_nan());
        let mut half = Histogram::default();
        for micros in 1..=1000 {
            let into = if micros % 2 == 0 { &mut histogram } else { &mut half };
            into.record(Duration::from_micros(micros));
        }
        histogram.merge(&half);
        for (fraction, wanted) in [(0.5, 500.0), (0.99, 990.0), (0.999, 999.0)] {
            let got = histogram.quantile_us(fraction);
            assert!((got / wanted - 1.0).abs() < 0.04, "{fraction}: {got}");
        }
        histogram.record(Duration::MAX);
        histogram.record(Duration::ZERO);
        assert!(histogram.quantile_us(1.0) > 1e8 && histogram.quantile_us(0.0) < 0.01);
    }
}
