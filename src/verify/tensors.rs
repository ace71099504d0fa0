//! The tensors: the set `tensor_storage` lists, and the quantized linears one by one.

use std::collections::{BTreeSet, HashSet};

use half::f16;
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::bundle::{BundleError, assemble_linear, multiplier_keys, read_raw, torch_name};
use crate::format::{Codebook, QuantizedLinear, TILE_LEN, is_tail_biting, pack, unpack};

use super::VerifyReport;
use super::files::Shards;
use super::manifest::{Manifest, TensorStorage};

/// Which tensors may be stored without being listed in `tensor_storage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unlisted {
    None,
    /// Tensors of modules that have modules of their own: the reference lists leaves only.
    OfInnerModules,
}

/// Every listed tensor is stored as listed, and no other is stored.
pub(super) fn check_storage(
    manifest: &Manifest,
    unlisted: Unlisted,
    shards: &Shards,
    report: &mut VerifyReport,
) {
    let mut listed = HashSet::new();
    for (module, storage) in &manifest.modules {
        for (name, value) in &storage.stored_tensors {
            let is_new = listed.insert(name.as_str());
            let is_own =
                name == module || name.strip_prefix(module.as_str()).is_some_and(|n| n.starts_with('.'));
            report.check("storage", name, is_new && is_own, "listed once, under its module", "not so");
            check_stored(name, value, shards, report);
        }
    }
    let is_inner = |tensor: &str| {
        let module = tensor.rsplit_once('.').map_or(tensor, |(module, _)| module);
        // To the reference, a convolution is a part of the module around it.
        let module = module.strip_suffix(".conv1d").unwrap_or(module);
        manifest.modules.iter().any(|(key, _)| key.strip_prefix(module).is_some_and(|k| k.starts_with('.')))
    };
    for stored in shards.tensors() {
        let is_allowed = unlisted == Unlisted::OfInnerModules && is_inner(&stored.name);
        let passed = is_allowed || !manifest.is_known || listed.contains(stored.name.as_str());
        report.check("tensor_set", &stored.name, passed, "listed in tensor_storage", "not listed");
    }
}

fn check_stored(name: &str, value: &Value, shards: &Shards, report: &mut VerifyReport) {
    let parsed = serde_json::from_value::<TensorStorage>(value.clone());
    let Some(listed) = report.try_to("storage", name, "shape, n_bytes and dtype", parsed) else { return };
    let Some((_, stored)) = shards.get(name) else {
        if shards.all_readable {
            report.check("tensor_set", name, false, "a stored tensor", "none");
        }
        return;
    };
    report.equal("storage", name, &listed.shape, &stored.shape);
    report.equal("storage", name, listed.n_bytes, stored.bytes());
    report.equal("storage", name, &listed.dtype, &torch_name(stored.dtype));
}

/// Modules that are listed as quantized or have a trellis.
pub(super) fn quantized_keys(manifest: &Manifest, shards: &Shards) -> BTreeSet<String> {
    let listed = manifest.modules.iter().filter(|(_, m)| m.is_quantized()).map(|(key, _)| key.as_str());
    let stored = shards.tensors().filter_map(|t| t.name.strip_suffix(".trellis"));
    listed.chain(stored).map(str::to_owned).collect()
}

/// One quantized linear: its tensors fit together and with the manifest, its scales are finite, its
/// tiles are rings.
pub(super) fn check_linear(
    key: &str,
    manifest: &Manifest,
    shards: &Shards,
    report: &mut VerifyReport,
) -> Option<QuantizedLinear> {
    let get = |name: &str| match shards.get(name) {
        Some((shard, _)) => read_raw(shard, name),
        None => Ok(None),
    };
    let origin = shards.get(&format!("{key}.trellis")).map(|(shard, _)| shard.path().to_owned());
    let linear = match assemble_linear(key, &origin.unwrap_or_default(), get) {
        // Named already as missing from a file or from the set, unless the manifest omits it too.
        Err(BundleError::MissingTensor { tensor, .. }) => {
            let is_reported = !shards.all_readable;
            report.check("geometry", &tensor, is_reported, "a tensor of a quantized module", "none");
            return None;
        }
        Err(BundleError::Tensor { tensor, expected, found, .. }) => {
            let is_marker = Codebook::ALL.iter().filter_map(|c| c.marker());
            let is_marker = is_marker.into_iter().any(|(leaf, _)| tensor.ends_with(&format!(".{leaf}")));
            let check = if is_marker { "codebook" } else { "geometry" };
            report.check(check, &tensor, false, expected, found);
            return None;
        }
        other => report.try_to("geometry", key, "tensors of a quantized linear", other)?,
    };
    check_against_manifest(&linear, manifest, report);
    for (leaf, values) in
        [("suh", Some(&linear.suh)), ("svh", Some(&linear.svh)), ("bias", linear.bias.as_ref())]
    {
        let Some(values) = values else { continue };
        check_finite(&format!("{key}.{leaf}"), values, report);
    }
    let not_a_ring = first_broken_tile(&linear);
    let found = not_a_ring.map(|at| format!("tile {at} is not")).unwrap_or_default();
    let name = format!("{key}.trellis");
    report.check("tail_biting", &name, not_a_ring.is_none(), "every tile a closed ring", found);
    Some(linear)
}

fn check_against_manifest(linear: &QuantizedLinear, manifest: &Manifest, report: &mut VerifyReport) {
    let key = &linear.key;
    let Some(module) = manifest.module(key) else {
        report.check("manifest", key, !manifest.is_known, "listed in tensor_storage", "not listed");
        return;
    };
    report.equal("manifest", key, Some("exl3"), module.quant_format.as_deref());
    report.equal("geometry", key, Some(linear.bits.as_f64()), module.bits_per_weight);
    for (field, codebook) in multiplier_keys() {
        let marker = codebook.marker().filter(|_| codebook == linear.codebook);
        let expected = marker.map(|(_, value)| json!(value));
        report.equal("codebook", &format!("{key}: {field}"), expected.as_ref(), module.rest.get(&field));
    }
}

fn check_finite(name: &str, values: &[f16], report: &mut VerifyReport) {
    let bad = values.iter().position(|v| !v.is_finite());
    let found = bad.map(|at| format!("{} at {at}", values[at])).unwrap_or_default();
    report.check("finite", name, bad.is_none(), "finite values", found);
}

/// The flat index of the first tile whose states do not close or do not pack to the same words.
fn first_broken_tile(linear: &QuantizedLinear) -> Option<usize> {
    let words = linear.trellis_shape()[2];
    linear.trellis.par_chunks(words).position_first(|tile| {
        let states = unpack(tile, linear.bits, TILE_LEN);
        !is_tail_biting(&states, linear.bits) || pack(&states, linear.bits) != tile
    })
}
