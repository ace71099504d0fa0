//! Hidden states of all calibration rows between two layers, and their cache on disk.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors, View, serialize};
use sha2::{Digest, Sha256};

use super::CaptureError;
use crate::bundle::durable;
use crate::model::{Layer, Model, ModelError, NoTap, WeightSource};

/// Share of rows that may turn non-finite, as a divisor.
const EXCLUDED_LIMIT: usize = 10;
const NAME: &str = "states";

/// A row that turned non-finite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excluded {
    pub row: usize,
    /// The layer behind which it was found.
    pub unit: String,
}

/// The state of every row in front of layer `layer`: `[t, hidden]`, or nothing for a row that is
/// excluded.
pub struct States {
    layer: usize,
    rows: Vec<Option<Tensor>>,
}

impl States {
    /// The embeddings of `tokens`.
    pub fn embed(
        model: &Model,
        weights: &dyn WeightSource,
        tokens: &[Vec<u32>],
    ) -> Result<Self, CaptureError> {
        let rows = tokens.iter().map(|ids| model.embed(weights, ids).map(Some)).collect::<Result<_, _>>()?;
        Ok(Self { layer: 0, rows })
    }

    /// The layer that comes next.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Rows that are left out.
    pub fn excluded(&self) -> Vec<usize> {
        (0..self.rows.len()).filter(|&row| self.rows[row].is_none()).collect()
    }

    /// Runs every row through a layer as it was written, and excludes the rows that turn
    /// non-finite in it. Returns those.
    ///
    /// # Errors
    /// More than a tenth of all rows are excluded.
    pub fn advance(&mut self, layer: &Layer, unit: &str) -> Result<Vec<Excluded>, CaptureError> {
        let advanced: Vec<Option<Tensor>> = self
            .rows
            .par_iter()
            .map(|row| row.as_ref().map(|x| layer.forward(x, &mut NoTap)).transpose())
            .collect::<Result<_, ModelError>>()?;
        let mut excluded = Vec::new();
        for (row, (state, next)) in self.rows.iter_mut().zip(advanced).enumerate() {
            *state = match next {
                Some(x) if !is_finite(&x)? => {
                    excluded.push(Excluded { row, unit: unit.to_owned() });
                    None
                }
                next => next,
            };
        }
        self.layer += 1;
        let gone = self.rows.iter().filter(|row| row.is_none()).count();
        if gone * EXCLUDED_LIMIT > self.rows.len() {
            let first = self.rows.iter().position(Option::is_none).unwrap_or(0);
            let (unit, rows) = (unit.to_owned(), self.rows.len());
            return Err(CaptureError::TooManyRows { unit, excluded: gone, rows, first });
        }
        Ok(excluded)
    }

    /// Calls `work` with the rows that are left, in order, at most `batch` at a time.
    pub(super) fn for_each_batch<'a>(
        &'a self,
        batch: usize,
        mut work: impl FnMut(Batch<'a>) -> Result<(), CaptureError>,
    ) -> Result<(), CaptureError> {
        let rows = self.rows.iter().enumerate();
        let rows: Vec<(usize, &Tensor)> = rows.filter_map(|(row, x)| Some((row, x.as_ref()?))).collect();
        rows.chunks(batch).try_for_each(|rows| work(Batch(rows.to_vec())))
    }

    /// Saves the states in `dir` and removes older ones. They are a cache: a run that finds none
    /// computes them again.
    pub fn save(&self, dir: &Path) -> Result<(), CaptureError> {
        let mut hash = Sha256::new();
        let mut views = Vec::new();
        for (row, state) in self.rows.iter().enumerate() {
            let Some(state) = state else { continue };
            hash.update(little_endian(state));
            views.push((format!("{row:06}"), RowView { state }));
        }
        let path = cache_path(dir, self.layer);
        let metadata = HashMap::from([
            ("rows".to_owned(), self.rows.len().to_string()),
            ("sha256".to_owned(), hex(hash)),
        ]);
        let file = serialize(views, Some(metadata)).map_err(|e| damaged(&path, &e.to_string()))?;
        durable::write(&path, |sink| sink.write_all(&file))?;
        for (layer, old) in cached(dir)? {
            if layer != self.layer {
                let _ = fs::remove_file(old);
            }
        }
        Ok(())
    }

    /// The newest states in `dir` that lie no further than `layer`. A file that is damaged is
    /// passed over.
    pub fn newest(dir: &Path, layer: usize, rows: usize) -> Result<Option<Self>, CaptureError> {
        let mut found = cached(dir)?;
        found.retain(|(at, _)| *at <= layer);
        found.sort();
        Ok(found.into_iter().rev().find_map(|(at, path)| load(&path, at, rows).ok()))
    }
}

