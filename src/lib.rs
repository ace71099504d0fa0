//! Converts Hugging Face checkpoints into EXL3 bundles.
//!
//! ```text
//! source::open ─► Checkpoint ─ plan::build(recipe) ─► Plan
//! for each layer in Plan:
//!     capture::observe(layer, &states)        ─► LayerCapture   (Hessians, sensitivities, bad rows)
//!     quantize::layer(weights, capture, spec) ─► quantized linears (trellis, suh, svh, metrics)
//!     bundle.commit(quantized)                                   (file on disk, then the journal line)
//!     states.advance(quantized)                                  (forward through what was written)
//! bundle.finish ─► Bundle ─ verify::run ─► Report
//! ```
//!
//! A linear is `y = x W` with `W: [k, n]` (`k` = in_features, `n` = out_features); Hugging Face
//! and candle hold the transpose `[n, k]`. `bits` is the bit rate of one tensor.

#![deny(unsafe_code)]

pub mod bundle;
pub mod capture;
pub mod corpus;
pub mod encode;
pub mod eval;
pub mod format;
pub mod linalg;
pub mod model;
pub mod pipeline;
pub mod plan;
pub mod progress;
pub mod quantize;
pub mod source;
pub mod verify;
