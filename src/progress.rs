//! What happened during a run, never how it looks.

/// An event of a conversion or of a transfer.
#[derive(Clone, Debug, PartialEq)]
pub enum Event<'a> {
    /// The plan is made: `units` decoder layers and heads, of which `committed` are on disk from an
    /// earlier run. Weights are counted for estimates.
    Planned { units: usize, committed: usize, weights: u64, committed_weights: u64 },
    /// Hidden states are being brought up to the first layer that is not committed.
    Replaying { unit: usize, until: usize },
    /// Work on a unit begins.
    UnitStarted { unit: usize, key: &'a str },
    /// Its inputs are known.
    Captured { unit: usize, key: &'a str },
    /// A tensor is quantized.
    Tensor(TensorDone<'a>),
    /// The unit's file and its journal line are on disk.
    UnitCommitted { unit: usize, key: &'a str, weights: u64 },
    /// Of `total` bytes of a file, `done` are here, or there.
    Transferred { file: &'a str, done: u64, total: u64 },
    /// A request failed for a reason that can pass, and is made again after a while.
    Waiting { reason: &'a str, seconds: f64 },
    /// Something a user should know.
    Warning(&'a str),
    /// The bundle is being put together.
    Finishing,
}

/// How one tensor went.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorDone<'a> {
    pub key: &'a str,
    pub bits: f64,
    pub proxy_error: f64,
    pub g_scale: f64,
    pub out_scales: bool,
    pub seconds: f64,
}

/// Sees events as they happen. Called from one thread at a time.
pub trait Observer {
    fn event(&self, event: Event<'_>);
}

/// Sees nothing.
pub struct Silent;

impl Observer for Silent {
    fn event(&self, _: Event<'_>) {}
}
