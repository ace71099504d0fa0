//! `bench encoder`: tiles per second, per bit rate and backend.

use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use exl3_candle::encode::opencl::{DeviceInfo, DeviceKind, Estimate, OpenClError, Tuning, Variant, devices};
use exl3_candle::encode::{Cpu, Scalar, SimdLevel, TileEncoder, TrellisSpec};
use exl3_candle::format::{Bits, Codebook, TILE_LEN};
use exl3_candle::linalg::Rng;
use serde::Serialize;

use super::backend::{self, Backend, MemoryArgs};
use super::{Status, Ui};

#[derive(Subcommand)]
pub enum Bench {
    /// Tiles per second of every encoder on normal noise, and its mean squared error
    Encoder(EncoderArgs),
}

#[derive(Args)]
pub struct EncoderArgs {
    /// Bit rates to measure [default: all]
    #[arg(long, value_delimiter = ',')]
    bits: Vec<Bits>,
    #[arg(long, default_value = "mul1")]
    codebook: Codebook,
    /// Encoders to measure: scalar, portable, avx2, avx512, opencl, opencl:N [default: all that run here but
    /// for OpenCL devices that are no GPU]
    #[arg(long, value_delimiter = ',')]
    backend: Vec<String>,
    /// Measure every variant of the kernels on the OpenCL devices
    #[arg(long)]
    sweep: bool,
    #[command(flatten)]
    memory: MemoryArgs,
    /// Tiles of a batch [default: 64 per thread, 4 for the scalar encoder, 8 per unit of a device]
    #[arg(long, allow_negative_numbers = true, value_parser = parse_tiles)]
    tiles: Option<usize>,
    /// Least time per measurement, after one batch to warm up; 0 encodes that batch only
    #[arg(long, default_value = "1", allow_negative_numbers = true, value_parser = parse_seconds)]
    seconds: Duration,
}

