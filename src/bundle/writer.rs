//! Committing units and finishing the bundle.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::format::QuantizedLinear;

use super::durable::{self, Written};
use super::job::{Paths, clear_after_finish, clear_bundle, unit_file};
use super::journal::{Commit, Journal};
use super::provenance::{self, Bpw, FileRecord, Provenance, Tool};
use super::{BundleContent, BundleError, CONFIG, INDEX, JobSpec, MANIFEST, Overwrite, PROVENANCE};
use super::{Shard, companions, fault, layout, linear, manifest};
use super::{TensorMetrics, Unit};

/// An open job.
pub struct Writer {
    paths: Paths,
    spec: JobSpec,
    journal: Journal,
    _lock: File,
}

/// A bundle in its place.
#[derive(Clone, Debug)]
pub struct FinishedBundle {
    pub dir: PathBuf,
    /// All files together.
    pub output_bytes: u64,
    pub bpw: Bpw,
    pub tensors: Vec<TensorMetrics>,
    pub files: Vec<FileRecord>,
}

impl Writer {
    pub(super) fn new(paths: Paths, spec: JobSpec, journal: Journal, lock: File) -> Self {
        Self { paths, spec, journal, _lock: lock }
    }

    /// The work folder. Files named `states-*.safetensors` in it are removed with it.
    pub fn work_dir(&self) -> &Path {
        &self.paths.work
    }

    /// Number of committed units; they are `0..committed`.
    pub fn committed(&self) -> usize {
        self.journal.commits().len()
    }

    /// Metrics of every committed tensor, in the order of their commits.
    pub fn metrics(&self) -> impl Iterator<Item = &TensorMetrics> {
        self.journal.commits().iter().flat_map(|c| &c.metrics)
    }

    /// Reads a committed unit back, its linears in the order they were committed.
    pub fn unit(&self, unit: usize) -> Result<Unit, BundleError> {
        let shard = self.shard(unit)?;
        let mut keys: Vec<&str> = shard.tensors().iter().map(|t| layout::module_of(&t.name)).collect();
        keys.dedup();
        keys.into_iter().map(|key| linear::read_linear(&shard, key)).collect()
    }

    fn shard(&self, unit: usize) -> Result<Shard, BundleError> {
        match self.journal.commits().get(unit) {
            Some(commit) => Shard::open(&self.paths.work.join(&commit.file)),
            None => Err(BundleError::UnitOrder { expected: self.committed(), found: unit }),
        }
    }

    /// Commits the next unit: first its file, then the journal's line.
    ///
    /// # Errors
    /// A unit out of order, a linear whose sizes contradict each other, a failed write.
    pub fn commit(
        &mut self,
        unit: usize,
        linears: &[QuantizedLinear],
        metrics: Vec<TensorMetrics>,
    ) -> Result<(), BundleError> {
        if unit != self.committed() {
            return Err(BundleError::UnitOrder { expected: self.committed(), found: unit });
        }
        let file = unit_file(unit);
        let Written { bytes, sha256 } = write_unit(&self.paths.work.join(&file), linears)?;
        self.journal.append(&Commit { unit, file, sha256, bytes, metrics })
    }

    /// Puts the bundle together from the committed units and `content`, moves it into place, and
    /// removes the work folder.
    pub fn finish(self, content: BundleContent<'_>) -> Result<FinishedBundle, BundleError> {
        let units = (0..self.committed()).map(|i| self.shard(i)).collect::<Result<Vec<_>, _>>()?;
        let tensors = content.passthrough.iter().map(|key| content.checkpoint.tensor(key));
        let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
        let modules = layout::modules(&content.modules, &units, &tensors)?;
        let provenance = Provenance {
            format: provenance::FORMAT,
            tool: Tool { name: env!("CARGO_PKG_NAME").into(), version: env!("CARGO_PKG_VERSION").into() },
            base: content.base.clone(),
            recipe: self.spec.recipe.clone(),
            bpw: bpw(&modules, self.metrics(), &content),
            tensors: self.metrics().map(|m| TensorMetrics { seconds: None, ..m.clone() }).collect(),
            files: Vec::new(),
        };
        clear_bundle(&self.paths.partial)?;
        fs::create_dir_all(&self.paths.partial).map_err(BundleError::io("create", &self.paths.partial))?;
        let files = write_bundle(&self.paths.partial, &content, &modules, provenance.clone())?;
        publish(&self.paths, self.spec.overwrite)?;
        clear_after_finish(&self.paths, &self.spec.recipe);
        Ok(FinishedBundle {
            dir: self.spec.out,
            output_bytes: files.iter().map(|f| f.bytes).sum(),
            bpw: provenance.bpw,
            tensors: provenance.tensors,
            files,
        })
    }
}

