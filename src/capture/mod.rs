//! What calibration sees: the hidden states of all rows between layers, and the inputs of the
//! linears inside a layer.

mod states;
mod tap;

use std::io;

use candle_core::Tensor;
use thiserror::Error;

use crate::bundle::BundleError;
use crate::linalg::Matrix;
use crate::model::{FinalNorm, Layer, ModelError, Mtp, Tap, computing};
use crate::quantize::Hessian;

pub use states::{Excluded, States};
use tap::{RowTap, Sensitivity};

/// Why a layer cannot be observed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CaptureError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(
        "{excluded} of {rows} calibration rows turned non-finite by {unit}, more than a tenth; the first is row {first}"
    )]
    TooManyRows { unit: String, excluded: usize, rows: usize, first: usize },
    #[error("reading activations failed")]
    Activations { source: Box<candle_core::Error> },
    #[error("{path}: {what}")]
    Cache { path: String, what: String },
    #[error("{path}: cannot be read")]
    Read { path: String, source: io::Error },
}

impl From<candle_core::Error> for CaptureError {
    fn from(source: candle_core::Error) -> Self {
        Self::Activations { source: Box::new(source) }
    }
}

/// Rows that run through a layer at the same time. Their activations are in memory together, and
/// the number is fixed so that sums do not depend on the threads.
const BATCH_ROWS: usize = 8;

/// What a layer's linears saw.
pub struct LayerCapture {
    /// One per group of linears with a common input, in the order they run.
    pub hessians: Vec<Hessian>,
    /// Mean squared slope of the gated product along the outputs of a linear, by its name.
    slopes: Vec<(String, Vec<f64>)>,
    /// Largest magnitude of any input.
    pub peak: f32,
}

impl LayerCapture {
    /// Loss per unit of error energy of each output channel of a gate or up projection: the mean
    /// squared slope of `act(g) * u` along it, times the energy of the channel's row of
    /// `down: [intermediate, hidden]`. `None` for any other linear.
    pub fn sensitivity(&self, key: &str, down: &Matrix) -> Option<Vec<f64>> {
        let (_, slopes) = self.slopes.iter().find(|(name, _)| name == key)?;
        let energy = |i: usize| down.row(i).iter().map(|&w| f64::from(w).powi(2)).sum::<f64>();
        Some(slopes.iter().enumerate().map(|(i, slope)| slope * energy(i)).collect())
    }

    /// Whether `key` is the gate or up projection of a gated MLP.
    pub fn is_gated(&self, key: &str) -> bool {
        self.slopes.iter().any(|(name, _)| name == key)
    }
}

/// Runs all rows through `layer` with its source weights, and collects what its linears see.
/// `widths` are the input widths of its groups.
pub fn observe(layer: &Layer, widths: &[usize], states: &States) -> Result<LayerCapture, CaptureError> {
    observe_runs(widths, states, |_, x, tap| layer.forward(x, tap).map(drop))
}

/// As [`observe`], of a multi-token prediction head. `embed` embeds the tokens of a row, of which
/// all but the first are some token's next one; a row of one token shows nothing.
pub fn observe_mtp(
    mtp: &Mtp,
    widths: &[usize],
    states: &States,
    tokens: &[Vec<u32>],
    embed: impl Fn(&[u32]) -> Result<Tensor, ModelError> + Sync,
) -> Result<LayerCapture, CaptureError> {
    observe_runs(widths, states, |row, x, tap| {
        let next = &tokens[row][1..];
        if next.is_empty() {
            return Ok(());
        }
        let x = x.narrow(0, 0, next.len()).map_err(computing("a row without its last token"))?;
        mtp.forward(&x, &embed(next)?, tap).map(drop)
    })
}

/// Collects what the linears see while `run` takes each row, by its number and state.
fn observe_runs(
    widths: &[usize],
    states: &States,
    run: impl Fn(usize, &Tensor, &mut dyn Tap) -> Result<(), ModelError> + Sync,
) -> Result<LayerCapture, CaptureError> {
    let mut hessians: Vec<Hessian> = widths.iter().map(|&k| Hessian::new(k)).collect();
    let mut sensitivity = Sensitivity::default();
    let mut peak = 0.0f32;
    states.for_each_batch(BATCH_ROWS, |rows| {
        let taps = rows.try_map(|row, x| {
            let mut tap = RowTap::default();
            run(row, x, &mut tap).map(|()| tap)
        })?;
        for tap in taps {
            for (hessian, input) in hessians.iter_mut().zip(&tap.inputs) {
                peak = peak.max(add_input(hessian, input)?);
            }
            sensitivity.add(tap.slopes);
        }
        Ok(())
    })?;
    Ok(LayerCapture { hessians, slopes: sensitivity.means(), peak })
}

/// Collects what the head sees: the final normed state.
pub fn observe_head(norm: &FinalNorm, width: usize, states: &States) -> Result<LayerCapture, CaptureError> {
    let mut hessian = Hessian::new(width);
    let mut peak = 0.0f32;
    states.for_each_batch(BATCH_ROWS, |rows| {
        for normed in rows.try_map(|_, x| norm.forward(x))? {
            peak = peak.max(add_input(&mut hessian, &normed)?);
        }
        Ok(())
    })?;
    Ok(LayerCapture { hessians: vec![hessian], slopes: Vec::new(), peak })
}

/// Adds an input `[rows, k]`; its largest magnitude.
fn add_input(hessian: &mut Hessian, input: &Tensor) -> Result<f32, CaptureError> {
    let data = input.flatten_all()?.to_vec1::<f32>()?;
    hessian.add(&data);
    Ok(data.iter().fold(0.0f32, |peak, v| peak.max(v.abs())))
}
