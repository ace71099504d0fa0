//! Cholesky factorization, the block LDL built on it, and solving with it.

use rayon::prelude::*;

use super::Matrix;
use super::gemm::{View, add_product};

/// Columns that are factored at a time.
const PANEL: usize = 64;

/// A pivot that is not positive, or not a number: the matrix has no Cholesky factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NotPositive {
    pub pivot: usize,
}

/// The lower Cholesky factor of a symmetric positive definite matrix: `A = L L^T`. Only the lower
/// triangle of `a` is read.
pub fn cholesky(mut a: Matrix) -> Result<Matrix, NotPositive> {
    let n = a.rows();
    assert_eq!(n, a.cols(), "a square matrix");
    for start in (0..n).step_by(PANEL) {
        let end = (start + PANEL).min(n);
        subtract_earlier_panels(&mut a, start, end);
        factor_diagonal_block(&mut a, start, end)?;
        solve_rows_below(&mut a, start, end);
    }
    for i in 0..n {
        a.row_mut(i)[i + 1..].fill(0.0);
    }
    Ok(a)
}

/// `A[start.., start..end] -= L[start.., ..start] L[start..end, ..start]^T`
fn subtract_earlier_panels(a: &mut Matrix, start: usize, end: usize) {
    if start == 0 {
        return;
    }
    let n = a.cols();
    let panel: Vec<f32> = (start..end).flat_map(|i| a.row(i)[..start].to_vec()).collect();
    let panel = View::new(&panel, end - start, start, start);
    a.data_mut()[start * n..].par_chunks_mut(PANEL * n).for_each(|rows| {
        let count = rows.len() / n;
        let mut product = vec![0.0; count * (end - start)];
        add_product(&mut product, end - start, View::new(rows, count, start, n), panel.t(), 1.0);
        for (row, product) in rows.chunks_mut(n).zip(product.chunks(end - start)) {
            row[start..end].iter_mut().zip(product).for_each(|(a, p)| *a -= p);
        }
    });
}

fn factor_diagonal_block(a: &mut Matrix, start: usize, end: usize) -> Result<(), NotPositive> {
    for j in start..end {
        for i in j..end {
            let sum: f64 = (start..j).map(|l| f64::from(a.get(i, l)) * f64::from(a.get(j, l))).sum();
            let value = f64::from(a.get(i, j)) - sum;
            if i > j {
                a.set(i, j, (value / f64::from(a.get(j, j))) as f32);
            } else if value > 0.0 && value.is_finite() {
                a.set(j, j, value.sqrt() as f32);
            } else {
                return Err(NotPositive { pivot: j });
            }
        }
    }
    Ok(())
}

/// `L[end.., start..end] = A[end.., start..end] L[start..end, start..end]^-T`
fn solve_rows_below(a: &mut Matrix, start: usize, end: usize) {
    let n = a.cols();
    let (above, below) = a.data_mut().split_at_mut(end * n);
    let diagonal: Vec<&[f32]> = (start..end).map(|i| &above[i * n + start..i * n + end]).collect();
    below.par_chunks_mut(n).for_each(|row| {
        let x = &mut row[start..end];
        for j in 0..x.len() {
            let sum: f32 = (0..j).map(|l| x[l] * diagonal[j][l]).sum();
            x[j] = (x[j] - sum) / diagonal[j][j];
        }
    });
}

/// The strictly block-lower factor of the block LDL decomposition: every 16-column block of the
/// Cholesky factor times the inverse of its diagonal block, less the identities that leaves on the
/// diagonal.
pub fn block_ldl(mut cholesky: Matrix, block: usize) -> Matrix {
    let n = cholesky.rows();
    assert_eq!(n % block, 0, "whole blocks");
    let inverses: Vec<Vec<f32>> =
        (0..n).step_by(block).map(|at| invert_lower(&cholesky, at, block)).collect();
    cholesky.data_mut().par_chunks_mut(n).enumerate().for_each(|(i, row)| {
        let mut column = vec![0.0f32; block];
        let own = i / block * block;
        for (inverse, part) in inverses.iter().zip(row[..own].chunks_mut(block)) {
            column.fill(0.0);
            for (l, &value) in part.iter().enumerate() {
                for (c, &inv) in column.iter_mut().zip(&inverse[l * block..(l + 1) * block]) {
                    *c += value * inv;
                }
            }
            part.copy_from_slice(&column);
        }
        row[own..].fill(0.0);
    });
    cholesky
}

