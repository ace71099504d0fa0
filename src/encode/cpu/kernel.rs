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

use super::super::trace::{Pass, Search, Values};
use super::super::{TrellisSpec, half_math};
use super::lanes::Lanes;

/// Vectors that are worked on at a time, so that their latencies overlap.
const UNROLL: usize = 8;
/// [`Lanes::load_repeated`] reads whole vectors: room behind the last node.
const SLACK: usize = 16;

/// Buffers of one thread, kept between tiles. About 16 MiB at 1 bit per weight.
#[derive(Default)]
pub struct Scratch {
    cost: [Vec<f32>; 2],
    /// Half bits of the costs after every step that a traceback may read.
    history: Vec<u16>,
}

/// Encodes one tile, see [`crate::encode`] for the algorithm.
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
    let mut pass = Pass::free(len);
    loop {
        forward(lanes, spec, values, weights, pass, scratch);
        let search = Search { spec, values, weights, pass, history: &scratch.history };
        match pass.start {
            None => pass = Pass::closed(search.closing_node()),
            Some(start) => return search.trace(start, states),
        }
    }
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
