//! Converts Hugging Face checkpoints into EXL3 bundles.
//!
//! ```text
//! source::open ─► Checkpoint ─ plan::build(model, recipe) ─► Plan
//! for each unit of the Plan (decoder layers, then the head):
//!     capture::observe(layer, states)          ─► LayerCapture    Hessians, slopes of gated MLPs, peak input
//!     quantize::group(inputs, calibration, ..) ─► Vec<Quantized>  trellis, suh, svh, bias, metrics
//!     writer.commit(unit, linears, metrics)       the unit's file, then its line in the journal
//!     states.advance(layer as written)            the forward pass through what was written
//! writer.finish(content) ─► FinishedBundle ─ verify::run ─► VerifyReport
//! ```
//!
//! [`pipeline::convert`] is this figure; the layers of the modules and what holds between them are in
//! `docs/ARCHITECTURE.md`.
//!
//! A linear is `y = x W` with `W: [k, n]` (`k` = in_features, `n` = out_features); Hugging Face
//! and candle hold the transpose `[n, k]`. `bits` is the bit rate of one tensor.

#![deny(unsafe_code)]

pub mod bundle;
pub mod capture;
pub mod compare;
pub mod corpus;
pub mod encode;
pub mod eval;
pub mod export;
pub mod format;
pub mod judge;
pub mod linalg;
pub mod model;
pub mod pipeline;
pub mod plan;
pub mod progress;
pub mod quantize;
pub mod source;
pub mod verify;
