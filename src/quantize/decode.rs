//! From trellis states back to weights.

use rayon::prelude::*;

use crate::format::{QuantizedLinear, TILE_DIM, TILE_LEN, tile_position, unpack};
use crate::linalg::{Matrix, rotate_columns, rotate_rows};

/// The weight `[k, n]` (padded) of a stored linear: `W = diag(suh) Had(tiles) Had diag(svh)`.
pub fn decode(linear: &QuantizedLinear) -> Matrix {
    let [_, tiles_n, _] = linear.trellis_shape();
    let values: Vec<f32> = linear.codebook.values().into_iter().map(f32::from).collect();
    let mut tiles = Matrix::zeros(linear.k(), linear.n());
    tiles.data_mut().par_chunks_mut(TILE_DIM * linear.n()).enumerate().for_each(|(tk, strip)| {
        for tn in 0..tiles_n {
            let states = unpack(linear.tile(tk, tn), linear.bits, TILE_LEN);
            put_tile(strip, linear.n(), tn, |p| values[usize::from(states[p])]);
        }
    });
    let suh: Vec<f32> = linear.suh.iter().map(|v| v.to_f32()).collect();
    let svh: Vec<f32> = linear.svh.iter().map(|v| v.to_f32()).collect();
    to_original_basis(tiles, &suh, &svh)
}

/// `diag(su) Had(q) Had diag(sv)`: from the rotated, scaled basis to that of the source.
pub fn to_original_basis(mut q: Matrix, su: &[f32], sv: &[f32]) -> Matrix {
    rotate_rows(&mut q);
    scale_rows(&mut q, su);
    rotate_columns(&mut q);
    scale_columns(&mut q, sv);
    q
}

/// Multiplies row `i` by `scales[i]`.
pub fn scale_rows(x: &mut Matrix, scales: &[f32]) {
    let cols = x.cols();
    x.data_mut()
        .par_chunks_mut(cols)
        .zip(scales)
        .for_each(|(row, &scale)| row.iter_mut().for_each(|v| *v *= scale));
}

/// Multiplies column `j` by `scales[j]`.
pub fn scale_columns(x: &mut Matrix, scales: &[f32]) {
    let cols = x.cols();
    x.data_mut()
        .par_chunks_mut(cols)
        .for_each(|row| row.iter_mut().zip(scales).for_each(|(v, &scale)| *v *= scale));
}

/// Writes the tile in tile column `tn` of a strip of 16 rows of `n` columns; `value(p)` is the
/// weight at the encoder's position `p`.
pub fn put_tile(strip: &mut [f32], n: usize, tn: usize, value: impl Fn(usize) -> f32) {
    for p in 0..TILE_LEN {
        let (row, col) = tile_position(p);
        strip[row * n + tn * TILE_DIM + col] = value(p);
    }
}

/// Reads the tile in tile column `tn` of a strip into the encoder's order.
pub fn take_tile(strip: &[f32], n: usize, tn: usize, tile: &mut [f32]) {
    for (p, value) in tile.iter_mut().enumerate() {
        let (row, col) = tile_position(p);
        *value = strip[row * n + tn * TILE_DIM + col];
    }
}
