//! Qwen3.5: layers of gated delta nets, every fourth one of full attention.
//!
//! The reference is `models/qwen3_5` of the Python package transformers 5.17. Weights of norms are
//! offsets from 1, but for the gated one inside a delta net. Image positions are not computed: on
//! text, the three position streams of the multimodal rotary embedding are one, and interleaving
//! their frequencies changes nothing.

mod attention;
mod delta_net;
mod delta_rule;
mod mtp;

use candle_core::Tensor;

use super::config::Fields;
use super::nn::{GatedMlp, RmsNorm};
use super::{Dims, Group, LinearSpec, ModelError, Tap, WeightSource, computing};
use attention::{Attention, AttentionShape};
use delta_net::{DeltaNet, DeltaNetShape};

pub use mtp::Mtp;

/// In `architectures` of a config of text alone, and of one with a vision tower.
pub(super) const ARCHITECTURES: [&str; 2] = ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"];

/// Every fourth layer attends, where a config does not list the layers.
const ATTENTION_INTERVAL: usize = 4;

/// The structure of a Qwen3.5.
#[derive(Clone, Debug)]
pub(super) struct Qwen3_5 {
    pub dims: Dims,
    intermediate_size: usize,
    layers: Vec<Mixing>,
    attention: AttentionShape,
    delta_net: DeltaNetShape,
    /// Layers of a multi-token prediction head that the config declares.
    pub mtp_layers: usize,
}

/// How a layer mixes its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mixing {
    DeltaNet,
    Attention,
}

impl Qwen3_5 {
    /// From a config of text alone, or one whose `text_config` lies beside a `vision_config`.
    pub fn new(fields: &Fields<'_>) -> Result<Self, ModelError> {
        let text = fields.object("text_config")?;
        let is_nested = text.is_some();
        let (outer, fields) = (fields, text.as_ref().unwrap_or(fields));
        outer.only("model_type", if is_nested { "qwen3_5" } else { "qwen3_5_text" }.into())?;
        fields.only("model_type", "qwen3_5_text".into())?;
        fields.only("hidden_act", "silu".into())?;
        fields.only("mtp_use_dedicated_embeddings", false.into())?;
        let mut dims = Dims::new(fields)?;
        dims.tied_head = outer.tied_head()?;
        Ok(Self {
            intermediate_size: fields.size("intermediate_size")?,
            layers: layers(fields, dims.layer_count)?,
            attention: AttentionShape::new(fields, &dims)?,
            delta_net: DeltaNetShape::new(fields, &dims)?,
            mtp_layers: fields.count_or_none("mtp_num_hidden_layers")?,
            dims,
        })
    }

    pub fn layer_groups(&self, layer: usize, key: &str) -> Vec<Group> {
        self.groups_of(self.layers[layer], key)
    }

    fn groups_of(&self, mixing: Mixing, key: &str) -> Vec<Group> {
        let mixing = match mixing {
            Mixing::DeltaNet => self.delta_net.groups(key),
            Mixing::Attention => self.attention.groups(key),
        };
        mixing.into_iter().chain(self.mlp_groups(key)).collect()
    }

    fn mlp_groups(&self, key: &str) -> [Group; 2] {
        GatedMlp::groups(key, self.dims.hidden_size, self.intermediate_size, false)
    }

    /// The tensors of a layer that are no linears to quantize, with their shapes.
    pub fn layer_others(&self, layer: usize, key: &str) -> Vec<(String, Vec<usize>)> {
        self.others_of(self.layers[layer], key)
    }

    fn others_of(&self, mixing: Mixing, key: &str) -> Vec<(String, Vec<usize>)> {
        let mixing = match mixing {
            Mixing::DeltaNet => self.delta_net.others(key),
            Mixing::Attention => self.attention.others(key),
        };
        let norms = norm_keys(key).map(|norm| (norm, vec![self.dims.hidden_size]));
        norms.into_iter().chain(mixing).collect()
    }

