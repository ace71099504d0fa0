//! Architectures as lists of layers over candle: load one layer's weights, run one row of tokens
//! through it, let a [`Tap`] see the input of every linear.
//!
//! All computation is f32 on the CPU. A hidden state is one row of text, `[t, hidden]`, from
//! position 0; rows know nothing of each other, so a caller runs them in parallel and the result
//! of a row does not depend on the others nor on the number of threads.

mod architecture;
mod bundle_weights;
mod check;
mod config;
mod llama;
mod names;
mod nn;
mod precision;
mod qwen3_5;
mod weights;

use std::path::PathBuf;

use candle_core::{Device, Tensor};
use serde_json::Value;
use thiserror::Error;

use crate::format::FormatError;
use crate::source::{Checkpoint, SourceError};

pub use architecture::Layer;
pub use bundle_weights::BundleWeights;
pub use check::TensorProblem;
pub use names::{canonical, renamed};
pub use precision::Precision;
pub use qwen3_5::Mtp;
pub use weights::{Bf16Weights, SourceWeights, WeightSource, open_weights};

use architecture::{Architecture, Dims};
use names::Names;
use nn::{Linear, RmsNorm};
use qwen3_5::Qwen3_5;

/// What cannot be computed, or not loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    #[error("config.json: {field} {found} is not supported; expected {expected}")]
    Unsupported { field: String, found: String, expected: String },
    #[error("config.json: {field} is missing; expected {expected}")]
    MissingField { field: String, expected: &'static str },
    #[error("config.json: {field}: expected {expected}, found {found}")]
    Field { field: String, expected: String, found: String },
    #[error(
        "{}: {} of the model's tensors cannot be used:{}",
        dir.display(), problems.len(), check::listing(problems)
    )]
    Tensors { dir: PathBuf, problems: Vec<TensorProblem> },
    #[error("tensor \"{tensor}\": expected {expected}, found {found}")]
    Tensor { tensor: String, expected: String, found: String },
    #[error("token {id} does not exist: the vocabulary has {vocab_size} entries")]
    Token { id: u32, vocab_size: usize },
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("computing {what} failed")]
    Compute { what: String, source: Box<candle_core::Error> },
}

/// Wraps candle's error with what was being computed.
pub fn computing(what: &str) -> impl Fn(candle_core::Error) -> ModelError + '_ {
    move |source| ModelError::Compute { what: what.to_owned(), source: source.into() }
}

/// Sees the activations of a layer while it runs.
pub trait Tap {
    /// The input `x: [rows, k]` that all of `linears` (module names) share.
    fn input(&mut self, linears: &[String], x: &Tensor) -> Result<(), ModelError>;

    /// The outputs `g`, `u`: `[rows, intermediate]` of a gated MLP's two input projections,
    /// before the activation.
    fn gated(&mut self, gate: &str, up: &str, g: &Tensor, u: &Tensor) -> Result<(), ModelError>;
}

/// Looks at nothing.
pub struct NoTap;

impl Tap for NoTap {
    fn input(&mut self, _: &[String], _: &Tensor) -> Result<(), ModelError> {
        Ok(())
    }

    fn gated(&mut self, _: &str, _: &str, _: &Tensor, _: &Tensor) -> Result<(), ModelError> {
        Ok(())
    }
}

/// One linear of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearSpec {
    /// Module name, such as `model.layers.0.self_attn.q_proj`.
    pub key: String,
    /// in_features
    pub k: usize,
    /// out_features
    pub n: usize,
    /// Whether the config asks for a bias. One in the checkpoint is used either way.
    pub has_bias: bool,
}

/// Linears that share their input, and so their Hessian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub linears: Vec<LinearSpec>,
}

impl Group {
    /// The module names of its linears.
    pub fn modules(&self) -> Vec<String> {
        self.linears.iter().map(|linear| linear.key.clone()).collect()
    }
}

/// Layers of a multi-token prediction head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MtpLayers {
    /// In the config.
    pub declared: usize,
    /// In the checkpoint.
    pub found: usize,
}

/// A model's structure and its tensors' names; it holds no weights.
#[derive(Clone, Debug)]
pub struct Model {
    architecture: Architecture,
    names: Names,
}

