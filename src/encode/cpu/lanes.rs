//! The few vector operations of the encoder's inner loop.

/// A vector of f32 lanes. Implementors are proof that the instructions exist on this processor.
pub trait Lanes: Copy + Send + Sync {
    type V: Copy;
    /// Lanes of a vector: a power of two, at most 16.
    const N: usize;

    fn splat(self, x: f32) -> Self::V;
    /// `src[at..at + N]`.
    fn load(self, src: &[f32], at: usize) -> Self::V;
    /// Lane `j` holds `src[at + (j >> K)]`. `src` must reach to `at + N`.
    fn load_repeated<const K: u32>(self, src: &[f32], at: usize) -> Self::V;
    fn store(self, x: Self::V, dst: &mut [f32], at: usize);
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `d * d + c` rounded to f32. For half-valued `d` the square is exact, so fused and plain
    /// multiply-add agree.
    fn square_add(self, d: Self::V, c: Self::V) -> Self::V;
    /// `d * d + c` rounded to odd, see [`crate::encode::half_math::square_add_to_odd`].
    fn square_add_to_odd(self, d: Self::V, c: Self::V) -> Self::V;
    /// Every lane rounded to the nearest half, ties to even.
    fn round_to_half(self, x: Self::V) -> Self::V;
    /// Stores the bits of half-valued lanes.
    fn store_half(self, x: Self::V, dst: &mut [u16], at: usize);
    /// Whether a lane of any of `xs` lies half way between two halves, or below the smallest normal
    /// half: there the value rounded to f32 does not tell how the exact one rounds.
    fn undecided<const M: usize>(self, xs: &[Self::V; M]) -> bool;
}
