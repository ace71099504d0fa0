//! How much of a device's memory may be used, and the one set of buffers that is used for it.

use super::super::TrellisSpec;
use super::OpenClError;
use super::device::{Arithmetic, DeviceInfo};
use super::driver::{Memory, Residence, Session};
use super::variant::stride;

/// What an encoder may allocate on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPolicy {
    /// Bytes that are left to others.
    pub reserve_bytes: u64,
    /// At most this much, whatever the device has.
    pub limit_bytes: Option<u64>,
    /// Free memory of the host: all there is for a device that computes in it.
    pub host_available_bytes: u64,
}

/// Bytes of the buffers for a batch, by purpose. The estimate is exact: these are the allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// The codebook's values.
    pub table: u64,
    /// One tile: its weights, states, start node and history of costs.
    pub per_tile: u64,
    /// The history alone, the largest buffer.
    pub history_per_tile: u64,
}

impl Estimate {
    pub fn of(spec: &TrellisSpec, device: &DeviceInfo) -> Self {
        let len = spec.len() as u64;
        let history = len * stride(spec) as u64 * size_of::<u16>() as u64;
        let weights_and_states = len * (size_of::<f32>() + size_of::<u16>()) as u64;
        let per_tile = history + weights_and_states + size_of::<u16>() as u64;
        let value = match device.arithmetic {
            Arithmetic::Emulated => size_of::<f32>(),
            _ => size_of::<u16>(),
        };
        Self { table: 65536 * value as u64, per_tile, history_per_tile: history }
    }

    pub fn bytes(&self, tiles: usize) -> u64 {
        self.table + tiles as u64 * self.per_tile
    }
}

impl MemoryPolicy {
    /// Bytes that may be allocated on `device`.
    pub fn budget(&self, device: &DeviceInfo) -> u64 {
        let total = self.total(device).saturating_sub(self.reserve_bytes);
        self.limit_bytes.map_or(total, |limit| total.min(limit))
    }

    fn total(&self, device: &DeviceInfo) -> u64 {
        match device.unified_memory {
            true => device.memory_bytes.min(self.host_available_bytes),
            false => device.memory_bytes,
        }
    }

    /// The most tiles that the budget and the largest buffer allow at a time.
    ///
    /// # Errors
    /// Not even one.
    pub fn most_tiles(&self, spec: &TrellisSpec, device: &DeviceInfo) -> Result<usize, OpenClError> {
        let estimate = Estimate::of(spec, device);
        let budget = self.budget(device);
        let by_budget = budget.saturating_sub(estimate.table) / estimate.per_tile;
        let by_buffer = device.max_buffer_bytes / estimate.history_per_tile;
        match by_budget.min(by_buffer) {
            0 => Err(OpenClError::Memory {
                device: device.name.clone(),
                bits: spec.bits(),
                needed: estimate.bytes(1),
                available: budget.min(device.max_buffer_bytes),
                total: self.limit_bytes.unwrap_or(u64::MAX).min(self.total(device)),
                reserve: self.reserve_bytes,
            }),
            tiles => Ok(usize::try_from(tiles).unwrap_or(usize::MAX)),
        }
    }
}

/// The buffers of a batch. They are kept between calls and bit rates, and replaced when a batch needs
/// larger ones.
pub struct Arena {
    pub tiles: Memory<f32>,
    pub start: Memory<u16>,
    pub states: Memory<u16>,
    pub history: Memory<u16>,
    residence: Residence,
}

impl Arena {
    fn new(
        session: &Session,
        spec: &TrellisSpec,
        tiles: usize,
        residence: Residence,
    ) -> Result<Self, OpenClError> {
        let weights = tiles * spec.len();
        Ok(Self {
            tiles: session.allocate(weights, Residence::Device)?,
            start: session.allocate(tiles, Residence::Device)?,
            states: session.allocate(weights, Residence::Device)?,
            history: session.allocate(weights * stride(spec), residence)?,
            residence,
        })
    }

    /// Tiles of `spec` that fit.
    fn capacity(&self, spec: &TrellisSpec) -> usize {
        let by_weights = self.tiles.len() / spec.len();
        by_weights.min(self.start.len()).min(self.history.len() / (spec.len() * stride(spec)))
    }

    /// Makes room for up to `tiles` tiles in `arena`, and says for how many there is. What was there is
    /// given back first; where the device refuses, half as many are tried.
    ///
    /// # Errors
    /// Not even one tile fits. Nothing stays allocated then.
    pub fn reserve(
        arena: &mut Option<Self>,
        session: &Session,
        spec: &TrellisSpec,
        tiles: usize,
        residence: Residence,
    ) -> Result<usize, OpenClError> {
        if let Some(kept) = arena.as_ref().filter(|kept| kept.residence == residence) {
            let capacity = kept.capacity(spec);
            if capacity >= tiles {
                return Ok(tiles);
            }
        }
        *arena = None;
        let mut tiles = tiles;
        loop {
            match Self::new(session, spec, tiles, residence) {
                Ok(made) => {
                    *arena = Some(made);
                    return Ok(tiles);
                }
                Err(error) if error.is_memory() && tiles > 1 => tiles /= 2,
                Err(error) => return Err(error),
            }
        }
    }
}
