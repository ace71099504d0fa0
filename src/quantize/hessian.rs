//! The Hessian of a layer's input: accumulated, damped, rotated and factored.
//!
//! ```text
//! H = (sum over tokens of x x^T) / tokens,  H_ii += 0.025 mean(diag H)
//! R = Had(su H su)Had,  R = C C^T (Cholesky),  L = C diag-block(C)^-1 - 1
//! ```
//!
//! `su` are random signs, `Had` the orthonormal rotation of order 128 on each block. `L` is strictly
//! block-lower with blocks of 16: its columns are those of `C` times the inverse of the diagonal
//! block, less the identities that this leaves on the diagonal.

use super::QuantizeError;
use super::decode::{scale_columns, scale_rows};
use crate::format::padded;
use crate::linalg::{
    Matrix, Rng, View, add_gram, block_ldl, cholesky, mirror_upper, rotate_columns, rotate_rows,
};

/// Damping, as a share of the mean of the diagonal.
pub const DAMPING: f64 = 0.025;
/// Times more damping is tried when there is no Cholesky factor.
const ATTEMPTS: usize = 10;
/// Mean of the diagonal below which nothing was seen of the input.
const DEAD: f64 = 1e-20;
/// Columns of a block of the LDL decomposition: a tile's side.
const LDL_BLOCK: usize = 16;

/// `sum x x^T` over calibration tokens, f32.
pub struct Hessian {
    /// Upper triangle of the sum, `[k, k]`.
    sum: Matrix,
    rows: u64,
    dropped: u64,
}

impl Hessian {
    pub fn new(k: usize) -> Self {
        Self { sum: Matrix::zeros(k, k), rows: 0, dropped: 0 }
    }

    /// A Hessian from its sum over `rows` tokens.
    pub fn from_sum(sum: Matrix, rows: u64) -> Self {
        Self { sum, rows, dropped: 0 }
    }

    /// Adds the tokens `x: [rows, k]`, row-major. Those with a non-finite element are left out and
    /// counted.
    pub fn add(&mut self, x: &[f32]) {
        let k = self.sum.cols();
        let rows = x.len() / k;
        let is_finite = |row: &[f32]| row.iter().all(|v| v.is_finite());
        if x.chunks_exact(k).all(is_finite) {
            add_gram(&mut self.sum, View::new(x, rows, k, k));
            self.rows += rows as u64;
            return;
        }
        let kept: Vec<f32> =
            x.chunks_exact(k).filter(|row| is_finite(row)).flat_map(|row| row.to_vec()).collect();
        let kept_rows = kept.len() / k;
        add_gram(&mut self.sum, View::new(&kept, kept_rows, k, k));
        self.rows += kept_rows as u64;
        self.dropped += (rows - kept_rows) as u64;
    }

    /// Tokens left out for a non-finite element.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Averages, damps, rotates and factors. The random signs are keyed by `seed` and `sign_key`, that
    /// of the first linear that uses the Hessian, and shared by all that do; `key` is its name.
    ///
    /// # Errors
    /// No Cholesky factor even with more damping.
    pub fn finish(self, seed: u64, sign_key: &str, key: &str) -> Result<Calibration, QuantizeError> {
        let signs = Rng::new(seed, &format!("{sign_key}.suh")).signs(padded(self.sum.rows()));
        self.finish_with_signs(signs, key)
    }

    /// [`Hessian::finish`] with given signs, `[k]` padded.
    pub fn finish_with_signs(mut self, signs: Vec<f32>, key: &str) -> Result<Calibration, QuantizeError> {
        if self.rows == 0 {
            return Ok(Calibration::Uncalibrated { signs, why: Uncalibrated::NoTokens });
        }
        mirror_upper(&mut self.sum);
        let rows = self.rows as f32;
        self.sum.data_mut().iter_mut().for_each(|v| *v /= rows);
        let mean = self.sum.diagonal_mean();
        if !self.sum.data().iter().all(|v| v.is_finite()) {
            return Ok(Calibration::Uncalibrated { signs, why: Uncalibrated::NotFinite });
        }
        if mean < DEAD {
            return Ok(Calibration::Uncalibrated { signs, why: Uncalibrated::Dead });
        }
        let k = signs.len();
        let mut damped = self.sum.padded(k, k);
        let damping = (DAMPING * mean) as f32;
        damped.add_to_diagonal(damping);
        factor(damped, damping, signs, key).map(Calibration::Calibrated)
    }
}

/// `Had(su H su)Had`, its Cholesky factor and from that the strictly block-lower factor.
fn factor(
    mut damped: Matrix,
    mut damping: f32,
    signs: Vec<f32>,
    key: &str,
) -> Result<Calibrated, QuantizeError> {
    for attempt in 0..=ATTEMPTS {
        if let Ok(l) = cholesky(rotate(damped.clone(), &signs)) {
            let factor = block_ldl(l, LDL_BLOCK);
            return Ok(Calibrated { damped, damping, signs, factor, attempts: attempt });
        }
        // A multiple of the identity is the same in every orthonormal basis.
        let more = (2.0 * DAMPING * damped.diagonal_mean()) as f32;
        damped.add_to_diagonal(more);
        damping += more;
    }
    Err(QuantizeError::NotPositive { key: key.to_owned(), attempts: ATTEMPTS })
}

/// `Had(su H su)Had`
pub(super) fn rotate(mut h: Matrix, signs: &[f32]) -> Matrix {
    scale_rows(&mut h, signs);
    scale_columns(&mut h, signs);
    rotate_columns(&mut h);
    rotate_rows(&mut h);
    h
}

/// Why a tensor is quantized without a Hessian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uncalibrated {
    NoTokens,
    Dead,
    NotFinite,
}

impl Uncalibrated {
    pub fn reason(self) -> &'static str {
        match self {
            Uncalibrated::NoTokens => "no calibration token reached it",
            Uncalibrated::Dead => "its inputs are all zero",
            Uncalibrated::NotFinite => "its Hessian overflowed",
        }
    }
}

/// A factored Hessian.
pub struct Calibrated {
    /// Mean Hessian with its damping, in the basis of the source, `[k, k]` padded.
    pub damped: Matrix,
    /// What was added to the diagonal.
    pub damping: f32,
    /// Input signs, `[k]` padded.
    pub signs: Vec<f32>,
    /// Strictly block-lower factor of the rotated Hessian, `[k, k]`.
    pub factor: Matrix,
    /// Times more damping was needed.
    pub attempts: usize,
}

/// What is known of a layer's input.
pub enum Calibration {
    Calibrated(Calibrated),
    Uncalibrated { signs: Vec<f32>, why: Uncalibrated },
}

impl Calibration {
    pub fn calibrated(&self) -> Option<&Calibrated> {
        match self {
            Calibration::Calibrated(calibrated) => Some(calibrated),
            Calibration::Uncalibrated { .. } => None,
        }
    }

    pub fn signs(&self) -> &[f32] {
        match self {
            Calibration::Calibrated(calibrated) => &calibrated.signs,
            Calibration::Uncalibrated { signs, .. } => signs,
        }
    }
}
