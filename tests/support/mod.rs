//! What several test files need.
#![allow(dead_code)] // every test binary uses its own part

pub mod checkpoint;
pub mod opencl;
pub mod program;

use std::path::PathBuf;

use safetensors::SafeTensors;

pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// A safetensors fixture, read whole.
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    pub fn open(name: &str) -> Self {
        let path = fixture(name);
        Self { bytes: std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())) }
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
