//! `eval layers`: where quality is lost.

use std::path::{Path, PathBuf};

use clap::Args;
use exl3_candle::eval::{self, LayerProbe, Subject};
use serde::Serialize;

use crate::cli::measured::{Measured, Opened, Window};
use crate::cli::{Status, Ui};

/// Error of the hidden state behind each layer of a quantized model
#[derive(Args)]
pub struct LayersArgs {
    /// Folder of the source model
    source: PathBuf,
    /// Folder of the quantized model
    model: PathBuf,
    #[command(flatten)]
    window: Window,
}

#[derive(Serialize)]
struct LayersOutput<'a> {
    source: &'a Path,
    model: &'a Path,
    layers: &'a [LayerProbe],
    #[serde(flatten)]
    measured: &'a Measured,
}

pub fn run(args: &LayersArgs, ui: &Ui) -> anyhow::Result<Status> {
    let source = Opened::new(&args.source)?;
    let opened = Opened::new(&args.model)?;
    let (corpus, measured) = args.window.read(&source)?;
    let (p, q) = (source.weights()?, opened.weights()?);
    let layers = eval::layers(
        Subject { model: &source.model, weights: p.as_ref() },
        Subject { model: &opened.model, weights: q.as_ref() },
        corpus.rows(),
    )?;
    let output =
        LayersOutput { source: &args.source, model: &args.model, layers: &layers, measured: &measured };
    ui.result(&text(&layers, &measured), &output)?;
    Ok(Status::Done)
}

fn text(layers: &[LayerProbe], measured: &Measured) -> String {
    let width = layers.iter().map(|one| one.layer.len()).max().unwrap_or(0).max("layer".len());
    let row = |layer: &str, cells: [String; 4]| {
        let [error, cosine, sqnr, alone] = cells;
        format!("{layer:<width$}  {error:>9} {cosine:>9} {sqnr:>8} {alone:>9}")
    };
    let mut lines = vec![row("layer", ["error", "cosine", "SQNR dB", "alone"].map(str::to_owned))];
    lines.extend(layers.iter().map(|one| {
        let LayerProbe { layer, relative_error, cosine, sqnr_db, relative_error_alone } = one;
        let cells = [
            format!("{relative_error:.5}"),
            format!("{cosine:.5}"),
            format!("{sqnr_db:.2}"),
            format!("{relative_error_alone:.5}"),
        ];
        row(layer, cells)
    }));
    lines.push(measured.line());
    lines.join("\n")
}
