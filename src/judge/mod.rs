//! The decision head of a dual-head model: a text in, a probability for every answer out.
//!
//! Beside its weights such a checkpoint has `head.safetensors`, `judge_config.json` and
//! `calibration.json`; `docs/FORMAT.md` describes them. The state of the text's last token after the
//! final norm goes through a linear to a few slots; each kind of question has slots of its own, whose
//! values, divided by the kind's temperature, are made probabilities by a softmax.

mod agreement;
mod head;

use std::path::PathBuf;

use rayon::prelude::*;
use thiserror::Error;

use crate::bundle::BundleError;
use crate::model::{Model, ModelError, NoTap, WeightSource, computing};

pub use agreement::{Agreement, agreement, argmax};
pub use head::{DecisionHead, Kind};

/// Why no decision can be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JudgeError {
    #[error("{} has no decision head: {file} is missing", dir.display())]
    NoHead { dir: PathBuf, file: &'static str },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: expected a JSON object", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{}: {field}: expected {expected}, found {found}", path.display())]
    Field { path: PathBuf, field: String, expected: String, found: String },
    #[error("{}: tensor \"{tensor}\": expected {expected}, found {found}", path.display())]
    Tensor { path: PathBuf, tensor: String, expected: String, found: String },
    #[error("there is no text to judge")]
    NoTexts,
    #[error("text {text} has no tokens")]
    EmptyText { text: usize },
    #[error("text {text} has {found} tokens; the model has positions for {expected}")]
    LongText { text: usize, expected: usize, found: usize },
    #[error("the final hidden state of text {text} is not finite")]
    NonFinite { text: usize },
    #[error("the two decision heads differ; expected a bundle of this source")]
    Heads,
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// The state of the last token of every text after the final norm, `[hidden]` each. `texts` are
/// token ids; texts are numbered from 1 in errors.
///
/// One layer's weights are in memory at a time.
pub fn last_states(
    model: &Model,
    w: &(dyn WeightSource + Sync),
    texts: &[Vec<u32>],
) -> Result<Vec<Vec<f32>>, JudgeError> {
    check_texts(model, texts)?;
    let mut states = texts.iter().map(|ids| model.embed(w, ids)).collect::<Result<Vec<_>, _>>()?;
    for i in 0..model.layer_count() {
        let layer = model.layer(w, i)?;
        states = states.par_iter().map(|x| layer.forward(x, &mut NoTap)).collect::<Result<_, _>>()?;
    }
    let norm = model.final_norm(w)?;
    let failed = computing("the final hidden state");
    let last = |(text, x): (usize, &candle_core::Tensor)| {
        let x = x.narrow(0, x.dims()[0] - 1, 1).map_err(&failed)?;
        let state: Vec<f32> = norm.forward(&x)?.flatten_all().and_then(|x| x.to_vec1()).map_err(&failed)?;
        match state.iter().all(|value| value.is_finite()) {
            true => Ok(state),
            false => Err(JudgeError::NonFinite { text: text + 1 }),
        }
    };
    states.iter().enumerate().map(last).collect()
}

fn check_texts(model: &Model, texts: &[Vec<u32>]) -> Result<(), JudgeError> {
    let expected = model.max_positions();
    if texts.is_empty() {
        return Err(JudgeError::NoTexts);
    }
    for (at, found) in texts.iter().map(Vec::len).enumerate() {
        let text = at + 1;
        if found == 0 {
            return Err(JudgeError::EmptyText { text });
        }
        if found > expected {
            return Err(JudgeError::LongText { text, expected, found });
        }
    }
    Ok(())
}
