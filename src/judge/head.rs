//! The decision head: reading its three files, and what it makes of a hidden state.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{Map, Value};

use super::JudgeError;
use crate::bundle::{DECISION_HEAD, Shard};

const CONFIG: &str = "judge_config.json";
const CALIBRATION: &str = "calibration.json";
/// The layout of a config that gives none: the choice is between 16 letters.
const DEFAULT_RANGES: [(&str, [usize; 2]); 3] = [("noul", [0, 2]), ("score", [2, 8]), ("choice", [8, 24])];
const LAST_TOKEN: &str = "last_token";

/// One kind of question, and the slots that answer it.
#[derive(Clone, Debug, PartialEq)]
pub struct Kind {
    /// `noul` (yes or no), `score` or `choice`.
    pub name: String,
    /// What each slot stands for.
    pub labels: Vec<String>,
    slots: Range<usize>,
    temperature: f64,
}

/// A linear from the last hidden state to slots, and their grouping into kinds.
#[derive(Clone, Debug, PartialEq)]
pub struct DecisionHead {
    /// `[slots, hidden]`, row-major.
    weight: Vec<f32>,
    bias: Vec<f32>,
    kinds: Vec<Kind>,
    /// `softcap * tanh(z / softcap)` bounds a slot's value.
    softcap: Option<f64>,
    adapter: Option<String>,
}

impl DecisionHead {
    /// Reads the head in `dir`, for a model of `hidden` channels.
    ///
    /// # Errors
    /// A missing file; tensors that are not `proj.weight`: F32 `[slots, hidden]` and `proj.bias`: F32
    /// `[slots]`; slot ranges that overlap or do not exist; a kind without a temperature.
    pub fn open(dir: &Path, hidden: usize) -> Result<Self, JudgeError> {
        let config = Object::read(dir, CONFIG)?;
        let calibration = Object::read(dir, CALIBRATION)?;
        let path = present(dir, DECISION_HEAD)?;
        let shard = Shard::open(&path)?;
        config.same("hidden_size", hidden)?;
        config.readout()?;
        let bias = floats(&shard, "proj.bias", |shape| shape.len() == 1, "F32 [slots]")?;
        let slots = bias.len();
        let expected = format!("F32 [{slots}, {hidden}]");
        let weight = floats(&shard, "proj.weight", |shape| shape == [slots, hidden], &expected)?;
        let temperatures = calibration
            .object("per_kind")?
            .ok_or_else(|| calibration.wrong("per_kind", "a temperature for every kind", &Value::Null))?;
        Ok(Self {
            weight,
            bias,
            kinds: config.kinds(slots, &temperatures)?,
            softcap: config.positive("softcap")?,
            adapter: config.adapter(),
        })
    }

    pub fn kinds(&self) -> &[Kind] {
        &self.kinds
    }

    /// The adapter that the head was trained with and that the weights do not have, as the config says.
    pub fn adapter(&self) -> Option<&str> {
        self.adapter.as_deref()
    }

    /// The probability of each of the first `options` slots of a kind: the others are no answer to the
    /// question. `hidden`: the last token's state after the final norm.
    ///
    /// `softmax((W h + b) / temperature)` over the slots.
    pub fn probabilities(&self, hidden: &[f32], kind: &Kind, options: usize) -> Vec<f64> {
        let slots = kind.slots.clone().take(options);
        let values: Vec<f64> = slots.map(|slot| self.slot(hidden, slot) / kind.temperature).collect();
        let largest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let shares: Vec<f64> = values.iter().map(|value| (value - largest).exp()).collect();
        let total: f64 = shares.iter().sum();
        shares.into_iter().map(|share| share / total).collect()
    }

    fn slot(&self, hidden: &[f32], slot: usize) -> f64 {
        let row = &self.weight[slot * hidden.len()..][..hidden.len()];
        let product: f64 = row.iter().zip(hidden).map(|(&w, &h)| f64::from(w) * f64::from(h)).sum();
        let value = product + f64::from(self.bias[slot]);
        self.softcap.map_or(value, |cap| cap * (value / cap).tanh())
    }
}

impl Kind {
    /// What the labels mean on average, where they are numbers.
    pub fn expected(&self, probabilities: &[f64]) -> Option<f64> {
        let weighed = |(label, p): (&String, &f64)| Some(label.parse::<f64>().ok()? * p);
        self.labels.iter().zip(probabilities).map(weighed).sum()
    }
}

/// The path of a file that has to be there.
fn present(dir: &Path, file: &'static str) -> Result<PathBuf, JudgeError> {
    let path = dir.join(file);
    if path.is_file() { Ok(path) } else { Err(JudgeError::NoHead { dir: dir.to_owned(), file }) }
}

fn floats(
    shard: &Shard,
    name: &str,
    fits: impl Fn(&[usize]) -> bool,
    expected: &str,
) -> Result<Vec<f32>, JudgeError> {
    let wrong = |found: String| JudgeError::Tensor {
        path: shard.path().to_owned(),
        tensor: name.to_owned(),
        expected: expected.to_owned(),
        found,
    };
    let tensor = shard.get(name).ok_or_else(|| wrong("nothing".into()))?;
    if tensor.dtype != Dtype::F32 || !fits(&tensor.shape) {
        return Err(wrong(format!("{:?} {:?}", tensor.dtype, tensor.shape)));
    }
    let bytes = shard.read(tensor)?;
    let values: Vec<f32> = bytes.as_chunks().0.iter().map(|&value| f32::from_le_bytes(value)).collect();
    match values.iter().position(|value| !value.is_finite()) {
        Some(at) => Err(wrong(format!("{} at {at}", values[at]))),
        None => Ok(values),
    }
}

