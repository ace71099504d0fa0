//! A bundle as an ordinary checkpoint folder for a runtime.
//!
//! The shards are the bundle's own files, hard-linked, unless the runtime reads the text model under
//! another prefix: then a shard is written anew with the same bytes under other names. The index
//! comes from the shards' headers. `config.json` holds the whole manifest, for runtimes that read no
//! other file.

mod names;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value, json};
use thiserror::Error;

use crate::bundle::durable::{self, Written};
use crate::bundle::{
    self, BundleError, CONFIG, FileRecord, INDEX, MANIFEST, PROVENANCE, Provenance, QUANT_METHOD, Shard,
};
use crate::model;

pub use names::Runtime;

/// Why a bundle cannot be exported.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExportError {
    #[error("{}: expected an EXL3 bundle, found quant_method {found} in its config", dir.display())]
    NoBundle { dir: PathBuf, found: String },
    #[error("architectures {found} cannot be exported for {runtime}; expected {expected}")]
    Architecture { runtime: Runtime, found: String, expected: String },
    #[error("tensors \"{first}\" and \"{second}\" would both be named \"{name}\"")]
    Clash { name: String, first: String, second: String },
    #[error("{}: expected a JSON object", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error(transparent)]
    Bundle(#[from] BundleError),
}

/// How a file came into the exported folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The bundle's file under a second name.
    Linked,
    Copied,
    Written,
}

/// A file of the exported folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Exported {
    pub name: String,
    pub bytes: u64,
    pub origin: Origin,
}

/// An exported folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Export {
    /// Where the names of the text model begin.
    pub prefix: &'static str,
    /// Tensors whose name is another than in the bundle.
    pub renamed: usize,
    pub files: Vec<Exported>,
}

/// Writes the bundle in `dir` as the folder `out`, which appears whole or not at all.
///
/// # Errors
/// A folder that is no bundle; an architecture that the runtime does not read; an `out` that holds
/// anything; a failed read or write.
pub fn run(dir: &Path, out: &Path, runtime: Runtime) -> Result<Export, ExportError> {
    let config = read_object(&dir.join(CONFIG))?;
    let method = config.get("quantization_config").map_or(&Value::Null, |section| &section["quant_method"]);
    if *method != QUANT_METHOD {
        return Err(ExportError::NoBundle { dir: dir.to_owned(), found: method.to_string() });
    }
    let manifest = read_object(&dir.join(MANIFEST))?;
    let prefix = runtime.text_prefix(&config)?;
    let shards = bundle::shard_files(dir)?.iter().map(|path| Shard::open(path)).collect::<Result<_, _>>()?;
    let source = Source { dir, config, manifest, shards, provenance: Provenance::read(dir)?, prefix };
    source.check_names()?;
    bundle::put_together(dir, out, |partial| source.write(partial))
}

fn read_object(path: &Path) -> Result<Map<String, Value>, ExportError> {
    let text =
        fs::read(path).map_err(|source| ExportError::Io { action: "read", path: path.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|source| ExportError::Json { path: path.to_owned(), source })
}

/// What is exported.
struct Source<'a> {
    dir: &'a Path,
    config: Map<String, Value>,
    manifest: Map<String, Value>,
    shards: Vec<Shard>,
    provenance: Option<Provenance>,
    prefix: &'static str,
}

