//! The encoder on the CPU, with the widest instruction set that the processor has.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod kernel;
mod lanes;
mod portable;

use std::cell::RefCell;

use rayon::prelude::*;

use super::trace::values_of;
use super::{EncodeError, TileEncoder, TrellisSpec, check_tiles};
use kernel::Scratch;
use portable::Portable;

/// An instruction set of the CPU encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimdLevel {
    Portable,
    Avx2,
    Avx512,
}

impl SimdLevel {
    pub const ALL: [SimdLevel; 3] = [SimdLevel::Portable, SimdLevel::Avx2, SimdLevel::Avx512];

    pub fn name(self) -> &'static str {
        match self {
            SimdLevel::Portable => "portable",
            SimdLevel::Avx2 => "avx2",
            SimdLevel::Avx512 => "avx512",
        }
    }
}

#[derive(Clone, Copy)]
enum Kernel {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
}

impl Kernel {
    fn detect(level: SimdLevel) -> Option<Self> {
        match level {
            SimdLevel::Portable => Some(Kernel::Portable),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => avx2::Avx2::detect().map(Kernel::Avx2),
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => avx512::Avx512::detect().map(Kernel::Avx512),
            #[cfg(not(target_arch = "x86_64"))]
            _ => None,
        }
    }
}

/// The CPU encoder.
pub struct Cpu {
    level: SimdLevel,
    kernel: Kernel,
}

thread_local! {
    /// Several MiB per thread: too much to allocate for every tile.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Cpu {
    /// The encoder with the widest instruction set of this processor.
    pub fn detect() -> Self {
        let widest = SimdLevel::ALL.into_iter().rev().find_map(|level| Self::with_level(level).ok());
        widest.unwrap_or(Self { level: SimdLevel::Portable, kernel: Kernel::Portable })
    }

    pub fn level(&self) -> SimdLevel {
        self.level
    }

    /// The encoder with this instruction set.
    ///
    /// # Errors
    /// The processor does not have it.
    pub fn with_level(level: SimdLevel) -> Result<Self, EncodeError> {
        let kernel = Kernel::detect(level).ok_or(EncodeError::Unavailable { name: level.name() })?;
        Ok(Self { level, kernel })
    }
}

impl TileEncoder for Cpu {
    fn name(&self) -> &str {
        self.level.name()
    }

    fn encode(&self, spec: &TrellisSpec, tiles: &[f32], states: &mut [u16]) -> Result<(), EncodeError> {
        check_tiles(spec, tiles, states)?;
        let values = values_of(spec);
        tiles.par_chunks_exact(spec.len()).zip(states.par_chunks_exact_mut(spec.len())).for_each(
            |(tile, states)| {
                SCRATCH.with_borrow_mut(|scratch| match self.kernel {
                    Kernel::Portable => kernel::encode_tile(Portable, spec, values, tile, states, scratch),
                    #[cfg(target_arch = "x86_64")]
                    Kernel::Avx2(lanes) => lanes.encode_tile(spec, values, tile, states, scratch),
                    #[cfg(target_arch = "x86_64")]
                    Kernel::Avx512(lanes) => lanes.encode_tile(spec, values, tile, states, scratch),
                })
            },
        );
        Ok(())
    }
}
