//! Which tensor goes into which shard, and the writing of a shard.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::path::Path;

use safetensors::Dtype;
use serde_json::{Map, Value, json};

use crate::format::{Bits, Codebook};
use crate::source::TensorRef;

use super::durable::{self, Sink, Written};
use super::{BundleError, Shard};

/// Where the bytes of a stored tensor come from.
enum Origin<'a> {
    Source(&'a [u8]),
    Unit(&'a Shard, usize),
}

/// One tensor of the bundle.
pub(super) struct Entry<'a> {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: u64,
    origin: Origin<'a>,
}

/// The stored tensors of one leaf module.
pub(super) struct Module<'a> {
    pub key: String,
    pub entries: Vec<Entry<'a>>,
    /// Set when the module is a quantized linear.
    pub quantized: Option<(Bits, Codebook)>,
}

/// One file of the bundle.
pub(super) struct ShardPlan<'a> {
    pub name: String,
    pub entries: Vec<&'a Entry<'a>>,
}

/// The module a tensor belongs to: its name without the last part.
pub fn module_of(tensor: &str) -> &str {
    tensor.rsplit_once('.').map_or(tensor, |(module, _)| module)
}

/// The modules of the bundle in order: those named in `order`, then those of pass-through tensors
/// that belong to no module named there, in the order they come.
pub(super) fn modules<'a>(
    order: &[String],
    units: &'a [Shard],
    passthrough: &[TensorRef<'a>],
) -> Result<Vec<Module<'a>>, BundleError> {
    let mut by_key: HashMap<&str, Module<'a>> = HashMap::new();
    let mut rest: Vec<&str> = Vec::new();
    let mut names = HashSet::new();
    let listed: HashSet<&str> = order.iter().map(String::as_str).collect();
    for unit in units {
        for (index, stored) in unit.tensors().iter().enumerate() {
            let module = module_of(&stored.name);
            if !names.insert(stored.name.as_str()) {
                return Err(BundleError::DuplicateTensor {
                    path: unit.path().to_owned(),
                    tensor: stored.name.clone(),
                });
            }
            if !listed.contains(module) {
                return Err(BundleError::Unplaced { tensor: stored.name.clone() });
            }
            module_at(&mut by_key, module).entries.push(Entry {
                name: stored.name.clone(),
                dtype: stored.dtype,
                shape: stored.shape.clone(),
                bytes: stored.bytes(),
                origin: Origin::Unit(unit, index),
            });
        }
    }
    for tensor in passthrough {
        let module = module_of(tensor.key());
        if !names.insert(tensor.key()) {
            let (path, tensor) = (tensor.file().to_owned(), tensor.key().to_owned());
            return Err(BundleError::DuplicateTensor { path, tensor });
        }
        if !listed.contains(module) && !by_key.contains_key(module) {
            rest.push(module);
        }
        module_at(&mut by_key, module).entries.push(Entry {
            name: tensor.key().to_owned(),
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
            bytes: tensor.bytes().len() as u64,
            origin: Origin::Source(tensor.bytes()),
        });
    }
    let keys = order.iter().map(String::as_str).chain(rest);
    keys.map(|key| {
        let empty = || BundleError::EmptyModule { module: key.to_owned() };
        let mut module = by_key.remove(key).ok_or_else(empty)?;
        module.quantized = quantization(&module.entries)?;
        Ok(module)
    })
    .collect()
}

fn module_at<'m, 'a>(by_key: &'m mut HashMap<&'a str, Module<'a>>, key: &'a str) -> &'m mut Module<'a> {
    by_key.entry(key).or_insert_with(|| Module { key: key.to_owned(), entries: Vec::new(), quantized: None })
}

/// Bit rate and codebook of a module with a trellis.
fn quantization(entries: &[Entry<'_>]) -> Result<Option<(Bits, Codebook)>, BundleError> {
    let leaf = |leaf: &str| entries.iter().find(|e| e.name.rsplit('.').next() == Some(leaf));
    let Some(trellis) = leaf("trellis") else { return Ok(None) };
    let words = trellis.shape.last().copied().unwrap_or(0);
    let has_marker = |c: &Codebook| c.marker().is_some_and(|(name, _)| leaf(name).is_some());
    let codebook = Codebook::ALL.into_iter().find(has_marker).unwrap_or(Codebook::ThreeInst);
    Ok(Some((Bits::try_from(words as f64 / 16.0)?, codebook)))
}

/// Distributes the modules over shards of at most `shard_bytes` of tensors, in order; a module is
/// never split, so a larger one has a shard of its own. Modules of `vision` are in other files than
/// the model's.
pub(super) fn shards<'a>(
    modules: &'a [Module<'a>],
    shard_bytes: u64,
    vision: &[String],
) -> Vec<ShardPlan<'a>> {
    let vision: HashSet<&str> = vision.iter().map(String::as_str).collect();
    let is_vision = |module: &&Module<'_>| module.entries.iter().any(|e| vision.contains(e.name.as_str()));
    let (vision, model): (Vec<&Module<'_>>, Vec<&Module<'_>>) = modules.iter().partition(is_vision);
    let mut shards = shards_of(&model, shard_bytes, "model");
    if !vision.is_empty() {
        shards.extend(shards_of(&vision, shard_bytes, "vision"));
    }
    shards
}

