//! Brings a weight into the distribution that the codebook expects: output scales, signs, input
//! scales and the two rotations.
//!
//! With `W: [k, n]`, `c_j` the RMS of column `j` over its mean, `H` the blockwise orthonormal
//! Hadamard rotation of order 128, and `e_u`, `e_v` random signs:
//!
//! ```text
//! sv_j = e_v_j c_j, or e_v_j without output scales;        W <- (W diag(sv)^-1) H
//! su_i = e_u_i r_i / -1.24371088, r_i the RMS of row i;    W <- H (diag(su)^-1 W)
//! global scale g:                                          W <- g W, su <- su / g
//! ```
//!
//! so that the source is `diag(su) H W H diag(sv)`.

use std::fmt;
use std::str::FromStr;

use super::decode::{scale_columns, scale_rows};
use crate::linalg::{Matrix, rotate_columns, rotate_rows};

/// Standard deviation of the codebook's values.
const CODEBOOK_SCALE: f32 = 1.243_710_9;
/// RMS below which a row or column counts as zero.
const ZERO_RMS: f32 = 1e-30;
/// Divisor of zero rows and columns.
const ZERO_DIVISOR: f32 = 0.1;
/// Predicted loss with output scales, relative to without, above which `auto` leaves them off.
const MAX_RATIO: f64 = 1.05;

/// Largest magnitudes of a side's scales that a half holds well: those below are subnormal or
/// close to it.
const COMFORTABLE: std::ops::Range<f32> = 1.220_703_1e-4..32_768.0;

/// Whether each output channel gets a scale of its own before quantization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutScales {
    /// On, but for gate and up projections whose sensitive channels are the large ones.
    Auto,
    Always,
    Never,
}

impl OutScales {
    pub fn name(self) -> &'static str {
        match self {
            OutScales::Auto => "auto",
            OutScales::Always => "always",
            OutScales::Never => "never",
        }
    }

    /// Whether to apply them to `weight`: `[k, n]`, with the sensitivity of its output channels
    /// where that is known. Without calibration they are on only when forced.
    pub fn decide(self, weight: &Matrix, sensitivity: Option<&[f64]>, uncalibrated: bool) -> bool {
        match self {
            OutScales::Always => true,
            OutScales::Never => false,
            OutScales::Auto if uncalibrated => false,
            OutScales::Auto => sensitivity
                .and_then(|s| out_scales_ratio(&column_rms(weight), s))
                .is_none_or(|ratio| ratio <= MAX_RATIO),
        }
    }
}

impl fmt::Display for OutScales {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for OutScales {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        [OutScales::Auto, OutScales::Always, OutScales::Never]
            .into_iter()
            .find(|o| o.name() == s)
            .ok_or_else(|| format!("\"{s}\" is none of auto, always, never"))
    }
}

/// `E[s e] / (E[s] E[e])` with `e` the energy of the output channels, `s` their sensitivity (no
/// longer than `rms`; channels behind its end are padding): the predicted loss with output scales
/// relative to that without. `None` if the sensitivity says nothing.
pub fn out_scales_ratio(rms: &[f32], sensitivity: &[f64]) -> Option<f64> {
    let n = rms.len() as f64;
    let energy = |j: usize| f64::from(rms[j]).powi(2);
    let mean_energy = (0..rms.len()).map(energy).sum::<f64>() / n;
    let mean_sensitivity = sensitivity.iter().sum::<f64>() / n;
    let joint = sensitivity.iter().enumerate().map(|(j, s)| s * energy(j)).sum::<f64>() / n;
    let ratio = joint / (mean_energy * mean_sensitivity);
    ratio.is_finite().then_some(ratio)
}

/// A weight ready for the scale search or, after it, for the encoder.
pub struct Regularized {
    /// `[k, n]`
    pub weight: Matrix,
    /// Input side: signs and scales, `[k]`.
    pub su: Vec<f32>,
    /// Output side: signs and scales, `[n]`; 0 for zero columns.
    pub sv: Vec<f32>,
    /// Global scale, already in `weight` and `su`.
    pub g: f64,
    pub out_scales: bool,
}

impl Regularized {
    /// Multiplies the weight by the global scale `g`.
    pub fn apply_scale(&mut self, g: f64) {
        let scale = g as f32;
        self.weight.data_mut().iter_mut().for_each(|v| *v *= scale);
        self.su.iter_mut().for_each(|v| *v /= scale);
        self.g *= g;
    }

