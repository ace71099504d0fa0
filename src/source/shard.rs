//! One safetensors file: its map and its checked header.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensorError, SafeTensors};

use super::{SourceError, mmap};

/// Bytes of the length field in front of a safetensors header.
const LENGTH_BYTES: usize = 8;

/// One memory-mapped safetensors file.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    map: Mmap,
}

/// Where one tensor lies. `range` is in bytes of the file, inside it, and exactly as long as
/// `dtype` and `shape` say.
#[derive(Debug)]
pub(super) struct Entry {
    pub key: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub range: Range<usize>,
}

impl Shard {
    /// Maps `path` and checks its header. The entries come in file order.
    pub(super) fn open(path: &Path) -> Result<(Shard, Vec<Entry>), SourceError> {
        let io = |source| SourceError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Err(SourceError::EmptyShard { path: path.to_owned() });
        }
        let shard = Shard { path: path.to_owned(), map: mmap::map(&file).map_err(io)? };
        let entries = shard.read_header()?;
        Ok((shard, entries))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file, header included.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    fn read_header(&self) -> Result<Vec<Entry>, SourceError> {
        let bytes = self.bytes();
        let file_bytes = bytes.len() as u64;
        let header_bytes = match bytes.first_chunk::<LENGTH_BYTES>() {
            Some(length) => u64::from_le_bytes(*length),
            None => LENGTH_BYTES as u64,
        };
        if header_bytes.checked_add(LENGTH_BYTES as u64).is_none_or(|end| end > file_bytes) {
            return Err(SourceError::HeaderTooLong { path: self.path.clone(), header_bytes, file_bytes });
        }
        let (header_len, metadata) =
            SafeTensors::read_metadata(bytes).map_err(|source| self.header_error(source))?;
        let data_start = LENGTH_BYTES + header_len;
        let mut entries: Vec<Entry> = metadata
            .tensors()
            .into_iter()
            .map(|(key, info)| Entry {
                key,
                dtype: info.dtype,
                shape: info.shape.clone(),
                range: data_start + info.data_offsets.0..data_start + info.data_offsets.1,
            })
            .collect();
        entries.sort_by(|a, b| (a.range.start, &a.key).cmp(&(b.range.start, &b.key)));
        Ok(entries)
    }

    /// The header's length is known to fit. A header that is valid but describes another number of
    /// bytes is the common case of a broken download, so it gets its own words.
    fn header_error(&self, source: SafeTensorError) -> SourceError {
        let path = self.path.clone();
        let data_bytes = || {
            let header_len = u64::from_le_bytes(*self.bytes().first_chunk::<LENGTH_BYTES>()?) as usize;
            let header = self.bytes().get(LENGTH_BYTES..LENGTH_BYTES + header_len)?;
            let json: serde_json::Value = serde_json::from_slice(header).ok()?;
            let ends = json.as_object()?.values().filter_map(|info| info["data_offsets"][1].as_u64());
            Some((ends.max()?, (self.bytes().len() - LENGTH_BYTES - header_len) as u64))
        };
        match (&source, data_bytes()) {
            (SafeTensorError::MetadataIncompleteBuffer, Some((expected_bytes, file_bytes))) => {
                SourceError::FileSize { path, expected_bytes, file_bytes }
            }
            _ => SourceError::Header { path, source },
        }
    }
}
