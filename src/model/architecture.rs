//! What differs between architectures: everything that depends on one is dispatched here.

use candle_core::Tensor;
use serde_json::Value;

use super::config::Fields;
use super::llama::{Family, Llama, LlamaLayer};
use super::nn::RmsNorm;
use super::qwen3_5::{self, Qwen3_5, Qwen3_5Layer};
use super::{Group, ModelError, Tap, WeightSource};

/// What every architecture has.
#[derive(Clone, Debug)]
pub(super) struct Dims {
    pub hidden_size: usize,
    pub vocab_size: usize,
    pub layer_count: usize,
    pub max_positions: usize,
    pub tied_head: bool,
    pub norm_eps: f32,
}

impl Dims {
    pub fn new(fields: &Fields<'_>) -> Result<Self, ModelError> {
        Ok(Self {
            hidden_size: fields.size("hidden_size")?,
            vocab_size: fields.size("vocab_size")?,
            layer_count: fields.layers("num_hidden_layers")?,
            max_positions: fields.count("max_position_embeddings")?,
            tied_head: fields.tied_head()?,
            norm_eps: fields.positive("rms_norm_eps")?,
        })
    }
}

#[derive(Clone, Debug)]
pub(super) enum Architecture {
    Llama(Llama),
    Qwen3_5(Qwen3_5),
}

impl Architecture {
    pub fn new(config: &Value) -> Result<Self, ModelError> {
        let fields = Fields::new(config)?;
        let name = fields.architecture()?;
        if qwen3_5::ARCHITECTURES.contains(&name) {
            return Qwen3_5::new(&fields).map(Self::Qwen3_5);
        }
        match Family::ALL.into_iter().find(|family| family.architecture() == name) {
            Some(family) => Llama::new(&fields, family).map(Self::Llama),
            None => Err(ModelError::Unsupported {
                field: "architectures".to_owned(),
                found: format!("\"{name}\""),
                expected: Family::ALL
                    .map(Family::architecture)
                    .into_iter()
                    .chain(qwen3_5::ARCHITECTURES)
                    .collect::<Vec<_>>()
                    .join(", "),
            }),
        }
    }

    pub fn dims(&self) -> &Dims {
        match self {
            Self::Llama(llama) => &llama.dims,
            Self::Qwen3_5(qwen) => &qwen.dims,
        }
    }

    /// The architecture if it can have a multi-token prediction head.
    pub fn with_mtp(&self) -> Option<&Qwen3_5> {
        match self {
            Self::Llama(_) => None,
            Self::Qwen3_5(qwen) => Some(qwen),
        }
    }

    /// The linears of layer `layer`, whose module name is `key`.
    pub fn layer_groups(&self, layer: usize, key: &str) -> Vec<Group> {
        match self {
            Self::Llama(llama) => llama.layer_groups(key),
            Self::Qwen3_5(qwen) => qwen.layer_groups(layer, key),
        }
    }

    /// The other tensors of a layer, with their shapes.
    pub fn layer_others(&self, layer: usize, key: &str) -> Vec<(String, Vec<usize>)> {
        match self {
            Self::Llama(llama) => llama.norms(key),
            Self::Qwen3_5(qwen) => qwen.layer_others(layer, key),
        }
    }

    pub fn layer(&self, w: &dyn WeightSource, layer: usize, key: &str) -> Result<Layer, ModelError> {
        let kind = match self {
            Self::Llama(llama) => llama.layer(w, key).map(LayerKind::Llama),
            Self::Qwen3_5(qwen) => qwen.layer(w, layer, key).map(LayerKind::Qwen3_5),
        };
        kind.map(|kind| Layer { kind })
    }

    pub fn norm(&self, w: &dyn WeightSource, key: &str) -> Result<RmsNorm, ModelError> {
        let Dims { hidden_size, norm_eps, .. } = *self.dims();
        match self {
            Self::Llama(_) => RmsNorm::load(w, key, hidden_size, norm_eps),
            Self::Qwen3_5(qwen) => qwen.norm(w, key),
        }
    }
}

/// One decoder layer with its weights, f32.
#[derive(Debug)]
pub struct Layer {
    kind: LayerKind,
}

#[derive(Debug)]
enum LayerKind {
    Llama(LlamaLayer),
    Qwen3_5(Qwen3_5Layer),
}

impl Layer {
    /// Runs one row `x: [t, hidden]` from position 0.
    pub fn forward(&self, x: &Tensor, tap: &mut dyn Tap) -> Result<Tensor, ModelError> {
        match &self.kind {
            LayerKind::Llama(layer) => layer.forward(x, tap),
            LayerKind::Qwen3_5(layer) => layer.forward(x, tap),
        }
    }
}