    /// Moves a power of two between input and output scales where one side is too large or too
    /// small for a half and the other has room. Their product, the weight, stays as it is.
    pub fn balance(&mut self) {
        let (input, output) = (largest(&self.su), largest(&self.sv));
        if input == 0.0 || output == 0.0 || [input, output].iter().all(|max| COMFORTABLE.contains(max)) {
            return;
        }
        let shift = ((input.log2() - output.log2()) / 2.0).round().exp2();
        self.su.iter_mut().for_each(|v| *v /= shift);
        self.sv.iter_mut().for_each(|v| *v *= shift);
    }

    /// Multiplies the stored scales.
    pub fn rescale(&mut self, rows: &[f32], columns: &[f32]) {
        self.su.iter_mut().zip(rows).for_each(|(su, r)| *su *= r);
        self.sv.iter_mut().zip(columns).for_each(|(sv, c)| *sv *= c);
    }
}

/// Largest magnitude.
pub(super) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0f32, |max, v| max.max(v.abs()))
}

/// Regularizes `weight: [k, n]` with the random signs `su: [k]` and `sv: [n]`, up to the global
/// scale.
pub fn regularize(mut weight: Matrix, su: &[f32], sv: &[f32], out_scales: bool) -> Regularized {
    let rms = column_rms(&weight);
    let mean = rms.iter().map(|&c| f64::from(c)).sum::<f64>() / rms.len() as f64;
    let zero: Vec<bool> =
        rms.iter().map(|&c| mean <= f64::from(ZERO_RMS) || c / (mean as f32) < ZERO_RMS).collect();
    let mut sv = sv.to_vec();
    if out_scales {
        for ((sv, &c), &zero) in sv.iter_mut().zip(&rms).zip(&zero) {
            *sv *= if zero { ZERO_DIVISOR } else { c / mean as f32 };
        }
    }
    let divisors: Vec<f32> = sv.iter().map(|v| 1.0 / v).collect();
    scale_columns(&mut weight, &divisors);
    for (sv, zero) in sv.iter_mut().zip(zero) {
        if zero {
            *sv = 0.0;
        }
    }
    rotate_columns(&mut weight);

    let su: Vec<f32> = su
        .iter()
        .enumerate()
        .map(|(i, sign)| {
            let r = rms_of(weight.row(i));
            sign * if r < ZERO_RMS { ZERO_DIVISOR } else { r } / -CODEBOOK_SCALE
        })
        .collect();
    let divisors: Vec<f32> = su.iter().map(|v| 1.0 / v).collect();
    scale_rows(&mut weight, &divisors);
    rotate_rows(&mut weight);
    Regularized { weight, su, sv, g: 1.0, out_scales }
}

fn rms_of(row: &[f32]) -> f32 {
    let sum: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum();
    (sum / row.len() as f64).sqrt() as f32
}

/// Root mean square of every column.
fn column_rms(weight: &Matrix) -> Vec<f32> {
    let mut sums = vec![0.0f64; weight.cols()];
    for i in 0..weight.rows() {
        for (sum, &v) in sums.iter_mut().zip(weight.row(i)) {
            *sum += f64::from(v).powi(2);
        }
    }
    sums.into_iter().map(|sum| (sum / weight.rows() as f64).sqrt() as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two channels, one ten times the other.
    fn uneven() -> Matrix {
        let mut weight = Matrix::zeros(128, 2);
        for i in 0..128 {
            weight.row_mut(i).copy_from_slice(&[10.0, 1.0]);
        }
        weight
    }

    #[test]
    fn scales_stay_off_where_the_large_channels_are_the_sensitive_ones() {
        let weight = uneven();
        assert!(OutScales::Auto.decide(&weight, None, false));
        assert!(OutScales::Auto.decide(&weight, Some(&[1.0, 100.0]), false));
        assert!(!OutScales::Auto.decide(&weight, Some(&[100.0, 1.0]), false));
        assert!(OutScales::Always.decide(&weight, Some(&[100.0, 1.0]), false));
        assert!(!OutScales::Auto.decide(&weight, None, true));
    }

    #[test]
    fn a_sensitivity_without_information_decides_nothing() {
        assert_eq!(out_scales_ratio(&[1.0, 2.0], &[0.0, 0.0]), None);
        assert_eq!(out_scales_ratio(&[1.0, 2.0], &[f64::NAN, 0.0]), None);
        let ratio = out_scales_ratio(&[1.0, 3.0], &[1.0, 1.0]).unwrap();
        assert!((ratio - 1.0).abs() < 1e-12);
    }
}
