//! Lanes of AVX-512F: sixteen f32.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::kernel::{self, Scratch};
use super::lanes::Lanes;
use crate::encode::TrellisSpec;
use crate::encode::trace::Values;

/// Proof that this processor has AVX-512F: [`Avx512::detect`] is the only way to get one.
#[derive(Clone, Copy)]
pub struct Avx512(());

const N: usize = 16;
const SMALLEST_NORMAL: f32 = 1.0 / 16384.0;
const TO_NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

impl Avx512 {
    pub fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx2")
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

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn encode_tile(
    lanes: Avx512,
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
impl Lanes for Avx512 {
    type V = __m512;
    const N: usize = N;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, src: &[f32], at: usize) -> __m512 {
        let src = &src[at..at + N];
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(src.as_ptr()) }
    }

    #[inline(always)]
    fn load_repeated<const K: u32>(self, src: &[f32], at: usize) -> __m512 {
        if K >= 4 {
            return self.splat(src[at]);
        }
        let src = &src[at..at + N];
        // SAFETY: see above.
        unsafe {
            let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let index = _mm512_srl_epi32(lane, _mm_cvtsi32_si128(K as i32));
            _mm512_permutexvar_ps(index, _mm512_loadu_ps(src.as_ptr()))
        }
    }

    #[inline(always)]
    fn store(self, x: __m512, dst: &mut [f32], at: usize) {
        let dst = &mut dst[at..at + N];
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(dst.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn square_add(self, d: __m512, c: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(d, d, c) }
    }

    #[inline(always)]
    fn square_add_to_odd(self, d: __m512, c: __m512) -> __m512 {
        const DOWN: i32 = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
        const UP: i32 = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
        // SAFETY: see above.
        unsafe {
            // Where the two differ they are neighbours, and one of them is odd.
            let down = _mm512_castps_si512(_mm512_fmadd_round_ps::<DOWN>(d, d, c));
            let up = _mm512_castps_si512(_mm512_fmadd_round_ps::<UP>(d, d, c));
            let differ = _mm512_and_si512(_mm512_xor_si512(down, up), _mm512_set1_epi32(1));
            _mm512_castsi512_ps(_mm512_or_si512(down, differ))
        }
    }

    #[inline(always)]
    fn round_to_half(self, x: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm512_cvtps_ph::<TO_NEAREST>(x)) }
    }

    #[inline(always)]
    fn store_half(self, x: __m512, dst: &mut [u16], at: usize) {
        let dst = &mut dst[at..at + N];
        // SAFETY: see above; sixteen halves are one 256-bit store.
        unsafe { _mm256_storeu_si256(dst.as_mut_ptr().cast(), _mm512_cvtps_ph::<TO_NEAREST>(x)) }
    }

    #[inline(always)]
    fn undecided<const M: usize>(self, xs: &[__m512; M]) -> bool {
        // SAFETY: see above.
        unsafe {
            let half_way = _mm512_set1_epi32(i32::MIN);
            let mut ties = 0;
            let mut least = xs[0];
            for &x in xs {
                let low_bits = _mm512_slli_epi32::<19>(_mm512_castps_si512(x));
                ties |= _mm512_cmpeq_epi32_mask(low_bits, half_way);
                least = _mm512_min_ps(least, x);
            }
            ties | _mm512_cmp_ps_mask::<_CMP_LT_OQ>(least, _mm512_set1_ps(SMALLEST_NORMAL)) != 0
        }
    }
}
