//! `bench encoder`: tiles per second, per bit rate and backend.

use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use exl3_candle::encode::{Cpu, Scalar, SimdLevel, TileEncoder, TrellisSpec};
use exl3_candle::format::{Bits, Codebook, TILE_LEN};
use exl3_candle::linalg::Rng;
use serde::Serialize;

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
    /// Encoders to measure: scalar, portable, avx2, avx512 [default: all that run here]
    #[arg(long, value_delimiter = ',')]
    backend: Vec<String>,
    /// Tiles of a batch [default: 64 per thread, 4 for the scalar encoder]
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

#[derive(Serialize)]
struct Measurement {
    bits: Bits,
    backend: &'static str,
    tiles_per_second: f64,
    /// Ratio to the scalar encoder of the same run, if that was measured.
    speedup: Option<f64>,
    mse: f64,
}

#[derive(Serialize)]
struct Report {
    threads: usize,
    codebook: Codebook,
    results: Vec<Measurement>,
}

pub fn run(bench: &Bench, ui: &Ui) -> anyhow::Result<Status> {
    let Bench::Encoder(args) = bench;
    let encoders = chosen_encoders(&args.backend)?;
    let rates = if args.bits.is_empty() { Bits::ALL.to_vec() } else { args.bits.clone() };
    let mut results: Vec<Measurement> = Vec::new();
    for bits in rates {
        let Ok(spec) = TrellisSpec::new(args.codebook, bits, TILE_LEN) else { continue };
        let mut scalar = None;
        for encoder in &encoders {
            let (tiles_per_second, mse) = measure(encoder.as_ref(), &spec, args)?;
            if encoder.name() == Scalar.name() {
                scalar = Some(tiles_per_second);
            }
            let speedup = scalar.map(|s| tiles_per_second / s);
            ui.note(&format!("{bits} bits, {}: {tiles_per_second:.2} tiles/s", encoder.name()));
            results.push(Measurement { bits, backend: encoder.name(), tiles_per_second, speedup, mse });
        }
    }
    anyhow::ensure!(!results.is_empty(), "codebook {} has none of these bit rates", args.codebook);
    let report = Report { threads: rayon::current_num_threads(), codebook: args.codebook, results };
    ui.result(&table(&report), &report)?;
    Ok(Status::Done)
}

fn chosen_encoders(names: &[String]) -> anyhow::Result<Vec<Box<dyn TileEncoder>>> {
    let mut all: Vec<Box<dyn TileEncoder>> = vec![Box::new(Scalar)];
    for level in SimdLevel::ALL {
        if let Ok(encoder) = Cpu::with_level(level) {
            all.push(Box::new(encoder));
        }
    }
    if let Some(unknown) = names.iter().find(|name| all.iter().all(|e| e.name() != *name)) {
        let known: Vec<_> = all.iter().map(|e| e.name()).collect();
        anyhow::bail!("no encoder \"{unknown}\" runs here; there are {}", known.join(", "));
    }
    all.retain(|e| names.is_empty() || names.iter().any(|name| name == e.name()));
    Ok(all)
}

/// Tiles per second over whole batches, after one batch to warm up; and the error on N(0, 1).
fn measure(encoder: &dyn TileEncoder, spec: &TrellisSpec, args: &EncoderArgs) -> anyhow::Result<(f64, f64)> {
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
    let rate = (batches * batch) as f64 / started.elapsed().as_secs_f64();
    let error: f64 = tiles
        .iter()
        .zip(&states)
        .map(|(&w, &s)| (f64::from(w) - spec.codebook().value(s).to_f64()).powi(2))
        .sum();
    Ok((rate, error / tiles.len() as f64))
}

fn table(report: &Report) -> String {
    let mut text = format!(
        "{} codebook, {} threads\n{:>5}  {:<9} {:>10} {:>9} {:>9}\n",
        report.codebook, report.threads, "bits", "backend", "tiles/s", "x scalar", "mse"
    );
    for m in &report.results {
        let speedup = m.speedup.map_or("-".to_owned(), |s| format!("{s:.1}"));
        text.push_str(&format!(
            "{:>5}  {:<9} {:>10.1} {:>9} {:>9.5}\n",
            m.bits, m.backend, m.tiles_per_second, speedup, m.mse
        ));
    }
    text
}
