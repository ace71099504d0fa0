//! Why an OpenCL device cannot encode.

use std::time::Duration;

use thiserror::Error;

use crate::format::Bits;

#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenClError {
    #[error("no OpenCL device: {reason}")]
    NoDevice { reason: String },
    #[error("no OpenCL device {found}; there are {count}, counted from 0")]
    NoSuchDevice { found: usize, count: usize },
    #[error("{device}: {call} failed with {code}")]
    Call { device: String, call: &'static str, code: String, memory: bool },
    #[error("{device}: the driver does not compile the kernels ({options}): {log}")]
    Build { device: String, options: String, log: String },
    #[error("{device}: the encoder does not run here: {reason}")]
    Unsuitable { device: String, reason: String },
    #[error(
        "{device}: the encoder needs {needed} bytes for one tile at {bits} bits; {available} are available \
         ({total} less a reserve of {reserve})"
    )]
    Memory { device: String, bits: Bits, needed: u64, available: u64, total: u64, reserve: u64 },
    #[error("{device}: no answer within {} s; the driver or the device hangs", limit.as_secs())]
    Deadline { device: String, limit: Duration },
    #[error("{device}: tile {tile} at {bits} bits differs from the CPU encoder's ({variant})")]
    WrongResult { device: String, bits: Bits, tile: usize, variant: String },
}

impl OpenClError {
    /// Whether the device ran out of memory, so that less may do.
    pub(super) fn is_memory(&self) -> bool {
        matches!(self, Self::Call { memory: true, .. })
    }

    /// What the user can do about it, where that is not obvious.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoDevice { .. } => {
                Some("install the device's OpenCL driver and an ICD loader, or use --backend cpu")
            }
            Self::NoSuchDevice { .. } => Some("`exl3-candle devices` lists them"),
            Self::Memory { .. } => Some("raise --device-memory, lower --reserve-gib, or use --backend cpu"),
            Self::Deadline { .. } => Some(
                "what was committed is on disk: run the same command again, with --backend cpu if it recurs",
            ),
            Self::Build { .. } | Self::WrongResult { .. } | Self::Unsuitable { .. } => {
                Some("use --backend cpu, or another device")
            }
            Self::Call { .. } => None,
        }
    }
}
