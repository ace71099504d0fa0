//! Rows that were tokenized elsewhere.

use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use super::{CorpusError, Shape};

type Rows = Vec<Vec<u32>>;

/// The rows of `{"format": .., "rows": [[ids], ..], ..}`; other keys are metadata.
pub(super) fn json(file: &Path, shape: Shape, least: usize) -> Result<Rows, CorpusError> {
    #[derive(Deserialize)]
    struct Document {
        rows: Vec<Vec<u32>>,
    }
    let bytes = read(file)?;
    let document: Document =
        serde_json::from_slice(&bytes).map_err(|source| CorpusError::Rows { path: file.into(), source })?;
    crop(file, document.rows.into_iter(), shape, least)
}

/// The rows of the tensor `input_ids` `[rows, cols]`, I64 or I32.
pub(super) fn safetensors(file: &Path, shape: Shape, least: usize) -> Result<Rows, CorpusError> {
    let bytes = read(file)?;
    let broken = |source| CorpusError::Safetensors { path: file.into(), source };
    let tensor = SafeTensors::deserialize(&bytes).map_err(broken)?.tensor("input_ids").map_err(broken)?;
    let content =
        |expected: &str, found| CorpusError::Content { path: file.into(), expected: expected.into(), found };
    let &[_, cols] = tensor.shape() else {
        return Err(content("input_ids of shape [rows, cols]", format!("shape {:?}", tensor.shape())));
    };
    let ids: Vec<i64> = match tensor.dtype() {
        Dtype::I64 => numbers(tensor.data(), i64::from_le_bytes),
        Dtype::I32 => numbers(tensor.data(), |four| i32::from_le_bytes(four).into()),
        other => return Err(content("input_ids of dtype I64 or I32", format!("{other:?}"))),
    };
    let ids: Vec<u32> = ids
        .into_iter()
        .map(|id| u32::try_from(id).map_err(|_| content("token ids", format!("{id}"))))
        .collect::<Result<_, _>>()?;
    // A tensor with no columns has rows all the same, each too short.
    let rows: Rows = match cols {
        0 => vec![Vec::new(); tensor.shape()[0].min(1)],
        _ => ids.chunks_exact(cols).map(<[u32]>::to_vec).collect(),
    };
    crop(file, rows.into_iter(), shape, least)
}

fn read(file: &Path) -> Result<Vec<u8>, CorpusError> {
    std::fs::read(file).map_err(|source| CorpusError::Read { path: file.into(), source })
}

fn numbers<const N: usize>(data: &[u8], number: impl Fn([u8; N]) -> i64) -> Vec<i64> {
    data.as_chunks::<N>().0.iter().map(|&bytes| number(bytes)).collect()
}

/// The first `shape.rows` rows, or all where there are fewer but `least`, cropped to `shape.cols`.
fn crop(
    file: &Path,
    rows: impl ExactSizeIterator<Item = Vec<u32>>,
    shape: Shape,
    least: usize,
) -> Result<Rows, CorpusError> {
    let path = file.to_path_buf();
    if rows.len() < least {
        return Err(CorpusError::TooFewRows { path, shape, need: least, have: rows.len() });
    }
    rows.take(shape.rows)
        .enumerate()
        .map(|(row, mut ids)| {
            if ids.len() < shape.cols {
                return Err(CorpusError::ShortRow {
                    path: path.clone(),
                    shape,
                    row,
                    need: shape.cols,
                    have: ids.len(),
                });
            }
            ids.truncate(shape.cols);
            Ok(ids)
        })
        .collect()
}
