//! `convert`: a Hugging Face folder to an EXL3 bundle.

mod output;
mod progress;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use exl3_candle::bundle::{self, Overwrite, default_work_dir};
use exl3_candle::corpus::{self, Corpus, Shape};
use exl3_candle::format::{Bits, Codebook};
use exl3_candle::model::Model;
use exl3_candle::pipeline::{self, Job, Outcome};
use exl3_candle::plan::{self, Recipe};
use exl3_candle::quantize::OutScales;
use exl3_candle::source::{self, Checkpoint};
use exl3_candle::verify;
use sha2::{Digest, Sha256};

use super::backend::BackendArgs;
use super::{Status, Ui, values};
use output::Report;
use progress::Progress;

const DEFAULT_ROWS: usize = 128;
const DEFAULT_COLS: usize = 512;
/// Bits per weight that stand for "leave it as it is".
const UNQUANTIZED: &str = "16";

/// Convert a Hugging Face folder to an EXL3 bundle
///
/// An interrupted conversion goes on when the same command is run again, and ends with the same
/// bytes.
#[derive(Args)]
pub struct ConvertArgs {
    /// Folder of the source: config.json, *.safetensors, tokenizer.json
    source: PathBuf,
    /// Folder of the bundle; it appears when it is complete
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Bits per weight: 1 to 8, 1.5, 2.5 or 3.5
    #[arg(short, long, allow_negative_numbers = true)]
    bits: Bits,
    /// Bits per weight of the head; 16 leaves it as it is
    #[arg(long, default_value = "6", value_parser = parse_bits_or_none)]
    head_bits: BitsOrNone,
    /// Bits per weight of a multi-token prediction head; 16 leaves it as it is
    #[arg(long, default_value = "4", value_parser = parse_bits_or_none)]
    mtp_bits: BitsOrNone,
    /// mul1, mcg or 3inst
    #[arg(long, default_value = "mul1")]
    codebook: Codebook,
    /// Scale of every output channel: auto, always or never
    #[arg(long, default_value = "auto")]
    out_scales: OutScales,
    /// Calibration text: plain text, JSONL with a "text" field, or pre-tokenized rows (JSON, or
    /// safetensors with input_ids) [default: a bundled mix]
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Calibration rows
    #[arg(long, default_value_t = DEFAULT_ROWS, allow_negative_numbers = true, value_parser = values::whole::<usize>)]
    rows: usize,
    /// Tokens of a calibration row [default: 512, or what the model has positions for]
    #[arg(long, allow_negative_numbers = true, value_parser = values::whole::<usize>)]
    cols: Option<usize>,
    /// Seed of the random signs, and of the bundled mix's random tokens
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, value_parser = values::whole::<u64>)]
    seed: u64,
    /// Where committed layers are kept until the bundle is complete [default: OUTPUT.work]
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// Largest shard, such as 4GiB or 500MB
    #[arg(long, default_value = "8GiB", value_parser = values::bytes)]
    shard_size: u64,
    /// Replace a bundle in the output folder, and discard work by other settings
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    backend: BackendArgs,
    /// Skip the check of the finished bundle against its source
    #[arg(long)]
    no_verify: bool,
}

#[derive(Clone, Copy, Debug)]
struct BitsOrNone(Option<Bits>);

fn parse_bits_or_none(text: &str) -> Result<BitsOrNone, String> {
    if text == UNQUANTIZED {
        return Ok(BitsOrNone(None));
    }
    text.parse()
        .map(|bits| BitsOrNone(Some(bits)))
        .map_err(|e: exl3_candle::format::FormatError| e.to_string())
}

