//! Half-precision arithmetic with single rounding, computed in f32.

use half::f16;

/// `a - b` rounded to half, for half-valued `a` and `b`. Rounding the f32 difference is exact
/// enough: f32 carries more than twice the digits of a half, so the first rounding is harmless.
#[inline]
pub fn sub(a: f32, b: f32) -> f32 {
    round(a - b)
}

/// `d * d + c` with one rounding to half, for half-valued `d` and `c`.
///
/// The product is exact in f32. The sum may not be; rounding it to f32 first would decide
/// near-ties wrongly. So it is rounded to odd: TwoSum gives the error, and an inexact sum takes
/// the neighbour whose last bit is set, which no later rounding can mistake for a tie.
#[inline]
pub fn square_add(d: f32, c: f32) -> f32 {
    round(square_add_to_odd(d, c))
}

/// `d * d + c` rounded to odd: the f32 with the last bit set next to the exact sum, or the sum
/// itself where it is an f32.
#[inline]
pub fn square_add_to_odd(d: f32, c: f32) -> f32 {
    let p = d * d;
    let sum = p + c;
    if !sum.is_finite() {
        return f32::INFINITY;
    }
    let c_part = sum - p;
    let error = (p - (sum - c_part)) + (c - c_part);
    let bits = sum.to_bits();
    if error == 0.0 || bits & 1 == 1 {
        return sum;
    }
    // Sums of squares and costs are positive, so adding to the bits moves away from zero.
    f32::from_bits(if error > 0.0 { bits + 1 } else { bits - 1 })
}

/// `x` rounded to the nearest half, ties to even. Adding and taking away 2^13 last places leaves
/// the nearest multiple of one; no branch depends on the data, so that loops over it vectorize.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    const EXPONENT: u32 = 0xff << 23;
    const SMALLEST_NORMAL: f32 = 1.0 / 16384.0;
    const OVERFLOW: f32 = 65520.0;
    let magnitude = x.abs();
    // The last place of a half is 2^-10 of its binade, and 2^-24 below the normal range.
    let binade = f32::from_bits(magnitude.max(SMALLEST_NORMAL).to_bits() & EXPONENT);
    let magic = binade * 8192.0;
    let rounded = (magnitude + magic) - magic;
    (if magnitude >= OVERFLOW { f32::INFINITY } else { rounded }).copysign(x)
}

/// The value of the non-negative half with these bits.
#[inline]
pub fn from_cost_bits(bits: u16) -> f32 {
    // Moving exponent and mantissa into place leaves the exponent biased by 112 too little; the
    // multiplication repairs that exactly, subnormals included. Infinity is the one exception.
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    if bits == f16::INFINITY.to_bits() {
        return f32::INFINITY;
    }
    f32::from_bits(u32::from(bits) << 13) * REBIAS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All arithmetic in f64 is exact for these operands, and one rounding follows.
    fn square_add_exact(d: f32, c: f32) -> f32 {
        let x = f64::from(d) * f64::from(d) + f64::from(c);
        let below = f16::from_f64(x).to_f64();
        // f16::from_f64 may round through a narrower type: search the neighbourhood instead.
        let bits = f16::from_f64(below).to_bits();
        (bits.saturating_sub(2)..=bits + 2)
            .map(|b| f16::from_bits(b).to_f64())
            .filter(|h| h.is_finite())
            .min_by(|a, b| {
                let (da, db) = ((a - x).abs(), (b - x).abs());
                let even = |h: &f64| f16::from_f64(*h).to_bits() & 1;
                da.total_cmp(&db).then(even(a).cmp(&even(b)))
            })
            .map_or(f32::INFINITY, |h| h as f32)
    }

    #[test]
    fn one_rounding_on_near_ties() {
        let mut seed = 7u64;
        let mut wrong_if_rounded_twice = 0;
        for _ in 0..2_000_000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let d = f16::from_bits((seed >> 33) as u16 & 0x43ff).to_f32();
            let c = f16::from_bits((seed >> 48) as u16 & 0x4fff).to_f32();
            let exact = square_add_exact(d, c);
            assert_eq!(square_add(d, c), exact, "{d} * {d} + {c}");
            wrong_if_rounded_twice += usize::from(round(d * d + c) != exact);
        }
        assert!(wrong_if_rounded_twice > 0, "the sample holds no near-tie");
    }

    #[test]
    fn rounds_like_the_half_type() {
        // Every 4097th pattern meets all exponents and all tie patterns of the low bits.
        for bits in (0..=f32::INFINITY.to_bits()).step_by(4097).chain([f32::INFINITY.to_bits()]) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                assert_eq!(round(x).to_bits(), f16::from_f32(x).to_f32().to_bits(), "{x:e}");
            }
        }
    }

    #[test]
    fn cost_bits_are_half_values() {
        for bits in 0..=f16::INFINITY.to_bits() {
            assert_eq!(from_cost_bits(bits), f16::from_bits(bits).to_f32());
        }
    }
}
