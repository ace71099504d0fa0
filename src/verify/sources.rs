//! The bundle against the checkpoint it was made from.

use std::collections::{BTreeMap, HashSet};

use half::f16;
use rayon::prelude::*;
use serde_json::Value;

use crate::bundle::{BundleError, Provenance};
use crate::format::{Bits, PAD, QuantizedLinear};
use crate::model::canonical;
use crate::source::{Checkpoint, SourceError, TensorRef};

use super::VerifyReport;
use super::decode::decode_block;
use super::files::Shards;
use super::manifest::is_head;

/// How far the recorded error of a tensor and the one found here may be apart, relative to the
/// recorded one, plus the part that rounding the scales to half adds.
const RECORDED_TOLERANCE: f64 = 0.05;
const SCALE_ROUNDING: f64 = 1e-3;
/// In a plain text model.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// The largest plausible relative Frobenius error at a bit rate. A Gaussian source cannot be coded
/// below `2^-bits`. The trellis comes within a seventh of that up to 4 bits and within a half above,
/// where the codebook's resolution shows; error feedback, which trades plain error for error in the
/// directions that matter, adds as much again. Three times the bound leaves room for that. The cap
/// is below 1, the error of all zeros, and far from the 1.4 of unrelated weights.
pub(super) fn error_limit(bits: Bits) -> f64 {
    (3.0 * (-bits.as_f64()).exp2()).min(0.95) + SCALE_ROUNDING
}

/// The source's tensors by the names of a plain text model: an exported bundle may have others.
pub(super) struct Source<'a> {
    checkpoint: &'a Checkpoint,
    names: BTreeMap<String, &'a str>,
}

impl<'a> Source<'a> {
    pub fn new(checkpoint: &'a Checkpoint) -> Self {
        let names = checkpoint.keys().map(|key| (canonical(key), key)).collect();
        Self { checkpoint, names }
    }

    /// The tensor that is called `name` here or in another container.
    fn get(&self, name: &str) -> Option<TensorRef<'a>> {
        self.names.get(&canonical(name)).and_then(|key| self.checkpoint.get(key))
    }
}

/// Compares one quantized linear with its source and returns the relative Frobenius error.
pub(super) fn check_linear(
    linear: &QuantizedLinear,
    source: &Source<'_>,
    provenance: Option<&Provenance>,
    report: &mut VerifyReport,
) -> Option<f64> {
    let key = &linear.key;
    check_bias(linear, source, report);
    let Some(weight) = source_weight(key, source) else {
        report.check("tensor_set", key, false, "a weight in the source", "none");
        return None;
    };
    let is_padded_from = |dim: usize, stored: usize| dim.div_ceil(PAD) * PAD == stored;
    let passed =
        matches!(weight.shape(), &[n, k] if is_padded_from(n, linear.n()) && is_padded_from(k, linear.k()));
    let expected = format!("{:?} padded to multiples of {PAD}", weight.shape());
    let found = format!("[{}, {}]", linear.n(), linear.k());
    if !report.check("geometry", key, passed, expected, found) {
        return None;
    }
    let error = relative_error(linear, weight);
    let error = report.try_to("accuracy", key, "readable weights in the source", error)?;
    let limit = error_limit(linear.bits);
    report.check("accuracy", key, error <= limit, format_args!("an error of at most {limit:.4}"), error);
    let recorded = provenance.and_then(|p| p.tensors.iter().find(|t| t.key == *key)).map(|t| t.rel_frobenius);
    if let Some(recorded) = recorded.filter(|r| r.is_finite()) {
        let passed = (error - recorded).abs() <= RECORDED_TOLERANCE * recorded + SCALE_ROUNDING;
        report.check("accuracy", key, passed, format_args!("an error of {recorded:.4}, as recorded"), error);
    }
    Some(error)
}

/// The weight a module was made from; a tied head was made from the embedding, whatever lies beside it.
fn source_weight<'a>(key: &str, source: &Source<'a>) -> Option<TensorRef<'a>> {
    match source.get(&format!("{key}.weight")) {
        found if is_head(key) && (found.is_none() || is_tied(source.checkpoint)) => source.get(EMBEDDING),
        found => found,
    }
}

