//! Models against their source, side by side: size, divergence, perplexity, error by layer; and a
//! report of it.

mod candidate;
mod report;
mod rtn;
mod size;

use std::path::PathBuf;

use serde::Serialize;
use thiserror::Error;

use crate::eval::{self, Bucket, Distribution, EvalError, LayerProbe, PplReport, Reference, Subject, TopK};
use crate::model::ModelError;

pub use candidate::{Candidate, ModelKind};
pub use report::{File, files};
pub use rtn::RtnWeights;
pub use size::Size;

/// Why models cannot be compared.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CompareError {
    #[error("{name} cannot be compared", name = name.display())]
    Candidate { name: PathBuf, source: ModelError },
    #[error("{name} cannot be compared")]
    Measure { name: String, source: Box<EvalError> },
    #[error(transparent)]
    Source(#[from] Box<EvalError>),
    #[error("the plot \"{plot}\" cannot be drawn: {found}")]
    Plot { plot: String, found: String },
}

/// The source and all that was measured against it.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    pub source: SourceReport,
    /// In the order in which they were given.
    pub models: Vec<ModelReport>,
}

/// The source itself.
#[derive(Clone, Debug, Serialize)]
pub struct SourceReport {
    pub name: String,
    pub size: Size,
    pub perplexity: f64,
    pub perplexity_standard_error: f64,
    /// KL(source || the source computed in bf16), in nats.
    pub bf16_floor: Distribution,
}

/// One model.
#[derive(Clone, Debug, Serialize)]
pub struct ModelReport {
    pub name: String,
    pub kind: ModelKind,
    pub size: Size,
    /// KL(source || model) of a position, in nats.
    pub kl: Distribution,
    /// KL(model || source)
    pub reverse_kl: Distribution,
    /// Mean KL above the floor.
    pub excess_kl: f64,
    pub top1: f64,
    pub top_k: TopK,
    pub perplexity: f64,
    pub perplexity_standard_error: f64,
    pub by_position: Vec<Bucket<usize>>,
    pub by_confidence: Vec<Bucket<f64>>,
    pub layers: Vec<LayerProbe>,
}

/// Measures `candidates` against `source` on `rows` of token ids. The source's logits come from
/// `reference`, which was made of the same rows; `next` is told each candidate's name before its
/// turn.
pub fn run(
    source: &Candidate<'_>,
    reference: &Reference,
    candidates: &[Candidate<'_>],
    rows: &[Vec<u32>],
    top_k: usize,
    mut next: impl FnMut(&str),
) -> Result<Comparison, CompareError> {
    let mut models = Vec::new();
    for candidate in candidates {
        next(candidate.name());
        models.push(measure(source.subject(), reference, candidate, rows, top_k)?);
    }
    let (floor, perplexity) =
        (Distribution::of(reference.floor().to_vec()), reference.perplexity(rows).map_err(Box::new)?);
    let PplReport { perplexity, perplexity_standard_error, .. } = perplexity;
    let source = SourceReport {
        name: source.name().to_owned(),
        size: source.size().clone(),
        perplexity,
        perplexity_standard_error,
        bf16_floor: floor,
    };
    Ok(Comparison { source, models })
}

fn measure(
    source: Subject<'_>,
    reference: &Reference,
    candidate: &Candidate<'_>,
    rows: &[Vec<u32>],
    top_k: usize,
) -> Result<ModelReport, CompareError> {
    let failed =
        |source| CompareError::Measure { name: candidate.name().to_owned(), source: Box::new(source) };
    let report = eval::kl(reference, candidate.subject(), rows, top_k).map_err(failed)?;
    let layers = eval::layers(source, candidate.subject(), rows).map_err(failed)?;
    Ok(ModelReport {
        name: candidate.name().to_owned(),
        kind: candidate.kind(),
        size: candidate.size().clone(),
        excess_kl: report.excess(),
        kl: report.kl,
        reverse_kl: report.reverse,
        top1: report.top1,
        top_k: report.top_k,
        perplexity: report.quantized.perplexity,
        perplexity_standard_error: report.quantized.perplexity_standard_error,
        by_position: report.by_position,
        by_confidence: report.by_confidence,
        layers,
    })
}
