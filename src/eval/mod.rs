//! Measuring a model on rows of tokens: perplexity, and how far a quantized model is from its
//! source.
//!
//! Every row is a text of its own from position 0. A model runs layer by layer over all rows, so
//! one layer's weights are in memory at a time; logits are made block by block. Sums are in f64, in
//! the order of rows and positions, so a result does not depend on the number of threads.

mod logits;

use rayon::prelude::*;
use serde::Serialize;
use thiserror::Error;

use candle_core::Tensor;

use crate::model::{Model, ModelError, NoTap, Output, WeightSource};
use logits::{Position, logit_blocks};

/// Why a model cannot be measured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EvalError {
    #[error("there are no rows of tokens to evaluate")]
    NoRows,
    #[error("row {row} has {found} tokens; expected at least 2, to predict one")]
    ShortRow { row: usize, found: usize },
    #[error("row {row} has {found} tokens; the model has positions for {expected}")]
    LongRow { row: usize, expected: usize, found: usize },
    #[error("the two models have different vocabularies, {source_size} and {quantized_size} tokens")]
    Vocabularies { source_size: usize, quantized_size: usize },
    #[error("the logits of row {row}, position {position} are not finite")]
    NonFinite { row: usize, position: usize },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("reading the logits failed")]
    Logits { source: Box<candle_core::Error> },
}

/// A model with its weights.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    pub model: &'a Model,
    pub weights: &'a dyn WeightSource,
}

/// Perplexity over rows of tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PplReport {
    /// `exp(nll_mean)`
    pub perplexity: f64,
    /// Mean negative log-likelihood of a predicted token, in nats.
    pub nll_mean: f64,
    /// Predicted tokens: all but the first of each row.
    pub tokens_scored: usize,
}

/// How far a quantized model is from its source on rows of tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KlReport {
    /// KL(source || quantized) of a position, in nats.
    pub kl: KlStats,
    /// Share of positions at which both models have the same most likely token.
    pub top1: f64,
    /// Positions compared: all of all rows.
    pub positions: usize,
    pub source: PplReport,
    pub quantized: PplReport,
}

/// The distribution of the divergence over positions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KlStats {
    pub mean: f64,
    pub median: f64,
    pub p99: f64,
    pub max: f64,
}

/// Perplexity of a model over `rows` of token ids: each row predicts all its tokens but the first.
pub fn perplexity(
    model: &Model,
    weights: &dyn WeightSource,
    rows: &[Vec<u32>],
) -> Result<PplReport, EvalError> {
    let subject = Subject { model, weights };
    check_rows(subject, rows)?;
    let (states, output) = subject.run(rows)?;
    let mut nll = Nll::default();
    for (row, (x, ids)) in states.iter().zip(rows).enumerate() {
        for block in logit_blocks(x.dims()[0], model.vocab_size()) {
            let logits = logits::of(&output, x, block.clone())?;
            let scored: Vec<Option<f64>> = logits
                .par_chunks(model.vocab_size())
                .zip(block.clone())
                .map(|(logits, t)| Ok(Position::new(logits, row, t)?.nll(next_token(ids, t))))
                .collect::<Result<_, EvalError>>()?;
            scored.into_iter().for_each(|one| nll.add(one));
        }
    }
    Ok(nll.report())
}

/// Compares a quantized model with its source over `rows` of token ids, at every position.
pub fn kl(source: Subject<'_>, quantized: Subject<'_>, rows: &[Vec<u32>]) -> Result<KlReport, EvalError> {
    check_rows(source, rows)?;
    check_rows(quantized, rows)?;
    let vocab = source.model.vocab_size();
    if quantized.model.vocab_size() != vocab {
        let quantized_size = quantized.model.vocab_size();
        return Err(EvalError::Vocabularies { source_size: vocab, quantized_size });
    }
    let (p_states, p_output) = source.run(rows)?;
    let (q_states, q_output) = quantized.run(rows)?;
    let mut total = Comparison::default();
    for (row, ids) in rows.iter().enumerate() {
        for block in logit_blocks(ids.len(), vocab) {
            let p = logits::of(&p_output, &p_states[row], block.clone())?;
            let q = logits::of(&q_output, &q_states[row], block.clone())?;
            let compared: Vec<Compared> = p
                .par_chunks(vocab)
                .zip(q.par_chunks(vocab))
                .zip(block)
                .map(|((p, q), t)| {
                    let (p, q) = (Position::new(p, row, t)?, Position::new(q, row, t)?);
                    Ok(Compared::new(&p, &q, next_token(ids, t)))
                })
                .collect::<Result<_, EvalError>>()?;
            compared.into_iter().for_each(|one| total.add(one));
        }
    }
    Ok(total.report())
}

