//! A gated delta net: a causal convolution, the gated delta rule, a gated norm.

use candle_core::{D, Device, Result as CandleResult, Tensor};

use super::super::config::{Fields, divides};
use super::super::nn::{Linear, RmsNorm, expect_shape, split_heads};
use super::super::{Dims, Group, LinearSpec, ModelError, Tap, WeightSource, computing};
use super::delta_rule::gated_delta_rule;
use super::linear;

const CONV_WIDTH: usize = 4;
/// Of the unit length of queries and keys, inside the root.
const LENGTH_EPS: f64 = 1e-6;

#[derive(Clone, Debug)]
pub(super) struct DeltaNetShape {
    hidden: usize,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    conv_width: usize,
    norm_eps: f32,
}

impl DeltaNetShape {
    pub fn new(fields: &Fields<'_>, dims: &Dims) -> Result<Self, ModelError> {
        let key_heads = fields.size("linear_num_key_heads")?;
        let value_heads = fields.size("linear_num_value_heads")?;
        divides("linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads)?;
        Ok(Self {
            hidden: dims.hidden_size,
            key_heads,
            value_heads,
            key_dim: fields.size("linear_key_head_dim")?,
            value_dim: fields.size("linear_value_head_dim")?,
            conv_width: fields.size_or("linear_conv_kernel_dim", CONV_WIDTH)?,
            norm_eps: dims.norm_eps,
        })
    }

    /// All queries, all keys, all values: what is convolved.
    fn channels(&self) -> [usize; 3] {
        let keys = self.key_heads * self.key_dim;
        [keys, keys, self.value_heads * self.value_dim]
    }

    /// The linears by shared input.
    pub fn groups(&self, layer: &str) -> Vec<Group> {
        let values = self.value_heads * self.value_dim;
        let linear = |name: &str, k, n| linear(layer, &format!("linear_attn.{name}"), k, n, false);
        let qkv = linear("in_proj_qkv", self.hidden, self.channels().iter().sum());
        let z = linear("in_proj_z", self.hidden, values);
        let out = linear("out_proj", values, self.hidden);
        vec![Group { linears: vec![qkv, z] }, Group { linears: vec![out] }]
    }

    /// Two linears that are small and stay as they are: the step size and the decay of each head.
    fn gates(&self, layer: &str) -> [LinearSpec; 2] {
        ["in_proj_b", "in_proj_a"]
            .map(|name| linear(layer, &format!("linear_attn.{name}"), self.hidden, self.value_heads, false))
    }

    pub fn others(&self, layer: &str) -> Vec<(String, Vec<usize>)> {
        let own = [
            ("conv1d.weight", self.conv_shape()),
            ("A_log", vec![self.value_heads]),
            ("dt_bias", vec![self.value_heads]),
            ("norm.weight", vec![self.value_dim]),
        ]
        .map(|(name, shape)| (tensor_key(layer, name), shape));
        let gates = self.gates(layer).map(|gate| (format!("{}.weight", gate.key), vec![gate.n, gate.k]));
        own.into_iter().chain(gates).collect()
    }

    fn conv_shape(&self) -> Vec<usize> {
        vec![self.channels().iter().sum(), 1, self.conv_width]
    }

    pub fn load(&self, w: &dyn WeightSource, layer: &str) -> Result<DeltaNet, ModelError> {
        let groups = self.groups(layer);
        let tensor = |name: &str, shape: &[usize]| {
            let key = tensor_key(layer, name);
            let tensor = w.tensor(&key)?;
            expect_shape(&key, &tensor, shape).map(|()| tensor)
        };
        let conv = tensor("conv1d.weight", &self.conv_shape())?;
        let per_head = [self.value_heads];
        let a_log = tensor("A_log", &per_head)?;
        let [b, a] = self.gates(layer).map(|gate| Linear::load(w, &gate));
        let at = computing(layer);
        Ok(DeltaNet {
            shape: self.clone(),
            qkv: Linear::load(w, &groups[0].linears[0])?,
            z: Linear::load(w, &groups[0].linears[1])?,
            out: Linear::load(w, &groups[1].linears[0])?,
            a: a?,
            b: b?,
            conv: conv.squeeze(1).and_then(|conv| conv.t()?.contiguous()).map_err(&at)?,
            rate: a_log.exp().map_err(&at)?,
            dt_bias: tensor("dt_bias", &per_head)?,
            norm: RmsNorm::load(w, &tensor_key(layer, "norm.weight"), self.value_dim, self.norm_eps)?,
            modules: [groups[0].modules(), groups[1].modules()],
        })
    }
}

fn tensor_key(layer: &str, name: &str) -> String {
    format!("{layer}.linear_attn.{name}")
}

#[derive(Debug)]
pub(super) struct DeltaNet {
    shape: DeltaNetShape,
    qkv: Linear,
    z: Linear,
    out: Linear,
    a: Linear,
    b: Linear,
    /// `[conv_width, channels]`
    conv: Tensor,
    /// `exp(A_log)`, `[value_heads]`
    rate: Tensor,
    /// `[value_heads]`
    dt_bias: Tensor,
    norm: RmsNorm,
    /// Module names by shared input, as taps get them.
    modules: [Vec<String>; 2],
}

impl DeltaNet {
    /// `[t, hidden]` to `[t, hidden]`. A row is a text of its own: convolution and recurrence start
    /// from nothing.
    pub fn forward(&self, x: &Tensor, tap: &mut dyn Tap) -> Result<Tensor, ModelError> {
        let [inputs, output] = &self.modules;
        let at = computing(&output[0]);
        tap.input(inputs, x)?;
        let mixed = self.mix(x).map_err(&at)?;
        tap.input(output, &mixed)?;
        self.out.forward(&mixed).map_err(&at)
    }

