//! Lanes of AVX2 with FMA and F16C: eight f32.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::kernel::{self, Scratch};
use super::lanes::Lanes;
use crate::encode::TrellisSpec;
use crate::encode::trace::Values;

/// Proof that this processor has AVX2, FMA and F16C: [`Avx2::detect`] is the only way to get one.
#[derive(Clone, Copy)]
pub struct Avx2(());

const N: usize = 8;
const SMALLEST_NORMAL: f32 = 1.0 / 16384.0;
const TO_NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

impl Avx2 {
    pub fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }

    pub fn encode_tile(
        self,
        spec: &TrellisSpec,
        values: &Values,
        tile: &[f32],
        states: &mut [u16],
        scratch: &mut Scratch,
    ) {
        // SAFETY: `self` proves that the features are there.
        unsafe { encode_tile(self, spec, values, tile, states, scratch) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn encode_tile(
    lanes: Avx2,
    spec: &TrellisSpec,
    values: &Values,
    tile: &[f32],
    states: &mut [u16],
    scratch: &mut Scratch,
) {
    kernel::encode_tile(lanes, spec, values, tile, states, scratch);
}

// SAFETY of every block below: `self` proves that the instructions exist; loads and stores go
// through slices of exactly the vector's length.
impl Lanes for Avx2 {
    type V = __m256;
    const N: usize = N;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, src: &[f32], at: usize) -> __m256 {
        let src = &src[at..at + N];
        // SAFETY: see above.
        unsafe { _mm256_loadu_ps(src.as_ptr()) }
    }

    #[inline(always)]
    fn load_repeated<const K: u32>(self, src: &[f32], at: usize) -> __m256 {
        if K >= 3 {
            return self.splat(src[at]);
        }
        let src = &src[at..at + N];
        // SAFETY: see above.
        unsafe {
            let index = if K == 1 {
                _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)
            } else {
                _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)
            };
            _mm256_permutevar8x32_ps(_mm256_loadu_ps(src.as_ptr()), index)
        }
    }

    #[inline(always)]
    fn store(self, x: __m256, dst: &mut [f32], at: usize) {
        let dst = &mut dst[at..at + N];
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(dst.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    fn square_add(self, d: __m256, c: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_fmadd_ps(d, d, c) }
    }

    #[inline(always)]
    fn square_add_to_odd(self, d: __m256, c: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let p = _mm256_mul_ps(d, d);
            let sum = _mm256_add_ps(p, c);
            let (big, small) = (_mm256_max_ps(p, c), _mm256_min_ps(p, c));
            // Exact, since `big` is not smaller than `small`; not a number where the sum is infinite.
            let error = _mm256_sub_ps(small, _mm256_sub_ps(sum, big));
            let zero = _mm256_setzero_ps();
            let up = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(error, zero));
            let down = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LT_OQ>(error, zero));
            let bits = _mm256_castps_si256(sum);
            let moved = _mm256_sub_epi32(_mm256_add_epi32(bits, down), up);
            let is_odd = _mm256_castsi256_ps(_mm256_slli_epi32::<31>(bits));
            _mm256_blendv_ps(_mm256_castsi256_ps(moved), sum, is_odd)
        }
    }

    #[inline(always)]
    fn round_to_half(self, x: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_cvtph_ps(_mm256_cvtps_ph::<TO_NEAREST>(x)) }
    }

    #[inline(always)]
    fn store_half(self, x: __m256, dst: &mut [u16], at: usize) {
        let dst = &mut dst[at..at + N];
        // SAFETY: see above; eight halves are one 128-bit store.
        unsafe { _mm_storeu_si128(dst.as_mut_ptr().cast(), _mm256_cvtps_ph::<TO_NEAREST>(x)) }
    }

    #[inline(always)]
    fn undecided<const M: usize>(self, xs: &[__m256; M]) -> bool {
        // SAFETY: see above.
        unsafe {
            let half_way = _mm256_set1_epi32(i32::MIN);
            let mut ties = _mm256_setzero_si256();
            let mut least = xs[0];
            for &x in xs {
                let low_bits = _mm256_slli_epi32::<19>(_mm256_castps_si256(x));
                ties = _mm256_or_si256(ties, _mm256_cmpeq_epi32(low_bits, half_way));
                least = _mm256_min_ps(least, x);
            }
            let tiny = _mm256_cmp_ps::<_CMP_LT_OQ>(least, _mm256_set1_ps(SMALLEST_NORMAL));
            _mm256_movemask_ps(_mm256_or_ps(_mm256_castsi256_ps(ties), tiny)) != 0
        }
    }
}
