//! The gated delta rule (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024), in chunks.
//!
//! Per head, with the state `S: [dk, dv]`, the log decay `g_t <= 0` and the step size `b_t`:
//!
//! ```text
//! S_t = exp(g_t) S_(t-1) + b_t k_t (v_t - exp(g_t) k_t^T S_(t-1))^T
//! o_t = S_t^T q_t
//! ```
//!
//! In a chunk that starts from the state `S`, with `G_i` the sum of its decays up to `i` and
//! `D_ij = exp(G_i - G_j)`, the corrections `U` that are written solve a triangular system, and
//! everything else is a product of matrices:
//!
//! ```text
//! (I + strictly lower(diag(b) K K^T o D)) U = diag(b) (V - diag(exp G) K S)
//! O = diag(exp G) Q S + (lower(Q K^T) o D) U
//! S' = exp(G_last) S + (diag(exp(G_last - G)) K)^T U
//! ```

use candle_core::{Device, Result, Tensor};

/// Tokens of a chunk.
const CHUNK: usize = 64;
/// A log decay whose factor is 0 in f32. Stronger ones are taken as this one, so that sums keep their
/// small terms.
const FORGET_ALL: f32 = -1e3;

/// `q`, `k`: `[heads, t, dk]`, `v`: `[heads, t, dv]`, `log_decay` (at most 0), `step`:
/// `[heads, t]`. Starts from a zero state; returns `[heads, t, dv]`.
pub(super) fn gated_delta_rule(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    log_decay: &Tensor,
    step: &Tensor,
) -> Result<Tensor> {
    let (heads, t, key_dim) = q.dims3()?;
    let mut state = Tensor::zeros((heads, key_dim, v.dim(2)?), q.dtype(), &Device::Cpu)?;
    let mut outputs = Vec::with_capacity(t.div_ceil(CHUNK));
    for start in (0..t).step_by(CHUNK) {
        let len = CHUNK.min(t - start);
        let [q, k, v, log_decay, step] =
            [q, k, v, log_decay, step].map(|x| x.narrow(1, start, len)?.contiguous());
        let (k, step) = (k?, step?);
        let decays = Decays::new(&log_decay?)?;
        let k_t = k.t()?.contiguous()?;

        let seen = k.broadcast_mul(&decays.from_start)?.matmul(&state)?;
        let system = (k.matmul(&k_t)? * &decays.between)?.broadcast_mul(&step.unsqueeze(2)?)?;
        let corrections = solve_unit_lower(&system, &(v? - seen)?.broadcast_mul(&step.unsqueeze(2)?)?)?;

        let q = q?;
        let from_state = q.broadcast_mul(&decays.from_start)?.matmul(&state)?;
        let inside = (q.matmul(&k_t)? * &decays.between)?.matmul(&corrections)?;
        outputs.push((from_state + inside)?);
        let written = k.broadcast_mul(&decays.to_end)?.t()?.contiguous()?.matmul(&corrections)?;
        state = (state.broadcast_mul(&decays.whole)? + written)?;
    }
    Tensor::cat(&outputs, 1)
}

/// Products of decays inside a chunk, per head.
struct Decays {
    /// From the chunk's start to behind each token, `[heads, len, 1]`.
    from_start: Tensor,
    /// From behind each token to the chunk's end, `[heads, len, 1]`.
    to_end: Tensor,
    /// From behind token `j` to behind token `i`, 0 above the diagonal, `[heads, len, len]`.
    between: Tensor,
    /// Over the whole chunk, `[heads, 1, 1]`.
    whole: Tensor,
}

impl Decays {
    /// The sums are in f64: behind a strong decay, the difference of two f32 sums would have lost
    /// the weak ones.
    fn new(log_decay: &Tensor) -> Result<Self> {
        let (heads, len) = log_decay.dims2()?;
        let (mut from_start, mut to_end) = (Vec::new(), Vec::new());
        let (mut between, mut whole) = (Vec::new(), Vec::new());
        for row in log_decay.to_vec2::<f32>()? {
            let mut total = 0.0f64;
            let sums: Vec<f64> = row
                .iter()
                .map(|&g| {
                    total += f64::from(g.max(FORGET_ALL));
                    total
                })
                .collect();
            from_start.extend(sums.iter().map(|sum| sum.exp() as f32));
            to_end.extend(sums.iter().map(|sum| (total - sum).exp() as f32));
            whole.push(total.exp() as f32);
            for (i, to) in sums.iter().enumerate() {
                between.extend(sums[..=i].iter().map(|from| ((to - from) as f32).exp()));
                between.resize(between.len() + len - 1 - i, 0.0);
            }
        }
        let tensor = |data, shape: [usize; 3]| Tensor::from_vec(data, &shape, &Device::Cpu);
        Ok(Self {
            from_start: tensor(from_start, [heads, len, 1])?,
            to_end: tensor(to_end, [heads, len, 1])?,
            between: tensor(between, [heads, len, len])?,
            whole: tensor(whole, [heads, 1, 1])?,
        })
    }
}

