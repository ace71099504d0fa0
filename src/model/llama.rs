//! `LlamaForCausalLM`: grouped-query attention with rotary positions and a gated MLP.

use candle_core::{Result as CandleResult, Tensor};

use super::config::Fields;
use super::nn::{Linear, RmsNorm, Rotary, causal_attention};
use super::{Dims, Group, LinearSpec, ModelError, Tap, WeightSource, computing};

/// The structure of a Llama.
#[derive(Clone, Debug)]
pub(super) struct Llama {
    pub dims: Dims,
    intermediate_size: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    attention_bias: bool,
    mlp_bias: bool,
    rotary: Rotary,
}

impl Llama {
    pub fn new(fields: &Fields<'_>) -> Result<Self, ModelError> {
        fields.only("model_type", "llama".into())?;
        fields.only("hidden_act", "silu".into())?;
        // Mistral-like configs under a Llama name; the windows are not computed.
        fields.only("sliding_window", serde_json::Value::Null)?;
        let dims = Dims::new(fields)?;
        let hidden_size = dims.hidden_size;
        let heads = fields.size("num_attention_heads")?;
        let kv_heads = fields.size_or("num_key_value_heads", heads)?;
        let head_dim = fields.size_or("head_dim", hidden_size / heads)?;
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
            attention_bias: fields.flag("attention_bias")?,
            mlp_bias: fields.flag("mlp_bias")?,
            rotary: Rotary::new(fields.rope()?, head_dim),
        })
    }

    pub fn layer_groups(&self, layer: &str) -> Vec<Group> {
        let (hidden, inner) = (self.dims.hidden_size, self.intermediate_size);
        let attention = self.heads * self.head_dim;
        let kv = self.kv_heads * self.head_dim;
        let linear =
            |module: &str, k, n, has_bias| LinearSpec { key: format!("{layer}.{module}"), k, n, has_bias };
        let (a, m) = (self.attention_bias, self.mlp_bias);
        let q = linear("self_attn.q_proj", hidden, attention, a);
        let k = linear("self_attn.k_proj", hidden, kv, a);
        let v = linear("self_attn.v_proj", hidden, kv, a);
        let o = linear("self_attn.o_proj", attention, hidden, a);
        let gate = linear("mlp.gate_proj", hidden, inner, m);
        let up = linear("mlp.up_proj", hidden, inner, m);
        let down = linear("mlp.down_proj", inner, hidden, m);
        [vec![q, k, v], vec![o], vec![gate, up], vec![down]].map(|linears| Group { linears }).into()
    }

    /// The norm weights of a layer with their shapes.
    pub fn norms(&self, layer: &str) -> [(String, Vec<usize>); 2] {
        ["input_layernorm", "post_attention_layernorm"]
            .map(|norm| (format!("{layer}.{norm}.weight"), vec![self.dims.hidden_size]))
    }

    pub fn layer(&self, w: &dyn WeightSource, key: &str) -> Result<LlamaLayer, ModelError> {
        let groups = self.layer_groups(key);
        let load = |group: usize, at: usize| Linear::load(w, &groups[group].linears[at]);
        let [input_norm, post_norm] = self
            .norms(key)
            .map(|(norm, _)| RmsNorm::load(w, &norm, self.dims.hidden_size, self.dims.norm_eps));
        Ok(LlamaLayer {
            key: key.to_owned(),
            input_norm: input_norm?,
            post_norm: post_norm?,
            attention: Attention {
                q: load(0, 0)?,
                k: load(0, 1)?,
                v: load(0, 2)?,
                head_dim: self.head_dim,
                rotary: self.rotary.clone(),
            },
            o: load(1, 0)?,
            gate: load(2, 0)?,
            up: load(2, 1)?,
            down: load(3, 0)?,
            linears: groups.into_iter().map(|g| g.linears.into_iter().map(|l| l.key).collect()).collect(),
        })
    }
}

fn divides(field: &str, value: usize, by: &str, divisor: usize) -> Result<(), ModelError> {
    if value.is_multiple_of(divisor) {
        return Ok(());
    }
    Err(ModelError::Field {
        field: field.to_owned(),
        expected: format!("a multiple of {divisor} ({by})"),
        found: value.to_string(),
    })
}

#[derive(Debug)]
struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    head_dim: usize,
    rotary: Rotary,
}

impl Attention {
    /// `[t, hidden]` to what `o_proj` sees, `[t, heads * head_dim]`.
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let q = self.rotary.rotate(&self.heads(&self.q.forward(x)?)?)?;
        let k = self.rotary.rotate(&self.heads(&self.k.forward(x)?)?)?;
        let v = self.heads(&self.v.forward(x)?)?;
        causal_attention(&q, &k, &v)
    }

    /// `[t, heads * head_dim]` to `[heads, t, head_dim]`.
    fn heads(&self, x: &Tensor) -> CandleResult<Tensor> {
        let (t, width) = x.dims2()?;
        x.reshape((t, width / self.head_dim, self.head_dim))?.transpose(0, 1)?.contiguous()
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
    gate: Linear,
    up: Linear,
    down: Linear,
    /// Module names of the four groups, as taps get them.
    linears: Vec<Vec<String>>,
}

impl LlamaLayer {
    /// `x: [t, hidden]` to the next layer's `x`.
    pub fn forward(&self, x: &Tensor, tap: &mut dyn Tap) -> Result<Tensor, ModelError> {
        let at = computing(&self.key);
        let h = self.input_norm.forward(x).map_err(&at)?;
        tap.input(&self.linears[0], &h)?;
        let mixed = self.attention.forward(&h).map_err(&at)?;
        tap.input(&self.linears[1], &mixed)?;
        let x = self.o.forward(&mixed).and_then(|y| x + y).map_err(&at)?;

        let h = self.post_norm.forward(&x).map_err(&at)?;
        tap.input(&self.linears[2], &h)?;
        let g = self.gate.forward(&h).map_err(&at)?;
        let u = self.up.forward(&h).map_err(&at)?;
        tap.gated(&self.linears[2][0], &self.linears[2][1], &g, &u)?;
        let inner = g.silu().and_then(|g| g * u).map_err(&at)?;
        tap.input(&self.linears[3], &inner)?;
        self.down.forward(&inner).and_then(|y| x + y).map_err(&at)
    }
}
