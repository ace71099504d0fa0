//! The fast search, over any [`Lanes`].
//!
//! Two facts take most of the work out of the inner loop.
//!
//! Rounding is monotonic, so the smallest rounded cost is the rounded smallest cost: a candidate
//! costs a subtraction, a rounding of the difference, a multiply-add and a minimum, all in f32,
//! and the rounding of the cost happens once per node. Where the f32 minimum cannot tell how the
//! exact sum rounds (half way between two halves) the nodes are computed again exactly.
//!
//! The path visits one node per step, so the forward pass stores costs and no branches; the
//! traceback recomputes the few candidates of the node it stands on and takes the first cheapest.

use super::super::{TrellisSpec, final_node_rank, half_math};
use super::lanes::Lanes;

/// Values of all states.
pub type Values = [f32; 65536];

/// Vectors that are worked on at a time, so that their latencies overlap.
const UNROLL: usize = 8;
/// [`Lanes::load_repeated`] reads whole vectors: room behind the last node.
const SLACK: usize = 16;
const INFINITE: u16 = 0x7c00;

/// Buffers of one thread, kept between tiles. About 16 MiB at 1 bit per weight.
#[derive(Default)]
pub struct Scratch {
    cost: [Vec<f32>; 2],
    /// Half bits of the costs after every step that a traceback may read.
    history: Vec<u16>,
}

/// One search through the ring.
#[derive(Clone, Copy)]
struct Pass {
    /// Ring position of the first step.
    roll: usize,
    /// The node that the first step must leave.
    start: Option<usize>,
    /// The first step whose costs are kept.
    keep_from: usize,
}

/// Encodes one tile, see [`super::super::Scalar`] for the algorithm.
#[inline(always)]
pub fn encode_tile<L: Lanes>(
    lanes: L,
    spec: &TrellisSpec,
    values: &Values,
    tile: &[f32],
    states: &mut [u16],
    scratch: &mut Scratch,
) {
    let len = spec.len();
    let mut weights = [0.0f32; 256];
    for (half, &w) in weights.iter_mut().zip(tile) {
        *half = half_math::round(w);
    }
    let weights = &weights[..len];

    // Pass 1 starts half way round the ring and finds where it closes; pass 2 starts there.
    let mut pass = Pass { roll: len / 2, start: None, keep_from: len / 2 - 1 };
    loop {
        forward(lanes, spec, values, weights, pass, scratch);
        let search = Search { spec, values, weights, pass, history: &scratch.history };
        match pass.start {
            None => pass = Pass { roll: 0, start: Some(search.closing_node()), keep_from: 0 },
            Some(start) => return search.trace(start, states),
        }
    }
}

/// Nodes behind the window of ring position `r`.
fn nodes_after(spec: &TrellisSpec, r: usize) -> usize {
    1 << (16 - spec.step(r + 1))
}

#[inline(always)]
fn forward<L: Lanes>(
    lanes: L,
    spec: &TrellisSpec,
    values: &Values,
    weights: &[f32],
    pass: Pass,
    scratch: &mut Scratch,
) {
    let len = spec.len();
    let stride = 1usize << (16 - spec.step(0));
    for cost in &mut scratch.cost {
        cost.resize(stride + SLACK, 0.0);
    }
    scratch.history.resize(scratch.history.len().max((len - pass.keep_from) * stride), 0);
    let [previous, next] = &mut scratch.cost;
    let (mut previous, mut next) = (&mut previous[..], &mut next[..]);
    // A cost of zero before the first step makes it `d * d`; infinity shuts a start node out.
    match pass.start {
        None => previous.fill(0.0),
        Some(start) => {
            previous.fill(f32::INFINITY);
            previous[start] = 0.0;
        }
    }
    for i in 0..len {
        let r = (i + pass.roll) % len;
        let keep = i.max(pass.keep_from) - pass.keep_from;
        let row = &mut scratch.history[keep * stride..(keep + 1) * stride];
        let w = weights[r];
        macro_rules! dispatch {
            ($(($kin:literal, $kout:literal)),*) => {
                match (spec.step(r), spec.step(r + 1)) {
                    $(($kin, $kout) => step::<L, $kin, $kout>(lanes, values, w, previous, next, row),)*
                    (kin, kout) => unreachable!("no bit rate steps from {kin} to {kout} bits"),
                }
            };
        }
        dispatch!(
            (1, 1),
            (2, 2),
            (3, 3),
            (4, 4),
            (5, 5),
            (6, 6),
            (7, 7),
            (8, 8),
            (1, 2),
            (2, 1),
            (2, 3),
            (3, 2),
            (3, 4),
            (4, 3)
        );
        std::mem::swap(&mut previous, &mut next);
    }
}