impl Model {
    /// The structure that a config describes, under the names of a plain text model.
    ///
    /// # Errors
    /// Whatever this crate cannot compute exactly is refused by name: architecture, activation,
    /// position scaling, attention windows, missing or contradictory fields.
    pub fn from_config(config: &Value) -> Result<Model, ModelError> {
        Ok(Model { architecture: Architecture::new(config)?, names: Names::plain() })
    }

    /// The structure of `checkpoint`, under the names it gives to its tensors.
    ///
    /// # Errors
    /// [`Model::from_config`]
    pub fn of(checkpoint: &Checkpoint) -> Result<Model, ModelError> {
        let architecture = Architecture::new(checkpoint.config())?;
        Ok(Model { architecture, names: Names::find(checkpoint.keys()) })
    }

    pub fn layer_count(&self) -> usize {
        self.architecture.dims().layer_count
    }

    pub fn hidden_size(&self) -> usize {
        self.architecture.dims().hidden_size
    }

    pub fn vocab_size(&self) -> usize {
        self.architecture.dims().vocab_size
    }

    /// The longest row the model was made for, in tokens.
    pub fn max_positions(&self) -> usize {
        self.architecture.dims().max_positions
    }

    /// Whether the config says that the head is the embedding.
    pub fn tied_head(&self) -> bool {
        self.architecture.dims().tied_head
    }

    /// Module name of layer `layer`, such as `model.layers.3`.
    pub fn layer_key(&self, layer: usize) -> String {
        self.names.layer(layer)
    }

    /// The linears of a layer by shared input, in the order of execution.
    pub fn layer_groups(&self, layer: usize) -> Vec<Group> {
        self.architecture.layer_groups(layer, &self.layer_key(layer))
    }

    /// The other tensors of a layer, with their shapes.
    fn layer_others(&self, layer: usize) -> Vec<(String, Vec<usize>)> {
        self.architecture.layer_others(layer, &self.layer_key(layer))
    }

    /// The output projection, hidden to vocabulary.
    pub fn head(&self) -> LinearSpec {
        let key = self.names.head.clone();
        LinearSpec { key, k: self.hidden_size(), n: self.vocab_size(), has_bias: false }
    }

    /// All linears: of the layers, the head, and a multi-token prediction head.
    pub(crate) fn linears(&self) -> impl Iterator<Item = LinearSpec> {
        let layers = (0..self.layer_count()).flat_map(|layer| self.layer_groups(layer));
        let groups = layers.chain(self.mtp_groups());
        groups.flat_map(|group| group.linears).chain([self.head()])
    }

    /// Layers of the multi-token prediction head; nothing for an architecture that has none.
    pub fn mtp_layers(&self) -> Option<MtpLayers> {
        let found = self.names.mtp_layers;
        self.architecture.with_mtp().map(|qwen| MtpLayers { declared: qwen.mtp_layers, found })
    }

    /// Module name of the checkpoint's multi-token prediction head.
    pub fn mtp_key(&self) -> Option<&str> {
        self.mtp_structure().map(|_| self.names.mtp.as_str())
    }

    fn mtp_structure(&self) -> Option<&Qwen3_5> {
        self.architecture.with_mtp().filter(|_| self.names.mtp_layers > 0)
    }

    /// The linears of the multi-token prediction head, as [`Model::layer_groups`]; empty without one.
    pub fn mtp_groups(&self) -> Vec<Group> {
        let Names { mtp, mtp_layers, .. } = &self.names;
        self.mtp_structure().map(|qwen| qwen.mtp_groups(mtp, *mtp_layers)).unwrap_or_default()
    }

    fn mtp_others(&self) -> Vec<(String, Vec<usize>)> {
        let Names { mtp, mtp_layers, .. } = &self.names;
        self.mtp_structure().map(|qwen| qwen.mtp_others(mtp, *mtp_layers)).unwrap_or_default()
    }

