//! What several test files need.
#![allow(dead_code)] // every test binary uses its own part

pub mod checkpoint;
pub mod hybrid;
pub mod opencl;
pub mod program;

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use safetensors::SafeTensors;

pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// `tiny-qwen3_5` as a checkpoint folder: its shards are stored compressed, and its tokenizer is
/// `tiny-llama`'s.
pub fn tiny_qwen3_5() -> PathBuf {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tiny-qwen3_5");
        fs::create_dir_all(&dir).unwrap();
        let packed = fs::read_dir(fixture("tiny-qwen3_5")).unwrap().map(|entry| entry.unwrap().path());
        for path in packed.chain([fixture("tiny-llama/tokenizer.json")]) {
            unpack_into(&dir, &path);
        }
        dir
    })
    .clone()
}

/// Another process may be reading an older copy, so a file is replaced whole.
fn unpack_into(dir: &Path, path: &Path) {
    let mut unpacked = tempfile::NamedTempFile::new_in(dir).unwrap();
    if path.extension().is_some_and(|extension| extension == "xz") {
        let mut packed = BufReader::new(File::open(path).unwrap());
        lzma_rs::xz_decompress(&mut packed, &mut unpacked).unwrap();
        unpacked.persist(dir.join(path.file_stem().unwrap())).unwrap();
    } else {
        fs::copy(path, dir.join(path.file_name().unwrap())).unwrap();
    }
}

/// A safetensors fixture, read whole.
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    pub fn open(name: &str) -> Self {
        let path = fixture(name);
        let mut bytes = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        if name.ends_with(".xz") {
            let packed = std::mem::take(&mut bytes);
            lzma_rs::xz_decompress(&mut packed.as_slice(), &mut bytes).unwrap();
        }
        Self { bytes }
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("a valid fixture")
    }

    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.tensors().names().iter().map(ToString::to_string).collect();
        names.sort();
        names
    }

    pub fn shape(&self, name: &str) -> Vec<usize> {
        self.tensors().tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).shape().to_vec()
    }

    pub fn bytes(&self, name: &str) -> Vec<u8> {
        self.tensors().tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data().to_vec()
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        self.bytes(name).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn u16(&self, name: &str) -> Vec<u16> {
        self.bytes(name).chunks_exact(2).map(|b| u16::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn i64(&self, name: &str) -> Vec<i64> {
        self.bytes(name).chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }
}
