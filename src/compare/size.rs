//! What a model takes.

use serde::Serialize;

use crate::model::{LinearSpec, Model};
use crate::source::Checkpoint;

/// Tensors of a linear that hold its weight: one, or what an EXL3 linear is stored as.
const WEIGHT_LEAVES: [&str; 4] = ["weight", "trellis", "suh", "svh"];

/// The size of a model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Size {
    /// All tensors.
    pub bytes: u64,
    /// Stored bits of the decoder's linears over their weights without padding.
    pub bpw_decoder: f64,
    /// The same of the head; null where it is the embedding.
    pub bpw_head: Option<f64>,
    /// The same of all linears.
    pub bpw: f64,
}

/// The linears of all decoder layers.
pub(super) fn decoder_linears(model: &Model) -> impl Iterator<Item = LinearSpec> {
    let groups = (0..model.layer_count()).flat_map(|layer| model.layer_groups(layer));
    groups.flat_map(|group| group.linears)
}

impl Size {
    /// Of a checkpoint as it is stored.
    pub fn stored(model: &Model, checkpoint: &Checkpoint) -> Self {
        let bytes =
            checkpoint.keys().filter_map(|key| checkpoint.get(key)).map(|t| t.bytes().len() as u64).sum();
        Self::new(model, bytes, |linear| stored_bits(checkpoint, linear))
    }

    /// Of a checkpoint whose decoder linears would be stored in `bits`.
    pub(super) fn with_decoder(
        model: &Model,
        checkpoint: &Checkpoint,
        bits: impl Fn(&LinearSpec) -> u64,
    ) -> Self {
        let source = Self::stored(model, checkpoint);
        let bits_of_all =
            |bits: &dyn Fn(&LinearSpec) -> u64| decoder_linears(model).map(|l| bits(&l)).sum::<u64>();
        let replaced = bits_of_all(&|linear| stored_bits(checkpoint, linear));
        let bytes = source.bytes - replaced / 8 + bits_of_all(&bits).div_ceil(8);
        let head = model.head().key;
        Self::new(model, bytes, |linear| {
            if linear.key == head { stored_bits(checkpoint, linear) } else { bits(linear) }
        })
    }

    fn new(model: &Model, bytes: u64, bits: impl Fn(&LinearSpec) -> u64) -> Self {
        let weights = |linear: &LinearSpec| linear.k as u64 * linear.n as u64;
        let (decoder_bits, decoder_weights) = decoder_linears(model)
            .fold((0, 0), |(sum, count), linear| (sum + bits(&linear), count + weights(&linear)));
        let head = model.head();
        // A head that is the embedding has no bits of its own.
        let (head_bits, head_weights) = match bits(&head) {
            0 => (0, 0),
            bits => (bits, weights(&head)),
        };
        let rate = |bits: u64, weights: u64| bits as f64 / weights as f64;
        Self {
            bytes,
            bpw_decoder: rate(decoder_bits, decoder_weights),
            bpw_head: (head_weights > 0).then(|| rate(head_bits, head_weights)),
            bpw: rate(decoder_bits + head_bits, decoder_weights + head_weights),
        }
    }
}

fn stored_bits(checkpoint: &Checkpoint, linear: &LinearSpec) -> u64 {
    let stored = WEIGHT_LEAVES.iter().filter_map(|leaf| checkpoint.get(&format!("{}.{leaf}", linear.key)));
    stored.map(|tensor| tensor.bytes().len() as u64 * 8).sum()
}
