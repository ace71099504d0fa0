//! `eval`: perplexity of a model, the divergence of a quantized model from its source, and the
//! layers in which it departs from it.

mod kl;
mod layers;
mod ppl;

use clap::Subcommand;

use super::{Status, Ui, judge};

/// Measure a model: a Hugging Face folder or an EXL3 bundle
#[derive(Subcommand)]
pub enum Command {
    Ppl(ppl::PplArgs),
    Kl(kl::KlArgs),
    Layers(layers::LayersArgs),
    Judge(judge::EvalJudgeArgs),
}

pub fn run(command: Command, ui: &Ui) -> anyhow::Result<Status> {
    match command {
        Command::Ppl(args) => ppl::run(&args, ui),
        Command::Kl(args) => kl::run(&args, ui),
        Command::Layers(args) => layers::run(&args, ui),
        Command::Judge(args) => judge::run_eval(&args, ui),
    }
}

/// A value that is no number is within no limit.
fn within(value: f64, limit: Option<f64>) -> Status {
    if limit.is_none_or(|limit| value <= limit) { Status::Done } else { Status::No }
}