fn write_unit(path: &Path, linears: &[QuantizedLinear]) -> Result<Written, BundleError> {
    let mut tensors = Vec::new();
    for linear in linears {
        linear.check()?;
        let named = linear::tensors_of(linear).into_iter();
        tensors.extend(named.map(|(leaf, raw)| (format!("{}.{leaf}", linear.key), raw)));
    }
    let described =
        tensors.iter().map(|(name, raw)| (name.as_str(), raw.dtype, &raw.shape[..], raw.bytes.len() as u64));
    let header = layout::header(path, described)?;
    let data_bytes: usize = tensors.iter().map(|(_, raw)| raw.bytes.len()).sum();
    durable::write_sized(path, (header.len() + data_bytes) as u64, |sink| {
        layout::put(sink, path, &header)?;
        tensors.iter().try_for_each(|(_, raw)| layout::put(sink, path, &raw.bytes))
    })
}

/// Writes every file of the bundle into `dir`, the manifest last: it marks the bundle as whole.
fn write_bundle(
    dir: &Path,
    content: &BundleContent<'_>,
    modules: &[layout::Module<'_>],
    mut provenance: Provenance,
) -> Result<Vec<FileRecord>, BundleError> {
    let shards = layout::shards(modules, content.shard_bytes, &content.vision);
    let mut files = Vec::new();
    for shard in &shards {
        files.push(record(&shard.name, shard.write(dir)?));
    }
    if shards.len() > 1 {
        files.push(write_json(dir, INDEX, &manifest::index(&shards))?);
    }
    let config = manifest::config(content);
    files.push(write_json(dir, CONFIG, &config)?);
    let companions = companions::copy(content.checkpoint.dir(), dir)?;
    files.extend(companions.into_iter().map(|(name, written)| record(&name, written)));
    let manifest = manifest::quantization_config(&config, modules);
    let manifest = manifest::render(&dir.join(MANIFEST), &manifest)?;
    let mut listed = files.clone();
    listed.push(record(MANIFEST, durable::digest_bytes(&manifest)));
    provenance.files = listed;
    files.push(write_json(dir, PROVENANCE, &provenance)?);
    files.push(write_bytes(dir, MANIFEST, &manifest)?);
    Ok(files)
}

fn record(name: &str, Written { bytes, sha256 }: Written) -> FileRecord {
    FileRecord { name: name.to_owned(), bytes, sha256 }
}

/// Writes a JSON file of a bundle.
pub fn write_json(dir: &Path, name: &str, value: &impl Serialize) -> Result<FileRecord, BundleError> {
    write_bytes(dir, name, &manifest::render(&dir.join(name), value)?)
}

fn write_bytes(dir: &Path, name: &str, bytes: &[u8]) -> Result<FileRecord, BundleError> {
    let path = dir.join(name);
    let written = durable::write_sized(&path, bytes.len() as u64, |sink| layout::put(sink, &path, bytes))?;
    Ok(record(name, written))
}

/// Moves the whole bundle into place. Between the two renames of a replacement there is no output
/// folder at all, never a mixed one. What has come into the output folder since the job was opened
/// is replaced only where that is allowed.
fn publish(paths: &Paths, overwrite: Overwrite) -> Result<(), BundleError> {
    let rename = |from: &Path, to: &Path| {
        let renamed = fault::step().and_then(|()| fs::rename(from, to));
        renamed.map_err(BundleError::io("rename", from))
    };
    let occupant = if paths.out.is_dir() { companions::names(&paths.out)?.into_iter().min() } else { None };
    if let Some(file) = occupant {
        if overwrite == Overwrite::Refuse {
            return Err(BundleError::OutputOccupied { dir: paths.out.clone(), file });
        }
        clear_bundle(&paths.replaced)?;
        rename(&paths.out, &paths.replaced)?;
    }
    rename(&paths.partial, &paths.out)?;
    durable::sync_parent(&paths.out)?;
    fault::step().map_err(BundleError::io("rename", &paths.out))
}

/// Stored bits per weight; the weights are counted by the metrics, which know the sizes before
/// padding.
fn bpw<'a>(
    modules: &[layout::Module<'_>],
    metrics: impl Iterator<Item = &'a TensorMetrics>,
    content: &BundleContent<'_>,
) -> Bpw {
    let is_head = |key: &str| Some(key) == content.head.as_deref();
    let is_mtp = |key: &str| content.mtp.as_deref().is_some_and(|mtp| key.starts_with(mtp));
    let weights: HashMap<&str, u64> = metrics.map(|m| (m.key.as_str(), m.k as u64 * m.n as u64)).collect();
    let ratio = |wanted: &dyn Fn(&str) -> bool| {
        let quantized = modules.iter().filter(|m| m.quantized.is_some() && wanted(&m.key));
        let (mut bits, mut count) = (0, 0);
        for module in quantized {
            let coded = module
                .entries
                .iter()
                .filter(|e| [".trellis", ".suh", ".svh"].iter().any(|leaf| e.name.ends_with(leaf)));
            bits += coded.map(|e| e.bytes * 8).sum::<u64>();
            count += weights.get(module.key.as_str()).copied().unwrap_or(0);
        }
        (count > 0).then(|| bits as f64 / count as f64)
    };
    Bpw {
        all: ratio(&|_| true).unwrap_or(0.0),
        decoder: ratio(&|key| !is_head(key) && !is_mtp(key)),
        head: ratio(&is_head),
    }
}
