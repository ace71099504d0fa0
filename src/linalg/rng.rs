//! Random numbers that depend on a seed and a tensor key only, so that a resumed run and a run
//! with other threads draw the same.

use sha2::{Digest, Sha256};

/// A stream of random numbers keyed by seed and tensor key (SplitMix64 over a SHA-256 state).
pub struct Rng {
    state: u64,
}

impl Rng {
    pub fn new(seed: u64, key: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(seed.to_le_bytes());
        hash.update(key.as_bytes());
        let digest = hash.finalize();
        let mut state = [0; 8];
        state.copy_from_slice(&digest[..8]);
        Self { state: u64::from_le_bytes(state) }
    }

    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1).
    fn uniform(&mut self) -> f64 {
        ((self.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Standard normal, by Box-Muller.
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        (radius * (std::f64::consts::TAU * self.uniform()).cos()) as f32
    }

    /// `len` random signs, each 1 or -1.
    pub fn signs(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| if self.next_u64() >> 63 == 0 { 1.0 } else { -1.0 }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_seeds_give_streams_of_their_own() {
        let draw = |seed, key| Rng::new(seed, key).signs(256);
        assert_eq!(draw(1, "a"), draw(1, "a"));
        assert_ne!(draw(1, "a"), draw(2, "a"));
        assert_ne!(draw(1, "a"), draw(1, "b"));
        let sum: f32 = draw(3, "c").iter().sum();
        assert!(sum.abs() < 80.0, "signs are unbalanced: {sum}");
    }
}
