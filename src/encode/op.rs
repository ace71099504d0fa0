//! The encoder as an operation of a candle graph.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};

use super::{EncodeError, TileEncoder, TrellisSpec};

/// Tiles, f32 `[count, len]` in the encoder's position order, to trellis states, i16 `[count, len]`: the
/// bits of u16. It runs on any encoder; the tensors are the host's.
pub struct EncodeTiles<'a> {
    encoder: &'a dyn TileEncoder,
    spec: TrellisSpec,
    /// The encoder's own error: candle's would keep its text alone.
    failure: Mutex<Option<EncodeError>>,
}

impl<'a> EncodeTiles<'a> {
    pub fn new(encoder: &'a dyn TileEncoder, spec: TrellisSpec) -> Self {
        Self { encoder, spec, failure: Mutex::new(None) }
    }
}

impl CustomOp1 for EncodeTiles<'_> {
    fn name(&self) -> &'static str {
        "encode-tiles"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let shape = layout.shape();
        let (_, len) = shape.dims2()?;
        if len != self.spec.len() {
            candle_core::bail!("tiles have {len} weights; the trellis has {}", self.spec.len());
        }
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("tiles must be contiguous")
        };
        let tiles = &storage.as_slice::<f32>()?[start..end];
        let mut states = vec![0u16; tiles.len()];
        if let Err(error) = self.encoder.encode(&self.spec, tiles, &mut states) {
            let text = error.to_string();
            *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            candle_core::bail!("{text}");
        }
        Ok((CpuStorage::I16(states.into_iter().map(u16::cast_signed).collect()), shape.clone()))
    }
}

/// Encodes `tiles`, f32 `[count, len]`, through the graph: states, u16 `[count, len]`.
///
/// # Errors
/// Those of the encoder.
pub fn encode(
    encoder: &dyn TileEncoder,
    spec: &TrellisSpec,
    tiles: Vec<f32>,
) -> Result<Vec<u16>, EncodeError> {
    let shape = (tiles.len() / spec.len(), spec.len());
    let op = EncodeTiles::new(encoder, *spec);
    let states = Tensor::from_vec(tiles, shape, &candle_core::Device::Cpu)
        .and_then(|tiles| tiles.apply_op1_no_bwd(&op))
        .and_then(|states| states.flatten_all()?.to_vec1::<i16>());
    let failure = op.failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    match (states, failure) {
        (_, Some(error)) => Err(error),
        (Err(error), None) => Err(EncodeError::Graph(error)),
        (Ok(states), None) => Ok(states.into_iter().map(i16::cast_unsigned).collect()),
    }
}
