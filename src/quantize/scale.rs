//! The search for the global scale: which multiple `g` of the weight the trellis fits best. The loss
//! of `g` is the mean square of `encode(g t) / g - t` over sample tiles `t`, widened by the drift
//! that error feedback adds.

use super::QuantizeError;
use super::decode::take_tile;
use crate::encode::{TileEncoder, TrellisSpec, op};
use crate::format::{Bits, TILE_DIM, TILE_LEN};
use crate::linalg::Matrix;

/// Tiles per tile row or column on the sampled diagonal.
const DIAGONAL_WIDTH: usize = 3;
const COARSE_FIRST: f64 = 0.1;
const COARSE_STEP: f64 = 0.2;
const COARSE_POINTS: usize = 10;
/// The coarse grid looks at every third tile of the sample.
const COARSE_STRIDE: usize = 3;
const FINE_STEP: f64 = 0.075;
const FINE_POINTS: usize = 5;
const LEAST: f64 = 0.01;

/// Error feedback widens the distribution that the encoder sees at low rates by this factor.
fn feedback_drift(bits: Bits) -> f32 {
    match bits.as_f64() {
        1.0 => 1.08,
        1.5 => 1.035,
        2.0 => 1.018,
        2.5 => 1.009,
        3.0 => 1.004,
        _ => 1.0,
    }
}

/// Finds the global scale of a regularized weight `[k, n]`: a coarse grid, a fine one around its
/// best point, and a parabola through the best of that.
pub fn search(weight: &Matrix, spec: &TrellisSpec, encoder: &dyn TileEncoder) -> Result<f64, QuantizeError> {
    let drift = feedback_drift(spec.bits());
    let sample: Vec<f32> = sample_tiles(weight).into_iter().map(|v| v * drift).collect();
    let coarse_sample: Vec<f32> =
        sample.chunks_exact(TILE_LEN).step_by(COARSE_STRIDE).flatten().copied().collect();

    let coarse: Vec<f64> = (0..COARSE_POINTS).map(|i| COARSE_FIRST + COARSE_STEP * i as f64).collect();
    let center = coarse[smallest(&losses(&coarse_sample, &coarse, spec, encoder)?)];

    let fine: Vec<f64> = (0..FINE_POINTS).map(|i| center + FINE_STEP * (i as f64 - 2.0)).collect();
    let loss = losses(&sample, &fine, spec, encoder)?;
    let best = smallest(&loss);
    let g = (fine[best] + parabola_offset(&loss, best) * FINE_STEP).max(LEAST);
    Ok(g)
}

/// A wrapped diagonal, which meets every tile row and column, and the tiles of extreme energy, in
/// the encoder's order.
fn sample_tiles(weight: &Matrix) -> Vec<f32> {
    let (tiles_k, tiles_n) = (weight.rows() / TILE_DIM, weight.cols() / TILE_DIM);
    let length = tiles_k.max(tiles_n);
    let diagonal = (0..length)
        .flat_map(|d| (0..DIAGONAL_WIDTH).map(move |w| (d % tiles_k) * tiles_n + (d + w) % tiles_n));

    let mut energy = vec![0.0f64; tiles_k * tiles_n];
    for i in 0..weight.rows() {
        for (tn, part) in weight.row(i).chunks_exact(TILE_DIM).enumerate() {
            energy[i / TILE_DIM * tiles_n + tn] += part.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>();
        }
    }
    let mut by_energy: Vec<usize> = (0..energy.len()).collect();
    by_energy.sort_by(|&a, &b| energy[b].total_cmp(&energy[a]).then(a.cmp(&b)));
    let extremes = (DIAGONAL_WIDTH * length / 16).max(8).min(energy.len().div_ceil(2));
    let highest = by_energy.iter().take(extremes).copied();
    let lowest = by_energy.iter().rev().take(extremes).copied();

    let mut tiles = Vec::new();
    for index in diagonal.chain(highest).chain(lowest) {
        let strip = &weight.data()[index / tiles_n * TILE_DIM * weight.cols()..];
        let at = tiles.len();
        tiles.resize(at + TILE_LEN, 0.0);
        take_tile(strip, weight.cols(), index % tiles_n, &mut tiles[at..]);
    }
    tiles
}

/// Mean square of `encode(g t) / g - t` over the tiles, for every scale `g`.
fn losses(
    tiles: &[f32],
    scales: &[f64],
    spec: &TrellisSpec,
    encoder: &dyn TileEncoder,
) -> Result<Vec<f64>, QuantizeError> {
    let scaled: Vec<f32> = scales.iter().flat_map(|&g| tiles.iter().map(move |t| t * g as f32)).collect();
    let states = op::encode(encoder, spec, scaled)?;
    let loss = |(states, &g): (&[u16], &f64)| {
        let error = |(&state, &t): (&u16, &f32)| {
            let value = spec.codebook().value(state).to_f32() / g as f32;
            f64::from(value - t).powi(2)
        };
        states.iter().zip(tiles).map(error).sum::<f64>() / tiles.len() as f64
    };
    Ok(states.chunks_exact(tiles.len()).zip(scales).map(loss).collect())
}

fn smallest(losses: &[f64]) -> usize {
    (0..losses.len()).min_by(|&a, &b| losses[a].total_cmp(&losses[b])).unwrap_or(0)
}

/// Where the parabola through the best point and its neighbours has its minimum, in grid steps
/// from the best point; at most half a step, and none at the grid's edge.
fn parabola_offset(loss: &[f64], best: usize) -> f64 {
    if best == 0 || best + 1 == loss.len() {
        return 0.0;
    }
    let (left, middle, right) = (loss[best - 1], loss[best], loss[best + 1]);
    let curvature = left - 2.0 * middle + right;
    if curvature > 0.0 { (0.5 * (left - right) / curvature).clamp(-0.5, 0.5) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parabola_stays_near_the_best_point() {
        assert_eq!(parabola_offset(&[1.0, 2.0, 3.0], 0), 0.0);
        assert_eq!(parabola_offset(&[3.0, 2.0, 1.0], 2), 0.0);
        assert_eq!(parabola_offset(&[2.0, 1.0, 2.0], 1), 0.0);
        assert!((parabola_offset(&[2.0, 1.0, 1.5], 1) - 1.0 / 6.0).abs() < 1e-12);
        assert_eq!(parabola_offset(&[1.0, 1.0, 1.0], 1), 0.0);
    }

    #[test]
    fn every_tile_row_and_column_is_in_the_sample() {
        let mut weight = Matrix::zeros(128, 512);
        for (i, v) in weight.data_mut().iter_mut().enumerate() {
            *v = i as f32;
        }
        let tiles = sample_tiles(&weight);
        // Diagonal: 3 * 32; extremes: 8 of each end.
        assert_eq!(tiles.len() / TILE_LEN, 96 + 16);
        let firsts: Vec<usize> = tiles.chunks(TILE_LEN).map(|t| t[0] as usize).collect();
        for tk in 0..8 {
            assert!(firsts.iter().any(|f| f / 512 == tk * 16), "tile row {tk}");
        }
        for tn in 0..32 {
            assert!(firsts.iter().any(|f| f % 512 == tn * 16), "tile column {tn}");
        }
    }
}
