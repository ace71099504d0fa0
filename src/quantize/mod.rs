//! Quantizes the linears of a layer: `hessian -> regularize -> scale -> ldlq -> refit -> metrics`.
//!
//! Matrices are f32, `[k, n]`; what comes in is padded to multiples of 128 with zeros.

mod decode;
mod hessian;
mod ldlq;
mod metrics;
mod refit;
mod regularize;
mod scale;

use std::time::Instant;

use half::f16;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::encode::{EncodeError, TileEncoder, TrellisSpec};
use crate::format::{Bits, Codebook, QuantizedLinear, TILE_LEN, pack, padded};
use crate::linalg::{Matrix, Rng};

pub use decode::decode;
pub use hessian::{Calibrated, Calibration, DAMPING, Hessian, Uncalibrated};
pub use ldlq::{Encoded, ldlq};
pub use metrics::{Errors, output_error};
pub use refit::refit;
use regularize::largest;
pub use regularize::{OutScales, Regularized, out_scales_ratio, regularize};
pub use scale::search as search_scale;

/// Why a tensor cannot be quantized.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum QuantizeError {
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error("tensor \"{key}\": its Hessian has no Cholesky factor after {attempts} times more damping")]
    NotPositive { key: String, attempts: usize },
    #[error("tensor \"{key}\": its weights are too large: they overflow when they are rotated")]
    Overflow { key: String },
    #[error("tensor \"{key}\": {what} does not fit a half: {value:e}")]
    ScaleRange { key: String, what: &'static str, value: f32 },
}

/// What holds for all linears of a job.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub codebook: Codebook,
    pub out_scales: OutScales,
    pub seed: u64,
}

/// One linear to quantize.
pub struct LinearInput {
    /// Module name.
    pub key: String,
    /// Keys the random signs, so that they do not depend on how a container names the module.
    pub sign_key: String,
    /// `[k, n]`
    pub weight: Matrix,
    /// `[n]`
    pub bias: Option<Vec<f32>>,
    /// For gate and up projections: loss per unit of error energy of each output channel, `[n]`
    /// without padding.
    pub sensitivity: Option<Vec<f64>>,
}

impl LinearInput {
    fn pad(&mut self) {
        let (k, n) = (padded(self.weight.rows()), padded(self.weight.cols()));
        self.weight = std::mem::replace(&mut self.weight, Matrix::zeros(0, 0)).padded(k, n);
        if let Some(bias) = &mut self.bias {
            bias.resize(n, 0.0);
        }
    }
}

/// How the quantization of one linear went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    pub errors: Errors,
    /// Global scale.
    pub g_scale: f64,
    /// Whether output scales were applied.
    pub out_scales: bool,
    /// Whether the tensor was quantized without a Hessian.
    pub fallback: bool,
    /// Its share, by columns, of the wall time of its group.
    pub seconds: f64,
}

/// A quantized linear and how it went.
pub struct Quantized {
    pub linear: QuantizedLinear,
    pub metrics: Metrics,
}

/// Quantizes linears that share their input at `bits`. The strips of all of them go through the
/// encoder side by side: columns are independent.
///
/// # Errors
/// A rate that the codebook does not have, weights that overflow, or a scale or bias beyond half
/// precision.
pub fn group(
    mut linears: Vec<LinearInput>,
    calibration: &Calibration,
    bits: Bits,
    settings: &Settings,
    encoder: &dyn TileEncoder,
) -> Result<Vec<Quantized>, QuantizeError> {
    let started = Instant::now();
    let spec = TrellisSpec::new(settings.codebook, bits, TILE_LEN)?;
    let quantizer = Quantizer { spec, settings, encoder };
    let sizes: Vec<(usize, usize)> = linears.iter().map(|l| (l.weight.rows(), l.weight.cols())).collect();
    linears.iter_mut().for_each(LinearInput::pad);
    let mut prepared =
        linears.iter().map(|linear| quantizer.prepare(linear, calibration)).collect::<Result<Vec<_>, _>>()?;
    let feedback = calibration.calibrated().map(|c| &c.factor);
    let weights: Vec<&Matrix> = prepared.iter().map(|p| &p.weight).collect();
    let encoded = ldlq(&weights, feedback, &spec, encoder)?;
    let total_columns: usize = weights.iter().map(|w| w.cols()).sum();
    // From here on only the scales count; the weight of a head is gigabytes.
    prepared.iter_mut().for_each(|p| p.weight = Matrix::zeros(0, 0));
    let mut done = Vec::with_capacity(linears.len());
    for (((linear, size), prepared), encoded) in linears.into_iter().zip(sizes).zip(prepared).zip(encoded) {
        done.push(quantizer.finish(linear, size, prepared, encoded, calibration)?);
    }
    let seconds = started.elapsed().as_secs_f64();
    for quantized in &mut done {
        quantized.metrics.seconds = seconds * quantized.linear.n() as f64 / total_columns as f64;
    }
    Ok(done)
}

