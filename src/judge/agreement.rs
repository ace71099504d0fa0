//! How far the decisions of a quantized model are from its source's.

use serde::Serialize;

use super::{DecisionHead, Kind};

/// The decisions of one kind over all texts, source and quantized side by side.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Agreement {
    pub kind: String,
    /// Share of texts with the same most likely answer.
    pub top1: f64,
    /// Mean over texts of KL(source || quantized) of the answers, in nats.
    pub kl_mean: f64,
    /// Largest difference of a probability, over all texts and answers.
    pub max_difference: f64,
}

/// Compares the final states of the same texts, `[texts][hidden]`, as `head` sees them: one entry per
/// kind.
pub fn agreement(head: &DecisionHead, source: &[Vec<f32>], quantized: &[Vec<f32>]) -> Vec<Agreement> {
    head.kinds().iter().map(|kind| of_kind(head, kind, source, quantized)).collect()
}

fn of_kind(head: &DecisionHead, kind: &Kind, source: &[Vec<f32>], quantized: &[Vec<f32>]) -> Agreement {
    let options = kind.labels.len();
    let (mut same, mut kl, mut max_difference) = (0, 0.0, 0.0f64);
    for (p, q) in source.iter().zip(quantized) {
        let p = head.probabilities(p, kind, options);
        let q = head.probabilities(q, kind, options);
        same += usize::from(argmax(&p) == argmax(&q));
        // The limit of p ln p is 0; a q of 0 beside it is a divergence without end.
        let terms = p.iter().zip(&q).filter(|(p, _)| **p > 0.0);
        kl += terms.map(|(p, q)| p * (p / q).ln()).sum::<f64>();
        let differences = p.iter().zip(&q).map(|(p, q)| (p - q).abs());
        max_difference = differences.fold(max_difference, f64::max);
    }
    let texts = source.len() as f64;
    Agreement { kind: kind.name.clone(), top1: same as f64 / texts, kl_mean: kl / texts, max_difference }
}

/// The first of the largest.
pub fn argmax(values: &[f64]) -> usize {
    let better = |best: usize, at: usize| if values[at] > values[best] { at } else { best };
    (1..values.len()).fold(0, better)
}
