//! Bit rates of one tensor.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::FormatError;

/// Bits per weight of a trellis: 1 to 8, and 1.5, 2.5, 3.5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Bits {
    halves: u8,
}

impl Bits {
    /// Every rate that exists, ascending.
    pub const ALL: [Bits; 11] = {
        let halves = [2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16];
        let mut all = [Bits { halves: 2 }; 11];
        let mut i = 0;
        while i < 11 {
            all[i] = Bits { halves: halves[i] };
            i += 1;
        }
        all
    };

    /// The whole-number rate `bits`, 1 to 8.
    pub fn whole(bits: u8) -> Result<Self, FormatError> {
        Self::try_from(f64::from(bits))
    }

    pub fn as_f64(self) -> f64 {
        f64::from(self.halves) / 2.0
    }

    pub fn is_half_integer(self) -> bool {
        self.halves % 2 == 1
    }

    /// Bits that enter the trellis at ring position `i`: `floor(bits)` where `i` is even, and one
    /// more at odd positions of a half-integer rate.
    pub fn step(self, i: usize) -> u32 {
        u32::from(self.halves / 2) + u32::from(self.is_half_integer() && i % 2 == 1)
    }

    /// Bits of the packed form of `len` weights. `len` must be even for a half-integer rate.
    pub fn stream_bits(self, len: usize) -> usize {
        len * usize::from(self.halves) / 2
    }
}

impl TryFrom<f64> for Bits {
    type Error = FormatError;

    fn try_from(bits: f64) -> Result<Self, FormatError> {
        Self::ALL
            .into_iter()
            .find(|b| b.as_f64() == bits)
            .ok_or_else(|| FormatError::Bits { found: bits.to_string() })
    }
}

impl From<Bits> for f64 {
    fn from(bits: Bits) -> f64 {
        bits.as_f64()
    }
}

impl FromStr for Bits {
    type Err = FormatError;

    fn from_str(s: &str) -> Result<Self, FormatError> {
        let found = || FormatError::Bits { found: s.to_owned() };
        s.parse::<f64>().map_err(|_| found())?.try_into().map_err(|_| found())
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.as_f64().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_alternate_at_half_integer_rates() {
        let bits: Bits = "2.5".parse().unwrap();
        assert_eq!((bits.step(0), bits.step(1), bits.step(254)), (2, 3, 2));
        assert_eq!(bits.stream_bits(256), 640);
    }

    #[test]
    fn only_existing_rates_parse() {
        for text in ["0", "9", "4.5", "1.25", "-2", "nan", "x", ""] {
            assert!(text.parse::<Bits>().is_err(), "{text}");
        }
        assert_eq!("3.0".parse::<Bits>().unwrap().to_string(), "3");
    }
}
