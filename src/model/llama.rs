//! Llama and its dense relatives: grouped-query attention with rotary positions and a gated MLP.
//!
//! They share the layer and differ in which linears have a bias, in Qwen3's norms of the heads, and
//! in how a config switches a sliding window on.

use candle_core::{Result as CandleResult, Tensor};

use super::config::{Fields, divides};
use super::nn::{GatedMlp, Linear, RmsNorm, Rotary, causal_attention, split_heads};
use super::{Dims, Group, LinearSpec, ModelError, Tap, WeightSource, computing};

const INPUT_NORM: &str = "input_layernorm";
const POST_NORM: &str = "post_attention_layernorm";
const Q_NORM: &str = "self_attn.q_norm";
const K_NORM: &str = "self_attn.k_norm";

/// Who is computed by this layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Llama,
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    Qwen3,
}

impl Family {
    pub const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// The entry of `architectures`.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// Which linears have a bias: Qwen2 has some without a flag, Mistral has none whatever a flag
    /// says.
    fn biases(self, fields: &Fields<'_>) -> Result<Biases, ModelError> {
        Ok(match self {
            Self::Llama => {
                let attention = fields.flag("attention_bias")?;
                Biases { qkv: attention, o: attention, mlp: fields.flag("mlp_bias")? }
            }
            Self::Mistral => Biases { qkv: false, o: false, mlp: false },
            Self::Qwen2 => Biases { qkv: true, o: false, mlp: false },
            Self::Qwen3 => {
                let attention = fields.flag("attention_bias")?;
                Biases { qkv: attention, o: attention, mlp: false }
            }
        })
    }

    /// The width of a head that a config leaves out. Qwen3's own code has a number there, the
    /// others divide.
    fn default_head_dim(self, hidden_size: usize, heads: usize) -> usize {
        if self == Self::Qwen3 { 128 } else { hidden_size / heads }
    }

    /// Attention windows are not computed. One that no row of `positions` tokens can leave does
    /// nothing, and Qwen's is off unless a flag says otherwise.
    fn refuse_windows(self, fields: &Fields<'_>, positions: usize) -> Result<(), ModelError> {
        fields.only_full_attention()?;
        let is_switched = matches!(self, Self::Qwen2 | Self::Qwen3);
        if is_switched && !fields.flag("use_sliding_window")? {
            return Ok(());
        }
        fields.no_window_below("sliding_window", positions)
    }
}

#[derive(Clone, Copy, Debug)]
struct Biases {
    qkv: bool,
    o: bool,
    mlp: bool,
}

/// The structure of a Llama or of a relative.
#[derive(Clone, Debug)]
pub(super) struct Llama {
    pub dims: Dims,
    intermediate_size: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Queries and keys are normed head by head before they are rotated.
    has_head_norms: bool,
    biases: Biases,
    rotary: Rotary,
}

