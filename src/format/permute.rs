//! The order of elements inside a 16x16 tile.

/// Side of a tile.
pub const TILE_DIM: usize = 16;
/// Weights of a tile.
pub const TILE_LEN: usize = TILE_DIM * TILE_DIM;

/// Row and column, inside the tile, of the encoder's position `p` (0..256). Rows run along `k`,
/// columns along `n`. The order is that of a tensor-core fragment: 32 threads of 8 elements.
pub const fn tile_position(p: usize) -> (usize, usize) {
    let (thread, j) = (p / 8, p % 8);
    let row = 2 * (thread % 4) + (j & 1) + 8 * ((j >> 1) & 1);
    let col = thread / 4 + 8 * ((j >> 2) & 1);
    (row, col)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_one_position() {
        let mut seen = [false; TILE_LEN];
        for p in 0..TILE_LEN {
            let (row, col) = tile_position(p);
            assert!(!std::mem::replace(&mut seen[row * TILE_DIM + col], true));
        }
    }
}
