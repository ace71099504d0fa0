//! One pass over all shards: the hash of their bytes, and a look for NaN and infinity.

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;
use sha2::{Digest, Sha256};

use super::{Shard, SourceError, TensorRef};

/// Bytes hashed and checked together, so that each page is read from disk once.
const BLOCK_BYTES: usize = 16 << 20;

/// The sha256 over `config` and the contents of `shards`, in hex; `tensors` holds those of each
/// shard.
pub(super) fn check_and_hash(
    config: &[u8],
    shards: &[Shard],
    tensors: &[Vec<TensorRef<'_>>],
) -> Result<String, SourceError> {
    let digests: Vec<Result<[u8; 32], SourceError>> =
        shards.par_iter().zip(tensors).map(|(shard, tensors)| scan_shard(shard, tensors)).collect();
    let mut hasher = Sha256::new();
    hasher.update(Sha256::digest(config));
    for digest in digests {
        hasher.update(digest?);
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn scan_shard(shard: &Shard, tensors: &[TensorRef<'_>]) -> Result<[u8; 32], SourceError> {
    let bytes = shard.bytes();
    // The bytes of a tensor are a part of its shard's, so their addresses give its place.
    let base = bytes.as_ptr() as usize;
    let mut spans: Vec<Span<'_>> = tensors
        .iter()
        .filter_map(|&tensor| {
            let (size, find) = non_finite_search(tensor.dtype)?;
            Some(Span { start: tensor.bytes.as_ptr() as usize - base, tensor, size, find })
        })
        .collect();
    spans.sort_by_key(|span| span.start);

    let mut hasher = Sha256::new();
    for start in (0..bytes.len()).step_by(BLOCK_BYTES) {
        let end = bytes.len().min(start + BLOCK_BYTES);
        let (_, checked) = rayon::join(
            || hasher.update(&bytes[start..end]),
            || spans.iter().try_for_each(|span| span.check(start, end)),
        );
        checked?;
    }
    Ok(hasher.finalize().into())
}

/// A float tensor at byte `start` of its file.
struct Span<'a> {
    start: usize,
    tensor: TensorRef<'a>,
    size: usize,
    find: Search,
}

impl Span<'_> {
    /// Checks the elements whose first byte lies in bytes `from..to` of the file.
    fn check(&self, from: usize, to: usize) -> Result<(), SourceError> {
        let count = self.tensor.bytes.len() / self.size;
        let element_at = |byte: usize| byte.saturating_sub(self.start).div_ceil(self.size).min(count);
        let (first, last) = (element_at(from), element_at(to));
        let elements = &self.tensor.bytes[first * self.size..last * self.size];
        match (self.find)(elements) {
            None => Ok(()),
            Some(at) => Err(self.non_finite(first + at)),
        }
    }

    fn non_finite(&self, index: usize) -> SourceError {
        let bytes = &self.tensor.bytes[index * self.size..];
        SourceError::NonFinite {
            path: self.tensor.file.to_owned(),
            tensor: self.tensor.key.to_owned(),
            index,
            value: match self.tensor.dtype {
                Dtype::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
                Dtype::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
                Dtype::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).into(),
                _ => f64::NAN,
            },
        }
    }
}

/// Finds the first element that is not finite.
type Search = fn(&[u8]) -> Option<usize>;

/// Element size in bytes of a float dtype, and its search. An exponent of all ones is infinity or
/// NaN, and the exponent lies in the two top bytes.
fn non_finite_search(dtype: Dtype) -> Option<(usize, Search)> {
    Some(match dtype {
        Dtype::BF16 => (2, |b| first::<2>(b, 0x7f80)),
        Dtype::F16 => (2, |b| first::<2>(b, 0x7c00)),
        Dtype::F32 => (4, |b| first::<4>(b, 0x7f80)),
        Dtype::F64 => (8, |b| first::<8>(b, 0x7ff0)),
        _ => return None,
    })
}

fn first<const N: usize>(bytes: &[u8], exponent: u16) -> Option<usize> {
    let (elements, _) = bytes.as_chunks::<N>();
    let bad = |e: &[u8; N]| u16::from_le_bytes([e[N - 2], e[N - 1]]) & exponent == exponent;
    // A fold without early exit over short runs is what the compiler vectorizes.
    let run = elements.chunks(1024).position(|run| run.iter().fold(false, |any, e| any | bad(e)))?;
    let start = run * 1024;
    elements[start..].iter().position(bad).map(|at| start + at)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Blocks that split elements and tensors anywhere find every element in exactly one block.
    #[test]
    fn elements_across_block_borders_are_checked_once() {
        let start = 7;
        for (dtype, bad) in [
            (Dtype::BF16, bf16::NAN.to_le_bytes().to_vec()),
            (Dtype::F16, f16::NEG_INFINITY.to_le_bytes().to_vec()),
            (Dtype::F32, f32::INFINITY.to_le_bytes().to_vec()),
            (Dtype::F64, f64::NAN.to_le_bytes().to_vec()),
        ] {
            let (size, find) = non_finite_search(dtype).unwrap();
            for at in 0..9 {
                let mut bytes = vec![0u8; 9 * size];
                bytes[at * size..(at + 1) * size].copy_from_slice(&bad);
                let tensor = TensorRef { key: "t", file: Path::new("f"), dtype, shape: &[9], bytes: &bytes };
                let span = Span { start, tensor, size, find };
                for block in 1..40 {
                    let found: Vec<_> = (0..start + bytes.len())
                        .step_by(block)
                        .filter_map(|from| span.check(from, from + block).err())
                        .collect();
                    assert!(
                        matches!(found[..], [SourceError::NonFinite { index, .. }] if index == at),
                        "{dtype:?}, element {at}, blocks of {block}: {found:?}"
                    );
                }
            }
        }
    }
}
