//! The multi-token prediction head: from the hidden state of a token and the embedding of the next
//! one to a hidden state for the token after that.

use candle_core::Tensor;

use super::super::nn::{Linear, RmsNorm};
use super::super::{Group, ModelError, Tap, WeightSource, computing};
use super::{Mixing, Qwen3_5, Qwen3_5Layer, linear};

const NORMS: [&str; 3] = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"];

impl Qwen3_5 {
    fn mtp_input(&self, key: &str) -> Group {
        let hidden = self.dims.hidden_size;
        Group { linears: vec![linear(key, "fc", 2 * hidden, hidden, false)] }
    }

    /// The linears of the head `key` by shared input, in the order of execution.
    pub fn mtp_groups(&self, key: &str, layers: usize) -> Vec<Group> {
        let layers = layer_keys(key, layers).flat_map(|layer| self.groups_of(Mixing::Attention, &layer));
        [self.mtp_input(key)].into_iter().chain(layers).collect()
    }

    /// The other tensors of the head, with their shapes.
    pub fn mtp_others(&self, key: &str, layers: usize) -> Vec<(String, Vec<usize>)> {
        let norms = NORMS.map(|norm| (norm_key(key, norm), vec![self.dims.hidden_size]));
        let layers = layer_keys(key, layers).flat_map(|layer| self.others_of(Mixing::Attention, &layer));
        norms.into_iter().chain(layers).collect()
    }

    /// Loads the head. It sees the hidden state behind the model's `final_norm`.
    pub fn mtp(
        &self,
        w: &dyn WeightSource,
        key: &str,
        layers: usize,
        final_norm: RmsNorm,
    ) -> Result<Mtp, ModelError> {
        let input = self.mtp_input(key);
        let [embedding_norm, hidden_norm, norm] = NORMS.map(|norm| self.norm(w, &norm_key(key, norm)));
        let layers = layer_keys(key, layers).map(|layer| self.layer_of(w, Mixing::Attention, &layer));
        Ok(Mtp {
            final_norm,
            embedding_norm: embedding_norm?,
            hidden_norm: hidden_norm?,
            fc: Linear::load(w, &input.linears[0])?,
            layers: layers.collect::<Result<_, _>>()?,
            norm: norm?,
            modules: input.modules(),
        })
    }
}

fn layer_keys(key: &str, layers: usize) -> impl Iterator<Item = String> {
    (0..layers).map(move |layer| format!("{key}.layers.{layer}"))
}

fn norm_key(key: &str, norm: &str) -> String {
    format!("{key}.{norm}.weight")
}

/// A multi-token prediction head with its weights, f32.
#[derive(Debug)]
pub struct Mtp {
    final_norm: RmsNorm,
    embedding_norm: RmsNorm,
    hidden_norm: RmsNorm,
    fc: Linear,
    layers: Vec<Qwen3_5Layer>,
    norm: RmsNorm,
    /// Module name of `fc`, as taps get it.
    modules: Vec<String>,
}

impl Mtp {
    /// `x: [t, hidden]` behind the last decoder layer, `next: [t, hidden]` the embedding of the
    /// token after each; to what the model's head sees.
    pub fn forward(&self, x: &Tensor, next: &Tensor, tap: &mut dyn Tap) -> Result<Tensor, ModelError> {
        let at = computing(&self.modules[0]);
        let hidden = self.final_norm.forward(x).and_then(|x| self.hidden_norm.forward(&x)).map_err(&at)?;
        let next = self.embedding_norm.forward(next).map_err(&at)?;
        let input = Tensor::cat(&[next, hidden], 1).map_err(&at)?;
        tap.input(&self.modules, &input)?;
        let mut x = self.fc.forward(&input).map_err(&at)?;
        for layer in &self.layers {
            x = layer.forward(&x, tap)?;
        }
        self.norm.forward(&x).map_err(&at)
    }
}
