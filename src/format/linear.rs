//! One quantized linear as stored.

use half::f16;

use super::{Bits, Codebook, FormatError, TILE_DIM, TILE_LEN, packed_len, padded};

/// A quantized linear: packed trellis and the two scale vectors. `k` and `n` are the stored
/// (padded) sizes; decoding is `W = diag(suh) Had(tiles) Had diag(svh)`, see
/// [`crate::quantize::decode`].
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedLinear {
    /// Module name, such as `model.layers.0.self_attn.q_proj`.
    pub key: String,
    pub bits: Bits,
    pub codebook: Codebook,
    /// `[k/16, n/16, 16*bits]`, tile rows first.
    pub trellis: Vec<u16>,
    /// Input-side scales and signs, `[k]`.
    pub suh: Vec<f16>,
    /// Output-side scales and signs, `[n]`.
    pub svh: Vec<f16>,
    /// `[n]`, if the source has a bias.
    pub bias: Option<Vec<f16>>,
}

impl QuantizedLinear {
    pub fn k(&self) -> usize {
        self.suh.len()
    }

    pub fn n(&self) -> usize {
        self.svh.len()
    }

    /// Shape of the `trellis` tensor.
    pub fn trellis_shape(&self) -> [usize; 3] {
        [self.k() / TILE_DIM, self.n() / TILE_DIM, packed_len(self.bits, TILE_LEN)]
    }

    /// Packed words of the tile in tile row `tk` and tile column `tn`.
    pub fn tile(&self, tk: usize, tn: usize) -> &[u16] {
        let [_, tiles_n, words] = self.trellis_shape();
        let at = (tk * tiles_n + tn) * words;
        &self.trellis[at..at + words]
    }

    /// Checks sizes against each other: padded dimensions, trellis length, bias length.
    pub fn check(&self) -> Result<(), FormatError> {
        let expect = |leaf: &str, expected: usize, found: usize| {
            if expected == found {
                return Ok(());
            }
            Err(FormatError::Geometry {
                key: format!("{}.{leaf}", self.key),
                expected: format!("{expected} elements"),
                found: found.to_string(),
            })
        };
        expect("suh", padded(self.k().max(1)), self.k())?;
        expect("svh", padded(self.n().max(1)), self.n())?;
        expect("trellis", self.trellis_shape().iter().product(), self.trellis.len())?;
        match &self.bias {
            Some(bias) => expect("bias", self.n(), bias.len()),
            None => Ok(()),
        }
    }
}
