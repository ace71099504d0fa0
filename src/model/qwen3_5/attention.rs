//! Full attention whose output is gated: `o_proj(attention(q, k, v) * sigmoid(gate))`. Queries and
//! keys are normalized per head, and rotated in a part of it.

use candle_core::{Result as CandleResult, Tensor};

use super::super::config::{Fields, divides};
use super::super::nn::{Linear, RmsNorm, Rotary, causal_attention, split_heads};
use super::super::{Dims, Group, ModelError, Tap, WeightSource, computing};
use super::linear;

/// Share of a head that is rotated, where a config does not say.
const ROTARY_FACTOR: f32 = 0.25;
const HEAD_DIM: usize = 256;

#[derive(Clone, Debug)]
pub(super) struct AttentionShape {
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    has_bias: bool,
    norm_eps: f32,
    rotary: Rotary,
}

impl AttentionShape {
    pub fn new(fields: &Fields<'_>, dims: &Dims) -> Result<Self, ModelError> {
        fields.only("attn_output_gate", true.into())?;
        let heads = fields.size("num_attention_heads")?;
        let kv_heads = fields.size_or("num_key_value_heads", heads)?;
        let head_dim = fields.size_or("head_dim", HEAD_DIM)?;
        divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)?;
        let rotary_dim = (head_dim as f32 * fields.partial_rotary_factor(ROTARY_FACTOR)?) as usize;
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            return Err(ModelError::Field {
                field: "partial_rotary_factor".to_owned(),
                expected: format!("an even number of the {head_dim} elements of a head"),
                found: rotary_dim.to_string(),
            });
        }
        Ok(Self {
            hidden: dims.hidden_size,
            heads,
            kv_heads,
            head_dim,
            has_bias: fields.flag("attention_bias")?,
            norm_eps: dims.norm_eps,
            rotary: Rotary::new(fields.partial_rope()?, rotary_dim),
        })
    }

    /// The linears by shared input. `q_proj` makes a query and a gate for every head.
    pub fn groups(&self, layer: &str) -> Vec<Group> {
        let (attention, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let linear = |name: &str, k, n| linear(layer, &format!("self_attn.{name}"), k, n, self.has_bias);
        let q = linear("q_proj", self.hidden, 2 * attention);
        let k = linear("k_proj", self.hidden, kv);
        let v = linear("v_proj", self.hidden, kv);
        let o = linear("o_proj", attention, self.hidden);
        vec![Group { linears: vec![q, k, v] }, Group { linears: vec![o] }]
    }

    pub fn others(&self, layer: &str) -> Vec<(String, Vec<usize>)> {
        norm_keys(layer).map(|norm| (norm, vec![self.head_dim])).into()
    }

    pub fn load(&self, w: &dyn WeightSource, layer: &str) -> Result<Attention, ModelError> {
        let groups = self.groups(layer);
        let load = |group: usize, at: usize| Linear::load(w, &groups[group].linears[at]);
        let [q_norm, k_norm] =
            norm_keys(layer).map(|norm| RmsNorm::load_offset(w, &norm, self.head_dim, self.norm_eps));
        Ok(Attention {
            q: load(0, 0)?,
            k: load(0, 1)?,
            v: load(0, 2)?,
            o: load(1, 0)?,
            q_norm: q_norm?,
            k_norm: k_norm?,
            head_dim: self.head_dim,
            rotary: self.rotary.clone(),
            modules: [groups[0].modules(), groups[1].modules()],
        })
    }
}

fn norm_keys(layer: &str) -> [String; 2] {
    ["q_norm", "k_norm"].map(|norm| format!("{layer}.self_attn.{norm}.weight"))
}

#[derive(Debug)]
pub(super) struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    head_dim: usize,
    rotary: Rotary,
    /// Module names by shared input, as taps get them.
    modules: [Vec<String>; 2],
}

impl Attention {
    /// `[t, hidden]` to `[t, hidden]`.
    pub fn forward(&self, x: &Tensor, tap: &mut dyn Tap) -> Result<Tensor, ModelError> {
        let [inputs, output] = &self.modules;
        let at = computing(&output[0]);
        tap.input(inputs, x)?;
        let mixed = self.mix(x).map_err(&at)?;
        tap.input(output, &mixed)?;
        self.o.forward(&mixed).map_err(&at)
    }

    /// `[t, hidden]` to what `o_proj` sees, `[t, heads * head_dim]`.
    fn mix(&self, x: &Tensor) -> CandleResult<Tensor> {
        // [heads, t, query and gate]
        let q = split_heads(&self.q.forward(x)?, 2 * self.head_dim)?;
        let gate = q.narrow(2, self.head_dim, self.head_dim)?.transpose(0, 1)?.flatten_from(1)?;
        let q = self.q_norm.forward(&q.narrow(2, 0, self.head_dim)?)?;
        let k = self.k_norm.forward(&split_heads(&self.k.forward(x)?, self.head_dim)?)?;
        let v = split_heads(&self.v.forward(x)?, self.head_dim)?;
        let mixed = causal_attention(&self.rotary.rotate(&q)?, &self.rotary.rotate(&k)?, &v)?;
        mixed * candle_nn::ops::sigmoid(&gate)?
    }
}