/// Solves `(I + strictly lower(a)) x = b` per head by forward substitution. `a: [heads, len, len]`,
/// of which the rest is not looked at; `b`: `[heads, len, n]`.
fn solve_unit_lower(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (_, len, n) = b.dims3()?;
    let a = a.flatten_all()?.to_vec1::<f32>()?;
    let mut x = b.flatten_all()?.to_vec1::<f32>()?;
    for (a, x) in a.chunks_exact(len * len).zip(x.chunks_exact_mut(len * n)) {
        for i in 1..len {
            let (done, rest) = x.split_at_mut(i * n);
            let target = &mut rest[..n];
            for (&factor, row) in a[i * len..i * len + i].iter().zip(done.chunks_exact(n)) {
                target.iter_mut().zip(row).for_each(|(target, &value)| *target -= factor * value);
            }
        }
    }
    Tensor::from_vec(x, b.shape(), &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::Rng;

    const HEADS: usize = 2;
    const KEY_DIM: usize = 24;
    const VALUE_DIM: usize = 40;

    /// The rule token by token, in f64: `[heads, t, dv]`.
    fn recurrent(q: &[f32], k: &[f32], v: &[f32], log_decay: &[f32], step: &[f32], t: usize) -> Vec<f64> {
        let mut outputs = Vec::new();
        for head in 0..HEADS {
            let mut state = vec![[0.0f64; VALUE_DIM]; KEY_DIM];
            for i in head * t..(head + 1) * t {
                let of = |x: &[f32], dim: usize| -> Vec<f64> {
                    x[i * dim..(i + 1) * dim].iter().map(|&x| f64::from(x)).collect()
                };
                let (q, k, v) = (of(q, KEY_DIM), of(k, KEY_DIM), of(v, VALUE_DIM));
                let decay = f64::from(log_decay[i]).exp();
                state.iter_mut().flatten().for_each(|s| *s *= decay);
                for j in 0..VALUE_DIM {
                    let seen: f64 = (0..KEY_DIM).map(|d| k[d] * state[d][j]).sum();
                    let correction = f64::from(step[i]) * (v[j] - seen);
                    (0..KEY_DIM).for_each(|d| state[d][j] += k[d] * correction);
                    outputs.push((0..KEY_DIM).map(|d| q[d] * state[d][j]).sum());
                }
            }
        }
        outputs
    }

    fn noise(key: &str, len: usize) -> Vec<f32> {
        let mut rng = Rng::new(5, key);
        (0..len).map(|_| (rng.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    fn unit_rows(mut data: Vec<f32>) -> Vec<f32> {
        for row in data.chunks_exact_mut(KEY_DIM) {
            let length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            row.iter_mut().for_each(|x| *x /= length);
        }
        data
    }

    #[test]
    fn chunks_give_what_the_recurrence_gives() {
        // Decays: none, weak, strong, some of everything, and one that forgets all.
        let decays: [fn(f32) -> f32; 5] = [
            |_| 0.0,
            |x| -1e-4 * x.abs(),
            |x| -30.0 * x.abs(),
            |x| -(12.0 * x).exp(),
            |x| if x > 0.9 { f32::NEG_INFINITY } else { -0.1 * x.abs() },
        ];
        for t in [1, 2, 63, 64, 65, 200] {
            for (at, decay) in decays.iter().enumerate() {
                let q = unit_rows(noise("q", HEADS * t * KEY_DIM));
                let k = unit_rows(noise("k", HEADS * t * KEY_DIM));
                let v = noise("v", HEADS * t * VALUE_DIM);
                let g: Vec<f32> = noise("g", HEADS * t).into_iter().map(decay).collect();
                let step: Vec<f32> = noise("step", HEADS * t).iter().map(|x| 0.5 + 0.5 * x).collect();
                let expected = recurrent(&q, &k, &v, &g, &step, t);
                let tensor = |data: &[f32], dim: usize| {
                    Tensor::from_slice(data, (HEADS, t, dim), &Device::Cpu).unwrap()
                };
                let flat = |data: &[f32]| tensor(data, 1).squeeze(2).unwrap();
                let (q, k, v) = (tensor(&q, KEY_DIM), tensor(&k, KEY_DIM), tensor(&v, VALUE_DIM));
                let found = gated_delta_rule(&q, &k, &v, &flat(&g), &flat(&step)).unwrap();
                let found: Vec<f32> = found.flatten_all().unwrap().to_vec1().unwrap();
                assert_eq!(found.len(), expected.len());
                let error = found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs());
                let error = error.fold(0.0, f64::max);
                assert!(error < 2e-5, "{t} tokens, decay {at}: off by {error}");
            }
        }
    }
}
