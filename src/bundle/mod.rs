//! Jobs and bundles on disk.
//!
//! A job's committed units lie in its work folder, next to a journal whose lines are the
//! commit points. The finished bundle is put together in `OUT.partial` and appears as `OUT` by one
//! rename. So a kill at any moment leaves either no bundle or a whole one, and the same command
//! goes on where it stopped.
//!
//! ```text
//! OUT.work/     journal.jsonl  unit-00000.safetensors ...  states-*.safetensors
//! OUT.partial/  shards, index, config.json, companions, exl3-candle.json, quantization_config.json
//! OUT/          the same, renamed
//! ```

mod companions;
pub mod durable;
mod error;
#[doc(hidden)]
pub mod fault;
mod job;
mod journal;
mod layout;
mod linear;
mod manifest;
mod provenance;
mod shard;
mod writer;

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::format::{Bits, Codebook};
use crate::source::Checkpoint;

pub use companions::{CONFIG, DECISION_HEAD, INDEX, MANIFEST, PROVENANCE, check as check_companions};
pub use companions::{copy as copy_companions, is_bundle_file, list as list_files};
pub use error::BundleError;
pub use job::{Opened, check_apart, default_work_dir, open_job, put_together};
pub use layout::{module_of, rewrite};
pub use linear::{RawTensor, assemble_linear, read_linear, read_raw};
pub use manifest::{FORMAT_VERSION, QUANT_METHOD, multiplier_keys, torch_name};
pub use provenance::{Bpw, FileRecord, Provenance, TensorMetrics, Tool};
pub use shard::{Shard, Stored, shard_files};
pub use writer::{FinishedBundle, Writer, write_json};

/// The quantized linears committed together: one decoder layer, or the head.
pub type Unit = Vec<crate::format::QuantizedLinear>;

/// Whether what is in the way may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwrite {
    /// An occupied output folder and the work of another recipe are errors.
    Refuse,
    /// A bundle in the output folder is replaced by the finished one. Work by the same recipe is
    /// continued, any other work is discarded.
    Replace,
}

/// What is to be made, where.
#[derive(Clone, Debug)]
pub struct JobSpec {
    /// The bundle's folder; it must not exist, or be empty, unless it may be replaced.
    pub out: PathBuf,
    /// Where committed units are kept until the bundle is finished; see [`default_work_dir`].
    pub work: PathBuf,
    /// Everything the bytes of the bundle depend on, by name. Work is only continued, and a
    /// finished bundle only recognized, under an equal recipe.
    pub recipe: Map<String, Value>,
    pub overwrite: Overwrite,
}

/// What a finished bundle holds besides the committed units.
#[derive(Clone, Debug)]
pub struct BundleContent<'a> {
    /// The source: its configuration, its companion files and the tensors passed through.
    pub checkpoint: &'a Checkpoint,
    /// What was converted, such as `owner/name@revision`; never a path of this machine.
    pub base: String,
    /// Every leaf module in the model's order. Modules of other pass-through tensors follow them.
    pub modules: Vec<String>,
    /// Names of the source's tensors that are stored as they are.
    pub passthrough: Vec<String>,
    /// Those of them that are stored in files of their own: a vision tower.
    pub vision: Vec<String>,
    /// The head's module name, if it is quantized; the configuration then unties it.
    pub head: Option<String>,
    /// The module name of a multi-token prediction head, if it is quantized.
    pub mtp: Option<String>,
    /// How many layers of such a head there are, where the configuration must be told.
    pub mtp_layers: Option<usize>,
    pub bits: Bits,
    /// `None` if the head is left as it is.
    pub head_bits: Option<Bits>,
    pub codebook: Codebook,
    /// `auto`, `always` or `never`.
    pub out_scales: String,
    /// Calibration rows, and tokens per row.
    pub rows: usize,
    pub cols: usize,
    /// A shard holds at most this many bytes of tensors, unless one module alone has more.
    pub shard_bytes: u64,
}
