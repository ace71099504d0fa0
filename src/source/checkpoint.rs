//! A folder of shards as one set of named tensors.

use std::collections::BTreeMap;
use std::collections::btree_map;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::files::{read_json, shard_files};
use super::shard::Entry;
use super::{Shard, SourceError, TensorRef, scan};

/// A checkpoint: its config and its tensors, whose bytes stay in the memory-mapped shards.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config_bytes: Vec<u8>,
    config: Value,
    shards: Vec<Shard>,
    /// Tensor name to its shard's place in `shards` and its header entry.
    tensors: BTreeMap<String, (usize, Entry)>,
}

/// Opens the checkpoint in `dir`: `config.json`, and either `model.safetensors.index.json` with
/// the shards it names or a single safetensors file. Reads the headers only.
///
/// # Errors
/// Every disagreement between index, headers and files, with the file named.
pub fn open(dir: &Path) -> Result<Checkpoint, SourceError> {
    let config = dir.join("config.json");
    if !config.is_file() {
        return Err(SourceError::NoConfig { dir: dir.to_owned() });
    }
    let (config_bytes, config) = read_json(&config)?;
    let mut shards = Vec::new();
    let mut tensors = BTreeMap::new();
    for (path, expected) in shard_files(dir)? {
        let (shard, entries) = Shard::open(&path)?;
        for entry in entries {
            match tensors.entry(entry.key.clone()) {
                btree_map::Entry::Vacant(slot) => slot.insert((shards.len(), entry)),
                btree_map::Entry::Occupied(slot) => {
                    let first: &Shard = &shards[slot.get().0];
                    return Err(SourceError::DuplicateTensor {
                        tensor: entry.key,
                        first: first.path().to_owned(),
                        second: path,
                    });
                }
            };
        }
        let here = |tensor: &String| tensors.get(tensor).is_some_and(|(at, _)| *at == shards.len());
        if let Some(tensor) = expected.into_iter().find(|tensor| !here(tensor)) {
            return Err(SourceError::NotInShard { shard: path, tensor });
        }
        shards.push(shard);
    }
    Ok(Checkpoint { dir: dir.to_owned(), config_bytes, config, shards, tensors })
}

impl Checkpoint {
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The parsed `config.json`, keys in the file's order.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The names of all tensors, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub fn get(&self, key: &str) -> Option<TensorRef<'_>> {
        self.tensors.get(key).map(|(shard, entry)| tensor_ref(&self.shards[*shard], entry))
    }

    /// Like [`Checkpoint::get`], with a missing tensor as [`SourceError::MissingTensor`].
    pub fn tensor(&self, key: &str) -> Result<TensorRef<'_>, SourceError> {
        self.get(key)
            .ok_or_else(|| SourceError::MissingTensor { dir: self.dir.clone(), tensor: key.to_owned() })
    }

    /// The shards, sorted by file name.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Reads every shard once and returns the sha256, in hex, of the config and of all shards in
    /// name order. It does not depend on where the folder lies.
    ///
    /// # Errors
    /// [`SourceError::NonFinite`] for the first NaN or infinity in a BF16, F16, F32 or F64 tensor,
    /// in the order of shards and of bytes.
    pub fn check_finite_and_hash(&self) -> Result<String, SourceError> {
        let mut by_shard: Vec<Vec<TensorRef<'_>>> = self.shards.iter().map(|_| Vec::new()).collect();
        for (shard, entry) in self.tensors.values() {
            by_shard[*shard].push(tensor_ref(&self.shards[*shard], entry));
        }
        scan::check_and_hash(&self.config_bytes, &self.shards, &by_shard)
    }
}

fn tensor_ref<'a>(shard: &'a Shard, entry: &'a Entry) -> TensorRef<'a> {
    TensorRef {
        key: &entry.key,
        file: shard.path(),
        dtype: entry.dtype,
        shape: &entry.shape,
        bytes: &shard.bytes()[entry.range.clone()],
    }
}
