//! LDLQ: strips of 16 rows from the last to the first, each with the errors of the rows below fed
//! back into it.
//!
//! With the strictly block-lower factor `L: [k, k]` of the rotated Hessian, the strip of rows `R` is
//! encoded from the target `W_R + L[B, R]^T (W - Q)_B`, where `B` are the rows below it and `Q` what
//! the encoder made of them. Inside a span of 128 rows the product is taken strip by strip; after a
//! span its part is carried to all rows above at once.

use std::borrow::Cow;

use rayon::prelude::*;

use super::QuantizeError;
use super::decode::{put_tile, take_tile};
use crate::encode::{TileEncoder, TrellisSpec, op};
use crate::format::{TILE_DIM, TILE_LEN};
use crate::linalg::{Matrix, add_product};

/// Rows whose errors are carried to all rows above at once.
const SPAN: usize = 128;

/// A weight as the encoder left it.
pub struct Encoded {
    /// Decoded tile values, `[k, n]`, in the rotated basis.
    pub values: Matrix,
    /// States, `[k/16, n/16, 256]`.
    pub states: Vec<u16>,
}

/// Quantizes regularized weights `[k, n_i]` that share their Hessian, side by side. `factor` is
/// the strictly block-lower factor `[k, k]` of the rotated Hessian; without one every tile is
/// rounded on its own.
pub fn ldlq(
    weights: &[&Matrix],
    factor: Option<&Matrix>,
    spec: &TrellisSpec,
    encoder: &dyn TileEncoder,
) -> Result<Vec<Encoded>, QuantizeError> {
    let k = weights[0].rows();
    let n: usize = weights.iter().map(|w| w.cols()).sum();
    let weight = match weights {
        [weight] => Cow::Borrowed(*weight),
        _ => Cow::Owned(side_by_side(weights, k, n)),
    };
    let mut values = Matrix::zeros(k, n);
    let mut states = vec![0u16; k * n];
    // Per row: the feedback of all spans below.
    let mut carried = Matrix::zeros(if factor.is_some() { k } else { 0 }, n);

    for end in (SPAN..=k).rev().step_by(SPAN) {
        let start = end - SPAN;
        let mut error = Matrix::zeros(SPAN, n);
        for row in (start..end).rev().step_by(TILE_DIM).map(|last| last + 1 - TILE_DIM) {
            let rows = row * n..(row + TILE_DIM) * n;
            let mut target = weight.data()[rows.clone()].to_vec();
            if let Some(factor) = factor {
                let below = row + TILE_DIM - start..SPAN;
                let l = factor.part(row + TILE_DIM..end, row..row + TILE_DIM);
                add_product(&mut carried.data_mut()[rows.clone()], n, l.t(), error.part(below, 0..n), 1.0);
                target.iter_mut().zip(&carried.data()[rows.clone()]).for_each(|(t, c)| *t += c);
            }
            let strip = &mut values.data_mut()[rows.clone()];
            encode_strip(&target, n, spec, encoder, &mut states[rows.clone()], strip)?;
            let error = &mut error.data_mut()[(row - start) * n..(row - start + TILE_DIM) * n];
            for ((e, w), q) in error.iter_mut().zip(&weight.data()[rows]).zip(strip) {
                *e = w - *q;
            }
        }
        if let Some(factor) = factor {
            let l = factor.part(start..end, 0..start);
            add_product(carried.data_mut(), n, l.t(), error.view(), 1.0);
        }
    }
    drop(carried);
    Ok(split(weights, values, states))
}

/// Encodes the `n/16` tiles of a strip of 16 rows at once.
fn encode_strip(
    target: &[f32],
    n: usize,
    spec: &TrellisSpec,
    encoder: &dyn TileEncoder,
    states: &mut [u16],
    strip: &mut [f32],
) -> Result<(), QuantizeError> {
    let mut tiles = vec![0.0f32; target.len()];
    tiles.par_chunks_exact_mut(TILE_LEN).enumerate().for_each(|(tn, tile)| take_tile(target, n, tn, tile));
    states.copy_from_slice(&op::encode(encoder, spec, tiles)?);
    for (tn, states) in states.chunks_exact(TILE_LEN).enumerate() {
        put_tile(strip, n, tn, |p| spec.codebook().value(states[p]).to_f32());
    }
    Ok(())
}

fn side_by_side(weights: &[&Matrix], k: usize, n: usize) -> Matrix {
    let mut data = Vec::with_capacity(k * n);
    for i in 0..k {
        weights.iter().for_each(|w| data.extend_from_slice(w.row(i)));
    }
    Matrix::from_vec(k, n, data)
}

fn split(weights: &[&Matrix], values: Matrix, states: Vec<u16>) -> Vec<Encoded> {
    if weights.len() == 1 {
        return vec![Encoded { values, states }];
    }
    let n = values.cols();
    let mut column = 0;
    weights
        .iter()
        .map(|w| {
            let columns = column..column + w.cols();
            column = columns.end;
            let rows = values.data().chunks_exact(n).flat_map(|row| &row[columns.clone()]).copied();
            // A strip of states holds whole tiles: 16 per column.
            let tiles = columns.start * TILE_DIM..columns.end * TILE_DIM;
            let strips = states.chunks_exact(n * TILE_DIM).flat_map(|strip| &strip[tiles.clone()]).copied();
            Encoded { values: Matrix::from_vec(w.rows(), w.cols(), rows.collect()), states: strips.collect() }
        })
        .collect()
}
