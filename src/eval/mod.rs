//! Measuring a model on rows of tokens: perplexity, how far a quantized model is from its source,
//! and in which layers it departs from it.
//!
//! Every row is a text of its own from position 0. A model runs layer by layer over all rows, so
//! one layer's weights are in memory at a time; logits are made block by block. Values of positions
//! are f64 and summed in the order of size, so a result depends neither on the number of threads
//! nor on the order of rows.

mod divergence;
mod layers;
mod logits;
mod protocol;
mod reference;
mod run;
mod stats;

use std::path::PathBuf;

use rayon::prelude::*;
use serde::Serialize;
use thiserror::Error;

use crate::bundle::BundleError;
use crate::model::ModelError;
use logits::{Position, blocks};

pub use divergence::{KlReport, TopK, kl};
pub use layers::{LayerProbe, layers};
pub use logits::Logits;
pub use protocol::{Protocol, Windows};
pub use reference::{Identity, Reference};
pub use run::{Run, Subject};
pub use stats::{Bucket, Distribution};

/// Why a model cannot be measured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EvalError {
    #[error("there are no rows of tokens to evaluate")]
    NoRows,
    #[error("row {row} has {found} tokens; expected at least 2, to predict one")]
    ShortRow { row: usize, found: usize },
    #[error("row {row} has {found} tokens; the model has positions for {expected}: choose fewer columns")]
    LongRow { row: usize, expected: usize, found: usize },
    #[error("no token of these rows is scored: each has too few")]
    NothingScored,
    #[error("the two models have different vocabularies, {source_size} and {model_size} tokens")]
    Vocabularies { source_size: usize, model_size: usize },
    #[error("the two models have different {what}, {source_size} and {model_size}")]
    Structures { what: &'static str, source_size: usize, model_size: usize },
    #[error("the logits of row {row}, position {position} are not finite")]
    NonFinite { row: usize, position: usize },
    #[error("{path}: cannot be read", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "{path}: the source's logits in this file were made for another {field}: expected {expected}, found {found}; \
         remove the file or name another",
        path = path.display()
    )]
    OtherCache { path: PathBuf, field: &'static str, expected: String, found: String },
    #[error("{path}: no file of a source's logits, or damaged: {found}; remove it or name another", path = path.display())]
    DamagedCache { path: PathBuf, found: String },
    #[error("writing logits failed")]
    Sink { source: std::io::Error },
    #[error(transparent)]
    Write(#[from] BundleError),
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// Perplexity over the scored tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PplReport {
    /// `exp(nll_mean)`
    pub perplexity: f64,
    /// `perplexity * nll_standard_error`
    pub perplexity_standard_error: f64,
    /// Mean negative log-likelihood of a scored token, in nats.
    pub nll_mean: f64,
    /// Of the mean, as if tokens were independent.
    pub nll_standard_error: f64,
    pub tokens_scored: usize,
}

impl PplReport {
    fn of(nll: Vec<f64>) -> Self {
        let tokens_scored = nll.len();
        let nll = Distribution::of(nll);
        let perplexity = nll.mean.exp();
        Self {
            perplexity,
            perplexity_standard_error: perplexity * nll.standard_error,
            nll_mean: nll.mean,
            nll_standard_error: nll.standard_error,
            tokens_scored,
        }
    }

    /// Bits that the model needs per byte of text, where the scored tokens stand for `bytes`.
    pub fn bits_per_byte(&self, bytes: usize) -> Option<f64> {
        let bits = self.nll_mean * self.tokens_scored as f64 / std::f64::consts::LN_2;
        (bytes > 0).then(|| bits / bytes as f64)
    }
}

/// Perplexity of a model over the scored tokens of `windows`.
pub fn perplexity(subject: Subject<'_>, windows: &Windows) -> Result<PplReport, EvalError> {
    if windows.targets().next().is_none() && !windows.rows().is_empty() {
        subject.check_rows(windows.rows())?;
        return Err(EvalError::NothingScored);
    }
    scored(&Run::of(subject, windows.rows())?, windows)
}

fn scored(logits: &dyn Logits, windows: &Windows) -> Result<PplReport, EvalError> {
    let vocab = logits.vocab();
    let mut nll = Vec::new();
    for (row, block) in blocks(windows.rows().iter().map(Vec::len), vocab) {
        let logits = logits.block(row, block.clone())?;
        let scored: Vec<Option<f64>> = logits
            .par_chunks(vocab)
            .zip(block)
            .map(|(logits, t)| {
                let position = Position::new(logits, row, t)?;
                Ok(windows.target(row, t).map(|token| position.nll(token)))
            })
            .collect::<Result<_, EvalError>>()?;
        nll.extend(scored.into_iter().flatten());
    }
    Ok(PplReport::of(nll))
}
