//! Dense f32 math of the quantizer: products, Hadamard rotations, block LDL, random signs.
//! Nothing here depends on the number of threads.

mod cholesky;
mod gemm;
mod hadamard;
mod matrix;
mod rng;

pub use cholesky::{NotPositive, block_ldl, cholesky, solve};
pub use gemm::{View, add_gram, add_product, dot, mirror_upper};
pub use hadamard::{rotate_columns, rotate_rows};
pub use matrix::Matrix;
pub use rng::Rng;
