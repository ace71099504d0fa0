//! Round-to-nearest int4 in groups of 128: the plainest quantization, computed from the source.
//!
//! Each output of a decoder linear is cut into groups of 128 inputs (the last may be shorter). A
//! group of weights `w` is stored as 4-bit codes `q`, a scale `s` (f16) and a zero point `z` (4
//! bits), with `w ~ s (q - z)`:
//!
//! ```text
//! s = (max(w, 0) - min(w, 0)) / 15        rounded to f16
//! z = round(-min(w, 0) / s)
//! q = clamp(round(w / s) + z, 0, 15)
//! ```
//!
//! No search, no calibration. Embeddings, norms, biases and the head stay as in the source, as in
//! the int4 checkpoints in use.

use std::collections::BTreeSet;

use candle_core::{Device, Tensor};
use half::f16;

use crate::model::{LinearSpec, Model, ModelError, WeightSource, computing};

const GROUP: usize = 128;
const MAX_CODE: f32 = 15.0;
const CODE_BITS: u64 = 4;
/// A scale and a zero point.
const GROUP_BITS: u64 = 16 + 4;

/// The weights of a model with its decoder linears rounded.
pub struct RtnWeights<'a> {
    source: &'a dyn WeightSource,
    rounded: BTreeSet<String>,
}

impl<'a> RtnWeights<'a> {
    pub fn new(source: &'a (dyn WeightSource + Sync), model: &Model) -> Self {
        Self { source, rounded: super::size::decoder_linears(model).map(|linear| linear.key).collect() }
    }
}

/// Stored bits of a rounded linear.
pub(super) fn bits(linear: &LinearSpec) -> u64 {
    let (k, n) = (linear.k as u64, linear.n as u64);
    n * (k * CODE_BITS + k.div_ceil(GROUP as u64) * GROUP_BITS)
}

impl WeightSource for RtnWeights<'_> {
    fn tensor(&self, key: &str) -> Result<Tensor, ModelError> {
        self.source.tensor(key)
    }

    fn linear(&self, module: &str) -> Result<Tensor, ModelError> {
        let weight = self.source.linear(module)?;
        if !self.rounded.contains(module) {
            return Ok(weight);
        }
        let failed = computing(module);
        let (n, k) = weight.dims2().map_err(&failed)?;
        let mut data = weight.flatten_all().and_then(|w| w.to_vec1::<f32>()).map_err(&failed)?;
        data.chunks_mut(k).flat_map(|output| output.chunks_mut(GROUP)).for_each(round);
        Tensor::from_vec(data, (n, k), &Device::Cpu).map_err(&failed)
    }

    fn has(&self, key: &str) -> bool {
        self.source.has(key)
    }

    fn has_linear(&self, module: &str) -> bool {
        self.source.has_linear(module)
    }

    fn rows(&self, key: &str, ids: &[u32]) -> Result<Tensor, ModelError> {
        self.source.rows(key, ids)
    }
}

/// A group of weights as its codes give it.
fn round(group: &mut [f32]) {
    let (low, high) = group.iter().fold((0.0f32, 0.0f32), |(low, high), &w| (low.min(w), high.max(w)));
    let scale = f16::from_f32((high - low) / MAX_CODE).to_f32();
    if scale == 0.0 {
        // Nothing but zeros, or too small for a scale.
        group.fill(0.0);
        return;
    }
    let zero = (-low / scale).round().clamp(0.0, MAX_CODE);
    for w in group {
        let code = ((*w / scale).round() + zero).clamp(0.0, MAX_CODE);
        *w = scale * (code - zero);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_levels_between_the_extremes() {
        let mut group: Vec<f32> = (0..=30).map(|i| (i as f32 - 10.0) / 2.0).collect();
        let original = group.clone();
        round(&mut group);
        let mut levels = group.clone();
        levels.dedup();
        assert_eq!(levels, (0..16).map(|q| q as f32 - 5.0).collect::<Vec<_>>());
        assert!(group.iter().zip(&original).all(|(a, b)| (a - b).abs() <= 0.5));
    }

    #[test]
    fn zero_is_kept_and_one_sided_groups_reach_it() {
        let mut group = [3.0, 1.5, 0.0, 0.1];
        round(&mut group);
        assert!((group[0] - 3.0).abs() < 1e-3 && group[2] == 0.0);
        let mut zeros = [0.0, -0.0];
        round(&mut zeros);
        assert_eq!(zeros, [0.0, 0.0]);
    }

    #[test]
    fn groups_count_their_scales() {
        let linear = |k| LinearSpec { key: "x".to_owned(), k, n: 3, has_bias: false };
        assert_eq!(bits(&linear(256)), 3 * (256 * 4 + 2 * 20));
        assert_eq!(bits(&linear(129)), 3 * (129 * 4 + 2 * 20));
    }
}
