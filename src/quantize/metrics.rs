//! How far a quantized weight is from its source.

use serde::{Deserialize, Serialize};

use super::Calibrated;
use crate::linalg::{Matrix, dot};

/// Errors of what is stored, in the basis of the source.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Errors {
    /// `tr(E^T H E) / tr(W^T H W)` with the undamped Hessian; without one it is the relative error
    /// squared.
    pub proxy: f64,
    /// `|E| / |W|`, Frobenius.
    pub rel_frobenius: f64,
    /// Mean square error.
    pub mse: f64,
}

impl Errors {
    /// `w` is the source's weight and `q` the stored one, both padded; `(k, n)` is the size
    /// without padding, and only that part counts.
    pub fn measure(w: &Matrix, q: &Matrix, (k, n): (usize, usize), calibrated: Option<&Calibrated>) -> Self {
        let output = calibrated.map(|c| output_error(w, q, c));
        let error = difference(w, q).cropped(k, n);
        let energy = dot(error.data(), error.data());
        let relative = ratio(energy, dot(w.data(), w.data()));
        let proxy = output.unwrap_or(relative);
        Self { proxy, rel_frobenius: relative.sqrt(), mse: energy / (k * n) as f64 }
    }
}

/// `tr(E^T H E) / tr(W^T H W)` with `E = W - Q` and the damping taken out of `H` again.
pub fn output_error(w: &Matrix, q: &Matrix, calibrated: &Calibrated) -> f64 {
    let energy = |x: &Matrix| {
        let hx = calibrated.damped.matmul(x);
        dot(x.data(), hx.data()) - f64::from(calibrated.damping) * dot(x.data(), x.data())
    };
    let error = energy(&difference(w, q));
    ratio(error, energy(w))
}

fn difference(w: &Matrix, q: &Matrix) -> Matrix {
    let data = w.data().iter().zip(q.data()).map(|(w, q)| w - q).collect();
    Matrix::from_vec(w.rows(), w.cols(), data)
}

/// `part / whole`, and 0 where there is nothing to compare with and nothing wrong.
fn ratio(part: f64, whole: f64) -> f64 {
    if part == 0.0 { 0.0 } else { part / whole.max(1e-300) }
}
