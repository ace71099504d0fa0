//! The conversion: the figure in the crate's documentation, and little else.

mod overlay;
mod timed;

use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Map, Value, json};
use thiserror::Error;

use crate::bundle::{
    self, BundleContent, BundleError, FinishedBundle, JobSpec, Opened, Overwrite, TensorMetrics, Writer,
};
use crate::capture::{self, CaptureError, LayerCapture, States};
use crate::corpus::Corpus;
use crate::encode::{EncodeError, TileEncoder};
use crate::format::QuantizedLinear;
use crate::linalg::Matrix;
use crate::model::{LinearSpec, Model, ModelError, SourceWeights, WeightSource, canonical, computing};
use crate::plan::{GroupPlan, Plan, PlanError, UnitKind, UnitPlan};
use crate::progress::{Event, Observer, TensorDone};
use crate::quantize::{self, Calibration, LinearInput, QuantizeError, Quantized, Settings};
use crate::source::{Checkpoint, SourceError};
use overlay::Committed;
use timed::Timed;

/// Version of what the bytes of a bundle depend on besides its recipe. A job that another version
/// began is not continued.
const ALGORITHM: u32 = 1;

/// Why a conversion stopped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PipelineError {
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Quantize(#[from] QuantizeError),
    #[error("calibration rows have {found} tokens; the model has positions for {expected}")]
    LongRows { expected: usize, found: usize },
}

impl PipelineError {
    /// What the user can do about it, where that is not obvious.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Bundle(error) | Self::Capture(CaptureError::Bundle(error)) => error.hint(),
            Self::Encode(EncodeError::OpenCl(error))
            | Self::Quantize(QuantizeError::Encode(EncodeError::OpenCl(error))) => error.hint(),
            _ => None,
        }
    }
}

/// Everything a conversion needs.
pub struct Job<'a> {
    pub checkpoint: &'a Checkpoint,
    pub model: &'a Model,
    pub plan: &'a Plan,
    pub corpus: &'a Corpus,
    pub encoder: &'a dyn TileEncoder,
    /// Name of the source, for the bundle's provenance.
    pub base: String,
    /// SHA-256 over the source's weights and config.
    pub source_sha256: String,
    /// SHA-256 over the tokenizer's files.
    pub tokenizer_sha256: String,
    pub out: PathBuf,
    pub work: PathBuf,
    pub overwrite: Overwrite,
    pub shard_bytes: u64,
}

/// How a conversion ended.
pub enum Outcome {
    Converted(Conversion),
    /// The output folder holds this very bundle.
    AlreadyDone(PathBuf),
}

/// A finished conversion.
pub struct Conversion {
    pub bundle: FinishedBundle,
    /// Units that an earlier run had committed.
    pub resumed_units: usize,
    /// Wall time of this run, and how much of it the encoder took.
    pub seconds: f64,
    pub encoder_seconds: f64,
    /// Largest magnitude of any linear's input, by unit, of the units of this run.
    pub peaks: Vec<(String, f32)>,
}

/// Converts a checkpoint, or goes on with its conversion.
///
/// # Errors
/// An output or work folder that is another job's, rows longer than the model has positions for, a
/// Hessian without a factor, more than a tenth of the rows turned non-finite, a failed read or write.
pub fn convert(job: &Job<'_>, observer: &dyn Observer) -> Result<Outcome, PipelineError> {
    let started = Instant::now();
    check_rows(job)?;
    bundle::check_apart(job.checkpoint.dir(), &job.out, &job.work)?;
    bundle::check_companions(job.checkpoint.dir())?;
    let spec = JobSpec {
        out: job.out.clone(),
        work: job.work.clone(),
        recipe: recipe(job),
        overwrite: job.overwrite,
    };
    let mut writer = match bundle::open_job(spec)? {
        Opened::AlreadyDone(dir) => return Ok(Outcome::AlreadyDone(dir)),
        Opened::Fresh(writer) | Opened::Resumed(writer) => writer,
    };
    for trellis in job.plan.trellises()? {
        job.encoder.prepare(&trellis)?;
    }
    let encoder = Timed::new(job.encoder);
    let run = Run { job, encoder: &encoder, observer };
    let resumed_units = writer.committed();
    run.announce(&writer);
    run.warn_about_short_calibration();
    for note in &job.plan.notes {
        run.warn(note);
    }
    for key in &job.plan.left_out {
        run.warn(&format!("{key} is left out: the head is the embedding"));
    }
    let peaks = run.units(&mut writer)?;
    observer.event(Event::Finishing);
    let bundle = writer.finish(content(job))?;
    Ok(Outcome::Converted(Conversion {
        bundle,
        resumed_units,
        seconds: started.elapsed().as_secs_f64(),
        encoder_seconds: encoder.seconds(),
        peaks,
    }))
}