impl Llama {
    pub fn new(fields: &Fields<'_>, family: Family) -> Result<Self, ModelError> {
        fields.only("model_type", family.model_type().into())?;
        fields.only("hidden_act", "silu".into())?;
        let dims = Dims::new(fields)?;
        family.refuse_windows(fields, dims.max_positions)?;
        let hidden_size = dims.hidden_size;
        let heads = fields.size("num_attention_heads")?;
        let kv_heads = fields.size_or("num_key_value_heads", heads)?;
        let head_dim = fields.size_or("head_dim", family.default_head_dim(hidden_size, heads))?;
        if head_dim == 0 {
            return Err(ModelError::Field {
                field: "num_attention_heads".to_owned(),
                expected: format!("at most hidden_size, {hidden_size}, without a head_dim"),
                found: heads.to_string(),
            });
        }
        divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)?;
        divides("head_dim", head_dim, "the two halves of a rotation", 2)?;
        Ok(Self {
            dims,
            intermediate_size: fields.size("intermediate_size")?,
            heads,
            kv_heads,
            head_dim,
            has_head_norms: family == Family::Qwen3,
            biases: family.biases(fields)?,
            rotary: Rotary::new(fields.rope()?, head_dim),
        })
    }

    pub fn layer_groups(&self, layer: &str) -> Vec<Group> {
        let (hidden, inner) = (self.dims.hidden_size, self.intermediate_size);
        let attention = self.heads * self.head_dim;
        let kv = self.kv_heads * self.head_dim;
        let linear =
            |module: &str, k, n, has_bias| LinearSpec { key: format!("{layer}.{module}"), k, n, has_bias };
        let Biases { qkv, o, mlp } = self.biases;
        let q = linear("self_attn.q_proj", hidden, attention, qkv);
        let k = linear("self_attn.k_proj", hidden, kv, qkv);
        let v = linear("self_attn.v_proj", hidden, kv, qkv);
        let o = linear("self_attn.o_proj", attention, hidden, o);
        let [gate_up, down] = GatedMlp::groups(layer, hidden, inner, mlp);
        vec![Group { linears: vec![q, k, v] }, Group { linears: vec![o] }, gate_up, down]
    }

    /// The norm weights of a layer with their shapes.
    pub fn norms(&self, layer: &str) -> Vec<(String, Vec<usize>)> {
        let of_states = [INPUT_NORM, POST_NORM].map(|norm| (norm, self.dims.hidden_size));
        let of_heads = [Q_NORM, K_NORM].map(|norm| (norm, self.head_dim));
        let of_heads = of_heads.into_iter().filter(|_| self.has_head_norms);
        let norms = of_states.into_iter().chain(of_heads);
        norms.map(|(norm, size)| (format!("{layer}.{norm}.weight"), vec![size])).collect()
    }

    pub fn layer(&self, w: &dyn WeightSource, key: &str) -> Result<LlamaLayer, ModelError> {
        let groups = self.layer_groups(key);
        let load = |group: usize, at: usize| Linear::load(w, &groups[group].linears[at]);
        let norm =
            |name: &str, size| RmsNorm::load(w, &format!("{key}.{name}.weight"), size, self.dims.norm_eps);
        let head_norm = |name| self.has_head_norms.then(|| norm(name, self.head_dim)).transpose();
        Ok(LlamaLayer {
            key: key.to_owned(),
            input_norm: norm(INPUT_NORM, self.dims.hidden_size)?,
            post_norm: norm(POST_NORM, self.dims.hidden_size)?,
            attention: Attention {
                q: load(0, 0)?,
                k: load(0, 1)?,
                v: load(0, 2)?,
                q_norm: head_norm(Q_NORM)?,
                k_norm: head_norm(K_NORM)?,
                head_dim: self.head_dim,
                rotary: self.rotary.clone(),
            },
            o: load(1, 0)?,
            mlp: GatedMlp::load(w, [&groups[2], &groups[3]])?,
            modules: [groups[0].modules(), groups[1].modules()],
        })
    }
}

#[derive(Debug)]
struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    head_dim: usize,
    rotary: Rotary,
}

impl Attention {
    /// `[t, hidden]` to what `o_proj` sees, `[t, heads * head_dim]`.
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let normed = |heads: Tensor, norm: &Option<RmsNorm>| match norm {
            Some(norm) => norm.forward(&heads),
            None => Ok(heads),
        };
        let q = normed(split_heads(&self.q.forward(x)?, self.head_dim)?, &self.q_norm)?;
        let k = normed(split_heads(&self.k.forward(x)?, self.head_dim)?, &self.k_norm)?;
        let v = split_heads(&self.v.forward(x)?, self.head_dim)?;
        causal_attention(&self.rotary.rotate(&q)?, &self.rotary.rotate(&k)?, &v)
    }
}

/// One decoder layer with its weights.
#[derive(Debug)]
pub(super) struct LlamaLayer {
    key: String,
    input_norm: RmsNorm,
    attention: Attention,
    o: Linear,
    post_norm: RmsNorm,
    mlp: GatedMlp,
    /// Module names of the attention's linears by shared input, as taps get them.
    modules: [Vec<String>; 2],
}

impl LlamaLayer {
    /// `x: [t, hidden]` to the next layer's `x`.
    pub fn forward(&self, x: &Tensor, tap: &mut dyn Tap) -> Result<Tensor, ModelError> {
        let at = computing(&self.key);
        let h = self.input_norm.forward(x).map_err(&at)?;
        tap.input(&self.modules[0], &h)?;
        let mixed = self.attention.forward(&h).map_err(&at)?;
        tap.input(&self.modules[1], &mixed)?;
        let x = self.o.forward(&mixed).and_then(|y| x + y).map_err(&at)?;
        let h = self.post_norm.forward(&x).map_err(&at)?;
        let y = self.mlp.forward(&h, tap)?;
        (x + y).map_err(&at)
    }
}