fn next_token(ids: &[u32], position: usize) -> Option<u32> {
    ids.get(position + 1).copied()
}

fn check_rows(subject: Subject<'_>, rows: &[Vec<u32>]) -> Result<(), EvalError> {
    let expected = subject.model.max_positions();
    if rows.is_empty() {
        return Err(EvalError::NoRows);
    }
    for (row, found) in rows.iter().map(Vec::len).enumerate() {
        if found < 2 {
            return Err(EvalError::ShortRow { row, found });
        }
        if found > expected {
            return Err(EvalError::LongRow { row, expected, found });
        }
    }
    Ok(())
}

impl Subject<'_> {
    /// The final normed state of every row, and the head.
    fn run(&self, rows: &[Vec<u32>]) -> Result<(Vec<Tensor>, Output), EvalError> {
        let mut states: Vec<Tensor> =
            rows.iter().map(|ids| self.model.embed(self.weights, ids)).collect::<Result<_, _>>()?;
        for i in 0..self.model.layer_count() {
            let layer = self.model.layer(self.weights, i)?;
            states = states.par_iter().map(|x| layer.forward(x, &mut NoTap)).collect::<Result<_, _>>()?;
        }
        let output = self.model.output(self.weights)?;
        let states = states.par_iter().map(|x| output.norm(x)).collect::<Result<_, _>>()?;
        Ok((states, output))
    }
}

/// A running sum of negative log-likelihoods.
#[derive(Default)]
struct Nll {
    sum: f64,
    count: usize,
}

impl Nll {
    fn add(&mut self, nll: Option<f64>) {
        if let Some(nll) = nll {
            self.sum += nll;
            self.count += 1;
        }
    }

    fn report(&self) -> PplReport {
        let nll_mean = self.sum / self.count as f64;
        PplReport { perplexity: nll_mean.exp(), nll_mean, tokens_scored: self.count }
    }
}

/// One position under both models.
struct Compared {
    kl: f64,
    same_argmax: bool,
    p_nll: Option<f64>,
    q_nll: Option<f64>,
}

impl Compared {
    fn new(p: &Position<'_>, q: &Position<'_>, next: Option<u32>) -> Self {
        Self { kl: p.kl(q), same_argmax: p.argmax == q.argmax, p_nll: p.nll(next), q_nll: q.nll(next) }
    }
}

#[derive(Default)]
struct Comparison {
    kl: Vec<f64>,
    same_argmax: usize,
    p_nll: Nll,
    q_nll: Nll,
}

impl Comparison {
    fn add(&mut self, one: Compared) {
        self.kl.push(one.kl);
        self.same_argmax += usize::from(one.same_argmax);
        self.p_nll.add(one.p_nll);
        self.q_nll.add(one.q_nll);
    }

    fn report(mut self) -> KlReport {
        let positions = self.kl.len();
        let mean = self.kl.iter().sum::<f64>() / positions as f64;
        self.kl.sort_by(f64::total_cmp);
        let quantile = |share: f64| self.kl[((positions - 1) as f64 * share).round() as usize];
        KlReport {
            kl: KlStats { mean, median: quantile(0.5), p99: quantile(0.99), max: quantile(1.0) },
            top1: self.same_argmax as f64 / positions as f64,
            positions,
            source: self.p_nll.report(),
            quantized: self.q_nll.report(),
        }
    }
}
