//! What a conversion will do, from a recipe and the checkpoint's headers alone.

use std::collections::HashSet;
use std::path::PathBuf;

use thiserror::Error;

use crate::bundle::module_of;
use crate::encode::{EncodeError, TrellisSpec};
use crate::format::{Bits, Codebook, TILE_LEN};
use crate::model::{LinearSpec, Model, ModelError};
use crate::quantize::OutScales;
use crate::source::Checkpoint;

/// Why a checkpoint cannot be converted under a recipe.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PlanError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error("{}: already quantized with \"{method}\"; expected plain weights", dir.display())]
    AlreadyQuantized { dir: PathBuf, method: String },
}

/// What a user decides.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    pub bits: Bits,
    /// `None` leaves the head as it is.
    pub head_bits: Option<Bits>,
    pub codebook: Codebook,
    pub out_scales: OutScales,
    pub seed: u64,
}

/// Linears that share their input, quantized side by side.
#[derive(Clone, Debug)]
pub struct GroupPlan {
    pub linears: Vec<LinearSpec>,
    pub bits: Bits,
}

/// What is committed at once: a decoder layer, or the head.
#[derive(Clone, Debug)]
pub struct UnitPlan {
    /// Module name, such as `model.layers.3` or `lm_head`.
    pub key: String,
    pub groups: Vec<GroupPlan>,
}

impl UnitPlan {
    /// Weights of all its linears, without padding.
    pub fn weights(&self) -> u64 {
        self.groups.iter().flat_map(|g| &g.linears).map(|l| l.k as u64 * l.n as u64).sum()
    }
}

/// What a conversion will do.
#[derive(Clone, Debug)]
pub struct Plan {
    pub recipe: Recipe,
    /// Decoder layers in ascending order, then the head if it is quantized.
    pub units: Vec<UnitPlan>,
    /// Every leaf module in the model's order.
    pub modules: Vec<String>,
    /// Source tensors that are stored as they are, sorted.
    pub passthrough: Vec<String>,
    /// Source tensors that are not stored: a second head beside a tied one, which no model reads.
    pub left_out: Vec<String>,
    /// The head's module name, if it is quantized.
    pub head: Option<String>,
}

/// Plans the conversion of `checkpoint`, a plain checkpoint of `model`.
///
/// # Errors
/// A checkpoint that is quantized already; tensors that are missing or have another shape; a rate
/// that the codebook does not have.
pub fn build(model: &Model, checkpoint: &Checkpoint, recipe: Recipe) -> Result<Plan, PlanError> {
    for bits in [Some(recipe.bits), recipe.head_bits].into_iter().flatten() {
        TrellisSpec::new(recipe.codebook, bits, TILE_LEN)?;
    }
    let quantization = &checkpoint.config()["quantization_config"];
    if !quantization.is_null() {
        let method = quantization["quant_method"].as_str().unwrap_or("unknown").to_owned();
        return Err(PlanError::AlreadyQuantized { dir: checkpoint.dir().to_owned(), method });
    }
    model.check(checkpoint)?;

    let mut units: Vec<UnitPlan> = (0..model.layer_count())
        .map(|layer| UnitPlan {
            key: model.layer_key(layer),
            groups: model
                .layer_groups(layer)
                .into_iter()
                .map(|group| GroupPlan { linears: group.linears, bits: recipe.bits })
                .collect(),
        })
        .collect();
    let head = recipe.head_bits.map(|bits| {
        let linear = model.head();
        let key = linear.key.clone();
        units.push(UnitPlan { key: key.clone(), groups: vec![GroupPlan { linears: vec![linear], bits }] });
        key
    });

    let quantized: HashSet<String> = units
        .iter()
        .flat_map(|unit| &unit.groups)
        .flat_map(|group| &group.linears)
        .flat_map(|linear| [format!("{}.weight", linear.key), format!("{}.bias", linear.key)])
        .collect();
    let is_left = |key: &&str| head.is_none() && model.tied_head() && module_of(key) == model.head().key;
    let (left_out, kept): (Vec<&str>, Vec<&str>) = checkpoint.keys().partition(is_left);
    let owned = |keys: Vec<&str>| keys.into_iter().map(str::to_owned).collect::<Vec<String>>();
    let mut passthrough = owned(kept);
    passthrough.retain(|key| !quantized.contains(key));
    let modules = modules(model, &units, head.is_some(), checkpoint);
    Ok(Plan { recipe, units, modules, passthrough, left_out: owned(left_out), head })
}

/// Embedding, layers, final norm, head.
fn modules(
    model: &Model,
    units: &[UnitPlan],
    has_quantized_head: bool,
    checkpoint: &Checkpoint,
) -> Vec<String> {
    let layers = &units[..model.layer_count()];
    let is_linear: HashSet<&str> =
        layers.iter().flat_map(|u| &u.groups).flat_map(|g| &g.linears).map(|l| l.key.as_str()).collect();
    let mut modules = vec![module_of(model.embedding_key()).to_owned()];
    for layer in layers {
        modules.extend(layer.groups.iter().flat_map(|g| &g.linears).map(|l| l.key.clone()));
        let prefix = format!("{}.", layer.key);
        let mut others: Vec<&str> =
            checkpoint.keys().filter(|k| k.starts_with(&prefix)).map(module_of).collect();
        others.dedup();
        modules.extend(others.into_iter().filter(|m| !is_linear.contains(m)).map(str::to_owned));
    }
    modules.push(module_of(model.final_norm_key()).to_owned());
    let head = model.head().key;
    let is_own = !model.tied_head() && checkpoint.get(&format!("{head}.weight")).is_some();
    if has_quantized_head || is_own {
        modules.push(head);
    }
    modules
}