    /// `[t, hidden]` to what `out_proj` sees, `[t, value_heads * value_dim]`.
    fn mix(&self, x: &Tensor) -> CandleResult<Tensor> {
        let DeltaNetShape { key_dim, value_dim, .. } = self.shape;
        let qkv = causal_conv(&self.qkv.forward(x)?, &self.conv)?.silu()?;
        let [queries, keys, values] = self.shape.channels();
        let q = unit_length(&split_heads(&qkv.narrow(1, 0, queries)?, key_dim)?)?;
        let k = unit_length(&split_heads(&qkv.narrow(1, queries, keys)?, key_dim)?)?;
        let v = split_heads(&qkv.narrow(1, queries + keys, values)?, value_dim)?;
        let q = (self.per_value_head(&q)? * (key_dim as f64).powf(-0.5))?;
        let k = self.per_value_head(&k)?;
        let step = candle_nn::ops::sigmoid(&self.b.forward(x)?)?.t()?.contiguous()?;
        let mixed = gated_delta_rule(&q, &k, &v, &self.log_decay(x)?, &step)?;

        // [heads, t, value_dim] -> [t, heads * value_dim]
        let normed = self.norm.forward(&mixed)?.transpose(0, 1)?.flatten_from(D::Minus2)?;
        normed * self.z.forward(x)?.silu()?
    }

    /// `-exp(A_log) softplus(a + dt_bias)`, `[value_heads, t]`.
    fn log_decay(&self, x: &Tensor) -> CandleResult<Tensor> {
        let a = self.a.forward(x)?.broadcast_add(&self.dt_bias)?;
        softplus(&a)?.broadcast_mul(&self.rate)?.neg()?.t()?.contiguous()
    }

    /// `[key_heads, t, d]` to `[value_heads, t, d]`: consecutive value heads share a key head.
    fn per_value_head(&self, x: &Tensor) -> CandleResult<Tensor> {
        let (heads, t, d) = x.dims3()?;
        let shared = self.shape.value_heads / heads;
        x.unsqueeze(1)?.expand((heads, shared, t, d))?.reshape((heads * shared, t, d))
    }
}

/// Depthwise: `y[t, c] = sum over j of w[j, c] x[t - (width - 1) + j, c]`, with zeros in front of the
/// row. `x: [t, c]`, `w: [width, c]`.
fn causal_conv(x: &Tensor, w: &Tensor) -> CandleResult<Tensor> {
    let ((t, channels), width) = (x.dims2()?, w.dim(0)?);
    let before = Tensor::zeros((width - 1, channels), x.dtype(), &Device::Cpu)?;
    let padded = Tensor::cat(&[&before, x], 0)?;
    let mut sum = padded.narrow(0, 0, t)?.broadcast_mul(&w.narrow(0, 0, 1)?)?;
    for j in 1..width {
        sum = (sum + padded.narrow(0, j, t)?.broadcast_mul(&w.narrow(0, j, 1)?)?)?;
    }
    Ok(sum)
}

/// `x / |x|` along the last dimension.
fn unit_length(x: &Tensor) -> CandleResult<Tensor> {
    x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + LENGTH_EPS)?.sqrt()?)
}

/// `ln(1 + exp(x))`, as `max(x, 0) + ln(1 + exp(-|x|))`.
fn softplus(x: &Tensor) -> CandleResult<Tensor> {
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?
}