struct Quantizer<'a> {
    spec: TrellisSpec,
    settings: &'a Settings,
    encoder: &'a dyn TileEncoder,
}

impl Quantizer<'_> {
    /// The weight in the distribution that the codebook expects.
    fn prepare(&self, linear: &LinearInput, calibration: &Calibration) -> Result<Regularized, QuantizeError> {
        let key = format!("{}.svh", linear.sign_key);
        let sv = Rng::new(self.settings.seed, &key).signs(linear.weight.cols());
        let out_scales = self.settings.out_scales.decide(
            &linear.weight,
            linear.sensitivity.as_deref(),
            calibration.calibrated().is_none(),
        );
        let mut regularized = regularize(linear.weight.clone(), calibration.signs(), &sv, out_scales);
        // The encoder would refuse a NaN as well, but it knows no names.
        if !regularized.weight.data().iter().all(|v| v.is_finite()) {
            return Err(QuantizeError::Overflow { key: linear.key.clone() });
        }
        let scale = search_scale(&regularized.weight, &self.spec, self.encoder)?;
        regularized.apply_scale(scale);
        Ok(regularized)
    }

    fn finish(
        &self,
        linear: LinearInput,
        size: (usize, usize),
        mut prepared: Regularized,
        Encoded { values, states }: Encoded,
        calibration: &Calibration,
    ) -> Result<Quantized, QuantizeError> {
        if let Some(calibrated) = calibration.calibrated() {
            let q = decode::to_original_basis(values, &prepared.su, &prepared.sv);
            let scales = refit(&linear.weight, q, &calibrated.damped);
            prepared.rescale(&scales.rows, &scales.columns);
        }
        prepared.balance();
        let (bits, codebook) = (self.spec.bits(), self.spec.codebook());
        let trellis = states.chunks_exact(TILE_LEN).flat_map(|tile| pack(tile, bits)).collect();
        drop(states);
        let stored = QuantizedLinear {
            bits,
            codebook,
            trellis,
            suh: scales(&linear.key, "an input scale", &prepared.su)?,
            svh: scales(&linear.key, "an output scale", &prepared.sv)?,
            bias: linear.bias.map(|bias| halves(&linear.key, "a bias", &bias)).transpose()?,
            key: linear.key,
        };
        let errors = Errors::measure(&linear.weight, &decode(&stored), size, calibration.calibrated());
        let metrics = Metrics {
            errors,
            g_scale: prepared.g,
            out_scales: prepared.out_scales,
            fallback: calibration.calibrated().is_none(),
            seconds: 0.0,
        };
        Ok(Quantized { linear: stored, metrics })
    }
}

/// [`halves`] of scales. Single ones may vanish, as those of dead channels do, but if the largest
/// is subnormal, all of them have lost their precision.
fn scales(key: &str, what: &'static str, values: &[f32]) -> Result<Vec<f16>, QuantizeError> {
    let value = largest(values);
    if value > 0.0 && value < f16::MIN_POSITIVE.to_f32() {
        return Err(QuantizeError::ScaleRange { key: key.to_owned(), what, value });
    }
    halves(key, what, values)
}

fn halves(key: &str, what: &'static str, values: &[f32]) -> Result<Vec<f16>, QuantizeError> {
    values
        .iter()
        .map(|&value| match f16::from_f32(value) {
            half if half.is_finite() => Ok(half),
            _ => Err(QuantizeError::ScaleRange { key: key.to_owned(), what, value }),
        })
        .collect()
}
