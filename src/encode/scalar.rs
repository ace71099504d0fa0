//! The oracle: the tail-biting Viterbi search, one candidate at a time.

use rayon::prelude::*;

use super::{EncodeError, TileEncoder, TrellisSpec, check_tiles, final_node_rank, half_math};

/// The scalar encoder: the algorithm of the [module documentation](super) as it is told. It keeps
/// the node of every step, and nothing is reordered for speed.
pub struct Scalar;

impl TileEncoder for Scalar {
    fn name(&self) -> &str {
        "scalar"
    }

    fn encode(&self, spec: &TrellisSpec, tiles: &[f32], states: &mut [u16]) -> Result<(), EncodeError> {
        check_tiles(spec, tiles, states)?;
        let values: Vec<f32> = spec.codebook().values().into_iter().map(f32::from).collect();
        tiles
            .par_chunks_exact(spec.len())
            .zip(states.par_chunks_exact_mut(spec.len()))
            .for_each(|(tile, states)| encode_tile(spec, &values, tile, states));
        Ok(())
    }
}

fn encode_tile(spec: &TrellisSpec, values: &[f32], tile: &[f32], states: &mut [u16]) {
    let len = spec.len();
    let weights: Vec<f32> = tile.iter().map(|&w| half_math::round(w)).collect();

    // Pass 1 starts half way round the ring, unconstrained, and finds where the ring closes.
    let free = forward(spec, values, &weights, len / 2, None);
    let mut node = free.best_final_node();
    for i in (len / 2..len).rev() {
        node = free.node_in[i][node] as usize;
    }

    // Pass 2 starts at position 0 from that node and must come back to it.
    let closed = forward(spec, values, &weights, 0, Some(node));
    for i in (0..len).rev() {
        let node_in = closed.node_in[i][node] as usize;
        states[i] = (node_in << spec.step(i) | node) as u16;
        node = node_in;
    }
}

struct Search {
    /// Per step and `node_out`: the `node_in` of the cheapest candidate.
    node_in: Vec<Vec<u16>>,
    /// Costs after the last step.
    cost: Vec<f32>,
}

impl Search {
    /// The cheapest final node in the encoder's tie order; node 0 if every cost is infinite.
    fn best_final_node(&self) -> usize {
        let best = self.cost.iter().copied().fold(f32::INFINITY, f32::min);
        if best == f32::INFINITY {
            return 0;
        }
        (0..self.cost.len())
            .filter(|&e| self.cost[e] == best)
            .min_by_key(|&e| final_node_rank(e))
            .unwrap_or(0)
    }
}

fn forward(spec: &TrellisSpec, values: &[f32], weights: &[f32], roll: usize, start: Option<usize>) -> Search {
    let mut cost: Vec<f32> = Vec::new();
    let mut node_in = Vec::with_capacity(spec.len());
    for i in 0..spec.len() {
        let r = (i + roll) % spec.len();
        let (kin, kout) = (spec.step(r), spec.step(r + 1));
        let nodes = 1usize << (16 - kout);
        let mut next = vec![f32::INFINITY; nodes];
        let mut from = vec![0u16; nodes];
        for e in 0..nodes {
            for q in 0..1usize << kout {
                let state = q << (16 - kout) | e;
                let node = state >> kin;
                let d = half_math::sub(values[state], weights[r]);
                let candidate = match (i, start) {
                    (0, Some(start)) if node != start => f32::INFINITY,
                    (0, _) => half_math::round(d * d),
                    _ => half_math::square_add(d, cost[node]),
                };
                if q == 0 || candidate < next[e] {
                    next[e] = candidate;
                    from[e] = node as u16;
                }
            }
        }
        cost = next;
        node_in.push(from);
    }
    Search { node_in, cost }
}
