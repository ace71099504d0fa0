//! The files: hashes, strays, shard headers, index.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::bundle::{BundleError, INDEX, PROVENANCE, Provenance, Shard, Stored, durable};
use crate::bundle::{is_bundle_file, list_files, shard_files};

use super::VerifyReport;

/// Every tensor a loader would find.
#[derive(Debug, Default)]
pub(super) struct Shards {
    shards: Vec<Shard>,
    tensors: BTreeMap<String, (usize, Stored)>,
    /// Whether every `*.safetensors` file could be opened: only then is a tensor known to be missing.
    pub all_readable: bool,
}

impl Shards {
    pub fn get(&self, name: &str) -> Option<(&Shard, &Stored)> {
        self.tensors.get(name).map(|(at, stored)| (&self.shards[*at], stored))
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = &Stored> {
        self.tensors.values().map(|(_, stored)| stored)
    }
}

/// The recorded length and sha256 of every file, and that no other weights lie around.
pub(super) fn check_hashes(
    bundle: &Path,
    report: &mut VerifyReport,
) -> Result<Option<Provenance>, BundleError> {
    // Loaders take every file of this kind, whatever its name.
    for name in list_files(bundle)?.iter().filter(|name| name.ends_with(".safetensors")) {
        report.check(
            "files",
            name,
            is_bundle_file(name),
            "only the bundle's own safetensors files",
            "a stray file",
        );
    }
    let has_provenance = bundle.join(PROVENANCE).exists();
    let provenance = Provenance::read(bundle);
    if !has_provenance {
        return Ok(None);
    }
    let Some(Some(provenance)) = report.try_to("files", PROVENANCE, "a readable record", provenance) else {
        return Ok(None);
    };
    for file in &provenance.files {
        // The record is not trusted: a name could lead out of the folder, or to a device without end.
        if !is_bundle_file(&file.name) {
            report.check("files", &file.name, false, "the name of a file of a bundle", "another name");
            continue;
        }
        let digest = durable::digest(&bundle.join(&file.name));
        let Some(found) = report.try_to("files", &file.name, "a readable file", digest) else { continue };
        let text = |bytes: u64, sha256: &str| format!("{bytes} bytes, sha256 {sha256}");
        let (expected, found) = (text(file.bytes, &file.sha256), text(found.bytes, &found.sha256));
        report.check("files", &file.name, expected == found, &expected, &found);
    }
    for name in list_files(bundle)?.iter().filter(|name| name.ends_with(".safetensors")) {
        let is_listed = provenance.files.iter().any(|f| f.name == *name);
        report.check("files", name, is_listed, format_args!("a file listed in {PROVENANCE}"), "not listed");
    }
    Ok(Some(provenance))
}

/// Opens every shard; a name must occur only once.
pub(super) fn open_shards(bundle: &Path, report: &mut VerifyReport) -> Result<Shards, BundleError> {
    let mut all = Shards { all_readable: true, ..Shards::default() };
    let files = shard_files(bundle)?;
    report.check("shard", "*.safetensors", !files.is_empty(), "at least one file", "none");
    for path in files {
        let name = file_name(&path);
        let Some(shard) = report.try_to("shard", &name, "a whole safetensors file", Shard::open(&path))
        else {
            all.all_readable = false;
            continue;
        };
        for stored in shard.tensors() {
            let earlier = all.tensors.insert(stored.name.clone(), (all.shards.len(), stored.clone()));
            let earlier = earlier.map(|(at, _)| file_name(all.shards[at].path()));
            let found = format_args!("in {name} and {}", earlier.as_deref().unwrap_or_default()).to_string();
            report.check("tensor_set", &stored.name, earlier.is_none(), "in one file", found);
        }
        all.shards.push(shard);
    }
    Ok(all)
}

/// The index, needed as soon as there are two shards, is what the shards hold.
pub(super) fn check_index(bundle: &Path, shards: &Shards, report: &mut VerifyReport) {
    let path = bundle.join(INDEX);
    if !path.exists() {
        let own = shards.shards.iter().filter(|s| is_bundle_file(&file_name(s.path()))).count();
        report.check("index", INDEX, own <= 1, "an index of several shards", "no file");
        return;
    }
    let Some(text) = report.try_to("index", INDEX, "a readable file", fs::read(&path)) else { return };
    let parsed = serde_json::from_slice::<Value>(&text);
    let Some(index) = report.try_to("index", INDEX, "JSON", parsed) else { return };
    let none = Map::new();
    let listed = index.get("weight_map").and_then(Value::as_object).unwrap_or(&none);
    for (name, (at, _)) in &shards.tensors {
        let file = json!(file_name(shards.shards[*at].path()));
        let found = listed.get(name);
        let shown = found.map_or("nothing".to_owned(), Value::to_string);
        report.check("index", name, found == Some(&file), &file, shown);
    }
    if shards.all_readable {
        for name in listed.keys().filter(|name| !shards.tensors.contains_key(*name)) {
            report.check("index", name, false, "a stored tensor", "in the index only");
        }
        let total: u64 = shards.tensors().map(Stored::bytes).sum();
        let found = index.pointer("/metadata/total_size").cloned().unwrap_or_default();
        report.check("index", "total_size", found == json!(total), total, &found);
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