/// `|decoded - source|_F / |source|_F` over the source's elements, summed in f64.
fn relative_error(linear: &QuantizedLinear, weight: TensorRef<'_>) -> Result<f64, SourceError> {
    let (n, k) = (weight.shape()[0], weight.shape()[1]);
    let values: Vec<f32> = linear.codebook.values().iter().map(|v| v.to_f32()).collect();
    let sums = (0..linear.n() / PAD).into_par_iter().map(|block| {
        let decoded = decode_block(linear, block, &values);
        let rows: Vec<u32> = (block * PAD..n.min((block + 1) * PAD)).map(|row| row as u32).collect();
        let rows = weight.rows_to_tensor(&rows)?;
        let rows = rows.to_vec2::<f32>().map_err(|source| SourceError::Candle {
            tensor: weight.key().to_owned(),
            source: Box::new(source),
        })?;
        let mut sums = (0.0, 0.0);
        for (row, decoded) in rows.iter().zip(decoded.chunks_exact(linear.k())) {
            for (&w, &q) in row[..k].iter().zip(decoded) {
                sums.0 += f64::from(q - w).powi(2);
                sums.1 += f64::from(w).powi(2);
            }
        }
        Ok(sums)
    });
    let sums: Vec<(f64, f64)> = sums.collect::<Result<_, SourceError>>()?;
    let (error, norm) = sums.iter().fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
    Ok(if error == 0.0 { 0.0 } else { (error / norm).sqrt() })
}

/// The bias of a quantized linear is the source's in half precision, zero in the padding.
fn check_bias(linear: &QuantizedLinear, source: &Source<'_>, report: &mut VerifyReport) {
    let name = format!("{}.bias", linear.key);
    let Some(bias) = source.get(&name) else {
        report.check("tensor_set", &name, linear.bias.is_none(), "no bias, as in the source", "a bias");
        return;
    };
    let Some(values) = report.try_to("pass_through", &name, "a readable bias in the source", bias.to_f32())
    else {
        return;
    };
    let mut expected: Vec<f16> = values.into_iter().map(f16::from_f32).collect();
    expected.resize(linear.n(), f16::ZERO);
    let passed = linear.bias.as_ref() == Some(&expected);
    report.check("pass_through", &name, passed, "the source's bias in half precision", "another, or none");
}

/// Tensors that are not quantized are the source's, byte for byte, and none of the source's is
/// left out.
pub(super) fn check_passthrough(source: &Source<'_>, shards: &Shards, report: &mut VerifyReport) {
    let names: HashSet<String> = shards.tensors().map(|stored| canonical(&stored.name)).collect();
    let is_quantized = |name: &str| {
        let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        names.contains(&canonical(&format!("{module}.trellis")))
    };
    for stored in shards.tensors().filter(|t| !is_quantized(&t.name)) {
        let Some(tensor) = source.get(&stored.name) else {
            report.check("tensor_set", &stored.name, false, "a tensor of the source", "not in the source");
            continue;
        };
        let described = |dtype, shape: &[usize]| format!("{dtype:?} {shape:?}");
        let expected = described(tensor.dtype(), tensor.shape());
        let found = described(stored.dtype, &stored.shape);
        if report.check("pass_through", &stored.name, expected == found, &expected, &found) {
            let difference = first_difference(tensor, &stored.name, shards);
            let Some(difference) = report.try_to("pass_through", &stored.name, "readable bytes", difference)
            else {
                continue;
            };
            let found = difference.map(|at| format!("byte {at} differs")).unwrap_or_default();
            report.check("pass_through", &stored.name, difference.is_none(), "the source's bytes", found);
        }
    }
    if !shards.all_readable {
        return;
    }
    for name in source.checkpoint.keys() {
        let is_stored = names.contains(&canonical(name)) || is_quantized(name);
        let is_stored = is_stored || may_be_left_out(name, source.checkpoint);
        report.check("tensor_set", name, is_stored, "in the bundle, as in the source", "missing");
    }
}

/// Rotary frequencies are computed, not loaded; a head beside a tied embedding is a copy of it.
fn may_be_left_out(name: &str, source: &Checkpoint) -> bool {
    let is_head = || name.strip_suffix(".weight").is_some_and(is_head);
    name.ends_with(".rotary_emb.inv_freq") || (is_tied(source) && is_head())
}

fn is_tied(source: &Checkpoint) -> bool {
    let tie =
        |config: Option<&Value>| config.and_then(|c| c.get("tie_word_embeddings")).and_then(Value::as_bool);
    let config = source.config();
    tie(Some(config)).or(tie(config.get("text_config"))) == Some(true)
}

/// Where the bytes of the stored tensor `name` leave the source's.
fn first_difference(tensor: TensorRef<'_>, name: &str, shards: &Shards) -> Result<Option<u64>, BundleError> {
    let Some((shard, stored)) = shards.get(name) else { return Ok(None) };
    let (mut at, mut difference) = (0, None);
    shard.stream(stored, |chunk| {
        let expected = tensor.bytes().get(at..at + chunk.len()).unwrap_or_default();
        if difference.is_none() && chunk != expected {
            let same = chunk.iter().zip(expected).take_while(|(a, b)| a == b).count();
            difference = Some((at + same) as u64);
        }
        at += chunk.len();
        Ok(())
    })?;
    Ok(difference)
}