/// A JSON file that holds an object.
struct Object {
    path: PathBuf,
    fields: Map<String, Value>,
}

impl Object {
    fn read(dir: &Path, file: &'static str) -> Result<Self, JudgeError> {
        let path = present(dir, file)?;
        let text = fs::read(&path).map_err(|source| JudgeError::Read { path: path.clone(), source })?;
        let fields = serde_json::from_slice(&text)
            .map_err(|source| JudgeError::Json { path: path.clone(), source })?;
        Ok(Self { path, fields })
    }

    fn wrong(&self, field: &str, expected: &str, found: &Value) -> JudgeError {
        JudgeError::Field {
            path: self.path.clone(),
            field: field.to_owned(),
            expected: expected.to_owned(),
            found: found.to_string(),
        }
    }

    /// A field that is there and not null.
    fn get(&self, field: &str) -> Option<&Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    fn object(&self, field: &str) -> Result<Option<Self>, JudgeError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_object() {
            Some(fields) => Ok(Some(Self { path: self.path.clone(), fields: fields.clone() })),
            None => Err(self.wrong(field, "an object", value)),
        }
    }

    fn positive(&self, field: &str) -> Result<Option<f64>, JudgeError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        number.map(Some).ok_or_else(|| self.wrong(field, "a number above zero", value))
    }

    /// A field that may be missing and is else `expected`.
    fn same(&self, field: &str, expected: usize) -> Result<(), JudgeError> {
        match self.get(field) {
            Some(value) if value.as_u64() != Some(expected as u64) => {
                Err(self.wrong(field, &expected.to_string(), value))
            }
            _ => Ok(()),
        }
    }

    /// Only the state of the last token is read.
    fn readout(&self) -> Result<(), JudgeError> {
        let Some(readout) = self.object("readout")? else { return Ok(()) };
        match readout.get("type") {
            Some(kind) if kind != LAST_TOKEN => {
                Err(readout.wrong("readout.type", &format!("\"{LAST_TOKEN}\""), kind))
            }
            _ => Ok(()),
        }
    }

    fn adapter(&self) -> Option<String> {
        let is_merged = self.get("weights_mode").is_some_and(|mode| mode != "unmerged");
        let folder = self.get("adapter_subfolder")?.as_str()?;
        (!is_merged).then(|| folder.to_owned())
    }

    /// The kinds in the order of their slots.
    fn kinds(&self, slots: usize, temperatures: &Self) -> Result<Vec<Kind>, JudgeError> {
        let layout = self.object("slots")?;
        if let Some(layout) = &layout {
            layout.same("num_slots", slots)?;
        }
        let labels = layout.as_ref().map_or(Ok(None), |layout| layout.verbalizers(slots))?;
        let ranges = match layout.as_ref().map_or(Ok(None), |layout| layout.object("ranges"))? {
            Some(ranges) => ranges.ranges()?,
            None => DEFAULT_RANGES.map(|(name, [begin, end])| (name.to_owned(), begin..end)).into(),
        };
        let mut end = 0;
        let kind = |(name, range): (String, Range<usize>)| {
            if range.start < end || range.is_empty() || range.end > slots {
                let expected = format!("slots of their own below {slots}");
                let found = Value::from(vec![range.start, range.end]);
                return Err(self.wrong(&format!("slots.ranges.{name}"), &expected, &found));
            }
            end = range.end;
            let temperature = temperatures.positive(&name)?.ok_or_else(|| {
                temperatures.wrong(&format!("per_kind.{name}"), "a temperature", &Value::Null)
            })?;
            let labels = match &labels {
                Some(labels) => labels[range.clone()].to_vec(),
                None => default_labels(&name, range.len()),
            };
            Ok(Kind { name, labels, slots: range, temperature })
        };
        ranges.into_iter().map(kind).collect()
    }

    /// The ranges of slots by kind, in ascending order.
    fn ranges(&self) -> Result<Vec<(String, Range<usize>)>, JudgeError> {
        let range = |(name, value): (&String, &Value)| {
            let bounds: Option<[usize; 2]> = serde_json::from_value(value.clone()).ok();
            let [begin, end] =
                bounds.ok_or_else(|| self.wrong(&format!("slots.ranges.{name}"), "[begin, end]", value))?;
            Ok((name.clone(), begin..end))
        };
        let mut ranges = self.fields.iter().map(range).collect::<Result<Vec<_>, JudgeError>>()?;
        ranges.sort_by_key(|(_, range)| (range.start, range.end));
        Ok(ranges)
    }

    fn verbalizers(&self, slots: usize) -> Result<Option<Vec<String>>, JudgeError> {
        let Some(value) = self.get("verbalizers") else { return Ok(None) };
        let labels: Option<Vec<String>> = serde_json::from_value(value.clone()).ok();
        match labels.filter(|labels| labels.len() == slots) {
            Some(labels) => Ok(Some(labels)),
            None => Err(self.wrong("slots.verbalizers", &format!("{slots} strings"), value)),
        }
    }
}

fn default_labels(kind: &str, count: usize) -> Vec<String> {
    match (kind, count) {
        ("noul", 2) => ["false", "true"].map(str::to_owned).into(),
        ("choice", ..=26) => ('A'..='Z').take(count).map(String::from).collect(),
        _ => (0..count).map(|slot| slot.to_string()).collect(),
    }
}
