//! The three codebooks: a 16-bit state `s` to one binary16 value. Arithmetic is in u32 and wraps.
//!
//! - `mul1`: `t` = 0x6400 + the sum of the four bytes of `0x83DCD12D s`; the value is
//!   `half(t) a + b`, rounded once, where `t`, `a` = 0x1EEE and `b` = 0xC931 are bits of halves.
//! - `mcg`: `x = 0xCBAC1FED s`, then `x = (x and 0x8FFF8FFF) xor 0x3B603B60`; the value is the sum of
//!   the two halves whose bits are in `x`, rounded to half.
//! - `3inst`: `x = 89226354 s + 64248484`, then as `mcg`.

use std::fmt;
use std::str::FromStr;

use half::f16;
use serde::{Deserialize, Serialize};

use super::FormatError;

/// How a trellis state becomes a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Codebook {
    #[serde(rename = "mul1")]
    Mul1,
    #[serde(rename = "mcg")]
    Mcg,
    #[serde(rename = "3inst")]
    ThreeInst,
}

const MUL1_MULTIPLIER: u32 = 0x83DC_D12D;
const MCG_MULTIPLIER: u32 = 0xCBAC_1FED;

impl Codebook {
    pub const ALL: [Codebook; 3] = [Codebook::Mul1, Codebook::Mcg, Codebook::ThreeInst];

    pub fn name(self) -> &'static str {
        match self {
            Codebook::Mul1 => "mul1",
            Codebook::Mcg => "mcg",
            Codebook::ThreeInst => "3inst",
        }
    }

    /// The 0-dimensional I32 tensor that names the codebook in a bundle: its leaf name and its
    /// value. The `3inst` codebook has none.
    pub fn marker(self) -> Option<(&'static str, u32)> {
        match self {
            Codebook::Mul1 => Some(("mul1", MUL1_MULTIPLIER)),
            Codebook::Mcg => Some(("mcg", MCG_MULTIPLIER)),
            Codebook::ThreeInst => None,
        }
    }

    /// The value of `state`. All integer arithmetic wraps at 32 bits.
    pub fn value(self, state: u16) -> f16 {
        let s = u32::from(state);
        match self {
            Codebook::Mul1 => mul1(s.wrapping_mul(MUL1_MULTIPLIER)),
            Codebook::Mcg => sum_of_halves(s.wrapping_mul(MCG_MULTIPLIER)),
            Codebook::ThreeInst => sum_of_halves(s.wrapping_mul(89_226_354).wrapping_add(64_248_484)),
        }
    }

    /// The values of all 65,536 states.
    pub fn values(self) -> Vec<f16> {
        (0..=u16::MAX).map(|state| self.value(state)).collect()
    }
}

/// The byte sum of `x`, 0..=1020, scaled and shifted by one half-precision fused multiply-add. In
/// f64 the product and the sum are exact, so the only rounding is the last one. The f32 step in
/// between is exact as well: `half` converts from f32 without loss of the sticky bits.
fn mul1(x: u32) -> f16 {
    let byte_sum: u32 = x.to_le_bytes().into_iter().map(u32::from).sum();
    let scale = f16::from_bits(0x1eee).to_f64();
    let shift = f16::from_bits(0xc931).to_f64();
    let exact = f64::from(1024 + byte_sum) * scale + shift;
    // 11 bits x 11 bits plus an aligned addend: at most 24 significant bits, exact in f32.
    f16::from_f32(exact as f32)
}

fn sum_of_halves(x: u32) -> f16 {
    let x = (x & 0x8fff_8fff) ^ 0x3b60_3b60;
    let low = f16::from_bits(x as u16).to_f32();
    let high = f16::from_bits((x >> 16) as u16).to_f32();
    f16::from_f32(low + high)
}

impl fmt::Display for Codebook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Codebook {
    type Err = FormatError;

    fn from_str(s: &str) -> Result<Self, FormatError> {
        Self::ALL
            .into_iter()
            .find(|c| c.name() == s)
            .ok_or_else(|| FormatError::Codebook { found: s.to_owned() })
    }
}
