//! Statistics over positions. Everything is computed from the sorted values, so the order of rows
//! does not matter to the last digit.

use serde::Serialize;

/// The distribution of a quantity over positions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Distribution {
    pub mean: f64,
    /// Of the mean, as if positions were independent: `sqrt(variance / (n - 1))`.
    pub standard_error: f64,
    pub median: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Distribution {
    /// Quantiles are values that occur: the one at rank `(n - 1) share`, rounded. NaN for no values.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let quantile = |share: f64| {
            let rank = (values.len().saturating_sub(1)) as f64 * share;
            values.get(rank.round() as usize).copied().unwrap_or(f64::NAN)
        };
        let mean = mean_of_sorted(&values);
        Self {
            mean,
            standard_error: standard_error(&values, mean),
            median: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            max: quantile(1.0),
        }
    }
}

/// The mean in the order of size; NaN for no values.
pub(super) fn mean(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    mean_of_sorted(&values)
}

fn mean_of_sorted(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// 0 for a single value, of which nothing is known.
fn standard_error(values: &[f64], mean: f64) -> f64 {
    let count = values.len() as f64;
    let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
    if values.len() == 1 { 0.0 } else { (variance / (count - 1.0)).sqrt() }
}

/// The positions of one range of a quantity.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bucket<T> {
    pub from: T,
    /// Not in the bucket, unless it is the largest value there can be.
    pub to: T,
    pub positions: usize,
    /// Mean KL(source || model) of the bucket, in nats; NaN for an empty one.
    pub kl: f64,
    /// Share of its positions at which both models have the same most likely token; NaN for an
    /// empty one.
    pub top1: f64,
}

impl<T> Bucket<T> {
    pub(super) fn of(from: T, to: T, members: impl Iterator<Item = (f64, bool)>) -> Self {
        let (kl, same): (Vec<f64>, Vec<bool>) = members.unzip();
        let agreeing = same.iter().filter(|&&same| same).count();
        let positions = kl.len();
        Self { from, to, positions, kl: mean(kl), top1: agreeing as f64 / positions as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_distribution() {
        let values: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        let found = Distribution::of(values);
        assert_eq!(
            (found.mean, found.median, found.p90, found.p99, found.max),
            (50.0, 50.0, 90.0, 99.0, 100.0)
        );
        // The variance of 0..=n is n (n + 2) / 12.
        assert!((found.standard_error - (100.0 * 102.0 / 12.0 / 100.0f64).sqrt()).abs() < 1e-12);
        assert_eq!(Distribution::of(vec![3.0]).standard_error, 0.0);
        assert!(Distribution::of(Vec::new()).mean.is_nan());
    }

    #[test]
    fn a_value_that_is_no_number_is_not_lost() {
        assert!(Distribution::of(vec![f64::NAN, 1.0]).max.is_nan());
        assert!(Distribution::of(vec![f64::NAN, 1.0]).mean.is_nan());
    }
}
