//! Blockwise rotations with the orthonormal Sylvester matrix `H_128`.

use rayon::prelude::*;

use super::Matrix;

/// Size of a block.
pub const BLOCK: usize = 128;

/// 1 / sqrt(128).
const SCALE: f32 = 0.088_388_35;

/// `X <- X H_128` on each 128-block of columns. The number of columns is a multiple of 128.
pub fn rotate_columns(x: &mut Matrix) {
    assert_eq!(x.cols() % BLOCK, 0, "columns are not padded");
    x.data_mut().par_chunks_mut(BLOCK).with_min_len(64).for_each(|block| {
        let mut half = 1;
        while half < BLOCK {
            for pair in block.chunks_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                butterfly(low, high);
            }
            half *= 2;
        }
        block.iter_mut().for_each(|v| *v *= SCALE);
    });
}

/// `X <- H_128 X` on each 128-block of rows. The number of rows is a multiple of 128.
pub fn rotate_rows(x: &mut Matrix) {
    assert_eq!(x.rows() % BLOCK, 0, "rows are not padded");
    let cols = x.cols();
    x.data_mut().par_chunks_mut(BLOCK * cols).for_each(|block| {
        let mut half = 1;
        while half < BLOCK {
            for pair in block.chunks_mut(2 * half * cols) {
                let (low, high) = pair.split_at_mut(half * cols);
                butterfly(low, high);
            }
            half *= 2;
        }
        block.iter_mut().for_each(|v| *v *= SCALE);
    });
}

fn butterfly(low: &mut [f32], high: &mut [f32]) {
    for (a, b) in low.iter_mut().zip(high) {
        (*a, *b) = (*a + *b, *a - *b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::Rng;

    #[test]
    fn rotations_match_the_sylvester_matrix_and_undo_themselves() {
        let mut rng = Rng::new(0, "hadamard");
        let x = Matrix::from_vec(128, 256, (0..128 * 256).map(|_| rng.normal()).collect());
        let sylvester =
            |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { SCALE } else { -SCALE };
        let mut right = x.clone();
        rotate_columns(&mut right);
        let mut left = x.clone();
        rotate_rows(&mut left);
        for (i, j) in [(0, 0), (5, 77), (127, 200), (64, 255)] {
            let block = j / BLOCK * BLOCK;
            let r: f32 = (0..BLOCK).map(|l| x.get(i, block + l) * sylvester(l, j % BLOCK)).sum();
            assert!((right.get(i, j) - r).abs() < 1e-4);
            let l: f32 = (0..BLOCK).map(|l| sylvester(i, l) * x.get(l, j)).sum();
            assert!((left.get(i, j) - l).abs() < 1e-4);
        }
        rotate_columns(&mut right);
        rotate_rows(&mut left);
        for (i, &v) in x.data().iter().enumerate() {
            assert!((right.data()[i] - v).abs() < 1e-5 && (left.data()[i] - v).abs() < 1e-5);
        }
    }
}
