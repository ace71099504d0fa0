//! The precision in which a model computes.

use candle_core::{DType, Result, Tensor};

/// How activations and weights are held; products are summed in f32 either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    F32,
    /// Inputs, weights and outputs of linears are rounded to bf16, to the nearest and to even.
    Bf16,
}

impl Precision {
    /// `x` as this precision holds it, f32.
    pub fn round(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Precision::F32 => Ok(x.clone()),
            Precision::Bf16 => x.to_dtype(DType::BF16)?.to_dtype(DType::F32),
        }
    }
}
