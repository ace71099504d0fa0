//! Dense f32 math of the quantizer: matrices, Hadamard rotations, block LDL, random signs.

mod matrix;

pub use matrix::Matrix;
