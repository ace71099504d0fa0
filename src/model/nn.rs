//! The pieces layers are made of: linear, norm, rotary embedding, causal attention.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{D, Device, Result, Tensor};

use super::config::{Rope, RopeScaling};
use super::{Group, LinearSpec, ModelError, Precision, Tap, WeightSource, computing};

/// `y = x W + b`, with the weight as candle holds it.
#[derive(Debug)]
pub(super) struct Linear {
    /// `[n, k]`
    weight: Tensor,
    /// `[n]`
    bias: Option<Tensor>,
    precision: Precision,
}

impl Linear {
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias, precision: Precision::F32 }
    }

    /// The same linear, computing in `precision`.
    pub fn in_precision(mut self, precision: Precision) -> Result<Self> {
        self.weight = precision.round(&self.weight)?;
        self.precision = precision;
        Ok(self)
    }

    pub fn load(w: &dyn WeightSource, spec: &LinearSpec) -> std::result::Result<Self, ModelError> {
        let weight = w.linear(&spec.key)?;
        expect_shape(&format!("{}.weight", spec.key), &weight, &[spec.n, spec.k])?;
        let key = format!("{}.bias", spec.key);
        let bias = if spec.has_bias || w.has(&key) { Some(w.tensor(&key)?) } else { None };
        if let Some(bias) = &bias {
            expect_shape(&key, bias, &[spec.n])?;
        }
        Self::new(weight, bias).in_precision(w.precision()).map_err(computing(&spec.key))
    }

    /// `[t, k]` to `[t, n]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.precision.round(x)?.matmul(&self.weight.t()?)?;
        let y = match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        };
        self.precision.round(&y)
    }
}

/// `x / rms(x) * w`
#[derive(Debug)]
pub(super) struct RmsNorm {
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    pub fn load(
        w: &dyn WeightSource,
        key: &str,
        size: usize,
        eps: f32,
    ) -> std::result::Result<Self, ModelError> {
        let weight = w.tensor(key)?;
        expect_shape(key, &weight, &[size])?;
        Ok(Self { weight, eps })
    }

    /// A norm whose stored weight is the offset from 1.
    pub fn load_offset(
        w: &dyn WeightSource,
        key: &str,
        size: usize,
        eps: f32,
    ) -> std::result::Result<Self, ModelError> {
        let Self { weight, eps } = Self::load(w, key, size, eps)?;
        Ok(Self { weight: (weight + 1.0).map_err(computing(key))?, eps })
    }

    /// `[.., size]` to `[.., size]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::rms_norm(&x.contiguous()?, &self.weight, self.eps)
    }
}

pub(super) fn expect_shape(
    key: &str,
    tensor: &Tensor,
    shape: &[usize],
) -> std::result::Result<(), ModelError> {
    if tensor.dims() == shape {
        return Ok(());
    }
    Err(ModelError::Tensor {
        tensor: key.to_owned(),
        expected: format!("shape {shape:?}"),
        found: format!("{:?}", tensor.dims()),
    })
}

/// `down(silu(gate(x)) * up(x))`
#[derive(Debug)]
pub(super) struct GatedMlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    /// Module names by shared input, as taps get them.
    modules: [Vec<String>; 2],
}

impl GatedMlp {
    /// The linears of the MLP of layer `layer`, by shared input.
    pub fn groups(layer: &str, hidden: usize, intermediate: usize, has_bias: bool) -> [Group; 2] {
        let linear = |name: &str, k, n| LinearSpec { key: format!("{layer}.mlp.{name}"), k, n, has_bias };
        let gate = linear("gate_proj", hidden, intermediate);
        let up = linear("up_proj", hidden, intermediate);
        let down = linear("down_proj", intermediate, hidden);
        [vec![gate, up], vec![down]].map(|linears| Group { linears })
    }

    /// Loads the linears of [`GatedMlp::groups`].
    pub fn load(
        w: &dyn WeightSource,
        [inputs, output]: [&Group; 2],
    ) -> std::result::Result<Self, ModelError> {
        Ok(Self {
            gate: Linear::load(w, &inputs.linears[0])?,
            up: Linear::load(w, &inputs.linears[1])?,
            down: Linear::load(w, &output.linears[0])?,
            modules: [inputs.modules(), output.modules()],
        })
    }

    /// `[t, hidden]` to `[t, hidden]`.
    pub fn forward(&self, x: &Tensor, tap: &mut dyn Tap) -> std::result::Result<Tensor, ModelError> {
        let [inputs, output] = &self.modules;
        let at = computing(&output[0]);
        tap.input(inputs, x)?;
        let gate = self.gate.forward(x).map_err(&at)?;
        let up = self.up.forward(x).map_err(&at)?;
        tap.gated(&inputs[0], &inputs[1], &gate, &up)?;
        let inner = gate.silu().and_then(|gate| gate * up).map_err(&at)?;
        tap.input(output, &inner)?;
        self.down.forward(&inner).map_err(&at)
    }
}

/// `[t, heads * head_dim]` to `[heads, t, head_dim]`.
pub(super) fn split_heads(x: &Tensor, head_dim: usize) -> Result<Tensor> {
    let (t, width) = x.dims2()?;
    x.reshape((t, width / head_dim, head_dim))?.transpose(0, 1)?.contiguous()
}

/// Rotary position embedding in Hugging Face's convention: of the first `rotary_dim` elements of a
/// head, element `i` is rotated with element `i + rotary_dim / 2`; the others stay.
#[derive(Clone, Debug)]
pub(super) struct Rotary {
    inverse_frequencies: Vec<f32>,
    /// The longest tables asked for so far; all layers share them.
    tables: Arc<Mutex<Option<Tables>>>,
}

