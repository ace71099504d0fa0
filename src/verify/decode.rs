//! Decoding for comparison: 128 output columns at a time, so that a head of any size fits.
//!
//! This is deliberately not the quantizer's decoder. A fault there would else confirm itself.

use crate::format::{PAD, QuantizedLinear, TILE_DIM, TILE_LEN, tile_position, unpack};

/// The weights of the output columns `128 * block ..` of `linear`, as they lie in a checkpoint:
/// `[128, k]`, row-major, f32. `values` are the codebook's values of all states.
///
/// `W = diag(suh) Had(tiles) Had diag(svh)` with the orthonormal Sylvester matrix of order 128 on
/// both sides.
pub(super) fn decode_block(linear: &QuantizedLinear, block: usize, values: &[f32]) -> Vec<f32> {
    let k = linear.k();
    let mut out = vec![0.0; PAD * k];
    for tk in 0..k / TILE_DIM {
        for tn in 0..PAD / TILE_DIM {
            let tile = linear.tile(tk, block * (PAD / TILE_DIM) + tn);
            for (p, &state) in unpack(tile, linear.bits, TILE_LEN).iter().enumerate() {
                let (row, col) = tile_position(p);
                out[(tn * TILE_DIM + col) * k + tk * TILE_DIM + row] = values[usize::from(state)];
            }
        }
    }
    for column in out.chunks_exact_mut(k) {
        column.chunks_exact_mut(PAD).for_each(hadamard);
    }
    let mut line = [0.0; PAD];
    for row in 0..k {
        for (n, value) in line.iter_mut().enumerate() {
            *value = out[n * k + row];
        }
        hadamard(&mut line);
        for (n, value) in line.iter().enumerate() {
            let scale = linear.suh[row].to_f32() * linear.svh[block * PAD + n].to_f32();
            out[n * k + row] = value * scale;
        }
    }
    out
}

/// The orthonormal Walsh-Hadamard transform of 128 values.
fn hadamard(x: &mut [f32]) {
    let mut half = 1;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    let norm = (x.len() as f32).sqrt().recip();
    x.iter_mut().for_each(|v| *v *= norm);
}
