//! What a conversion will do, from a recipe and the checkpoint's headers alone.

use std::collections::{BTreeSet, HashSet};
use std::path::PathBuf;

use thiserror::Error;

use crate::bundle::module_of;
use crate::encode::{EncodeError, TrellisSpec};
use crate::format::{Bits, Codebook, TILE_LEN};
use crate::model::{Group, LinearSpec, Model, ModelError, MtpLayers};
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
    /// Of a multi-token prediction head; `None` leaves it as it is.
    pub mtp_bits: Option<Bits>,
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

/// What a unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitKind {
    Layer(usize),
    Head,
    /// The multi-token prediction head.
    Mtp,
}

/// What is committed at once: a decoder layer, the head, or the multi-token prediction head.
#[derive(Clone, Debug)]
pub struct UnitPlan {
    pub kind: UnitKind,
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
    /// Decoder layers in ascending order, then the head and the multi-token prediction head, if they
    /// are quantized.
    pub units: Vec<UnitPlan>,
    /// Every leaf module in the model's order.
    pub modules: Vec<String>,
    /// Source tensors that are stored as they are, sorted.
    pub passthrough: Vec<String>,
    /// Those of them that are part of a vision tower.
    pub vision: Vec<String>,
    /// Source tensors that are not stored: a second head beside a tied one, which no model reads.
    pub left_out: Vec<String>,
    /// The head's module name, if it is quantized.
    pub head: Option<String>,
    /// The multi-token prediction head's, if it is quantized.
    pub mtp: Option<String>,
    /// How many layers it has, where the config says otherwise.
    pub mtp_layers: Option<usize>,
    /// What a user should know of the source.
    pub notes: Vec<String>,
}

impl Plan {
    /// The trellises that the plan's linears are encoded with, each once.
    ///
    /// # Errors
    /// A rate that the codebook does not have.
    pub fn trellises(&self) -> Result<Vec<TrellisSpec>, PlanError> {
        let groups = self.units.iter().flat_map(|unit| &unit.groups);
        let rates: BTreeSet<Bits> = groups.map(|group| group.bits).collect();
        let trellis = |bits| Ok(TrellisSpec::new(self.recipe.codebook, bits, TILE_LEN)?);
        rates.into_iter().map(trellis).collect()
    }
}

/// Plans the conversion of `checkpoint`, a plain checkpoint of `model`.
///
/// # Errors
/// A checkpoint that is quantized already; tensors that are missing or have another shape; a rate
/// that the codebook does not have.
pub fn build(model: &Model, checkpoint: &Checkpoint, recipe: Recipe) -> Result<Plan, PlanError> {
    for bits in [Some(recipe.bits), recipe.head_bits, recipe.mtp_bits].into_iter().flatten() {
        TrellisSpec::new(recipe.codebook, bits, TILE_LEN)?;
    }
    let quantization = &checkpoint.config()["quantization_config"];
    if !quantization.is_null() {
        let method = quantization["quant_method"].as_str().unwrap_or("unknown").to_owned();
        return Err(PlanError::AlreadyQuantized { dir: checkpoint.dir().to_owned(), method });
    }
    model.check(checkpoint)?;

    let units = units(model, &recipe);
    let key_of = |kind| units.iter().find(|unit| unit.kind == kind).map(|unit| unit.key.clone());
    let (head, mtp) = (key_of(UnitKind::Head), key_of(UnitKind::Mtp));

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
    let vision = passthrough.iter().filter(|key| Model::is_vision(key)).cloned().collect();
    let modules = modules(model, &units, checkpoint);
    let (mtp_layers, notes) = mtp_notes(model, checkpoint);
    let left_out = owned(left_out);
    Ok(Plan { recipe, units, modules, passthrough, left_out, vision, head, mtp, mtp_layers, notes })
}

fn units(model: &Model, recipe: &Recipe) -> Vec<UnitPlan> {
    let unit = |kind, key, groups: Vec<Group>, bits| {
        let groups = groups.into_iter().map(|group| GroupPlan { linears: group.linears, bits }).collect();
        UnitPlan { kind, key, groups }
    };
    let mut units: Vec<UnitPlan> = (0..model.layer_count())
        .map(|i| unit(UnitKind::Layer(i), model.layer_key(i), model.layer_groups(i), recipe.bits))
        .collect();
    if let Some(bits) = recipe.head_bits {
        let head = model.head();
        units.push(unit(UnitKind::Head, head.key.clone(), vec![Group { linears: vec![head] }], bits));
    }
    if let (Some(bits), Some(key)) = (recipe.mtp_bits, model.mtp_key()) {
        units.push(unit(UnitKind::Mtp, key.to_owned(), model.mtp_groups(), bits));
    }
    units
}

/// How many layers of a multi-token prediction head there are, where the config says otherwise, and
/// the words for it.
fn mtp_notes(model: &Model, checkpoint: &Checkpoint) -> (Option<usize>, Vec<String>) {
    let Some(MtpLayers { declared, found }) = model.mtp_layers() else { return (None, Vec::new()) };
    if declared == found {
        return (None, Vec::new());
    }
    let dir = checkpoint.dir().display();
    let note = format!(
        "{dir}: mtp_num_hidden_layers is {declared}, but the multi-token prediction head has {found} layers \
         in the checkpoint; the bundle's config.json says {found}"
    );
    (Some(found), vec![note])
}

/// Embedding, layers, final norm, head, multi-token prediction head.
fn modules(model: &Model, units: &[UnitPlan], checkpoint: &Checkpoint) -> Vec<String> {
    let mut modules = vec![module_of(model.embedding_key()).to_owned()];
    let is_layer = |unit: &&UnitPlan| matches!(unit.kind, UnitKind::Layer(_));
    modules.extend(units.iter().filter(is_layer).flat_map(|unit| unit_modules(unit, checkpoint)));
    modules.push(module_of(model.final_norm_key()).to_owned());
    let has_quantized_head = units.iter().any(|unit| unit.kind == UnitKind::Head);
    let head = model.head().key;
    let is_own = !model.tied_head() && checkpoint.get(&format!("{head}.weight")).is_some();
    if has_quantized_head || is_own {
        modules.push(head);
    }
    let mtp = units.iter().filter(|unit| unit.kind == UnitKind::Mtp);
    modules.extend(mtp.flat_map(|unit| unit_modules(unit, checkpoint)));
    modules
}

/// The linears of a unit, and the modules of its other tensors.
fn unit_modules(unit: &UnitPlan, checkpoint: &Checkpoint) -> Vec<String> {
    let mut modules: Vec<String> =
        unit.groups.iter().flat_map(|group| &group.linears).map(|linear| linear.key.clone()).collect();
    let mut listed: HashSet<String> = modules.iter().cloned().collect();
    let prefix = format!("{}.", unit.key);
    let others = checkpoint.keys().filter(|key| key.starts_with(&prefix)).map(module_of);
    modules.extend(others.filter(|module| listed.insert((*module).to_owned())).map(str::to_owned));
    modules
}
