//! A tensor inside a mapped shard.

use std::path::Path;

use candle_core::{Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;

use super::SourceError;

/// Elements converted by one task.
const CHUNK: usize = 1 << 16;

/// A tensor of a checkpoint: its header entry, checked, and its bytes, unread until asked for.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a> {
    pub(super) key: &'a str,
    pub(super) file: &'a Path,
    pub(super) dtype: Dtype,
    pub(super) shape: &'a [usize],
    pub(super) bytes: &'a [u8],
}

impl<'a> TensorRef<'a> {
    pub fn key(&self) -> &'a str {
        self.key
    }

    /// The shard that holds it.
    pub fn file(&self) -> &'a Path {
        self.file
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// Little-endian elements in row-major order; no alignment is promised.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// All elements, row-major.
    ///
    /// # Errors
    /// [`SourceError::Dtype`] unless the tensor is BF16, F16 or F32.
    pub fn to_f32(&self) -> Result<Vec<f32>, SourceError> {
        let element = self.float()?;
        let mut out = vec![0.0; self.bytes.len() / element.size];
        element.convert(self.bytes, &mut out);
        Ok(out)
    }

    /// The tensor as f32 on the CPU, in its own shape.
    pub fn to_tensor(&self) -> Result<Tensor, SourceError> {
        self.tensor_from(self.to_f32()?, self.shape)
    }

    /// The rows `ids` of a matrix, `[ids.len(), cols]`, f32. Reads those rows only, so an embedding
    /// of any size costs what is looked up.
    ///
    /// # Errors
    /// [`SourceError::Shape`] if the tensor is no matrix or has too few rows.
    pub fn rows_to_tensor(&self, ids: &[u32]) -> Result<Tensor, SourceError> {
        let shape_error = |expected: String| SourceError::Shape {
            path: self.file.to_owned(),
            tensor: self.key.to_owned(),
            expected,
            found: self.shape.to_vec(),
        };
        let &[rows, cols] = self.shape else {
            return Err(shape_error("a matrix".to_owned()));
        };
        let element = self.float()?;
        let row_bytes = cols * element.size;
        let mut out = vec![0.0; ids.len() * cols];
        for (i, &id) in ids.iter().enumerate() {
            let id = id as usize;
            if id >= rows {
                return Err(shape_error(format!("at least {} rows", id + 1)));
            }
            let row = &self.bytes[id * row_bytes..(id + 1) * row_bytes];
            element.convert(row, &mut out[i * cols..(i + 1) * cols]);
        }
        self.tensor_from(out, &[ids.len(), cols])
    }

    fn tensor_from(&self, data: Vec<f32>, shape: &[usize]) -> Result<Tensor, SourceError> {
        Tensor::from_vec(data, shape, &Device::Cpu)
            .map_err(|source| SourceError::Candle { tensor: self.key.to_owned(), source: source.into() })
    }

    fn float(&self) -> Result<Float, SourceError> {
        Float::of(self.dtype).ok_or_else(|| SourceError::Dtype {
            path: self.file.to_owned(),
            tensor: self.key.to_owned(),
            found: format!("{:?}", self.dtype),
        })
    }
}

/// How the elements of one float dtype become f32. All three conversions are exact.
struct Float {
    size: usize,
    to_f32: fn(&[u8], &mut [f32]),
}

impl Float {
    fn of(dtype: Dtype) -> Option<Self> {
        Some(match dtype {
            Dtype::BF16 => {
                Self { size: 2, to_f32: |b, out| each(b, out, |e| bf16::from_le_bytes(e).to_f32()) }
            }
            Dtype::F16 => Self { size: 2, to_f32: |b, out| each(b, out, |e| f16::from_le_bytes(e).to_f32()) },
            Dtype::F32 => Self { size: 4, to_f32: |b, out| each(b, out, f32::from_le_bytes) },
            _ => return None,
        })
    }

    fn convert(&self, bytes: &[u8], out: &mut [f32]) {
        out.par_chunks_mut(CHUNK)
            .zip(bytes.par_chunks(CHUNK * self.size))
            .for_each(|(out, bytes)| (self.to_f32)(bytes, out));
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], to_f32: impl Fn([u8; N]) -> f32) {
    for (out, &element) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = to_f32(element);
    }
}