impl Source<'_> {
    fn rename(&self, name: &str) -> String {
        model::renamed(name, self.prefix)
    }

    /// No two tensors may get the same name.
    fn check_names(&self) -> Result<(), ExportError> {
        let mut seen: BTreeMap<String, &str> = BTreeMap::new();
        for tensor in self.shards.iter().flat_map(Shard::tensors) {
            let name = self.rename(&tensor.name);
            if let Some(first) = seen.insert(name.clone(), &tensor.name) {
                let (first, second) = (first.to_owned(), tensor.name.clone());
                return Err(ExportError::Clash { name, first, second });
            }
        }
        Ok(())
    }

    /// Writes every file into `out`.
    fn write(&self, out: &Path) -> Result<Export, ExportError> {
        let mut files = Files::default();
        for shard in &self.shards {
            self.write_shard(shard, out, &mut files)?;
        }
        files.written(bundle::write_json(out, INDEX, &self.index())?);
        let manifest = Value::Object(self.renamed_manifest());
        let mut config = self.config.clone();
        config.insert("quantization_config".into(), manifest.clone());
        files.written(bundle::write_json(out, CONFIG, &config)?);
        for (name, Written { bytes, sha256 }) in bundle::copy_companions(self.dir, out)? {
            files.push(FileRecord { name, bytes, sha256 }, Origin::Copied);
        }
        let text = bundle::write_json(out, MANIFEST, &manifest)?;
        if let Some(provenance) = self.renamed_provenance(&files, &text) {
            files.written(bundle::write_json(out, PROVENANCE, &provenance)?);
        }
        files.written(text);
        let tensors = self.shards.iter().flat_map(Shard::tensors);
        let renamed = tensors.filter(|tensor| self.rename(&tensor.name) != tensor.name).count();
        Ok(Export { prefix: self.prefix, renamed, files: files.exported })
    }

    fn write_shard(&self, shard: &Shard, out: &Path, files: &mut Files) -> Result<(), ExportError> {
        let path = shard.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let target = out.join(&name);
        let record = |Written { bytes, sha256 }: Written| FileRecord { name: name.clone(), bytes, sha256 };
        if shard.tensors().iter().any(|tensor| self.rename(&tensor.name) != tensor.name) {
            let written = bundle::rewrite(shard, &target, |tensor| self.rename(tensor))?;
            files.written(record(written));
            return Ok(());
        }
        if !link(path, &target)? {
            let mut file = open(path)?;
            let written = durable::write(&target, |sink| io::copy(&mut file, sink).map(drop))?;
            files.push(record(written), Origin::Copied);
            return Ok(());
        }
        let known = self.provenance.iter().flat_map(|p| &p.files).find(|file| file.name == name);
        let known = known.cloned().map_or_else(|| durable::digest(path).map(record), Ok)?;
        files.push(known, Origin::Linked);
        Ok(())
    }

    /// `model.safetensors.index.json`, whatever the number of shards: a loader that reads it opens no
    /// other file.
    fn index(&self) -> Value {
        let (mut weight_map, mut total_size) = (Map::new(), 0);
        for shard in &self.shards {
            let file = shard.path().file_name().unwrap_or_default().to_string_lossy();
            for tensor in shard.tensors() {
                total_size += tensor.bytes();
                weight_map.insert(self.rename(&tensor.name), json!(file));
            }
        }
        json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map })
    }

    /// The manifest with the modules and tensors of its storage renamed.
    fn renamed_manifest(&self) -> Map<String, Value> {
        let renamed = |object: &Map<String, Value>| -> Map<String, Value> {
            object.iter().map(|(name, value)| (self.rename(name), value.clone())).collect()
        };
        let mut manifest = self.manifest.clone();
        if let Some(Value::Object(storage)) = manifest.get_mut("tensor_storage") {
            *storage = renamed(storage);
            for module in storage.values_mut() {
                if let Some(Value::Object(tensors)) = module.get_mut("stored_tensors") {
                    *tensors = renamed(tensors);
                }
            }
        }
        manifest
    }

    fn renamed_provenance(&self, files: &Files, manifest: &FileRecord) -> Option<Provenance> {
        let mut provenance = self.provenance.clone()?;
        for tensor in &mut provenance.tensors {
            tensor.key = self.rename(&tensor.key);
        }
        provenance.files = files.records.clone();
        provenance.files.push(manifest.clone());
        Some(provenance)
    }
}

#[derive(Default)]
struct Files {
    records: Vec<FileRecord>,
    exported: Vec<Exported>,
}

impl Files {
    fn push(&mut self, record: FileRecord, origin: Origin) {
        self.exported.push(Exported { name: record.name.clone(), bytes: record.bytes, origin });
        self.records.push(record);
    }

    fn written(&mut self, record: FileRecord) {
        self.push(record, Origin::Written);
    }
}

fn open(path: &Path) -> Result<File, ExportError> {
    File::open(path).map_err(|source| ExportError::Io { action: "open", path: path.to_owned(), source })
}

/// Gives the file behind `path` a second name. Whether that was possible: not every file system has
/// hard links, and none has them across its border.
fn link(path: &Path, target: &Path) -> Result<bool, ExportError> {
    // A checkpoint in a cache consists of links, whose names alone would be linked.
    let real = path.canonicalize();
    let real = real.map_err(|source| ExportError::Io { action: "open", path: path.to_owned(), source })?;
    Ok(fs::hard_link(real, target).is_ok())
}
