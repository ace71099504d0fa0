//! `exl3-candle export`: a bundle as an ordinary checkpoint folder for a runtime.

use std::path::{Path, PathBuf};

use clap::Args;
use exl3_candle::export::{self, Export, Origin, Runtime};
use serde::Serialize;

use super::ui::bytes_text;
use super::{Status, Ui};

/// Write a bundle as a checkpoint folder under the names that a runtime reads
#[derive(Args)]
pub struct ExportArgs {
    /// The bundle's folder
    bundle: PathBuf,
    /// The new folder; it must not exist, or be empty, and appears when it is complete
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Who reads it: vllm or exllamav3
    #[arg(long = "for", value_name = "RUNTIME")]
    runtime: Runtime,
}

pub fn run(args: &ExportArgs, ui: &Ui) -> anyhow::Result<Status> {
    let export = export::run(&args.bundle, &args.output, args.runtime)?;
    let output = Output { output: &args.output, runtime: args.runtime.name(), export: &export };
    ui.result(&text(args, &export), &output)?;
    Ok(Status::Done)
}

#[derive(Serialize)]
struct Output<'a> {
    output: &'a Path,
    runtime: &'static str,
    #[serde(flatten)]
    export: &'a Export,
}

fn text(args: &ExportArgs, export: &Export) -> String {
    let of = |origin: Origin| {
        let files = export.files.iter().filter(move |file| file.origin == origin);
        let (count, bytes) = files.fold((0, 0), |(count, bytes), file| (count + 1, bytes + file.bytes));
        format!("{count} ({})", bytes_text(bytes))
    };
    [
        format!("exported   {}", args.output.display()),
        format!("names      below \"{}\", {} tensors renamed", export.prefix, export.renamed),
        format!(
            "files      linked {}, copied {}, written {}",
            of(Origin::Linked),
            of(Origin::Copied),
            of(Origin::Written)
        ),
    ]
    .join("\n")
}
