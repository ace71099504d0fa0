//! Several encoders that share the tiles of a batch.

use super::{EncodeError, TileEncoder, TrellisSpec};

/// Encoders side by side: each takes a part of the tiles in proportion to its measured speed. All give
/// the same states, so the parts do not show.
pub struct Shared {
    name: String,
    encoders: Vec<Box<dyn TileEncoder>>,
}

impl Shared {
    /// `encoders` must not be empty.
    pub fn new(encoders: Vec<Box<dyn TileEncoder>>) -> Self {
        assert!(!encoders.is_empty(), "an encoder");
        let names: Vec<&str> = encoders.iter().map(|encoder| encoder.name()).collect();
        Self { name: names.join("+"), encoders }
    }

    /// Tiles for each encoder. Without a speed of each, all get the same.
    fn parts(&self, spec: &TrellisSpec, count: usize) -> Vec<usize> {
        let speeds: Option<Vec<f64>> =
            self.encoders.iter().map(|encoder| encoder.speed(spec).filter(|&speed| speed > 0.0)).collect();
        let speeds = speeds.unwrap_or_else(|| vec![1.0; self.encoders.len()]);
        let total: f64 = speeds.iter().sum();
        let (mut speed_before, mut start) = (0.0, 0);
        let part = |speed: f64| {
            speed_before += speed;
            let end = ((speed_before / total * count as f64).round() as usize).min(count);
            let part = end - start;
            start = end;
            part
        };
        speeds.into_iter().map(part).collect()
    }
}

impl TileEncoder for Shared {
    fn name(&self) -> &str {
        &self.name
    }

    fn encode(&self, spec: &TrellisSpec, tiles: &[f32], states: &mut [u16]) -> Result<(), EncodeError> {
        super::check_tiles(spec, tiles, states)?;
        self.prepare(spec)?; // for the speeds
        let parts = self.parts(spec, tiles.len() / spec.len());
        let (mut tiles, mut states) = (tiles, states);
        // Threads of their own: an encoder may wait for its device, or use the thread pool.
        std::thread::scope(|scope| {
            let mut running = Vec::new();
            for (encoder, part) in self.encoders.iter().zip(parts) {
                let (part_tiles, other_tiles) = tiles.split_at(part * spec.len());
                let (part_states, other_states) = states.split_at_mut(part * spec.len());
                (tiles, states) = (other_tiles, other_states);
                if part > 0 {
                    running.push(scope.spawn(move || encoder.encode(spec, part_tiles, part_states)));
                }
            }
            running.into_iter().try_for_each(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    fn prepare(&self, spec: &TrellisSpec) -> Result<(), EncodeError> {
        self.encoders.iter().try_for_each(|encoder| encoder.prepare(spec))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Bits, Codebook};

    struct Fixed(f64);

    impl TileEncoder for Fixed {
        fn name(&self) -> &str {
            "fixed"
        }

        fn encode(&self, _: &TrellisSpec, _: &[f32], states: &mut [u16]) -> Result<(), EncodeError> {
            states.fill(self.0 as u16);
            Ok(())
        }

        fn speed(&self, _: &TrellisSpec) -> Option<f64> {
            Some(self.0)
        }
    }

    #[test]
    fn tiles_are_shared_by_speed() {
        let spec = TrellisSpec::new(Codebook::Mul1, Bits::ALL[2], 256).expect("a trellis");
        let encoders: Vec<Box<dyn TileEncoder>> =
            [300.0, 100.0, 100.0].map(|speed| Box::new(Fixed(speed)) as Box<dyn TileEncoder>).into();
        let shared = Shared::new(encoders);
        assert_eq!(shared.parts(&spec, 10), [6, 2, 2]);
        assert_eq!(shared.parts(&spec, 1).iter().sum::<usize>(), 1);
        let mut states = vec![0; 10 * 256];
        shared.encode(&spec, &vec![0.0; 10 * 256], &mut states).expect("encoded");
        let firsts: Vec<u16> = states.chunks(256).map(|tile| tile[0]).collect();
        assert_eq!(firsts, [300, 300, 300, 300, 300, 300, 100, 100, 100, 100]);
    }
}
