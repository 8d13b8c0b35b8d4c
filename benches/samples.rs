//! Times of one thing, measured again and again.

use std::time::Duration;

/// Nanoseconds, in the order in which they were taken.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<u64>);

impl Samples {
    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn extend(&mut self, others: Self) {
        self.0.extend(others.0);
    }

    /// The value that `part` of all are below, nanoseconds; 0 of none.
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let last = sorted.len().saturating_sub(1);
        sorted.get((last as f64 * part).round() as usize).map_or(0.0, |nanos| *nanos as f64)
    }

    pub(crate) fn median_ms(&self) -> f64 {
        self.quantile(0.5) / 1e6
    }

    pub(crate) fn median_us(&self) -> f64 {
        self.quantile(0.5) / 1e3
    }

    pub(crate) fn p99_us(&self) -> f64 {
        self.quantile(0.99) / 1e3
    }
}

/// The middle one; 0 of none.
pub(crate) fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or_default()
}

/// The order of `count` targets in a round: each begins in its turn, and every other round runs
/// backwards, so that none always comes after the same other.
pub(crate) fn order(round: usize, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).map(|index| (round / 2 + index) % count).collect();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}
