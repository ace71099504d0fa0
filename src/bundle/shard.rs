//! Reading one safetensors file without mapping it: the header is checked against the file, the
//! tensors are read one at a time.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{BundleError, DECISION_HEAD};

/// No checkpoint needs a header near this size; the limit keeps a damaged length from being
/// allocated.
const MAX_HEADER_BYTES: u64 = 100 << 20;
const CHUNK_BYTES: usize = 1 << 20;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Offset from the start of the file.
    begin: u64,
    bytes: u64,
}

impl Stored {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// An open safetensors file whose header has been checked: the tensors lie one after the other,
/// fill the file exactly, and are as long as their shapes say.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    file: File,
    tensors: Vec<Stored>,
}

impl Shard {
    /// Opens the file and reads its header.
    ///
    /// # Errors
    /// A header that is longer than the file or no JSON; a name that occurs twice; tensors that
    /// overlap, leave gaps, or are not as long as their shapes say.
    pub fn open(path: &Path) -> Result<Self, BundleError> {
        let file = File::open(path).map_err(BundleError::io("open", path))?;
        let file_bytes = file.metadata().map_err(BundleError::io("read", path))?.len();
        let header_error = |found: u64, problem: &dyn fmt::Display| BundleError::Header {
            path: path.to_owned(),
            found,
            problem: problem.to_string(),
        };
        let mut length = [0; 8];
        if file_bytes < 8 {
            return Err(header_error(file_bytes, &"the file is shorter than the length of its header"));
        }
        file.read_exact_at(&mut length, 0).map_err(BundleError::io("read", path))?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > (file_bytes - 8).min(MAX_HEADER_BYTES) {
            return Err(header_error(header_bytes, &format!("the file has {file_bytes} bytes")));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, 8).map_err(BundleError::io("read", path))?;
        let Header(entries) = serde_json::from_slice(&header).map_err(|e| header_error(header_bytes, &e))?;
        let tensors = laid_out(path, entries, 8 + header_bytes, file_bytes)?;
        Ok(Self { path: path.to_owned(), file, tensors })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors in the order of their bytes.
    pub fn tensors(&self) -> &[Stored] {
        &self.tensors
    }

    pub fn get(&self, name: &str) -> Option<&Stored> {
        self.tensors.iter().find(|t| t.name == name)
    }

    /// The bytes of one tensor of this file.
    pub fn read(&self, tensor: &Stored) -> Result<Vec<u8>, BundleError> {
        let mut bytes = vec![0; tensor.bytes as usize];
        let read = self.file.read_exact_at(&mut bytes, tensor.begin);
        read.map_err(BundleError::io("read", &self.path))?;
        Ok(bytes)
    }

    /// Hands the bytes of one tensor to `take`, in pieces.
    pub fn stream(
        &self,
        tensor: &Stored,
        mut take: impl FnMut(&[u8]) -> Result<(), BundleError>,
    ) -> Result<(), BundleError> {
        let mut chunk = vec![0; CHUNK_BYTES.min(tensor.bytes as usize)];
        let mut done = 0;
        while done < tensor.bytes {
            let len = chunk.len().min((tensor.bytes - done) as usize);
            let read = self.file.read_exact_at(&mut chunk[..len], tensor.begin + done);
            read.map_err(BundleError::io("read", &self.path))?;
            take(&chunk[..len])?;
            done += len as u64;
        }
        Ok(())
    }
}

/// Orders the entries by offset and checks that they fill the file.
fn laid_out(
    path: &Path,
    mut entries: Vec<(String, Entry)>,
    data_begin: u64,
    file_bytes: u64,
) -> Result<Vec<Stored>, BundleError> {
    entries.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut tensors: Vec<Stored> = Vec::with_capacity(entries.len());
    let mut names = std::collections::HashSet::new();
    let mut end = data_begin;
    for (name, Entry { dtype, shape, data_offsets: (from, to) }) in entries {
        let error = |expected: String, found: String| BundleError::Tensor {
            path: path.to_owned(),
            tensor: name.clone(),
            expected,
            found,
        };
        if !names.insert(name.clone()) {
            return Err(BundleError::DuplicateTensor { path: path.to_owned(), tensor: name });
        }
        let begin = data_begin.saturating_add(from);
        if begin != end || to < from {
            return Err(error(format!("offset {}", end - data_begin), format!("offsets {from} to {to}")));
        }
        let bytes = to - from;
        let bits = shape.iter().try_fold(dtype.bitsize() as u64, |bits, &d| bits.checked_mul(d as u64));
        if bits != bytes.checked_mul(8) {
            return Err(error(format!("{dtype:?} {shape:?}"), format!("{bytes} bytes")));
        }
        end = begin.saturating_add(bytes);
        tensors.push(Stored { name, dtype, shape, begin, bytes });
    }
    if end != file_bytes {
        return Err(BundleError::FileLength { path: path.to_owned(), expected: end, found: file_bytes });
    }
    Ok(tensors)
}

#[derive(Deserialize)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// The header as a list, because a map would hide a name that occurs twice.
struct Header(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a safetensors header")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Header(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

/// Every `*.safetensors` file in `dir` in the order of their names, but for a decision head's: what
/// a loader reads.
pub fn shard_files(dir: &Path) -> Result<Vec<PathBuf>, BundleError> {
    let list = || -> io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            let is_head = path.file_name().is_some_and(|name| name == DECISION_HEAD);
            if path.extension().is_some_and(|e| e == "safetensors") && !is_head {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    };
    list().map_err(BundleError::io("list", dir))
}