fn parse_tiles(text: &str) -> Result<usize, String> {
    const MAX_TILES: usize = 1 << 20; // 1.5 GiB of weights and states
    let tiles = text.parse::<usize>().ok().filter(|tiles| (1..=MAX_TILES).contains(tiles));
    tiles.ok_or_else(|| format!("expected a number of tiles, 1 to {MAX_TILES}"))
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().map_err(|error| error.to_string())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// What is measured.
enum Subject {
    Host(Box<dyn TileEncoder>),
    Device(DeviceInfo),
}

#[derive(Serialize)]
struct Measurement {
    bits: Bits,
    backend: String,
    /// Of an OpenCL device's kernels.
    #[serde(skip_serializing_if = "Option::is_none")]
    variant: Option<String>,
    tiles_per_second: f64,
    /// Ratio to the scalar encoder of the same run, if that was measured.
    speedup: Option<f64>,
    mse: f64,
    /// Device memory for one tile, and for all bit rates' table of values.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_bytes_per_tile: Option<u64>,
}

#[derive(Serialize)]
struct Report {
    threads: usize,
    codebook: Codebook,
    results: Vec<Measurement>,
}

pub fn run(bench: &Bench, ui: &Ui) -> anyhow::Result<Status> {
    let Bench::Encoder(args) = bench;
    let subjects = chosen_subjects(&args.backend)?;
    let rates = if args.bits.is_empty() { Bits::ALL.to_vec() } else { args.bits.clone() };
    let mut results: Vec<Measurement> = Vec::new();
    for bits in rates {
        let Ok(spec) = TrellisSpec::new(args.codebook, bits, TILE_LEN) else { continue };
        let first = results.len();
        for subject in &subjects {
            match subject {
                Subject::Host(encoder) => results.push(measure(encoder.as_ref(), None, &spec, args, ui)?),
                Subject::Device(device) => results.extend(on_device(device, &spec, args, ui)?),
            }
        }
        let scalar = results[first..].iter().find(|m| m.backend == Scalar.name()).map(|m| m.tiles_per_second);
        for m in &mut results[first..] {
            m.speedup = scalar.map(|scalar| m.tiles_per_second / scalar);
        }
    }
    anyhow::ensure!(!results.is_empty(), "codebook {} has none of these bit rates", args.codebook);
    let report = Report { threads: rayon::current_num_threads(), codebook: args.codebook, results };
    ui.result(&table(&report), &report)?;
    Ok(Status::Done)
}

fn chosen_subjects(names: &[String]) -> anyhow::Result<Vec<Subject>> {
    let mut hosts: Vec<Box<dyn TileEncoder>> = vec![Box::new(Scalar)];
    for level in SimdLevel::ALL {
        if let Ok(encoder) = Cpu::with_level(level) {
            hosts.push(Box::new(encoder));
        }
    }
    if names.is_empty() {
        let gpus = devices().unwrap_or_default().into_iter().filter(|device| device.kind == DeviceKind::Gpu);
        return Ok(hosts.into_iter().map(Subject::Host).chain(gpus.map(Subject::Device)).collect());
    }
    let known: Vec<String> = hosts.iter().map(|host| host.name().to_owned()).collect();
    let mut subjects = Vec::new();
    for name in names {
        if let Ok(Backend::OpenCl(numbers)) = name.parse() {
            subjects.extend(backend::chosen(&devices()?, &numbers)?.into_iter().map(Subject::Device));
        } else if let Some(at) = hosts.iter().position(|host| host.name() == name) {
            subjects.push(Subject::Host(hosts.remove(at)));
        } else {
            anyhow::bail!("no encoder \"{name}\" runs here; there are {} and opencl:N", known.join(", "));
        }
    }
    Ok(subjects)
}

/// The variants of a device: all of them in a sweep, else the one that a conversion takes.
fn on_device(
    device: &DeviceInfo,
    spec: &TrellisSpec,
    args: &EncoderArgs,
    ui: &Ui,
) -> anyhow::Result<Vec<Measurement>> {
    if !args.sweep {
        let encoder = args.memory.open(device, backend::measured())?;
        return Ok(vec![measure(&encoder, Some((encoder.variant(spec)?, device)), spec, args, ui)?]);
    }
    let mut results = Vec::new();
    for variant in Variant::all(spec, device) {
        let encoder = args.memory.open(device, Tuning::Fixed(variant))?;
        match encoder.variant(spec) {
            Ok(_) => results.push(measure(&encoder, Some((variant, device)), spec, args, ui)?),
            Err(error @ (OpenClError::Deadline { .. } | OpenClError::WrongResult { .. })) => {
                return Err(error.into());
            }
            Err(error) => ui.note(&format!("{variant}: {error}")),
        }
    }
    results.sort_by(|a, b| b.tiles_per_second.total_cmp(&a.tiles_per_second));
    Ok(results)
}

/// Tiles per second over whole batches, after one batch to warm up; and the error on N(0, 1).
fn measure(
    encoder: &dyn TileEncoder,
    kernels: Option<(Variant, &DeviceInfo)>,
    spec: &TrellisSpec,
    args: &EncoderArgs,
    ui: &Ui,
) -> anyhow::Result<Measurement> {
    let per_thread = if encoder.name() == Scalar.name() { 4 } else { 64 };
    let batch = args.tiles.unwrap_or(per_thread * rayon::current_num_threads());
    let mut rng = Rng::new(0, "bench");
    let tiles: Vec<f32> = (0..batch * spec.len()).map(|_| rng.normal()).collect();
    let mut states = vec![0u16; tiles.len()];
    let mut started = Instant::now();
    encoder.encode(spec, &tiles, &mut states)?;
    let mut batches = 1;
    if !args.seconds.is_zero() {
        (started, batches) = (Instant::now(), 0);
    }
    while started.elapsed() < args.seconds {
        encoder.encode(spec, &tiles, &mut states)?;
        batches += 1;
    }
    let tiles_per_second = (batches * batch) as f64 / started.elapsed().as_secs_f64();
    let error: f64 = tiles
        .iter()
        .zip(&states)
        .map(|(&w, &s)| (f64::from(w) - spec.codebook().value(s).to_f64()).powi(2))
        .sum();
    let measurement = Measurement {
        bits: spec.bits(),
        backend: encoder.name().to_owned(),
        variant: kernels.map(|(variant, _)| variant.to_string()),
        tiles_per_second,
        speedup: None,
        mse: error / tiles.len() as f64,
        device_bytes_per_tile: kernels.map(|(_, device)| Estimate::of(spec, device).per_tile),
    };
    ui.note(&format!("{} bits, {}: {tiles_per_second:.2} tiles/s", spec.bits(), measurement.label()));
    Ok(measurement)
}

impl Measurement {
    fn label(&self) -> String {
        let variant = self.variant.as_ref().map_or(String::new(), |variant| format!(" {variant}"));
        format!("{}{variant}", self.backend)
    }
}

fn table(report: &Report) -> String {
    let width = report.results.iter().map(|m| m.label().len()).max().unwrap_or(0);
    let mut text = format!(
        "{} codebook, {} threads\n{:>5}  {:<width$} {:>10} {:>9} {:>9}\n",
        report.codebook, report.threads, "bits", "backend", "tiles/s", "x scalar", "mse"
    );
    for m in &report.results {
        let speedup = m.speedup.map_or("-".to_owned(), |s| format!("{s:.1}"));
        text.push_str(&format!(
            "{:>5}  {:<width$} {:>10.1} {:>9} {:>9.5}\n",
            m.bits,
            m.label(),
            m.tiles_per_second,
            speedup,
            m.mse
        ));
    }
    text
}
