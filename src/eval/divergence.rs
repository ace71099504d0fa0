//! How far a model's distributions of the next token are from its source's.

use std::ops::Range;

use rayon::prelude::*;
use serde::Serialize;

use super::logits::{Logits, Position, blocks};
use super::stats::{Bucket, Distribution};
use super::{EvalError, PplReport, Reference, Run, Subject};

/// Ranges of a row for which the divergence is told.
const POSITION_BUCKETS: usize = 16;

/// Edges of the ranges of the source's confidence.
const CONFIDENCE_EDGES: [f64; 7] = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0];

/// How far a model is from its source on rows of tokens, over all positions of all rows.
#[derive(Clone, Debug, PartialEq)]
pub struct KlReport {
    /// KL(source || model) of a position, in nats.
    pub kl: Distribution,
    /// KL(model || source)
    pub reverse: Distribution,
    /// KL(source || the source computed in bf16): the size of a divergence that means nothing.
    pub floor: Distribution,
    /// Share of positions at which both models have the same most likely token.
    pub top1: f64,
    pub top_k: TopK,
    pub positions: usize,
    pub by_position: Vec<Bucket<usize>>,
    /// By the probability that the source gives to its most likely token.
    pub by_confidence: Vec<Bucket<f64>>,
    pub source: PplReport,
    pub quantized: PplReport,
}

impl KlReport {
    /// Mean divergence above that of the source computed in bf16, in nats.
    pub fn excess(&self) -> f64 {
        self.kl.mean - self.floor.mean
    }
}

/// Mean share of the source's `k` most likely tokens that are among the model's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TopK {
    pub k: usize,
    pub agreement: f64,
}

/// Compares a model with its source over `rows` of token ids, at every position.
pub fn kl(
    source: &Reference,
    model: Subject<'_>,
    rows: &[Vec<u32>],
    top_k: usize,
) -> Result<KlReport, EvalError> {
    let (source_size, model_size) = (source.logits().vocab(), model.model.vocab_size());
    if source_size != model_size {
        return Err(EvalError::Vocabularies { source_size, model_size });
    }
    let run = Run::of(model, rows)?;
    let mut compared = Vec::new();
    for_each_block(source.logits(), &run, rows, |row, block, p, q| {
        let next = |t: usize| rows[row].get(t + 1).copied();
        let positions =
            pairs(row, block, p, q, source_size, |t, p, q| Compared::new(t, p, q, next(t), top_k))?;
        compared.extend(positions);
        Ok(())
    })?;
    Ok(report(&compared, source.floor(), top_k))
}

/// Calls `work` with a row, a range of its positions, and the logits of both for it, in order.
pub(super) fn for_each_block(
    p: &dyn Logits,
    q: &dyn Logits,
    rows: &[Vec<u32>],
    mut work: impl FnMut(usize, Range<usize>, &[f32], &[f32]) -> Result<(), EvalError>,
) -> Result<(), EvalError> {
    for (row, block) in blocks(rows.iter().map(Vec::len), p.vocab()) {
        let (p, q) = (p.block(row, block.clone())?, q.block(row, block.clone())?);
        work(row, block, &p, &q)?;
    }
    Ok(())
}

/// `compare` of every position of a block, in order.
pub(super) fn pairs<T: Send>(
    row: usize,
    block: Range<usize>,
    p: &[f32],
    q: &[f32],
    vocab: usize,
    compare: impl Fn(usize, &Position<'_>, &Position<'_>) -> T + Sync,
) -> Result<Vec<T>, EvalError> {
    p.par_chunks(vocab)
        .zip(q.par_chunks(vocab))
        .zip(block)
        .map(|((p, q), t)| Ok(compare(t, &Position::new(p, row, t)?, &Position::new(q, row, t)?)))
        .collect()
}

/// One position under both models.
struct Compared {
    position: usize,
    kl: f64,
    reverse: f64,
    same_argmax: bool,
    /// Of the source's `k` most likely tokens, those that are among the model's.
    shared_top: usize,
    confidence: f64,
    p_nll: Option<f64>,
    q_nll: Option<f64>,
}

impl Compared {
    fn new(position: usize, p: &Position<'_>, q: &Position<'_>, next: Option<u32>, top_k: usize) -> Self {
        let (kl, reverse) = p.divergences(q);
        let q_top = q.top(top_k);
        Self {
            position,
            kl,
            reverse,
            same_argmax: p.argmax == q.argmax,
            shared_top: p.top(top_k).iter().filter(|token| q_top.contains(token)).count(),
            confidence: p.confidence(),
            p_nll: next.map(|token| p.nll(token)),
            q_nll: next.map(|token| q.nll(token)),
        }
    }
}

fn report(compared: &[Compared], floor: &[f64], top_k: usize) -> KlReport {
    let positions = compared.len();
    let share = |count: usize, of: usize| count as f64 / of as f64;
    let shared_top = compared.iter().map(|one| one.shared_top).sum();
    KlReport {
        kl: Distribution::of(compared.iter().map(|one| one.kl).collect()),
        reverse: Distribution::of(compared.iter().map(|one| one.reverse).collect()),
        floor: Distribution::of(floor.to_vec()),
        top1: share(compared.iter().filter(|one| one.same_argmax).count(), positions),
        top_k: TopK { k: top_k, agreement: share(shared_top, positions * top_k) },
        positions,
        by_position: by_position(compared),
        by_confidence: by_confidence(compared),
        source: PplReport::of(compared.iter().filter_map(|one| one.p_nll).collect()),
        quantized: PplReport::of(compared.iter().filter_map(|one| one.q_nll).collect()),
    }
}

/// Ranges of equal length, the last one shorter where the rows do not divide.
fn by_position(compared: &[Compared]) -> Vec<Bucket<usize>> {
    let cols = compared.iter().map(|one| one.position + 1).max().unwrap_or(0);
    let len = cols.div_ceil(POSITION_BUCKETS).max(1);
    let bucket = |from: usize| {
        let to = cols.min(from + len);
        let members = compared.iter().filter(|one| (from..to).contains(&one.position));
        Bucket::of(from, to, members.map(|one| (one.kl, one.same_argmax)))
    };
    (0..cols).step_by(len).map(bucket).collect()
}

fn by_confidence(compared: &[Compared]) -> Vec<Bucket<f64>> {
    let bucket = |edges: &[f64]| {
        let (from, to) = (edges[0], edges[1]);
        // Rounding can lift a certain token's probability a hair above 1.
        let inside = |one: &&Compared| one.confidence >= from && (one.confidence < to || to == 1.0);
        Bucket::of(from, to, compared.iter().filter(inside).map(|one| (one.kl, one.same_argmax)))
    };
    CONFIDENCE_EDGES.windows(2).map(bucket).collect()
}
