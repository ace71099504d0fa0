//! Where a model's weights come from.

use candle_core::{Device, Tensor};

use super::{BundleWeights, Model, ModelError, Precision, computing};
use crate::source::Checkpoint;

/// Weights by name, f32 on the CPU.
pub trait WeightSource {
    /// The tensor `key` in its own shape.
    fn tensor(&self, key: &str) -> Result<Tensor, ModelError>;

    /// The weight of the linear `module`, `[n, k]`, without padding.
    fn linear(&self, module: &str) -> Result<Tensor, ModelError>;

    /// Whether there is a tensor `key`.
    fn has(&self, key: &str) -> bool;

    /// Whether there is a linear `module`, plain or quantized.
    fn has_linear(&self, module: &str) -> bool;

    /// The rows `ids` of the matrix `key`, `[ids.len(), cols]`.
    fn rows(&self, key: &str, ids: &[u32]) -> Result<Tensor, ModelError> {
        let ids = Tensor::new(ids, &Device::Cpu).map_err(computing(key))?;
        self.tensor(key)?.index_select(&ids, 0).map_err(computing(key))
    }

    /// The precision of the linears that are loaded from here.
    fn precision(&self) -> Precision {
        Precision::F32
    }
}

/// The same weights, for linears that compute in bf16.
pub struct Bf16Weights<'a>(pub &'a dyn WeightSource);

impl WeightSource for Bf16Weights<'_> {
    fn tensor(&self, key: &str) -> Result<Tensor, ModelError> {
        self.0.tensor(key)
    }

    fn linear(&self, module: &str) -> Result<Tensor, ModelError> {
        self.0.linear(module)
    }

    fn has(&self, key: &str) -> bool {
        self.0.has(key)
    }

    fn has_linear(&self, module: &str) -> bool {
        self.0.has_linear(module)
    }

    fn rows(&self, key: &str, ids: &[u32]) -> Result<Tensor, ModelError> {
        self.0.rows(key, ids)
    }

    fn precision(&self) -> Precision {
        Precision::Bf16
    }
}

/// The plain weights of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct SourceWeights<'a>(pub &'a Checkpoint);

impl WeightSource for SourceWeights<'_> {
    fn tensor(&self, key: &str) -> Result<Tensor, ModelError> {
        Ok(self.0.tensor(key)?.to_tensor()?)
    }

    fn linear(&self, module: &str) -> Result<Tensor, ModelError> {
        self.tensor(&format!("{module}.weight"))
    }

    fn has(&self, key: &str) -> bool {
        self.0.get(key).is_some()
    }

    fn has_linear(&self, module: &str) -> bool {
        self.has(&format!("{module}.weight"))
    }

    fn rows(&self, key: &str, ids: &[u32]) -> Result<Tensor, ModelError> {
        Ok(self.0.tensor(key)?.rows_to_tensor(ids)?)
    }
}

/// The weights of `checkpoint`, which is plain or an EXL3 bundle as its config says.
///
/// # Errors
/// Another quantization is refused by name.
pub fn open_weights<'a>(
    checkpoint: &'a Checkpoint,
    model: &Model,
) -> Result<Box<dyn WeightSource + Sync + 'a>, ModelError> {
    let section = &checkpoint.config()["quantization_config"];
    match &section["quant_method"] {
        _ if section.is_null() => Ok(Box::new(SourceWeights(checkpoint))),
        method if method == "exl3" => Ok(Box::new(BundleWeights::new(checkpoint, model))),
        method => Err(ModelError::Unsupported {
            field: "quantization_config.quant_method".to_owned(),
            found: method.to_string(),
            expected: "\"exl3\", or no quantization".to_owned(),
        }),
    }
}
