//! What the bytes of an EXL3 tensor mean: bit rates, codebooks, tile order, packing.

mod bits;
mod codebook;
mod linear;
mod permute;
mod trellis;

use thiserror::Error;

pub use bits::Bits;
pub use codebook::Codebook;
pub use linear::QuantizedLinear;
pub use permute::{TILE_DIM, TILE_LEN, tile_position};
pub use trellis::{is_tail_biting, pack, packed_len, unpack};

/// Rows and columns of a stored tensor are padded to multiples of this (the Hadamard block).
pub const PAD: usize = 128;

/// `dim` rounded up to a multiple of [`PAD`].
pub fn padded(dim: usize) -> usize {
    dim.div_ceil(PAD) * PAD
}

/// What no EXL3 tensor is like.
#[derive(Debug, Error, PartialEq)]
pub enum FormatError {
    #[error("{found} bits per weight do not exist; expected 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7 or 8")]
    Bits { found: String },
    #[error("codebook \"{found}\" does not exist; expected mul1, mcg or 3inst")]
    Codebook { found: String },
    #[error("codebook {codebook} has no {bits}-bit trellis; half-integer rates need mul1")]
    HalfIntegerRate { codebook: Codebook, bits: Bits },
    #[error("tensor \"{key}\": expected {expected}, found {found}")]
    Geometry { key: String, expected: String, found: String },
}