/// The shards of some modules, named after `stem`.
fn shards_of<'a>(modules: &[&'a Module<'a>], shard_bytes: u64, stem: &str) -> Vec<ShardPlan<'a>> {
    let mut groups: Vec<Vec<&Entry<'_>>> = vec![Vec::new()];
    let mut filled_bytes = 0;
    for module in modules {
        let bytes: u64 = module.entries.iter().map(|e| e.bytes).sum();
        if filled_bytes > 0 && filled_bytes + bytes > shard_bytes {
            groups.push(Vec::new());
            filled_bytes = 0;
        }
        filled_bytes += bytes;
        if let Some(group) = groups.last_mut() {
            group.extend(&module.entries);
        }
    }
    let count = groups.len();
    let plan = |(i, mut entries): (usize, Vec<&'a Entry<'a>>)| {
        // Widest elements first keeps every tensor aligned to its element size.
        entries.sort_by_key(|e| std::cmp::Reverse(e.dtype.bitsize()));
        let name = match count {
            1 => format!("{stem}.safetensors"),
            _ => format!("{stem}-{:05}-of-{count:05}.safetensors", i + 1),
        };
        ShardPlan { name, entries }
    };
    groups.into_iter().enumerate().map(plan).collect()
}

impl ShardPlan<'_> {
    pub fn write(&self, dir: &Path) -> Result<Written, BundleError> {
        let path = dir.join(&self.name);
        let described = self.entries.iter().map(|e| (e.name.as_str(), e.dtype, &e.shape[..], e.bytes));
        let header = header(&path, described)?;
        let data_bytes: u64 = self.entries.iter().map(|e| e.bytes).sum();
        durable::write_sized(&path, header.len() as u64 + data_bytes, |sink| {
            put(sink, &path, &header)?;
            self.entries.iter().try_for_each(|entry| match entry.origin {
                Origin::Source(bytes) => put(sink, &path, bytes),
                Origin::Unit(unit, index) => {
                    unit.stream(&unit.tensors()[index], |chunk| put(sink, &path, chunk))
                }
            })
        })
    }
}

/// Writes the tensors of `shard` to `path` under other names: `rename` gives the new one.
pub fn rewrite(shard: &Shard, path: &Path, rename: impl Fn(&str) -> String) -> Result<Written, BundleError> {
    let names: Vec<String> = shard.tensors().iter().map(|tensor| rename(&tensor.name)).collect();
    let described = names.iter().zip(shard.tensors());
    let header = header(path, described.map(|(name, t)| (name.as_str(), t.dtype, &t.shape[..], t.bytes())))?;
    let data_bytes: u64 = shard.tensors().iter().map(|tensor| tensor.bytes()).sum();
    durable::write_sized(path, header.len() as u64 + data_bytes, |sink| {
        put(sink, path, &header)?;
        shard.tensors().iter().try_for_each(|tensor| shard.stream(tensor, |chunk| put(sink, path, chunk)))
    })
}

pub(super) fn put(sink: &mut Sink, path: &Path, bytes: &[u8]) -> Result<(), BundleError> {
    sink.write_all(bytes).map_err(BundleError::io("write", path))
}

/// The start of a safetensors file: length and header, padded so that the data begins at a multiple
/// of 8. `tensors` are name, dtype, shape and size of the tensors in the order of their bytes.
pub(super) fn header<'a>(
    path: &Path,
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [usize], u64)>,
) -> Result<Vec<u8>, BundleError> {
    let mut entries = Map::new();
    // Some loaders refuse a file that does not say so.
    entries.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut at = 0;
    for (name, dtype, shape, bytes) in tensors {
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes] });
        entries.insert(name.to_owned(), entry);
        at += bytes;
    }
    let mut text = serde_json::to_vec(&Value::Object(entries)).map_err(BundleError::json(path))?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.append(&mut text);
    Ok(out)
}
