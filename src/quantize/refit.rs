//! Refits the stored scale vectors to the quantized weight in the metric of the Hessian. The
//! trellis does not change, and neither does the cost of inference.

use super::decode::{scale_columns, scale_rows};
use crate::linalg::{Matrix, add_product, solve};

const ROUNDS: usize = 2;
/// Added to the diagonal of the input side's system, as a share of its mean.
const RIDGE: f64 = 1e-6;
/// Ridges tried, each ten times the last, before the input scales are left alone.
const RIDGES: usize = 4;
const SMALLEST_ENERGY: f64 = 1e-30;

/// Factors on the scale vectors.
pub struct Scales {
    /// `[k]`
    pub rows: Vec<f32>,
    /// `[n]`
    pub columns: Vec<f32>,
}

/// Alternates between the best output scales, `c_j = (q_j^T H w_j) / (q_j^T H q_j)`, and the best
/// input scales, from `((Q Q^T) o H) r = rowsum(Q o (H W))`. `w` is the source's weight and `q` the
/// quantized one, both `[k, n]` in the source's basis; `h` is the damped Hessian there.
pub fn refit(w: &Matrix, mut q: Matrix, h: &Matrix) -> Scales {
    let hw = h.matmul(w);
    let mut scales = Scales { rows: vec![1.0; q.rows()], columns: vec![1.0; q.cols()] };
    for _ in 0..ROUNDS {
        let columns = column_scales(&q, &hw, h);
        scale_columns(&mut q, &columns);
        multiply(&mut scales.columns, &columns);
        let rows = row_scales(&q, &hw, h);
        scale_rows(&mut q, &rows);
        multiply(&mut scales.rows, &rows);
    }
    scales
}

fn multiply(scales: &mut [f32], factors: &[f32]) {
    scales.iter_mut().zip(factors).for_each(|(s, f)| *s *= f);
}

fn column_scales(q: &Matrix, hw: &Matrix, h: &Matrix) -> Vec<f32> {
    let hq = h.matmul(q);
    let (mut with_w, mut with_q) = (vec![0.0f64; q.cols()], vec![0.0f64; q.cols()]);
    for i in 0..q.rows() {
        for (j, &value) in q.row(i).iter().enumerate() {
            with_w[j] += f64::from(value) * f64::from(hw.get(i, j));
            with_q[j] += f64::from(value) * f64::from(hq.get(i, j));
        }
    }
    with_w
        .into_iter()
        .zip(with_q)
        .map(|(w, q)| if q > SMALLEST_ENERGY { (w / q) as f32 } else { 1.0 })
        .collect()
}

fn row_scales(q: &Matrix, hw: &Matrix, h: &Matrix) -> Vec<f32> {
    let k = q.rows();
    let mut system = Matrix::zeros(k, k);
    add_product(system.data_mut(), k, q.view(), q.view().t(), 1.0);
    system.data_mut().iter_mut().zip(h.data()).for_each(|(a, h)| *a *= h);
    let right: Vec<f32> = (0..k)
        .map(|i| {
            let products = q.row(i).iter().zip(hw.row(i));
            products.map(|(&q, &hw)| f64::from(q) * f64::from(hw)).sum::<f64>() as f32
        })
        .collect();
    let mut ridge = RIDGE * system.diagonal_mean();
    for _ in 0..RIDGES {
        let mut damped = system.clone();
        damped.add_to_diagonal(ridge as f32);
        if let Ok(rows) = solve(damped, &right) {
            return rows.into_iter().map(|r| if r.is_finite() && r > 0.0 { r } else { 1.0 }).collect();
        }
        ridge *= 10.0;
    }
    vec![1.0; k]
}
