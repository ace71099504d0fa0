//! How long the encoder takes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::encode::{EncodeError, TileEncoder, TrellisSpec};

/// An encoder whose time is counted. The quantizer calls it from one thread at a time, so this is
/// wall time.
pub struct Timed<'a> {
    inner: &'a dyn TileEncoder,
    nanoseconds: AtomicU64,
}

impl<'a> Timed<'a> {
    pub fn new(inner: &'a dyn TileEncoder) -> Self {
        Self { inner, nanoseconds: AtomicU64::new(0) }
    }

    pub fn seconds(&self) -> f64 {
        Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed)).as_secs_f64()
    }
}

impl TileEncoder for Timed<'_> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn encode(&self, spec: &TrellisSpec, tiles: &[f32], states: &mut [u16]) -> Result<(), EncodeError> {
        let started = Instant::now();
        let result = self.inner.encode(spec, tiles, states);
        self.nanoseconds.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }
}
