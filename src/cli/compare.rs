//! `compare`: models against their source, in one table and one report.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use exl3_candle::bundle::durable;
use exl3_candle::compare::{self, Candidate, Comparison, File, ModelReport};
use serde::Serialize;

use super::measured::{Measured, Opened, SourceArgs, Window};
use super::ui::bytes_text;
use super::{Status, Ui};

const JSON: &str = "comparison.json";

/// Compare models with their source: size, divergence, perplexity, error by layer
#[derive(Args)]
pub struct CompareArgs {
    /// Folder of the source model
    source: PathBuf,
    /// Folders of the models: EXL3 bundles or plain
    #[arg(required_unless_present = "output")]
    models: Vec<PathBuf>,
    #[command(flatten)]
    window: Window,
    #[command(flatten)]
    logits: SourceArgs,
    /// Write the report, its plots and the JSON document into this folder
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Leave out the baseline, round-to-nearest int4 in groups of 128
    #[arg(long)]
    no_baseline: bool,
}

#[derive(Serialize)]
struct CompareOutput<'a> {
    #[serde(flatten)]
    comparison: &'a Comparison,
    #[serde(flatten)]
    measured: &'a Measured,
}

pub fn run(args: &CompareArgs, ui: &Ui) -> anyhow::Result<Status> {
    let output = args.output.as_deref();
    output.map(check_folder).transpose()?;
    let source = Opened::new(&args.source)?;
    let models = args.models.iter().map(|dir| Opened::new(dir)).collect::<anyhow::Result<Vec<_>>>()?;
    let (corpus, measured) = args.window.read(&source)?;
    let source_weights = source.weights()?;
    let original = Candidate::stored(&name(&args.source, &[]), &source.checkpoint, &source.model)?;
    let mut candidates = Vec::new();
    for (opened, dir) in models.iter().zip(&args.models) {
        candidates.push(Candidate::stored(&name(dir, &args.models), &opened.checkpoint, &opened.model)?);
    }
    if !args.no_baseline {
        candidates.push(Candidate::rounded(&source.checkpoint, &source.model, source_weights.as_ref()));
    }
    ui.note(&format!("running the source, {}", original.name()));
    let reference = args.logits.reference(&source, &corpus)?;
    let comparison =
        compare::run(&original, &reference, &candidates, corpus.rows(), args.logits.top_k, |name| {
            ui.note(&format!("measuring {name}"));
        })?;
    let document = CompareOutput { comparison: &comparison, measured: &measured };
    let mut text = table(&comparison);
    text.push(measured.line());
    if let Some(dir) = output {
        let mut files = compare::files(&comparison, &[measured.line()])?;
        files.push(File { name: JSON.to_owned(), content: serde_json::to_vec_pretty(&document)? });
        write(dir, &files)?;
        text.push(format!("report      {}", dir.join("report.html").display()));
    }
    ui.result(&text.join("\n"), &document)?;
    Ok(Status::Done)
}

/// The last part of a path, or the whole where another model's ends alike.
fn name(dir: &Path, all: &[PathBuf]) -> String {
    let last = |dir: &Path| {
        let whole = fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
        whole.file_name().map(|name| name.to_string_lossy().into_owned())
    };
    let alike = all.iter().filter(|other| last(other) == last(dir)).count();
    last(dir).filter(|_| alike < 2).unwrap_or_else(|| dir.display().to_string())
}

/// A report replaces an older one and nothing else.
fn check_folder(dir: &Path) -> anyhow::Result<()> {
    let holds_something = dir.read_dir().is_ok_and(|mut entries| entries.next().is_some());
    if dir.exists() && !dir.is_dir() || holds_something && !dir.join(JSON).is_file() {
        bail!("{} exists and is no folder of an earlier report; name another", dir.display());
    }
    Ok(())
}

fn write(dir: &Path, files: &[File]) -> anyhow::Result<()> {
    for file in files {
        let path = dir.join(&file.name);
        let folder = path.parent().unwrap_or(dir);
        fs::create_dir_all(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
        durable::write(&path, |sink| sink.write_all(&file.content))?;
    }
    Ok(())
}

/// One line per model.
fn table(comparison: &Comparison) -> Vec<String> {
    let source = &comparison.source;
    let names = comparison.models.iter().map(|m| m.name.len()).chain([source.name.len(), 5]);
    let width = names.max().unwrap_or(0);
    let row = |name: &str, cells: [String; 8]| {
        let [size, bpw, kl, error, excess, top1, top_k, ppl] = cells;
        format!(
            "{name:<width$} {size:>11} {bpw:>7} {kl:>9} {error:>9} {excess:>9} {top1:>7} {top_k:>7} {ppl:>11}"
        )
    };
    let top = comparison.models.first().map_or(0, |m| m.top_k.k);
    let head = ["size", "bpw", "kl", "+-", "excess", "top-1", &format!("top-{top}"), "perplexity"];
    let mut lines = vec![row("model", head.map(str::to_owned))];
    let none = || "-".to_owned();
    lines.push(row(
        &source.name,
        [
            bytes_text(source.size.bytes),
            format!("{:.3}", source.size.bpw_decoder),
            none(),
            none(),
            none(),
            none(),
            none(),
            format!("{:.4}", source.perplexity),
        ],
    ));
    lines.extend(comparison.models.iter().map(|model| {
        let ModelReport { size, kl, excess_kl, top1, top_k, perplexity, .. } = model;
        let cells = [
            bytes_text(size.bytes),
            format!("{:.3}", size.bpw_decoder),
            format!("{:.5}", kl.mean),
            format!("{:.5}", kl.standard_error),
            format!("{excess_kl:.5}"),
            format!("{top1:.4}"),
            format!("{:.4}", top_k.agreement),
            format!("{perplexity:.4}"),
        ];
        row(&model.name, cells)
    }));
    lines.push(format!("bf16 floor  {:.6} nats, the source computed in bf16", source.bf16_floor.mean));
    lines
}
