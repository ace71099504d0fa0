//! Logits as distributions over the next token.

use std::ops::Range;

use candle_core::Tensor;

use super::EvalError;
use crate::model::Output;

/// Logits held at once per model: 128 MiB, whatever the vocabulary.
const BLOCK_LOGITS: usize = 1 << 25;

/// Positions `0..t` in blocks whose logits fit.
pub(super) fn logit_blocks(t: usize, vocab: usize) -> impl Iterator<Item = Range<usize>> {
    let len = (BLOCK_LOGITS / vocab).max(1);
    (0..t).step_by(len).map(move |start| start..t.min(start + len))
}

/// Logits of the positions `block` of one row's final state `x: [t, hidden]`, row-major
/// `[block, vocab]`.
pub(super) fn of(output: &Output, x: &Tensor, block: Range<usize>) -> Result<Vec<f32>, EvalError> {
    let failed = |source| EvalError::Logits { source };
    let x = x.narrow(0, block.start, block.len()).map_err(failed)?;
    output.logits(&x)?.flatten_all().and_then(|logits| logits.to_vec1()).map_err(failed)
}

/// The distribution of the next token at one position.
pub(super) struct Position<'a> {
    logits: &'a [f32],
    max: f64,
    /// Logarithm of the sum of `exp(logit - max)`.
    log_sum: f64,
    /// The most likely token, the first of several.
    pub argmax: usize,
}

impl<'a> Position<'a> {
    pub fn new(logits: &'a [f32], row: usize, position: usize) -> Result<Self, EvalError> {
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(EvalError::NonFinite { row, position });
        }
        let (argmax, max) = logits
            .iter()
            .enumerate()
            .fold((0, f32::NEG_INFINITY), |best, (i, &x)| if x > best.1 { (i, x) } else { best });
        let max = f64::from(max);
        let log_sum = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln();
        Ok(Self { logits, max, log_sum, argmax })
    }

    fn log_probability(&self, token: usize) -> f64 {
        f64::from(self.logits[token]) - self.max - self.log_sum
    }

    /// Negative log-likelihood of the token that follows, if one does.
    pub fn nll(&self, next: Option<u32>) -> Option<f64> {
        next.map(|token| -self.log_probability(token as usize))
    }

    /// KL(self || other) in nats: exactly 0 for equal logits, never negative.
    pub fn kl(&self, other: &Position<'_>) -> f64 {
        let terms = (0..self.logits.len()).map(|token| {
            let log_p = self.log_probability(token);
            log_p.exp() * (log_p - other.log_probability(token))
        });
        // Rounding can leave a divergence of nearly equal distributions a hair below zero.
        terms.sum::<f64>().max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_and_likelihood_of_known_distributions() {
        // p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4), both up to a shift of the logits.
        let (p, q) = ([2f32.ln(), 0.0, 0.0].map(|x| x + 90.0), [0.0, 2f32.ln(), 0.0]);
        let (p, q) = (Position::new(&p, 0, 0).unwrap(), Position::new(&q, 0, 0).unwrap());
        let expected = 0.25 * 2f64.ln();
        assert!((p.kl(&q) - expected).abs() < 1e-5);
        assert_eq!(p.kl(&p), 0.0);
        assert!((p.nll(Some(1)).unwrap() - 4f64.ln()).abs() < 1e-5);
        assert_eq!((p.nll(None), p.argmax, q.argmax), (None, 0, 1));
    }

    #[test]
    fn a_logit_that_is_not_finite_is_named() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let found = Position::new(&[0.0, bad], 3, 7).err();
            assert!(matches!(found, Some(EvalError::NonFinite { row: 3, position: 7 })));
        }
    }

    #[test]
    fn blocks_cover_every_position_once() {
        for (t, vocab) in [(512, 4096), (1000, 1 << 24), (3, usize::MAX)] {
            let blocks: Vec<_> = logit_blocks(t, vocab).collect();
            assert_eq!(blocks.iter().cloned().flatten().collect::<Vec<_>>(), (0..t).collect::<Vec<_>>());
            assert!(blocks.iter().all(|b| b.len() == 1 || b.len() * vocab <= BLOCK_LOGITS));
        }
    }
}