/// A row as safetensors stores it, converted when it is its turn.
struct RowView<'a> {
    state: &'a Tensor,
}

impl View for RowView<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        self.state.dims()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        little_endian(self.state).into()
    }

    fn data_len(&self) -> usize {
        self.state.elem_count() * size_of::<f32>()
    }
}

/// The f32 values of a state. Should candle fail to read its own memory, the file ends up shorter
/// than its header says and is passed over when it is loaded.
fn little_endian(state: &Tensor) -> Vec<u8> {
    let values = state.flatten_all().and_then(|x| x.to_vec1::<f32>()).unwrap_or_default();
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Rows that run at the same time, with their numbers.
pub(super) struct Batch<'a>(Vec<(usize, &'a Tensor)>);

impl Batch<'_> {
    /// `f` of every row, computed in parallel, in order.
    pub fn try_map<T: Send>(
        &self,
        f: impl Fn(usize, &Tensor) -> Result<T, ModelError> + Sync,
    ) -> Result<Vec<T>, ModelError> {
        self.0.par_iter().map(|&(row, x)| f(row, x)).collect()
    }
}

fn is_finite(x: &Tensor) -> Result<bool, CaptureError> {
    Ok(x.flatten_all()?.to_vec1::<f32>()?.iter().all(|v| v.is_finite()))
}

fn cache_path(dir: &Path, layer: usize) -> PathBuf {
    dir.join(format!("{NAME}-{layer:05}.safetensors"))
}

/// The cache files of `dir` with their layers.
fn cached(dir: &Path) -> Result<Vec<(usize, PathBuf)>, CaptureError> {
    let unreadable = |source| CaptureError::Read { path: dir.display().to_string(), source };
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let layer = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.strip_prefix(NAME)?.strip_prefix('-')?.strip_suffix(".safetensors"))
            .and_then(|digits| digits.parse().ok());
        found.extend(layer.map(|layer| (layer, path)));
    }
    Ok(found)
}

fn load(path: &Path, layer: usize, rows: usize) -> Result<States, CaptureError> {
    let bytes =
        fs::read(path).map_err(|source| CaptureError::Read { path: path.display().to_string(), source })?;
    let broken = |e: safetensors::SafeTensorError| damaged(path, &e.to_string());
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(broken)?;
    let metadata = header.metadata().clone().unwrap_or_default();
    if metadata.get("rows") != Some(&rows.to_string()) {
        return Err(damaged(path, "holds another number of rows"));
    }
    let tensors = SafeTensors::deserialize(&bytes).map_err(broken)?;
    let mut states: Vec<Option<Tensor>> = vec![None; rows];
    let mut hash = Sha256::new();
    let mut names = tensors.names();
    names.sort();
    for name in names {
        let view = tensors.tensor(name).map_err(broken)?;
        let row = name.parse::<usize>().ok().filter(|&row| row < rows);
        let row = row.ok_or_else(|| damaged(path, "holds a row that does not exist"))?;
        hash.update(view.data());
        let data: Vec<f32> = view.data().as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        states[row] = Some(Tensor::from_vec(data, view.shape(), &Device::Cpu)?);
    }
    if metadata.get("sha256") != Some(&hex(hash)) {
        return Err(damaged(path, "does not match its checksum"));
    }
    Ok(States { layer, rows: states })
}

fn damaged(path: &Path, what: &str) -> CaptureError {
    CaptureError::Cache { path: path.display().to_string(), what: what.to_owned() }
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_states_come_back_with_the_rows_that_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let row = |value: f32| Tensor::from_vec(vec![value; 6], (2, 3), &Device::Cpu).unwrap();
        let states = States { layer: 4, rows: vec![Some(row(-0.0)), None, Some(row(1e-41)), None] };
        states.save(dir.path()).unwrap();
        assert!(States::newest(dir.path(), 3, 4).unwrap().is_none(), "they lie behind layer 3");
        assert!(States::newest(dir.path(), 5, 3).unwrap().is_none(), "of another number of rows");
        let loaded = States::newest(dir.path(), 5, 4).unwrap().unwrap();
        assert_eq!((loaded.layer(), loaded.excluded()), (4, vec![1, 3]));
        for (a, b) in states.rows.iter().flatten().zip(loaded.rows.iter().flatten()) {
            assert_eq!(a.dims(), b.dims());
            assert_eq!(little_endian(a), little_endian(b));
        }
    }
}