pub fn run(args: &ConvertArgs, ui: &Ui) -> anyhow::Result<Status> {
    let checkpoint = source::open(&args.source)?;
    let work = args.work.clone().unwrap_or_else(|| default_work_dir(&args.output));
    bundle::check_apart(&args.source, &args.output, &work)?;
    bundle::check_companions(&args.source)?;
    let model =
        Model::of(&checkpoint).with_context(|| format!("{} cannot be converted", args.source.display()))?;
    let recipe = Recipe {
        bits: args.bits,
        head_bits: args.head_bits.0,
        mtp_bits: args.mtp_bits.0,
        codebook: args.codebook,
        out_scales: args.out_scales,
        seed: args.seed,
    };
    let plan = plan::build(&model, &checkpoint, recipe)?;
    let corpus = calibration(args, &model)?;
    ui.note(&format!("calibration: {}", corpus.description()));
    let encoder = args.backend.encoder(&plan.trellises()?, ui)?;
    let source_sha256 = checkpoint.check_finite_and_hash()?;
    let job = Job {
        checkpoint: &checkpoint,
        model: &model,
        plan: &plan,
        corpus: &corpus,
        encoder: encoder.as_ref(),
        base: base_name(&args.source)?,
        source_sha256,
        tokenizer_sha256: tokenizer_sha256(&args.source)?,
        out: args.output.clone(),
        work,
        overwrite: if args.overwrite { Overwrite::Replace } else { Overwrite::Refuse },
        shard_bytes: args.shard_size,
    };
    resumable_on_interrupt(ui)?;
    let progress = Progress::new(ui, encoder.as_ref());
    let outcome = pipeline::convert(&job, &progress)?;
    progress.end();
    let mut report = match outcome {
        Outcome::Converted(conversion) => Report::converted(&conversion),
        Outcome::AlreadyDone(dir) => Report::already_done(&dir)?,
    };
    report.left_out = plan.left_out.clone();
    if !args.no_verify {
        ui.note("checking the bundle against its source");
        report.verified = Some(checked(&args.output, &checkpoint)?);
    }
    ui.result(&report.text(), &report)?;
    Ok(if report.is_sound() { Status::Done } else { Status::No })
}

fn calibration(args: &ConvertArgs, model: &Model) -> anyhow::Result<Corpus> {
    let tokenizer = corpus::load_tokenizer(&args.source)?;
    let cols = args.cols.unwrap_or_else(|| DEFAULT_COLS.min(model.max_positions()));
    let shape = Shape { rows: args.rows, cols };
    Ok(match &args.calibration {
        Some(file) => corpus::from_file(&tokenizer, file, shape, model.vocab_size())?,
        None => corpus::default_mix(&tokenizer, shape, args.seed, model.vocab_size())?,
    })
}

/// The source folder's own name: where it lies on this machine is nobody else's business.
fn base_name(source: &Path) -> anyhow::Result<String> {
    let path = source.canonicalize().with_context(|| format!("{}: cannot be read", source.display()))?;
    match path.file_name() {
        Some(name) => Ok(name.to_string_lossy().into_owned()),
        None => bail!("{}: a source folder needs a name", source.display()),
    }
}

/// Over the tokenizer's files: they are copied into the bundle, so a job is not continued with
/// others.
fn tokenizer_sha256(source: &Path) -> anyhow::Result<String> {
    let mut hash = Sha256::new();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let path = source.join(name);
        if path.is_file() {
            let bytes =
                std::fs::read(&path).with_context(|| format!("{}: cannot be read", path.display()))?;
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Every file appears whole or not at all, so stopping anywhere is safe.
fn resumable_on_interrupt(ui: &Ui) -> anyhow::Result<()> {
    const INTERRUPTED: i32 = 130;
    let ui = *ui;
    ctrlc::set_handler(move || {
        ui.note("\ninterrupted; run the same command again to go on");
        std::process::exit(INTERRUPTED);
    })
    .context("cannot listen for interrupts")
}

fn checked(bundle: &Path, source: &Checkpoint) -> anyhow::Result<output::Verified> {
    let report = verify::run(bundle, Some(source.dir()))?;
    Ok(output::Verified { checks: report.checks, failures: report.failures.len() })
}
