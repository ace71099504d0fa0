//! A model run over rows of tokens, layer by layer.

use std::ops::Range;

use candle_core::Tensor;
use rayon::prelude::*;

use super::EvalError;
use super::logits::Logits;
use crate::model::{Model, ModelError, NoTap, Output, WeightSource, computing};

/// A model with its weights.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    pub model: &'a Model,
    pub weights: &'a dyn WeightSource,
}

/// What a model makes of rows of tokens: the final normed state of every row, `[t, hidden]`, and
/// the head.
pub struct Run {
    states: Vec<Tensor>,
    output: Output,
    vocab: usize,
}

impl Run {
    /// One layer's weights are in memory at a time, and last the head's.
    pub fn of(subject: Subject<'_>, rows: &[Vec<u32>]) -> Result<Self, EvalError> {
        subject.check_rows(rows)?;
        let mut states = subject.embed(rows)?;
        for i in 0..subject.model.layer_count() {
            states = subject.advance(i, &states)?;
        }
        let output = subject.model.output(subject.weights)?;
        let states = states.par_iter().map(|x| output.norm(x)).collect::<Result<_, _>>()?;
        Ok(Self { states, output, vocab: subject.model.vocab_size() })
    }
}

impl Logits for Run {
    fn block(&self, row: usize, block: Range<usize>) -> Result<Vec<f32>, EvalError> {
        let failed = computing("the logits");
        let x = self.states[row].narrow(0, block.start, block.len()).map_err(&failed)?;
        Ok(self.output.logits(&x)?.flatten_all().and_then(|logits| logits.to_vec1()).map_err(&failed)?)
    }

    fn vocab(&self) -> usize {
        self.vocab
    }
}

impl Subject<'_> {
    /// Every row can predict a token and is no longer than what the model was made for.
    pub(super) fn check_rows(&self, rows: &[Vec<u32>]) -> Result<(), EvalError> {
        let expected = self.model.max_positions();
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

    /// The state in front of the first layer, `[t, hidden]` for every row.
    pub(super) fn embed(&self, rows: &[Vec<u32>]) -> Result<Vec<Tensor>, EvalError> {
        let embed = |ids: &Vec<u32>| self.round(self.model.embed(self.weights, ids)?);
        Ok(rows.iter().map(embed).collect::<Result<_, _>>()?)
    }

    /// The state behind layer `i`.
    fn advance(&self, i: usize, states: &[Tensor]) -> Result<Vec<Tensor>, EvalError> {
        let layer = self.model.layer(self.weights, i)?;
        let precision = self.weights.precision();
        let forward = |x: &Tensor| {
            let y = layer.forward(x, &mut NoTap)?;
            precision.round(&y).map_err(computing("the hidden state"))
        };
        Ok(states.par_iter().map(forward).collect::<Result<_, ModelError>>()?)
    }

    fn round(&self, x: Tensor) -> Result<Tensor, ModelError> {
        self.weights.precision().round(&x).map_err(computing("the hidden state"))
    }
}
