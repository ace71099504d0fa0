//! Matrix products. The work is cut into blocks of fixed size, each computed by one thread, so
//! that results do not depend on the number of threads.
#![allow(unsafe_code)]

use rayon::prelude::*;

use super::Matrix;

/// Rows of the result that one task computes.
const BLOCK_ROWS: usize = 64;

/// A strided view of f32 data: a part of a matrix, or its transpose.
#[derive(Clone, Copy)]
pub struct View<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> View<'a> {
    /// Row-major data of `rows x cols` whose rows lie `row_stride` apart.
    pub fn new(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(cols <= row_stride || rows <= 1, "rows overlap");
        assert!(rows == 0 || (rows - 1) * row_stride + cols <= data.len(), "view leaves its data");
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transpose, without copying.
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    fn rows_from(self, row: usize, rows: usize) -> Self {
        Self { data: &self.data[row * self.row_stride..], rows, ..self }
    }
}

impl Matrix {
    /// The whole matrix as a view.
    pub fn view(&self) -> View<'_> {
        View::new(self.data(), self.rows(), self.cols(), self.cols())
    }

    /// Rows `rows` and columns `cols` as a view.
    pub fn part(&self, rows: std::ops::Range<usize>, cols: std::ops::Range<usize>) -> View<'_> {
        assert!(rows.end <= self.rows() && cols.end <= self.cols(), "part leaves its matrix");
        if rows.is_empty() || cols.is_empty() {
            return View::new(&[], 0, 0, 0);
        }
        let at = rows.start * self.cols() + cols.start;
        View::new(&self.data()[at..], rows.len(), cols.len(), self.cols())
    }

    /// `self * other`.
    pub fn matmul(&self, other: &Matrix) -> Matrix {
        let mut out = Matrix::zeros(self.rows(), other.cols());
        let cols = other.cols();
        add_product(out.data_mut(), cols, self.view(), other.view(), 1.0);
        out
    }
}

/// `dst += scale * a * b`, where `dst` holds the rows of the result, `dst_stride` apart.
pub fn add_product(dst: &mut [f32], dst_stride: usize, a: View<'_>, b: View<'_>, scale: f32) {
    assert_eq!(a.cols, b.rows, "inner dimensions differ");
    if a.rows == 0 || b.cols == 0 || a.cols == 0 {
        return;
    }
    assert!(b.cols <= dst_stride, "result rows overlap");
    assert!((a.rows - 1) * dst_stride + b.cols <= dst.len(), "result leaves its data");
    let used = dst.len().min(a.rows * dst_stride);
    dst[..used].par_chunks_mut(BLOCK_ROWS * dst_stride).enumerate().for_each(|(block, dst)| {
        let row = block * BLOCK_ROWS;
        let rows = BLOCK_ROWS.min(a.rows - row);
        block_product(dst, dst_stride, a.rows_from(row, rows), b, scale);
    });
}

fn block_product(dst: &mut [f32], dst_stride: usize, a: View<'_>, b: View<'_>, scale: f32) {
    let reach = |v: &View<'_>| (v.rows - 1) * v.row_stride + (v.cols - 1) * v.col_stride + 1;
    assert!(reach(&a) <= a.data.len() && reach(&b) <= b.data.len(), "operand leaves its data");
    assert!((a.rows - 1) * dst_stride + b.cols <= dst.len(), "result leaves its data");
    // SAFETY: the strides and sizes stay inside the three slices, as just checked, and `dst` is
    // exclusively borrowed, so it aliases neither operand.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            dst.as_mut_ptr(),
            1,
            dst_stride as isize,
            true,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// Adds `x^T x` to the upper triangle of `gram`, `x: [rows, k]`. The lower triangle is left alone
/// but for the blocks on the diagonal; [`mirror_upper`] fills it.
pub fn add_gram(gram: &mut Matrix, x: View<'_>) {
    let k = gram.cols();
    assert!(x.cols == k && gram.rows() == k, "inputs of another width");
    if x.rows == 0 {
        return;
    }
    gram.data_mut().par_chunks_mut(BLOCK_ROWS * k).enumerate().for_each(|(block, dst)| {
        let at = block * BLOCK_ROWS;
        let rows = BLOCK_ROWS.min(k - at);
        let left = View { data: &x.data[at * x.col_stride..], cols: rows, ..x };
        let right = View { data: &x.data[at * x.col_stride..], cols: k - at, ..x };
        block_product(&mut dst[at..], k, left.t(), right, 1.0);
    });
}

/// Copies the upper triangle of a square matrix into the lower one.
pub fn mirror_upper(square: &mut Matrix) {
    for i in 0..square.rows() {
        for j in 0..i {
            square.set(i, j, square.get(j, i));
        }
    }
}

/// `sum_ij a_ij b_ij`, summed in f64.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    const CHUNK: usize = 1 << 14;
    let partial: Vec<f64> = a
        .par_chunks(CHUNK)
        .zip(b.par_chunks(CHUNK))
        .map(|(a, b)| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum())
        .collect();
    partial.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::Rng;

    fn random(rows: usize, cols: usize, key: &str) -> Matrix {
        let mut rng = Rng::new(1, key);
        Matrix::from_vec(rows, cols, (0..rows * cols).map(|_| rng.normal()).collect())
    }

    fn naive(a: &Matrix, b: &Matrix) -> Matrix {
        let mut out = Matrix::zeros(a.rows(), b.cols());
        for i in 0..a.rows() {
            for j in 0..b.cols() {
                let sum: f64 = (0..a.cols()).map(|l| f64::from(a.get(i, l)) * f64::from(b.get(l, j))).sum();
                out.set(i, j, sum as f32);
            }
        }
        out
    }

    fn assert_close(a: &[f32], b: &[f32]) {
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            assert!((a - b).abs() < 1e-4 * (1.0 + b.abs()), "{i}: {a} {b}");
        }
    }

    #[test]
    fn products_of_views_and_transposes() {
        let (a, b) = (random(150, 70, "a"), random(70, 33, "b"));
        assert_close(a.matmul(&b).data(), naive(&a, &b).data());
        let at = a.transpose();
        let mut out = Matrix::zeros(150, 33);
        add_product(out.data_mut(), 33, at.view().t(), b.view(), 1.0);
        assert_close(out.data(), naive(&a, &b).data());
        // A part of `a`, and a result inside a wider matrix.
        let mut wide = Matrix::zeros(100, 40);
        add_product(&mut wide.data_mut()[5..], 40, a.part(50..150, 10..70), b.part(10..70, 0..33), -1.0);
        let expected = naive(&a.clone(), &b);
        let mut head = Matrix::zeros(150, 33);
        add_product(head.data_mut(), 33, a.part(0..150, 0..10), b.part(0..10, 0..33), 1.0);
        for i in 0..100 {
            for j in 0..33 {
                let want = head.get(50 + i, j) - expected.get(50 + i, j);
                assert!((wide.get(i, 5 + j) - want).abs() < 1e-3);
            }
        }
    }

    #[test]
    fn gram_is_the_transpose_times_itself() {
        let x = random(37, 130, "x");
        let mut gram = Matrix::zeros(130, 130);
        add_gram(&mut gram, x.part(0..20, 0..130));
        add_gram(&mut gram, x.part(20..37, 0..130));
        mirror_upper(&mut gram);
        assert_close(gram.data(), naive(&x.transpose(), &x).data());
    }
}