/// One step: from the costs of the nodes before a window to those behind it. `row` takes their
/// half bits.
#[inline(always)]
fn step<L: Lanes, const KIN: u32, const KOUT: u32>(
    lanes: L,
    values: &Values,
    w: f32,
    previous: &[f32],
    next: &mut [f32],
    row: &mut [u16],
) {
    let block = UNROLL * L::N;
    let nodes_out = 1usize << (16 - KOUT);
    let next = &mut next[..nodes_out];
    let row = &mut row[..nodes_out];
    let weight = lanes.splat(w);
    for e in (0..nodes_out).step_by(block) {
        let mut best = [lanes.splat(f32::INFINITY); UNROLL];
        for q in 0..1usize << KOUT {
            let state = q << (16 - KOUT) | e;
            let values = &values[state..state + block];
            let previous = &previous[state >> KIN..(state >> KIN) + (block >> KIN) + L::N];
            for (v, best) in best.iter_mut().enumerate() {
                let d = lanes.round_to_half(lanes.sub(weight, lanes.load(values, v * L::N)));
                // `state` is a multiple of the block, so no carry is lost.
                let cost_in = lanes.load_repeated::<KIN>(previous, (v * L::N) >> KIN);
                *best = lanes.min(*best, lanes.square_add(d, cost_in));
            }
        }
        for (v, &best) in best.iter().enumerate() {
            let cost = lanes.round_to_half(best);
            lanes.store(cost, next, e + v * L::N);
            lanes.store_half(cost, row, e + v * L::N);
        }
        if lanes.undecided(&best) {
            for (v, best) in best.into_iter().enumerate() {
                if lanes.undecided(&[best]) {
                    let at = e + v * L::N;
                    let exact = exact_costs::<L, KIN, KOUT>(lanes, values, weight, previous, at);
                    let cost = lanes.round_to_half(exact);
                    lanes.store(cost, next, at);
                    lanes.store_half(cost, row, at);
                }
            }
        }
    }
}

/// The smallest costs of `N` nodes from `e`, rounded to odd, so that their rounding to half is that
/// of the exact sums.
#[inline(always)]
fn exact_costs<L: Lanes, const KIN: u32, const KOUT: u32>(
    lanes: L,
    values: &Values,
    weight: L::V,
    previous: &[f32],
    e: usize,
) -> L::V {
    // A loop and not a fold: a closure would be compiled without the caller's instruction set.
    let mut best = lanes.splat(f32::INFINITY);
    for q in 0..1usize << KOUT {
        let state = q << (16 - KOUT) | e;
        let d = lanes.round_to_half(lanes.sub(weight, lanes.load(values, state)));
        let cost_in = lanes.load_repeated::<KIN>(previous, state >> KIN);
        best = lanes.min(best, lanes.square_add_to_odd(d, cost_in));
    }
    best
}

/// A finished forward pass, ready to be traced back.
struct Search<'a> {
    spec: &'a TrellisSpec,
    values: &'a Values,
    weights: &'a [f32],
    pass: Pass,
    history: &'a [u16],
}

impl Search<'_> {
    /// Where the ring closes: the node that the best path of pass 1 has at ring position 0.
    fn closing_node(&self) -> usize {
        let len = self.spec.len();
        (len / 2..len).rev().fold(best_final_node(self.costs_after(len - 1)), |node, i| {
            self.state_into(i, node) >> self.spec.step(i + self.pass.roll)
        })
    }

    /// The states of pass 2, from its last step back to its first.
    fn trace(&self, start: usize, states: &mut [u16]) {
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
