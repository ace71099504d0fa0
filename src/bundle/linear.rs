//! A quantized linear as the tensors of a file, and back.

use std::borrow::Cow;
use std::path::Path;

use half::f16;
use safetensors::Dtype;

use crate::format::{Bits, Codebook, QuantizedLinear};

use super::{BundleError, Shard};

/// One tensor in memory: dtype, shape and little-endian bytes.
#[derive(Clone, Debug)]
pub struct RawTensor<'a> {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Cow<'a, [u8]>,
}

/// The tensors of `linear` by leaf name, in the order they are stored.
pub(super) fn tensors_of(linear: &QuantizedLinear) -> Vec<(&'static str, RawTensor<'static>)> {
    let halves = |values: &[f16]| RawTensor {
        dtype: Dtype::F16,
        shape: vec![values.len()],
        bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    };
    let mut tensors = vec![("suh", halves(&linear.suh)), ("svh", halves(&linear.svh))];
    if let Some((leaf, value)) = linear.codebook.marker() {
        let bytes = value.to_le_bytes().to_vec().into();
        tensors.push((leaf, RawTensor { dtype: Dtype::I32, shape: Vec::new(), bytes }));
    }
    let trellis = RawTensor {
        dtype: Dtype::I16,
        shape: linear.trellis_shape().to_vec(),
        bytes: linear.trellis.iter().flat_map(|w| w.to_le_bytes()).collect(),
    };
    tensors.push(("trellis", trellis));
    if let Some(bias) = &linear.bias {
        tensors.push(("bias", halves(bias)));
    }
    tensors
}

/// Puts together the quantized linear `key` from the tensors `get` finds by their full names.
/// The bit rate comes from the trellis, the codebook from the marker. `origin` is named in errors.
pub fn assemble_linear<'a>(
    key: &str,
    origin: &Path,
    mut get: impl FnMut(&str) -> Result<Option<RawTensor<'a>>, BundleError>,
) -> Result<QuantizedLinear, BundleError> {
    let mut leaf = |leaf: &str, dtype: Dtype, rank: usize| {
        let tensor = format!("{key}.{leaf}");
        let raw = get(&tensor)?;
        let Some(raw) = raw else { return Ok(None) };
        if raw.dtype != dtype || raw.shape.len() != rank {
            let expected = format!("{dtype:?} of {rank} dimensions");
            let found = format!("{:?} {:?}", raw.dtype, raw.shape);
            return Err(BundleError::Tensor { path: origin.to_owned(), tensor, expected, found });
        }
        Ok(Some(raw))
    };
    let missing =
        |leaf: &str| BundleError::MissingTensor { path: origin.to_owned(), tensor: format!("{key}.{leaf}") };
    let trellis = leaf("trellis", Dtype::I16, 3)?.ok_or_else(|| missing("trellis"))?;
    let suh = leaf("suh", Dtype::F16, 1)?.ok_or_else(|| missing("suh"))?;
    let svh = leaf("svh", Dtype::F16, 1)?.ok_or_else(|| missing("svh"))?;
    let bias = leaf("bias", Dtype::F16, 1)?;
    let mut codebook = Codebook::ThreeInst;
    for candidate in Codebook::ALL {
        let Some((name, value)) = candidate.marker() else { continue };
        let Some(raw) = leaf(name, Dtype::I32, 0)? else { continue };
        let found = word(&raw.bytes);
        if found != value || codebook != Codebook::ThreeInst {
            let expected = format!("one codebook marker, {value:#010x} for {candidate}");
            let (tensor, found) = (format!("{key}.{name}"), format!("{found:#010x}"));
            return Err(BundleError::Tensor { path: origin.to_owned(), tensor, expected, found });
        }
        codebook = candidate;
    }
    let linear = QuantizedLinear {
        key: key.to_owned(),
        bits: Bits::try_from(trellis.shape[2] as f64 / 16.0)?,
        codebook,
        trellis: words(&trellis.bytes).collect(),
        suh: words(&suh.bytes).map(f16::from_bits).collect(),
        svh: words(&svh.bytes).map(f16::from_bits).collect(),
        bias: bias.map(|raw| words(&raw.bytes).map(f16::from_bits).collect()),
    };
    linear.check()?;
    if linear.trellis_shape()[..] != trellis.shape[..] {
        return Err(BundleError::Tensor {
            path: origin.to_owned(),
            tensor: format!("{key}.trellis"),
            expected: format!("{:?}", linear.trellis_shape()),
            found: format!("{:?}", trellis.shape),
        });
    }
    Ok(linear)
}

/// As [`assemble_linear`], from one file.
pub fn read_linear(shard: &Shard, key: &str) -> Result<QuantizedLinear, BundleError> {
    assemble_linear(key, shard.path(), |name| read_raw(shard, name))
}

/// The tensor `name` of a file, if it is there.
pub fn read_raw(shard: &Shard, name: &str) -> Result<Option<RawTensor<'static>>, BundleError> {
    let Some(stored) = shard.get(name) else { return Ok(None) };
    let bytes = shard.read(stored)?.into();
    Ok(Some(RawTensor { dtype: stored.dtype, shape: stored.shape.clone(), bytes }))
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]))
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |word, &b| word << 8 | u32::from(b))
}
