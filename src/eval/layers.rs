//! Where quality is lost: the hidden state behind each layer, against the source's.

use candle_core::Tensor;
use rayon::prelude::*;
use serde::Serialize;

use super::{EvalError, Subject};
use crate::model::{ModelError, NoTap, computing};

/// The hidden state behind one layer, over all positions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerProbe {
    /// Such as `model.layers.3`.
    pub layer: String,
    /// `|model - source| / |source|`, Frobenius norms: what all layers so far have lost.
    pub relative_error: f64,
    /// Mean over positions of the cosine between the two states.
    pub cosine: f64,
    /// Signal to quantization noise, `-20 log10(relative_error)`; infinite without an error.
    pub sqnr_db: f64,
    /// The relative error of this layer alone: both layers see the source's state.
    pub relative_error_alone: f64,
}

/// Runs both models side by side, layer by layer. Two layers' weights are in memory at a time.
pub fn layers(
    source: Subject<'_>,
    model: Subject<'_>,
    rows: &[Vec<u32>],
) -> Result<Vec<LayerProbe>, EvalError> {
    check_structures(source, model)?;
    source.check_rows(rows)?;
    model.check_rows(rows)?;
    let starts = source.embed(rows)?.into_iter().zip(model.embed(rows)?);
    let mut states: Vec<(Tensor, Tensor)> = starts.collect();
    let mut probes = Vec::new();
    for i in 0..source.model.layer_count() {
        let (p, q) = (source.model.layer(source.weights, i)?, model.model.layer(model.weights, i)?);
        let key = source.model.layer_key(i);
        let stepped: Vec<_> = states
            .par_iter()
            .map(|(x, y)| {
                let (p_x, q_x) = (p.forward(x, &mut NoTap)?, q.forward(x, &mut NoTap)?);
                let q_y = q.forward(y, &mut NoTap)?;
                let (alone, so_far) = (Sums::of(&p_x, &q_x, &key)?, Sums::of(&p_x, &q_y, &key)?);
                Ok(((p_x, q_y), alone, so_far))
            })
            .collect::<Result<_, ModelError>>()?;
        let (mut alone, mut so_far) = (Sums::default(), Sums::default());
        states = Vec::with_capacity(stepped.len());
        for (state, row_alone, row_so_far) in stepped {
            alone.add(&row_alone);
            so_far.add(&row_so_far);
            states.push(state);
        }
        probes.push(LayerProbe {
            layer: key,
            relative_error: so_far.relative_error(),
            cosine: so_far.cosines / so_far.positions as f64,
            sqnr_db: -20.0 * so_far.relative_error().log10(),
            relative_error_alone: alone.relative_error(),
        });
    }
    Ok(probes)
}

fn check_structures(source: Subject<'_>, model: Subject<'_>) -> Result<(), EvalError> {
    let (p, q) = (source.model, model.model);
    for (what, source_size, model_size) in [
        ("numbers of layers", p.layer_count(), q.layer_count()),
        ("hidden sizes", p.hidden_size(), q.hidden_size()),
    ] {
        if source_size != model_size {
            return Err(EvalError::Structures { what, source_size, model_size });
        }
    }
    Ok(())
}

/// Sums over positions.
#[derive(Default)]
struct Sums {
    signal: f64,
    error: f64,
    cosines: f64,
    positions: usize,
}

impl Sums {
    /// Of two states `[t, hidden]`.
    fn of(source: &Tensor, model: &Tensor, layer: &str) -> Result<Self, ModelError> {
        let read = |x: &Tensor| x.to_vec2::<f32>().map_err(computing(layer));
        let mut sums = Self::default();
        for (p, q) in read(source)?.iter().zip(read(model)?) {
            let (mut pp, mut qq, mut pq, mut error) = (0.0f64, 0.0f64, 0.0f64, 0.0f64);
            for (&p, &q) in p.iter().zip(&q) {
                let (p, q) = (f64::from(p), f64::from(q));
                pp += p * p;
                qq += q * q;
                pq += p * q;
                error += (p - q) * (p - q);
            }
            sums.add(&Self { signal: pp, error, cosines: cosine(pp, qq, pq), positions: 1 });
        }
        Ok(sums)
    }

    fn add(&mut self, other: &Self) {
        self.signal += other.signal;
        self.error += other.error;
        self.cosines += other.cosines;
        self.positions += other.positions;
    }

    fn relative_error(&self) -> f64 {
        (self.error / self.signal).sqrt()
    }
}

/// 1 for two zero vectors, which are equal.
fn cosine(pp: f64, qq: f64, pq: f64) -> f64 {
    if pp == 0.0 && qq == 0.0 { 1.0 } else { pq / (pp * qq).sqrt() }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn sums_of_known_states() {
        let state = |values: [f32; 4]| Tensor::from_slice(&values, (2, 2), &Device::Cpu).unwrap();
        let source = state([3.0, 4.0, 1.0, 0.0]);
        let sums = Sums::of(&source, &state([4.0, 3.0, 0.0, 0.0]), "x").unwrap();
        assert!((sums.relative_error() - (3.0f64 / 26.0).sqrt()).abs() < 1e-12);
        assert!(sums.cosines.is_nan(), "a zero vector has no direction");
        let same = Sums::of(&source, &source, "x").unwrap();
        assert_eq!((same.relative_error(), same.cosines / 2.0), (0.0, 1.0));
        let turned = Sums::of(&source, &state([-4.0, 3.0, 1.0, 0.0]), "x").unwrap();
        assert_eq!((turned.cosines, turned.positions), (1.0, 2));
    }
}
