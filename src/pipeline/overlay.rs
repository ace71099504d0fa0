//! The weights of a layer as they were written.

use std::collections::HashMap;

use candle_core::{Device, Tensor};

use super::{ModelError, QuantizedLinear, SourceWeights, WeightSource, computing, quantize};
use crate::bundle::Unit;

/// The quantized linears of a committed unit, and the source's weights for everything else.
pub struct Committed<'a> {
    linears: HashMap<String, QuantizedLinear>,
    source: SourceWeights<'a>,
}

impl<'a> Committed<'a> {
    pub fn new(unit: Unit, source: SourceWeights<'a>) -> Self {
        let linears = unit.into_iter().map(|linear| (linear.key.clone(), linear)).collect();
        Self { linears, source }
    }
}

impl WeightSource for Committed<'_> {
    /// The bias of a quantized linear is the stored one: rounded to half, without padding.
    fn tensor(&self, key: &str) -> Result<Tensor, ModelError> {
        let source = self.source.tensor(key)?;
        let quantized = key.strip_suffix(".bias").and_then(|module| self.linears.get(module));
        match quantized.and_then(|linear| linear.bias.as_ref()) {
            Some(bias) => {
                let n = source.elem_count();
                let bias: Vec<f32> = bias.iter().take(n).map(|b| b.to_f32()).collect();
                Tensor::from_vec(bias, n, &Device::Cpu).map_err(computing(key))
            }
            None => Ok(source),
        }
    }

    fn linear(&self, module: &str) -> Result<Tensor, ModelError> {
        let Some(quantized) = self.linears.get(module) else { return self.source.linear(module) };
        let source = self.source.0.tensor(&format!("{module}.weight"))?;
        let &[n, k] = source.shape() else {
            return Err(ModelError::Tensor {
                tensor: source.key().to_owned(),
                expected: "shape [n, k]".to_owned(),
                found: format!("{:?}", source.shape()),
            });
        };
        let weight = quantize::decode(quantized).cropped(k, n).transpose();
        Tensor::from_vec(weight.into_vec(), (n, k), &Device::Cpu).map_err(computing(module))
    }

    fn has(&self, key: &str) -> bool {
        self.source.has(key)
    }

    fn has_linear(&self, module: &str) -> bool {
        self.source.has_linear(module)
    }
}
