//! Lanes for any processor: plain arrays that the compiler may vectorize.

use super::lanes::Lanes;
use crate::encode::half_math;

/// Four f32 lanes without special instructions.
#[derive(Clone, Copy)]
pub struct Portable;

const N: usize = 4;

/// Smallest normal half.
const SMALLEST_NORMAL: f32 = 1.0 / 16384.0;

impl Lanes for Portable {
    type V = [f32; N];
    const N: usize = N;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; N]
    }

    #[inline(always)]
    fn load(self, src: &[f32], at: usize) -> Self::V {
        let src = &src[at..at + N];
        std::array::from_fn(|j| src[j])
    }

    #[inline(always)]
    fn load_repeated<const K: u32>(self, src: &[f32], at: usize) -> Self::V {
        let src = &src[at..at + N];
        std::array::from_fn(|j| src[j >> K])
    }

    #[inline(always)]
    fn store(self, x: Self::V, dst: &mut [f32], at: usize) {
        dst[at..at + N].copy_from_slice(&x);
    }

    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|j| a[j] - b[j])
    }

    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|j| if a[j] < b[j] { a[j] } else { b[j] })
    }

    #[inline(always)]
    fn square_add(self, d: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|j| d[j] * d[j] + c[j])
    }

    #[inline(always)]
    fn square_add_to_odd(self, d: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|j| half_math::square_add_to_odd(d[j], c[j]))
    }

    #[inline(always)]
    fn round_to_half(self, x: Self::V) -> Self::V {
        x.map(half_math::round)
    }

    #[inline(always)]
    fn store_half(self, x: Self::V, dst: &mut [u16], at: usize) {
        for (bits, x) in dst[at..at + N].iter_mut().zip(x) {
            *bits = half::f16::from_f32_const(x).to_bits();
        }
    }

    #[inline(always)]
    fn undecided<const M: usize>(self, xs: &[Self::V; M]) -> bool {
        let flag = |x: f32| (x.to_bits() << 19 == 1 << 31) | (x < SMALLEST_NORMAL);
        xs.iter().flatten().fold(false, |any, &x| any | flag(x))
    }
}