    /// Loads the multi-token prediction head.
    ///
    /// # Errors
    /// Also where [`Model::mtp_key`] knows of none.
    pub fn mtp(&self, w: &dyn WeightSource) -> Result<Mtp, ModelError> {
        let Names { mtp, mtp_layers, .. } = &self.names;
        let none = || ModelError::Tensor {
            tensor: mtp.clone(),
            expected: "a multi-token prediction head".to_owned(),
            found: "none".to_owned(),
        };
        let qwen = self.mtp_structure().ok_or_else(none)?;
        qwen.mtp(w, mtp, *mtp_layers, self.architecture.norm(w, self.final_norm_key())?)
    }

    /// Whether a tensor is part of a vision tower, which is not computed here.
    pub fn is_vision(key: &str) -> bool {
        names::is_vision(key)
    }

    /// Tensor name of the embedding, `[vocab, hidden]`.
    pub fn embedding_key(&self) -> &str {
        self.names.embedding()
    }

    /// Tensor name of the final norm's weight, `[hidden]`.
    pub fn final_norm_key(&self) -> &str {
        self.names.final_norm()
    }

    /// Every tensor a source must hold, with its shape in Hugging Face's layout. With a tied head,
    /// `lm_head.weight` is optional and not listed.
    pub fn expected_tensors(&self) -> Vec<(String, Vec<usize>)> {
        check::expected_tensors(self)
    }

    /// Checks presence, shape and dtype of all tensors: plain ones, and the quantized linears of
    /// a bundle.
    ///
    /// # Errors
    /// [`ModelError::Tensors`] with all problems at once.
    pub fn check(&self, checkpoint: &Checkpoint) -> Result<(), ModelError> {
        check::check(self, checkpoint)
    }

    /// Embeds one row of tokens: `[t, hidden]`.
    pub fn embed(&self, w: &dyn WeightSource, ids: &[u32]) -> Result<Tensor, ModelError> {
        let vocab_size = self.vocab_size();
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(ModelError::Token { id, vocab_size });
        }
        w.rows(self.embedding_key(), ids)
    }

    /// Loads the weights of layer `i`.
    pub fn layer(&self, w: &dyn WeightSource, i: usize) -> Result<Layer, ModelError> {
        self.architecture.layer(w, i, &self.layer_key(i))
    }

    /// Loads the final norm alone: the head's weights can be gigabytes.
    pub fn final_norm(&self, w: &dyn WeightSource) -> Result<FinalNorm, ModelError> {
        self.architecture.norm(w, self.final_norm_key()).map(FinalNorm)
    }

    /// Loads the final norm and the head. A tied head is the embedding, whatever redundant
    /// `lm_head.weight` the checkpoint holds; only a quantized head takes its place.
    pub fn output(&self, w: &dyn WeightSource) -> Result<Output, ModelError> {
        let head = self.head();
        let is_quantized = w.has_linear(&head.key) && !w.has(&format!("{}.weight", head.key));
        let head = if self.tied_head() && !is_quantized {
            let tied = Linear::new(w.tensor(self.embedding_key())?, None);
            tied.in_precision(w.precision()).map_err(computing(&head.key))?
        } else {
            Linear::load(w, &head)?
        };
        Ok(Output { norm: self.final_norm(w)?, head })
    }
}

/// The final norm.
#[derive(Debug)]
pub struct FinalNorm(RmsNorm);

impl FinalNorm {
    /// `[t, hidden]`: what the head sees.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        self.0.forward(x).map_err(computing("the final norm"))
    }
}

/// The final norm and the head.
#[derive(Debug)]
pub struct Output {
    norm: FinalNorm,
    head: Linear,
}

impl Output {
    /// [`FinalNorm::forward`]
    pub fn norm(&self, x: &Tensor) -> Result<Tensor, ModelError> {
        self.norm.forward(x)
    }

    /// `[t, vocab]` from the output of [`Output::norm`].
    pub fn logits(&self, normed: &Tensor) -> Result<Tensor, ModelError> {
        self.head.forward(normed).map_err(computing("the logits"))
    }
}

/// An f32 tensor on the CPU from row-major data.
fn tensor(data: Vec<f32>, shape: impl Into<candle_core::Shape>, what: &str) -> Result<Tensor, ModelError> {
    Tensor::from_vec(data, shape, &Device::Cpu).map_err(computing(what))
}