fn check_rows(job: &Job<'_>) -> Result<(), PipelineError> {
    let (expected, found) = (job.model.max_positions(), job.corpus.shape().cols);
    if found > expected { Err(PipelineError::LongRows { expected, found }) } else { Ok(()) }
}

/// Everything the bytes of the bundle depend on, by the names that a user knows.
fn recipe(job: &Job<'_>) -> Map<String, Value> {
    let recipe = &job.plan.recipe;
    let shape = job.corpus.shape();
    // Only where there is such a head do the bytes depend on its rate.
    let mtp_bits = job.model.mtp_key().map(|_| ("mtp_bits", json!(recipe.mtp_bits)));
    let fields = [
        ("algorithm", json!(ALGORITHM)),
        ("source_sha256", json!(job.source_sha256)),
        ("tokenizer_sha256", json!(job.tokenizer_sha256)),
        ("bits", json!(recipe.bits)),
        ("head_bits", json!(recipe.head_bits)),
        ("codebook", json!(recipe.codebook)),
        ("out_scales", json!(recipe.out_scales.name())),
        ("seed", json!(recipe.seed)),
        ("rows", json!(shape.rows)),
        ("cols", json!(shape.cols)),
        ("calibration_sha256", json!(job.corpus.fingerprint())),
        ("shard_bytes", json!(job.shard_bytes)),
    ];
    fields.into_iter().chain(mtp_bits).map(|(name, value)| (name.to_owned(), value)).collect()
}

fn content<'a>(job: &Job<'a>) -> BundleContent<'a> {
    let (recipe, shape) = (&job.plan.recipe, job.corpus.shape());
    BundleContent {
        checkpoint: job.checkpoint,
        base: job.base.clone(),
        modules: job.plan.modules.clone(),
        passthrough: job.plan.passthrough.clone(),
        vision: job.plan.vision.clone(),
        head: job.plan.head.clone(),
        mtp: job.plan.mtp.clone(),
        mtp_layers: job.plan.mtp_layers,
        bits: recipe.bits,
        head_bits: recipe.head_bits,
        codebook: recipe.codebook,
        out_scales: recipe.out_scales.name().to_owned(),
        rows: shape.rows,
        cols: shape.cols,
        shard_bytes: job.shard_bytes,
    }
}

struct Run<'a> {
    job: &'a Job<'a>,
    encoder: &'a Timed<'a>,
    observer: &'a dyn Observer,
}

