//! Packing of trellis states: one MSB-first bit stream per tile, a ring.

use super::Bits;

/// 16-bit words of the packed form of `len` weights.
pub fn packed_len(bits: Bits, len: usize) -> usize {
    bits.stream_bits(len).div_ceil(32) * 2
}

/// Packs the states of one tile: the new bits of position `i` are the low `bits.step(i)` bits of
/// `states[i]`; they form one stream whose first bit is the top bit of the first u32 word. The
/// words are stored little-endian, here as pairs of u16.
pub fn pack(states: &[u16], bits: Bits) -> Vec<u16> {
    let mut words = vec![0u32; packed_len(bits, states.len()) / 2];
    let mut at = 0;
    for (i, &state) in states.iter().enumerate() {
        let width = bits.step(i);
        for b in (0..width).rev() {
            words[at / 32] |= (u32::from(state >> b) & 1) << (31 - at % 32);
            at += 1;
        }
    }
    words.iter().flat_map(|w| [*w as u16, (*w >> 16) as u16]).collect()
}

/// The states of a packed tile of `len` weights: `states[i]` is the 16 stream bits that end where
/// the bits of position `i` end, on the ring.
///
/// # Panics
/// If `packed.len() != packed_len(bits, len)`.
pub fn unpack(packed: &[u16], bits: Bits, len: usize) -> Vec<u16> {
    assert_eq!(packed.len(), packed_len(bits, len), "packed tile of the wrong length");
    let total = bits.stream_bits(len);
    let stream_bit = |at: usize| {
        let word = u32::from(packed[at / 32 * 2]) | u32::from(packed[at / 32 * 2 + 1]) << 16;
        (word >> (31 - at % 32)) as u16 & 1
    };
    let mut window = (total - 16..total).fold(0u16, |w, at| w << 1 | stream_bit(at));
    let mut at = 0;
    (0..len)
        .map(|i| {
            for _ in 0..bits.step(i) {
                window = window << 1 | stream_bit(at);
                at += 1;
            }
            window
        })
        .collect()
}

/// Whether consecutive windows overlap in all but their new bits, around the ring.
pub fn is_tail_biting(states: &[u16], bits: Bits) -> bool {
    let len = states.len();
    (0..len).all(|i| {
        let previous = states[(i + len - 1) % len];
        let width = bits.step(i);
        let new_bits = states[i] & ((1u32 << width) - 1) as u16;
        states[i] == (u32::from(previous) << width) as u16 | new_bits
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_of_random_bits_survives_packing() {
        for bits in Bits::ALL {
            let mut seed = 1u32;
            let words: Vec<u16> = (0..packed_len(bits, 256))
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (seed >> 16) as u16
                })
                .collect();
            let states = unpack(&words, bits, 256);
            assert!(is_tail_biting(&states, bits));
            assert_eq!(pack(&states, bits), words, "{bits} bits");
            let mut broken = states.clone();
            broken[17] ^= 0x8000;
            assert!(!is_tail_biting(&broken, bits));
        }
    }
}
