//! The tap that calibration puts into a layer.

use candle_core::Tensor;

use crate::model::{ModelError, Tap, computing};

/// What one row of tokens shows.
#[derive(Default)]
pub(super) struct RowTap {
    /// Inputs of the groups of linears, in the order they run: `[t, k]`.
    pub inputs: Vec<Tensor>,
    pub slopes: Vec<Slopes>,
}

/// Squared slopes of `silu(g) * u` along the outputs of one linear, summed over the row.
pub(super) struct Slopes {
    linear: String,
    sums: Vec<f64>,
    tokens: usize,
}

impl Tap for RowTap {
    fn input(&mut self, _: &[String], x: &Tensor) -> Result<(), ModelError> {
        self.inputs.push(x.clone());
        Ok(())
    }

    fn gated(&mut self, gate: &str, up: &str, g: &Tensor, u: &Tensor) -> Result<(), ModelError> {
        let width = g.dims()[1];
        let read = |x: &Tensor| x.flatten_all().and_then(|x| x.to_vec1::<f32>()).map_err(computing(gate));
        let (g, u) = (read(g)?, read(u)?);
        let (mut along_gate, mut along_up) = (vec![0.0f64; width], vec![0.0f64; width]);
        for (g, u) in g.chunks_exact(width).zip(u.chunks_exact(width)) {
            for j in 0..width {
                let (dg, du) = slopes(f64::from(g[j]), f64::from(u[j]));
                along_gate[j] += dg * dg;
                along_up[j] += du * du;
            }
        }
        let tokens = g.len() / width;
        self.slopes.push(Slopes { linear: gate.to_owned(), sums: along_gate, tokens });
        self.slopes.push(Slopes { linear: up.to_owned(), sums: along_up, tokens });
        Ok(())
    }
}

/// Derivatives of `silu(g) u` with respect to `g` and to `u`; 0 where not finite.
fn slopes(g: f64, u: f64) -> (f64, f64) {
    let sigmoid = 1.0 / (1.0 + (-g).exp());
    let finite = |slope: f64| if slope.is_finite() { slope } else { 0.0 };
    (finite(sigmoid * (1.0 + g * (1.0 - sigmoid)) * u), finite(g * sigmoid))
}

/// Slopes over all rows.
#[derive(Default)]
pub(super) struct Sensitivity {
    linears: Vec<Slopes>,
}

impl Sensitivity {
    pub fn add(&mut self, row: Vec<Slopes>) {
        for slopes in row {
            match self.linears.iter_mut().find(|l| l.linear == slopes.linear) {
                Some(total) => {
                    total.sums.iter_mut().zip(&slopes.sums).for_each(|(total, s)| *total += s);
                    total.tokens += slopes.tokens;
                }
                None => self.linears.push(slopes),
            }
        }
    }

    /// Mean squared slope of every channel, by linear.
    pub fn means(self) -> Vec<(String, Vec<f64>)> {
        self.linears
            .into_iter()
            .map(|l| {
                let tokens = l.tokens.max(1) as f64;
                (l.linear, l.sums.into_iter().map(|s| s / tokens).collect())
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_the_derivatives() {
        let f = |g: f64, u: f64| g / (1.0 + (-g).exp()) * u;
        for (g, u) in [(0.3, -1.2), (-2.0, 0.7), (5.0, 3.0)] {
            let h = 1e-6;
            let (dg, du) = slopes(g, u);
            assert!((dg - (f(g + h, u) - f(g - h, u)) / (2.0 * h)).abs() < 1e-6);
            assert!((du - (f(g, u + h) - f(g, u - h)) / (2.0 * h)).abs() < 1e-6);
        }
        assert_eq!(slopes(f64::NEG_INFINITY, 1.0), (0.0, 0.0));
    }
}