impl Run<'_> {
    fn announce(&self, writer: &Writer) {
        let units = &self.job.plan.units;
        let weights = |units: &[UnitPlan]| units.iter().map(UnitPlan::weights).sum();
        self.observer.event(Event::Planned {
            units: units.len(),
            committed: writer.committed(),
            weights: weights(units),
            committed_weights: weights(&units[..writer.committed()]),
        });
    }

    /// With fewer tokens than an input has channels, its Hessian is known in a few directions only.
    fn warn_about_short_calibration(&self) {
        let shape = self.job.corpus.shape();
        let tokens = shape.rows * shape.cols;
        let linears = self.job.plan.units.iter().flat_map(|u| &u.groups).flat_map(|g| &g.linears);
        let widest = linears.map(|linear| linear.k).max().unwrap_or(0);
        if tokens < widest {
            self.warn(&format!(
                "{tokens} calibration tokens are fewer than the {widest} inputs of the widest linear; \
                 expect a worse result than with more rows or columns"
            ));
        }
    }

    /// Every unit that is not committed yet.
    fn units(&self, writer: &mut Writer) -> Result<Vec<(String, f32)>, PipelineError> {
        let first = writer.committed();
        let mut peaks = Vec::new();
        if first == self.job.plan.units.len() {
            return Ok(peaks);
        }
        let mut states = self.states(writer)?;
        for (index, unit) in self.job.plan.units.iter().enumerate().skip(first) {
            self.observer.event(Event::UnitStarted { unit: index, key: &unit.key });
            let capture = self.observe(unit, &states)?;
            peaks.push((unit.key.clone(), capture.peak));
            self.observer.event(Event::Captured { unit: index, key: &unit.key });
            let quantized = self.quantize(unit, capture)?;
            self.commit(writer, index, unit, quantized)?;
            if matches!(unit.kind, UnitKind::Layer(_)) && index + 1 < self.job.plan.units.len() {
                self.advance(&mut states, writer, index)?;
                states.save(writer.work_dir())?;
            }
        }
        Ok(peaks)
    }

    /// The states in front of the first unit that is not committed: the newest on disk, brought up
    /// by running them through the committed layers after them.
    fn states(&self, writer: &Writer) -> Result<States, PipelineError> {
        let until = writer.committed().min(self.job.model.layer_count());
        let rows = self.job.corpus.rows();
        let saved = States::newest(writer.work_dir(), until, rows.len())?;
        let mut states = match saved {
            Some(states) => {
                for row in states.excluded() {
                    self.warn(&format!("calibration row {row} turned non-finite before; it is left out"));
                }
                states
            }
            None => States::embed(self.job.model, &SourceWeights(self.job.checkpoint), rows)?,
        };
        for unit in states.layer()..until {
            self.observer.event(Event::Replaying { unit, until });
            self.advance(&mut states, writer, unit)?;
        }
        Ok(states)
    }

    /// Runs the states through layer `index` as it was written.
    fn advance(&self, states: &mut States, writer: &Writer, index: usize) -> Result<(), PipelineError> {
        let weights = Committed::new(writer.unit(index)?, SourceWeights(self.job.checkpoint));
        let layer = self.job.model.layer(&weights, index)?;
        for row in states.advance(&layer, &self.job.plan.units[index].key)? {
            let (row, unit) = (row.row, row.unit);
            self.warn(&format!(
                "calibration row {row} turned non-finite in {unit}; it is left out from here on"
            ));
        }
        Ok(())
    }

    fn observe(&self, unit: &UnitPlan, states: &States) -> Result<LayerCapture, PipelineError> {
        let model = self.job.model;
        let weights = SourceWeights(self.job.checkpoint);
        let widths: Vec<usize> = unit.groups.iter().map(|group| group.linears[0].k).collect();
        let capture = match unit.kind {
            UnitKind::Layer(layer) => capture::observe(&model.layer(&weights, layer)?, &widths, states)?,
            UnitKind::Head => capture::observe_head(&model.final_norm(&weights)?, widths[0], states)?,
            UnitKind::Mtp => {
                let mtp = model.mtp(&weights)?;
                let embed = |ids: &[u32]| model.embed(&weights, ids);
                capture::observe_mtp(&mtp, &widths, states, self.job.corpus.rows(), embed)?
            }
        };
        Ok(capture)
    }

    fn quantize(&self, unit: &UnitPlan, mut capture: LayerCapture) -> Result<Vec<Quantized>, PipelineError> {
        let mut done = Vec::new();
        let hessians = std::mem::take(&mut capture.hessians);
        for (at, (group, hessian)) in unit.groups.iter().zip(hessians).enumerate() {
            let first = &group.linears[0].key;
            if hessian.dropped() > 0 {
                let dropped = hessian.dropped();
                self.warn(&format!(
                    "{first}: {dropped} calibration tokens with non-finite inputs are left out"
                ));
            }
            let calibration = hessian.finish(self.job.plan.recipe.seed, &canonical(first), first)?;
            self.warn_about(first, &calibration);
            let inputs = self.inputs(group, unit.groups.get(at + 1), &capture)?;
            let quantized = self.quantize_group(inputs, &calibration, group)?;
            done.extend(quantized);
        }
        Ok(done)
    }

    fn quantize_group(
        &self,
        inputs: Vec<LinearInput>,
        calibration: &Calibration,
        group: &GroupPlan,
    ) -> Result<Vec<Quantized>, PipelineError> {
        let recipe = &self.job.plan.recipe;
        let settings =
            Settings { codebook: recipe.codebook, out_scales: recipe.out_scales, seed: recipe.seed };
        let quantized = quantize::group(inputs, calibration, group.bits, &settings, self.encoder)?;
        for Quantized { linear, metrics } in &quantized {
            self.observer.event(Event::Tensor(TensorDone {
                key: &linear.key,
                bits: linear.bits.as_f64(),
                proxy_error: metrics.errors.proxy,
                g_scale: metrics.g_scale,
                out_scales: metrics.out_scales,
                seconds: metrics.seconds,
            }));
        }
        Ok(quantized)
    }

    fn warn_about(&self, key: &str, calibration: &Calibration) {
        match calibration {
            Calibration::Uncalibrated { why, .. } => {
                self.warn(&format!("{key}: quantized without calibration: {}", why.reason()));
            }
            Calibration::Calibrated(c) if c.attempts > 0 => {
                self.warn(&format!("{key}: its Hessian needed {} times more damping", c.attempts));
            }
            Calibration::Calibrated(_) => {}
        }
    }

    fn warn(&self, text: &str) {
        self.observer.event(Event::Warning(text));
    }

    /// The weights of a group. For gate and up projections, which share their input, `next` is the
    /// group that takes their product: the down projection.
    fn inputs(
        &self,
        group: &GroupPlan,
        next: Option<&GroupPlan>,
        capture: &LayerCapture,
    ) -> Result<Vec<LinearInput>, PipelineError> {
        let is_gated = group.linears.iter().any(|linear| capture.is_gated(&linear.key));
        let down = match next {
            Some(next) if is_gated => Some(self.weight(&next.linears[0])?),
            _ => None,
        };
        group
            .linears
            .iter()
            .map(|linear| {
                Ok(LinearInput {
                    key: linear.key.clone(),
                    sign_key: canonical(&linear.key),
                    weight: self.weight(linear)?,
                    bias: self.bias(linear)?,
                    sensitivity: down.as_ref().and_then(|down| capture.sensitivity(&linear.key, down)),
                })
            })
            .collect()
    }

    /// The source's weight of a linear, `[k, n]`. A tied head is the embedding.
    fn weight(&self, linear: &LinearSpec) -> Result<Matrix, PipelineError> {
        let model = self.job.model;
        let key = if model.tied_head() && linear.key == model.head().key {
            model.embedding_key().to_owned()
        } else {
            format!("{}.weight", linear.key)
        };
        let data = self.job.checkpoint.tensor(&key)?.to_f32()?;
        Ok(Matrix::from_vec(linear.n, linear.k, data).transpose())
    }

    fn bias(&self, linear: &LinearSpec) -> Result<Option<Vec<f32>>, PipelineError> {
        let key = format!("{}.bias", linear.key);
        let bias = self.job.checkpoint.get(&key).map(|bias| bias.to_f32()).transpose()?;
        Ok(bias)
    }

    fn commit(
        &self,
        writer: &mut Writer,
        index: usize,
        unit: &UnitPlan,
        quantized: Vec<Quantized>,
    ) -> Result<(), PipelineError> {
        let specs = unit.groups.iter().flat_map(|group| &group.linears);
        let metrics =
            specs.zip(&quantized).map(|(spec, quantized)| tensor_metrics(spec, quantized)).collect();
        let linears: Vec<QuantizedLinear> = quantized.into_iter().map(|q| q.linear).collect();
        writer.commit(index, &linears, metrics)?;
        self.observer.event(Event::UnitCommitted { unit: index, key: &unit.key, weights: unit.weights() });
        Ok(())
    }
}

fn tensor_metrics(spec: &LinearSpec, quantized: &Quantized) -> TensorMetrics {
    let metrics = &quantized.metrics;
    TensorMetrics {
        key: spec.key.clone(),
        bits: quantized.linear.bits.as_f64(),
        k: spec.k,
        n: spec.n,
        proxy_error: metrics.errors.proxy,
        rel_frobenius: metrics.errors.rel_frobenius,
        mse: metrics.errors.mse,
        g_scale: metrics.g_scale,
        out_scales: metrics.out_scales,
        fallback: metrics.fallback,
        seconds: Some(metrics.seconds),
    }
}
