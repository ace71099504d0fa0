//! Tiles to trellis states, behind one trait. [`Scalar`] states the algorithm and is the oracle for
//! every other encoder: all of them agree bit for bit.
//!
//! A tile is a ring of `L` weights, indices modulo `L`. At position `i`, `D(i)` new bits enter
//! ([`Bits::step`]) and the state `s_i` is a window of 16 bits. The node between two positions is
//! what their windows share; with `kin = D(i)` and `kout = D(i + 1)`:
//!
//! ```text
//! node_in = s_i >> kin                                     16 - kin bits
//! node_out = s_i mod 2^(16 - kout)                         16 - kout bits
//! ```
//!
//! A pass starts at ring position `roll` and visits `r = (i + roll) mod L` for `i` in `0..L`. For
//! every `node_out` its candidates are `s = q 2^(16 - kout) + node_out`, `q = 0 .. 2^kout - 1`, with
//!
//! ```text
//! d = half(value(s) - w_r)
//! cost = half(d d)                                         at the first step
//! cost = half(d d + cost_before[node_in])                  at later steps, rounded once
//! ```
//!
//! The smallest cost is kept, the first of equals. Pass 1 has `roll = L / 2` and is free; the path to
//! its cheapest final node (ties by `final_node_rank`) is traced back to ring position 0, and the
//! node found there closes the ring. Pass 2 has `roll = 0`, may only start from that node, and is
//! traced back from it; its states are the result.

mod cpu;
mod half_math;
pub mod op;
pub mod opencl;
mod scalar;
mod shared;
mod trace;

use thiserror::Error;

use crate::format::{Bits, Codebook, FormatError};

pub use cpu::{Cpu, SimdLevel};
pub use opencl::OpenCl;
pub use scalar::Scalar;
pub use shared::Shared;

/// Ring lengths that exist: a 16x16 tile, and a row of n-gram embeddings.
pub const RING_LENGTHS: [usize; 2] = [256, 160];

/// Why tiles cannot be encoded.
#[derive(Debug, Error)]
pub enum EncodeError {
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("no trellis has a ring of {found} weights; expected 256 or 160")]
    RingLength { found: usize },
    #[error("tile {tile} holds a value that is not a number at position {position}")]
    NotANumber { tile: usize, position: usize },
    #[error("SIMD level {name} is not available on this processor")]
    Unavailable { name: &'static str },
    #[error(transparent)]
    OpenCl(#[from] opencl::OpenClError),
    #[error("the operation in the graph failed")]
    Graph(#[source] candle_core::Error),
}

/// Which trellis a batch of tiles is encoded with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TrellisSpec {
    codebook: Codebook,
    bits: Bits,
    len: usize,
}

impl TrellisSpec {
    /// `len` is the number of weights on the ring.
    pub fn new(codebook: Codebook, bits: Bits, len: usize) -> Result<Self, EncodeError> {
        if bits.is_half_integer() && codebook != Codebook::Mul1 {
            return Err(FormatError::HalfIntegerRate { codebook, bits }.into());
        }
        if !RING_LENGTHS.contains(&len) {
            return Err(EncodeError::RingLength { found: len });
        }
        Ok(Self { codebook, bits, len })
    }

    pub fn codebook(&self) -> Codebook {
        self.codebook
    }

    pub fn bits(&self) -> Bits {
        self.bits
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: every ring holds weights.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bits that enter at ring position `i`, indices modulo the ring.
    fn step(&self, i: usize) -> u32 {
        self.bits.step(i % self.len)
    }
}

/// Encodes tiles into trellis states.
pub trait TileEncoder: Send + Sync {
    /// Name for people and for reports, such as `avx2`.
    fn name(&self) -> &str;

    /// Encodes `tiles`, f32 `[count, len]` in the encoder's position order, into `states`, u16
    /// `[count, len]`. Weights are rounded to half first. The result does not depend on the
    /// number of threads.
    ///
    /// # Errors
    /// A NaN in a tile; a device that fails.
    fn encode(&self, spec: &TrellisSpec, tiles: &[f32], states: &mut [u16]) -> Result<(), EncodeError>;

    /// Makes ready for a trellis, so that trouble shows before any work.
    ///
    /// # Errors
    /// A device that fails, or whose states are not the CPU encoder's.
    fn prepare(&self, _spec: &TrellisSpec) -> Result<(), EncodeError> {
        Ok(())
    }

    /// Tiles per second of the latest work, where the encoder measures itself.
    fn speed(&self, _spec: &TrellisSpec) -> Option<f64> {
        None
    }
}

fn check_tiles(spec: &TrellisSpec, tiles: &[f32], states: &[u16]) -> Result<(), EncodeError> {
    assert_eq!(tiles.len(), states.len(), "one state per weight");
    assert_eq!(tiles.len() % spec.len, 0, "whole tiles");
    match tiles.iter().position(|w| w.is_nan()) {
        Some(at) => Err(EncodeError::NotANumber { tile: at / spec.len, position: at % spec.len }),
        None => Ok(()),
    }
}

/// The tie order of final nodes in pass 1: among nodes of equal cost the smallest rank wins. With
/// `v = e & 1023` it is `(rev5(v >> 5), rev5(v & 31), e >> 10)`, `rev5` reversing five bits.
fn final_node_rank(node: usize) -> usize {
    let rev5 = |v: usize| ((v as u8).reverse_bits() >> 3) as usize;
    let v = node & 1023;
    rev5(v >> 5) << 10 | rev5(v & 31) << 5 | node >> 10
}