/// Cosines and sines, `[positions, rotary_dim / 2]` each.
#[derive(Clone, Debug)]
struct Tables {
    positions: usize,
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    pub fn new(rope: Rope, rotary_dim: usize) -> Self {
        // In f32 like the models' own code, whose rounding the weights were trained with.
        let inverse_frequencies = (0..rotary_dim)
            .step_by(2)
            .map(|i| 1.0 / rope.theta.powf(i as f32 / rotary_dim as f32))
            .map(|frequency| scaled(frequency, rope.scaling))
            .collect();
        Self { inverse_frequencies, tables: Arc::default() }
    }

    /// Rotates `x: [heads, t, head_dim]`, positions 0 to t.
    pub fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let positions = x.dim(1)?;
        let tables = self.tables(positions)?;
        let cos = tables.cos.narrow(0, 0, positions)?;
        let sin = tables.sin.narrow(0, 0, positions)?;
        let (head_dim, rotary_dim) = (x.dim(2)?, 2 * self.inverse_frequencies.len());
        let rotated = x.narrow(2, 0, rotary_dim)?.unsqueeze(0)?.contiguous()?;
        let rotated = candle_nn::rotary_emb::rope(&rotated, &cos, &sin)?.squeeze(0)?;
        if rotary_dim == head_dim {
            return Ok(rotated);
        }
        Tensor::cat(&[&rotated, &x.narrow(2, rotary_dim, head_dim - rotary_dim)?], 2)
    }

    fn tables(&self, positions: usize) -> Result<Tables> {
        // The tables are replaced whole, so a thread that panicked left nothing half-done.
        let mut cached = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        match &*cached {
            Some(tables) if tables.positions >= positions => Ok(tables.clone()),
            _ => {
                let tables = self.build_tables(positions)?;
                *cached = Some(tables.clone());
                Ok(tables)
            }
        }
    }

    fn build_tables(&self, positions: usize) -> Result<Tables> {
        let angles = (0..positions).flat_map(|p| self.inverse_frequencies.iter().map(move |f| p as f32 * f));
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.map(|angle| (angle.cos(), angle.sin())).unzip();
        let shape = (positions, self.inverse_frequencies.len());
        Ok(Tables {
            positions,
            cos: Tensor::from_vec(cos, shape, &Device::Cpu)?,
            sin: Tensor::from_vec(sin, shape, &Device::Cpu)?,
        })
    }
}

/// One inverse frequency after scaling. `llama3` divides long wavelengths by its factor, keeps
/// short ones, and blends in between.
fn scaled(frequency: f32, scaling: RopeScaling) -> f32 {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } = scaling
    else {
        return frequency;
    };
    let wavelength = 2.0 * std::f32::consts::PI / frequency;
    if wavelength < original_positions / high_freq_factor {
        frequency
    } else if wavelength > original_positions / low_freq_factor {
        frequency / factor
    } else {
        let smooth =
            (original_positions / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}

/// Queries attended at once: bounds the scores of a head group to `[heads * QUERY_BLOCK, t]`.
const QUERY_BLOCK: usize = 256;

/// Causal softmax attention over one row, scaled by `1 / sqrt(head_dim)`.
///
/// `q: [heads, t, head_dim]`, `k` and `v`: `[kv_heads, t, head_dim]`; head `h` attends to the
/// `h / (heads / kv_heads)`-th of them. Returns `[t, heads * head_dim]`.
pub(super) fn causal_attention(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (heads, t, head_dim) = q.dims3()?;
    let kv_heads = k.dim(0)?;
    let group = heads / kv_heads;
    let q = (q * (head_dim as f64).powf(-0.5))?;
    let mut blocks = Vec::new();
    for start in (0..t).step_by(QUERY_BLOCK) {
        let len = QUERY_BLOCK.min(t - start);
        let seen = start + len; // later keys are masked for every query of the block
        let mask = causal_mask(start, len)?;
        let mut outputs = Vec::with_capacity(kv_heads);
        for head in 0..kv_heads {
            let q = q.narrow(0, head * group, group)?.narrow(1, start, len)?;
            let q = q.contiguous()?.reshape((group * len, head_dim))?;
            let k = k.get(head)?.narrow(0, 0, seen)?;
            let v = v.get(head)?.narrow(0, 0, seen)?;
            let scores = q.matmul(&k.t()?)?.reshape((group, len, seen))?.broadcast_add(&mask)?;
            let shares = candle_nn::ops::softmax_last_dim(&scores)?.reshape((group * len, seen))?;
            outputs.push(shares.matmul(&v)?.reshape((group, len, head_dim))?);
        }
        // [heads, len, head_dim] -> [len, heads * head_dim]
        let block = Tensor::cat(&outputs, 0)?.transpose(0, 1)?.contiguous()?;
        blocks.push(block.flatten_from(D::Minus2)?);
    }
    Tensor::cat(&blocks, 0)
}

/// `[len, start + len]`: query `start + i` sees keys `0..=start + i`.
fn causal_mask(start: usize, len: usize) -> Result<Tensor> {
    let keys = start + len;
    let mask = (0..len)
        .flat_map(|i| (0..keys).map(move |key| if key <= start + i { 0.0 } else { f32::NEG_INFINITY }))
        .collect();
    Tensor::from_vec(mask, (len, keys), &Device::Cpu)
}
