//! What can be compared: models with their weights, whatever they are stored as.

use serde::Serialize;

use super::rtn::{self, RtnWeights};
use super::{CompareError, Size};
use crate::eval::Subject;
use crate::model::{Model, WeightSource, open_weights};
use crate::source::Checkpoint;

/// How the weights of a model are stored. A further kind of checkpoint is a variant here and a
/// [`WeightSource`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum ModelKind {
    /// A plain checkpoint.
    #[serde(rename = "plain")]
    Plain,
    /// An EXL3 bundle, ours or another writer's.
    #[serde(rename = "exl3")]
    Exl3,
    /// Round-to-nearest int4 in groups of 128, see [`RtnWeights`].
    #[serde(rename = "rtn-int4-g128")]
    RtnInt4,
}

impl ModelKind {
    pub fn name(self) -> &'static str {
        match self {
            ModelKind::Plain => "plain",
            ModelKind::Exl3 => "exl3",
            ModelKind::RtnInt4 => "rtn-int4-g128",
        }
    }

    /// What a checkpoint is, by its config.
    fn of(checkpoint: &Checkpoint) -> Self {
        if checkpoint.config()["quantization_config"].is_null() { ModelKind::Plain } else { ModelKind::Exl3 }
    }
}

/// A model to be compared.
pub struct Candidate<'a> {
    name: String,
    kind: ModelKind,
    model: &'a Model,
    weights: Box<dyn WeightSource + 'a>,
    size: Size,
}

impl<'a> Candidate<'a> {
    /// The model in a folder.
    pub fn stored(name: &str, checkpoint: &'a Checkpoint, model: &'a Model) -> Result<Self, CompareError> {
        let weights = open_weights(checkpoint, model)
            .map_err(|source| CompareError::Candidate { name: checkpoint.dir().to_owned(), source })?;
        Ok(Self {
            name: name.to_owned(),
            kind: ModelKind::of(checkpoint),
            model,
            weights,
            size: Size::stored(model, checkpoint),
        })
    }

    /// The source with its decoder linears rounded to nearest.
    pub fn rounded(checkpoint: &Checkpoint, model: &'a Model, source: &'a (dyn WeightSource + Sync)) -> Self {
        Self {
            name: ModelKind::RtnInt4.name().to_owned(),
            kind: ModelKind::RtnInt4,
            model,
            weights: Box::new(RtnWeights::new(source, model)),
            size: Size::with_decoder(model, checkpoint, rtn::bits),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn kind(&self) -> ModelKind {
        self.kind
    }

    pub fn size(&self) -> &Size {
        &self.size
    }

    /// What is measured.
    pub fn subject(&self) -> Subject<'_> {
        Subject { model: self.model, weights: self.weights.as_ref() }
    }
}
