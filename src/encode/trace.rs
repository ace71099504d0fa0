//! The way back through a forward pass that kept the costs of its nodes and no branches: the path
//! visits one node per step, so the few candidates of that node are computed again.

use super::{TrellisSpec, final_node_rank, half_math};

/// Values of all states.
pub type Values = [f32; 65536];

const INFINITE: u16 = 0x7c00;

/// One pass through the ring.
#[derive(Clone, Copy)]
pub struct Pass {
    /// Ring position of the first step.
    pub roll: usize,
    /// The node that the first step must leave.
    pub start: Option<usize>,
    /// The first step whose costs are kept.
    pub keep_from: usize,
}

impl Pass {
    /// Pass 1: half way round the ring, unconstrained.
    pub fn free(len: usize) -> Self {
        Self { roll: len / 2, start: None, keep_from: len / 2 - 1 }
    }

    /// Pass 2: from ring position 0 and the node that closes the ring.
    pub fn closed(start: usize) -> Self {
        Self { roll: 0, start: Some(start), keep_from: 0 }
    }
}

/// A finished forward pass, ready to be traced back.
pub struct Search<'a> {
    pub spec: &'a TrellisSpec,
    pub values: &'a Values,
    /// Half-valued.
    pub weights: &'a [f32],
    pub pass: Pass,
    /// Half bits of the costs, a row per kept step, as long as the most nodes of any step.
    pub history: &'a [u16],
}

impl Search<'_> {
    /// Where the ring closes: the node that the best path of pass 1 has at ring position 0.
    pub fn closing_node(&self) -> usize {
        let len = self.spec.len();
        (len / 2..len).rev().fold(best_final_node(self.costs_after(len - 1)), |node, i| {
            self.state_into(i, node) >> self.spec.step(i + self.pass.roll)
        })
    }

    /// The states of pass 2, from its last step back to its first.
    pub fn trace(&self, start: usize, states: &mut [u16]) {
        let mut node = start;
        for i in (0..self.spec.len()).rev() {
            let state = self.state_into(i, node);
            states[i] = state as u16;
            node = state >> self.spec.step(i);
        }
    }

    /// Half bits of the costs after step `i`. Rows are as long as the widest step needs.
    fn costs_after(&self, i: usize) -> &[u16] {
        let stride = 1 << (16 - self.spec.step(0));
        let at = (i - self.pass.keep_from) * stride;
        &self.history[at..at + nodes_after(self.spec, i + self.pass.roll)]
    }

    /// The state of step `i` on the cheapest path into `node`: the first candidate whose exact cost
    /// is the one that the forward pass found.
    fn state_into(&self, i: usize, node: usize) -> usize {
        let r = (i + self.pass.roll) % self.spec.len();
        let (kin, kout) = (self.spec.step(r), self.spec.step(r + 1));
        let target = half_math::from_cost_bits(self.costs_after(i)[node]);
        // All candidates infinite: the first one stands.
        if target == f32::INFINITY {
            return node;
        }
        // The square before its rounding is off by at most 2^-10 of itself, and the cost is within
        // 2^-11 of the target: farther candidates need no exact look.
        let limit = target * (1.0 + 1.0 / 256.0) + 1e-6;
        let previous = (i > 0).then(|| self.costs_after(i - 1));
        let cost_in = |node_in: usize| match (previous, self.pass.start) {
            (Some(row), _) => half_math::from_cost_bits(row[node_in]),
            (None, Some(start)) if node_in != start => f32::INFINITY,
            (None, _) => 0.0,
        };
        (0..1usize << kout)
            .map(|q| q << (16 - kout) | node)
            .find(|&state| {
                let cost_in = cost_in(state >> kin);
                let rough = self.values[state] - self.weights[r];
                rough * rough * (1.0 - 1.0 / 256.0) + cost_in <= limit
                    && half_math::square_add(half_math::sub(self.values[state], self.weights[r]), cost_in)
                        == target
            })
            .expect("a cost of the forward pass comes from one of its candidates")
    }
}

/// The cheapest final node in the encoder's tie order; node 0 if every cost is infinite.
fn best_final_node(costs: &[u16]) -> usize {
    let best = costs.iter().copied().min().unwrap_or(INFINITE);
    if best == INFINITE {
        return 0;
    }
    (0..costs.len()).filter(|&e| costs[e] == best).min_by_key(|&e| final_node_rank(e)).unwrap_or(0)
}

/// Nodes behind the window of ring position `r`.
pub fn nodes_after(spec: &TrellisSpec, r: usize) -> usize {
    1 << (16 - spec.step(r + 1))
}

/// The codebook's values in f32, made at its first use: a strip may be a few tiles only.
pub fn values_of(spec: &TrellisSpec) -> &'static Values {
    use std::sync::OnceLock;
    static VALUES: [OnceLock<Box<Values>>; 3] = [const { OnceLock::new() }; 3];
    VALUES[spec.codebook() as usize].get_or_init(|| {
        let mut values: Box<Values> = vec![0.0; 65536].try_into().expect("65536 values");
        for (f32_value, half) in values.iter_mut().zip(spec.codebook().values()) {
            *f32_value = half.to_f32();
        }
        values
    })
}
