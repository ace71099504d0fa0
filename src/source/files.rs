//! Which files of a folder are the checkpoint: its config, its index, its shards.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::SourceError;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The shards of a checkpoint, sorted by name, each with the tensors the index puts there (none
/// without an index).
pub(super) type ShardFiles = BTreeMap<PathBuf, Vec<String>>;

/// Reads and parses a JSON file, keeping its bytes.
pub(super) fn read_json(path: &Path) -> Result<(Vec<u8>, Value), SourceError> {
    let bytes = fs::read(path).map_err(|source| SourceError::Io { path: path.to_owned(), source })?;
    let value = serde_json::from_slice(&bytes)
        .map_err(|source| SourceError::Json { path: path.to_owned(), source })?;
    Ok((bytes, value))
}

/// The shards of the checkpoint in `dir`. With an index, only the files it names: other
/// safetensors files in the folder (adapters, test vectors) are none of the model.
pub(super) fn shard_files(dir: &Path) -> Result<ShardFiles, SourceError> {
    let index = dir.join(INDEX);
    if index.exists() {
        return indexed_files(dir, &index);
    }
    let single = dir.join(SINGLE);
    if single.exists() {
        return Ok([(single, Vec::new())].into());
    }
    let mut found = safetensors_files(dir)?;
    match found.pop() {
        None => Err(SourceError::NoWeights { dir: dir.to_owned() }),
        Some(file) if found.is_empty() => Ok([(file, Vec::new())].into()),
        Some(_) => Err(SourceError::NoIndex { dir: dir.to_owned(), found: found.len() + 1 }),
    }
}

fn safetensors_files(dir: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let io = |source| SourceError::Io { path: dir.to_owned(), source };
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            found.push(path);
        }
    }
    Ok(found)
}

fn indexed_files(dir: &Path, index: &Path) -> Result<ShardFiles, SourceError> {
    let (_, json) = read_json(index)?;
    let structure = |expected, found: &Value| SourceError::Structure {
        path: index.to_owned(),
        expected,
        found: found.to_string().chars().take(80).collect(),
    };
    let map = json
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| structure("an object \"weight_map\" of tensor names to file names", &json))?;
    let mut files = ShardFiles::new();
    for (tensor, file) in map {
        let name = file.as_str().ok_or_else(|| structure("a file name", file))?;
        // Shards lie beside their index; anything else could reach outside the folder.
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(SourceError::ShardName {
                index: index.to_owned(),
                tensor: tensor.clone(),
                shard: name.to_owned(),
            });
        }
        files.entry(dir.join(name)).or_default().push(tensor.clone());
    }
    if files.is_empty() {
        return Err(SourceError::NoWeights { dir: dir.to_owned() });
    }
    match files.iter().find(|(path, _)| !path.exists()) {
        Some((path, tensors)) => {
            Err(SourceError::MissingShard { shard: path.clone(), tensor: tensors[0].clone() })
        }
        None => Ok(files),
    }
}
