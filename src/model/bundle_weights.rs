//! The weights of an EXL3 bundle: quantized linears are decoded, everything else is read.

use std::collections::HashMap;

use candle_core::Tensor;
use half::f16;
use safetensors::Dtype;

use super::{Model, ModelError, SourceWeights, WeightSource, computing, tensor};
use crate::format::{Bits, Codebook, FormatError, QuantizedLinear, TILE_DIM};
use crate::quantize::decode;
use crate::source::{Checkpoint, TensorRef};

/// The weights of a bundle, ours or another writer's.
#[derive(Debug)]
pub struct BundleWeights<'a> {
    checkpoint: &'a Checkpoint,
    /// `(k, n)` without padding of every linear of the model; a bundle stores padded sizes only.
    sizes: HashMap<String, (usize, usize)>,
}

impl<'a> BundleWeights<'a> {
    /// The weights of `model` in the bundle `checkpoint`.
    pub fn new(checkpoint: &'a Checkpoint, model: &Model) -> Self {
        let sizes = model.linears().map(|linear| (linear.key, (linear.k, linear.n))).collect();
        Self { checkpoint, sizes }
    }

    fn is_quantized(&self, module: &str) -> bool {
        self.has(&format!("{module}.trellis"))
    }

    /// The quantized linear `module` as stored, with its sizes and its codebook marker checked.
    pub fn quantized(&self, module: &str) -> Result<QuantizedLinear, ModelError> {
        let trellis = self.checkpoint.tensor(&format!("{module}.trellis"))?;
        let &[tiles_k, tiles_n, words] = trellis.shape() else {
            return Err(unexpected(
                &trellis,
                "shape [k/16, n/16, 16*bits]",
                format!("{:?}", trellis.shape()),
            ));
        };
        let leaf = |leaf: &str| self.checkpoint.get(&format!("{module}.{leaf}"));
        let linear = QuantizedLinear {
            key: module.to_owned(),
            bits: Bits::try_from(words as f64 / TILE_DIM as f64)?,
            codebook: self.codebook(module)?,
            trellis: words_of(&trellis, Dtype::I16)?,
            suh: halves_of(&self.checkpoint.tensor(&format!("{module}.suh"))?)?,
            svh: halves_of(&self.checkpoint.tensor(&format!("{module}.svh"))?)?,
            bias: leaf("bias").map(|bias| halves_of(&bias)).transpose()?,
        };
        linear.check()?;
        let (bits, codebook) = (linear.bits, linear.codebook);
        if bits.is_half_integer() && codebook != Codebook::Mul1 {
            return Err(FormatError::HalfIntegerRate { codebook, bits }.into());
        }
        if [tiles_k * TILE_DIM, tiles_n * TILE_DIM] != [linear.k(), linear.n()] {
            let expected = format!("shape {:?}", linear.trellis_shape());
            return Err(unexpected(&trellis, &expected, format!("{:?}", trellis.shape())));
        }
        Ok(linear)
    }

    /// The codebook whose marker tensor is there; `3inst` has none.
    fn codebook(&self, module: &str) -> Result<Codebook, ModelError> {
        let mut found = Codebook::ThreeInst;
        for codebook in Codebook::ALL {
            let Some((leaf, value)) = codebook.marker() else { continue };
            let Some(marker) = self.checkpoint.get(&format!("{module}.{leaf}")) else { continue };
            if marker.bytes() != value.to_le_bytes() {
                let expected = format!("the multiplier {value:#010x}");
                return Err(unexpected(&marker, &expected, format!("bytes {:x?}", marker.bytes())));
            }
            if found != Codebook::ThreeInst {
                return Err(unexpected(&marker, "one codebook marker", format!("one of {found} too")));
            }
            found = codebook;
        }
        Ok(found)
    }
}

impl WeightSource for BundleWeights<'_> {
    /// The bias of a quantized linear comes without its padding.
    fn tensor(&self, key: &str) -> Result<Tensor, ModelError> {
        let stored = SourceWeights(self.checkpoint).tensor(key)?;
        match key.strip_suffix(".bias").filter(|module| self.is_quantized(module)) {
            Some(module) => match self.sizes.get(module) {
                Some(&(_, n)) if stored.elem_count() > n => stored.narrow(0, 0, n).map_err(computing(key)),
                _ => Ok(stored),
            },
            None => Ok(stored),
        }
    }

    fn linear(&self, module: &str) -> Result<Tensor, ModelError> {
        if !self.is_quantized(module) {
            return SourceWeights(self.checkpoint).linear(module);
        }
        let linear = self.quantized(module)?;
        let (k, n) = self.sizes.get(module).copied().unwrap_or((linear.k(), linear.n()));
        if k > linear.k() || n > linear.n() {
            return Err(ModelError::Tensor {
                tensor: format!("{module}.trellis"),
                expected: format!("at least {k} x {n} weights"),
                found: format!("{} x {}", linear.k(), linear.n()),
            });
        }
        let weight = decode(&linear).cropped(k, n).transpose();
        tensor(weight.into_vec(), (n, k), module)
    }

    fn has(&self, key: &str) -> bool {
        self.checkpoint.get(key).is_some()
    }

    fn has_linear(&self, module: &str) -> bool {
        self.is_quantized(module) || self.has(&format!("{module}.weight"))
    }

    fn rows(&self, key: &str, ids: &[u32]) -> Result<Tensor, ModelError> {
        SourceWeights(self.checkpoint).rows(key, ids)
    }
}

fn unexpected(tensor: &TensorRef<'_>, expected: &str, found: String) -> ModelError {
    ModelError::Tensor { tensor: tensor.key().to_owned(), expected: expected.to_owned(), found }
}

/// The 16-bit elements of a tensor of dtype `dtype`.
fn words_of(tensor: &TensorRef<'_>, dtype: Dtype) -> Result<Vec<u16>, ModelError> {
    if tensor.dtype() != dtype {
        return Err(unexpected(tensor, &format!("{dtype:?}"), format!("{:?}", tensor.dtype())));
    }
    Ok(tensor.bytes().as_chunks().0.iter().map(|&word| u16::from_le_bytes(word)).collect())
}

fn halves_of(tensor: &TensorRef<'_>) -> Result<Vec<f16>, ModelError> {
    Ok(words_of(tensor, Dtype::F16)?.into_iter().map(f16::from_bits).collect())
}