/// Row-major inverse of the lower-triangular diagonal block at `at`.
fn invert_lower(l: &Matrix, at: usize, size: usize) -> Vec<f32> {
    let mut inverse = vec![0.0f64; size * size];
    for j in 0..size {
        for i in j..size {
            let unit = if i == j { 1.0 } else { 0.0 };
            let sum: f64 = (j..i).map(|m| f64::from(l.get(at + i, at + m)) * inverse[m * size + j]).sum();
            inverse[i * size + j] = (unit - sum) / f64::from(l.get(at + i, at + i));
        }
    }
    inverse.into_iter().map(|v| v as f32).collect()
}

/// Solves `A x = b` for symmetric positive definite `A`.
pub fn solve(a: Matrix, b: &[f32]) -> Result<Vec<f32>, NotPositive> {
    let l = cholesky(a)?;
    let n = l.rows();
    let mut x: Vec<f64> = b.iter().map(|&v| f64::from(v)).collect();
    for i in 0..n {
        let sum: f64 = l.row(i)[..i].iter().zip(&x).map(|(&l, &x)| f64::from(l) * x).sum();
        x[i] = (x[i] - sum) / f64::from(l.get(i, i));
    }
    for i in (0..n).rev() {
        x[i] /= f64::from(l.get(i, i));
        let (value, row) = (x[i], l.row(i));
        for (x, &l) in x[..i].iter_mut().zip(row) {
            *x -= f64::from(l) * value;
        }
    }
    Ok(x.into_iter().map(|v| v as f32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::{Rng, add_gram, mirror_upper};

    fn positive(n: usize) -> Matrix {
        let mut rng = Rng::new(2, "cholesky");
        let x = Matrix::from_vec(2 * n, n, (0..2 * n * n).map(|_| rng.normal()).collect());
        let mut gram = Matrix::zeros(n, n);
        add_gram(&mut gram, x.view());
        mirror_upper(&mut gram);
        gram
    }

    #[test]
    fn factor_times_its_transpose_is_the_matrix() {
        let a = positive(208);
        let l = cholesky(a.clone()).unwrap();
        let product = l.matmul(&l.transpose());
        for (p, a) in product.data().iter().zip(a.data()) {
            assert!((p - a).abs() < 1e-2, "{p} {a}");
        }
    }

    #[test]
    fn block_factor_reproduces_the_matrix_with_its_block_diagonal() {
        let a = positive(64);
        let c = cholesky(a.clone()).unwrap();
        let mut l = block_ldl(c.clone(), 16);
        assert!((0..64).all(|i| l.row(i)[i / 16 * 16..].iter().all(|&v| v == 0.0)));
        l.add_to_diagonal(1.0);
        // A = L D L^T with D = the diagonal blocks of C times their transposes.
        let mut d = Matrix::zeros(64, 64);
        for i in 0..64 {
            for j in i / 16 * 16..i / 16 * 16 + 16 {
                let sum: f32 = (i / 16 * 16..64).map(|m| c.get(i, m) * c.get(j, m)).sum();
                d.set(i, j, sum);
            }
        }
        let product = l.matmul(&d).matmul(&l.transpose());
        for (p, a) in product.data().iter().zip(a.data()) {
            assert!((p - a).abs() < 1e-2, "{p} {a}");
        }
    }

    #[test]
    fn solves_and_refuses() {
        let a = positive(100);
        let want: Vec<f32> = (0..100).map(|i| (i as f32).sin()).collect();
        let b = a.matmul(&Matrix::from_vec(100, 1, want.clone()));
        let x = solve(a.clone(), b.data()).unwrap();
        assert!(x.iter().zip(&want).all(|(x, w)| (x - w).abs() < 1e-3));
        let mut indefinite = a.clone();
        indefinite.set(70, 70, -1.0);
        assert_eq!(cholesky(indefinite).unwrap_err().pivot, 70);
        let mut broken = a;
        broken.set(3, 3, f32::NAN);
        assert_eq!(cholesky(broken).unwrap_err().pivot, 3);
    }
}
