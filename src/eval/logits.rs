//! Logits as distributions over the next token.

use std::ops::Range;

use super::EvalError;

/// Logits held at once per model: 32 MiB, whatever the vocabulary (one position at least).
const BLOCK_LOGITS: usize = 1 << 23;

/// The logits of rows of tokens, wherever they come from.
pub trait Logits {
    /// Logits of the positions `block` of `row`, row-major `[block, vocab]`.
    fn block(&self, row: usize, block: Range<usize>) -> Result<Vec<f32>, EvalError>;

    /// Logits of a position.
    fn vocab(&self) -> usize;
}

/// All positions of rows of these lengths, in blocks of one row whose logits fit.
pub(super) fn blocks(
    lengths: impl Iterator<Item = usize>,
    vocab: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let len = (BLOCK_LOGITS / vocab).max(1);
    let of_row = move |(row, t): (usize, usize)| {
        (0..t).step_by(len).map(move |start| (row, start..t.min(start + len)))
    };
    lengths.enumerate().flat_map(of_row)
}

/// The distribution of the next token at one position.
pub(super) struct Position<'a> {
    logits: &'a [f32],
    /// `log(sum(exp(logit)))`: what a logit is above its log-probability.
    log_normalizer: f64,
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
        let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
        Ok(Self { logits, log_normalizer: max + sum.ln(), argmax })
    }

    fn log_probability(&self, token: usize) -> f64 {
        f64::from(self.logits[token]) - self.log_normalizer
    }

    /// The probability of the most likely token.
    pub fn confidence(&self) -> f64 {
        self.log_probability(self.argmax).exp()
    }

    /// Negative log-likelihood of a token.
    pub fn nll(&self, token: u32) -> f64 {
        -self.log_probability(token as usize)
    }

    /// KL(self || other) and KL(other || self) in nats: exactly 0 for equal logits, never negative.
    pub fn divergences(&self, other: &Position<'_>) -> (f64, f64) {
        let (mut forth, mut back) = (0.0, 0.0);
        for token in 0..self.logits.len() {
            let (log_p, log_q) = (self.log_probability(token), other.log_probability(token));
            let difference = log_p - log_q;
            forth += log_p.exp() * difference;
            back -= log_q.exp() * difference;
        }
        // Rounding can leave a divergence of nearly equal distributions a hair below zero.
        (forth.max(0.0), back.max(0.0))
    }

    /// The `k` most likely tokens, the first of equals first.
    pub fn top(&self, k: usize) -> Vec<usize> {
        let k = k.min(self.logits.len());
        let mut top: Vec<usize> = Vec::with_capacity(k + 1);
        for (token, &logit) in self.logits.iter().enumerate() {
            if top.len() < k || top.last().is_some_and(|&last| logit > self.logits[last]) {
                let at = top.partition_point(|&other| self.logits[other] >= logit);
                top.insert(at, token);
                top.truncate(k);
            }
        }
        top
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_and_likelihood_of_known_distributions() {
        // p = (1/2, 1/4, 1/4), q = (1/8, 1/2, 3/8), both up to a shift of the logits.
        let p = [2f32.ln(), 0.0, 0.0].map(|x| x + 90.0);
        let q = [0.0, 4f32.ln(), 3f32.ln()];
        let (p, q) = (Position::new(&p, 0, 0).unwrap(), Position::new(&q, 0, 0).unwrap());
        let kl = |p: [f64; 3], q: [f64; 3]| p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum::<f64>();
        let (p_exact, q_exact) = ([0.5, 0.25, 0.25], [0.125, 0.5, 0.375]);
        let (forth, back) = p.divergences(&q);
        assert!((forth - kl(p_exact, q_exact)).abs() < 1e-5);
        assert!((back - kl(q_exact, p_exact)).abs() < 1e-5);
        assert_eq!(p.divergences(&p), (0.0, 0.0));
        assert!((p.nll(1) - 4f64.ln()).abs() < 1e-5);
        assert!((q.confidence() - 0.5).abs() < 1e-6);
        assert_eq!((p.argmax, q.argmax), (0, 1));
    }

    #[test]
    fn the_most_likely_tokens_with_the_first_of_equals_first() {
        let logits = [1.0, 3.0, 2.0, 3.0, 2.0, 0.0];
        let position = Position::new(&logits, 0, 0).unwrap();
        assert_eq!(position.top(3), [1, 3, 2]);
        assert_eq!(position.top(9), [1, 3, 2, 4, 0, 5]);
        assert!(position.top(0).is_empty());
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
        for (t, vocab) in [(512, 4096), (1000, 1 << 22), (3, usize::MAX)] {
            let found: Vec<_> = blocks([t, 2].into_iter(), vocab).collect();
            let positions: Vec<_> =
                found.iter().flat_map(|(row, b)| b.clone().map(move |t| (*row, t))).collect();
            let expected: Vec<_> = (0..t).map(|t| (0, t)).chain([(1, 0), (1, 1)]).collect();
            assert_eq!(positions, expected);
            assert!(found.iter().all(|(_, b)| b.len() == 1 || b.len() * vocab <= BLOCK_LOGITS));
        }
    }
}