    pub fn layer(&self, w: &dyn WeightSource, layer: usize, key: &str) -> Result<Qwen3_5Layer, ModelError> {
        self.layer_of(w, self.layers[layer], key)
    }

    fn layer_of(&self, w: &dyn WeightSource, mixing: Mixing, key: &str) -> Result<Qwen3_5Layer, ModelError> {
        let [input_norm, post_norm] = norm_keys(key).map(|norm| self.norm(w, &norm));
        let [gate_up, down] = self.mlp_groups(key);
        Ok(Qwen3_5Layer {
            key: key.to_owned(),
            input_norm: input_norm?,
            mixer: match mixing {
                Mixing::DeltaNet => Mixer::DeltaNet(self.delta_net.load(w, key)?),
                Mixing::Attention => Mixer::Attention(self.attention.load(w, key)?),
            },
            post_norm: post_norm?,
            mlp: GatedMlp::load(w, [&gate_up, &down])?,
        })
    }

    /// A norm over the hidden state.
    pub fn norm(&self, w: &dyn WeightSource, key: &str) -> Result<RmsNorm, ModelError> {
        RmsNorm::load_offset(w, key, self.dims.hidden_size, self.dims.norm_eps)
    }
}

fn norm_keys(layer: &str) -> [String; 2] {
    ["input_layernorm", "post_attention_layernorm"].map(|norm| format!("{layer}.{norm}.weight"))
}

/// `layer_types`, or every `full_attention_interval`-th layer.
fn layers(fields: &Fields<'_>, count: usize) -> Result<Vec<Mixing>, ModelError> {
    let Some(names) = fields.strings("layer_types")? else {
        let interval = fields.size_or("full_attention_interval", ATTENTION_INTERVAL)?;
        let attends = |layer: usize| (layer + 1).is_multiple_of(interval);
        let mixing = |layer| if attends(layer) { Mixing::Attention } else { Mixing::DeltaNet };
        return Ok((0..count).map(mixing).collect());
    };
    let wrong = |expected: String, found: String| ModelError::Field {
        field: "layer_types".to_owned(),
        expected,
        found,
    };
    if names.len() != count {
        return Err(wrong(format!("num_hidden_layers, {count}, entries"), names.len().to_string()));
    }
    names
        .into_iter()
        .map(|name| match name {
            "linear_attention" => Ok(Mixing::DeltaNet),
            "full_attention" => Ok(Mixing::Attention),
            other => Err(wrong("linear_attention or full_attention".to_owned(), other.to_owned())),
        })
        .collect()
}

/// One decoder layer with its weights.
#[derive(Debug)]
pub(super) struct Qwen3_5Layer {
    key: String,
    input_norm: RmsNorm,
    mixer: Mixer,
    post_norm: RmsNorm,
    mlp: GatedMlp,
}

#[derive(Debug)]
enum Mixer {
    DeltaNet(DeltaNet),
    Attention(Attention),
}

impl Qwen3_5Layer {
    /// `x: [t, hidden]` to the next layer's `x`.
    pub fn forward(&self, x: &Tensor, tap: &mut dyn Tap) -> Result<Tensor, ModelError> {
        let at = computing(&self.key);
        let h = self.input_norm.forward(x).map_err(&at)?;
        let mixed = match &self.mixer {
            Mixer::DeltaNet(net) => net.forward(&h, tap)?,
            Mixer::Attention(attention) => attention.forward(&h, tap)?,
        };
        let x = (x + mixed).map_err(&at)?;
        let h = self.post_norm.forward(&x).map_err(&at)?;
        let y = self.mlp.forward(&h, tap)?;
        (x + y).map_err(&at)
    }
}

fn linear(layer: &str, module: &str, k: usize, n: usize, has_bias: bool) -> LinearSpec {
    LinearSpec { key: format!("{layer}.{module}"), k, n, has_bias }
}
