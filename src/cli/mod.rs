//! The command line: the only code that reads arguments and the environment, prints, draws bars
//! and picks exit codes. One command per file.

mod backend;
mod bench;
mod compare;
mod convert;
mod devices;
mod eval;
mod export;
mod judge;
mod measured;
mod threads;
mod ui;
mod values;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use exl3_candle::bundle::fault::Fault;

pub use ui::Ui;

/// How a command ended, as the shell sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Done,
    /// Ran to the end, and the answer is no.
    No,
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> ExitCode {
        ExitCode::from(match status {
            Status::Done => 0,
            Status::No => 1,
        })
    }
}

const EXIT_ERROR: u8 = 2;

/// Convert Hugging Face checkpoints to EXL3 bundles, verify and measure them.
#[derive(Parser)]
#[command(
    name = "exl3-candle",
    version,
    after_help = "Exit codes: 0 done; 1 ran, and the answer is no; 2 error; 130 interrupted, resumable."
)]
struct Cli {
    /// Print one JSON document on stdout instead of text
    #[arg(long, global = true)]
    json: bool,
    /// Threads to use [default: all cores]
    #[arg(long, global = true, value_name = "N", allow_negative_numbers = true, value_parser = threads::parse)]
    threads: Option<usize>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Convert(convert::ConvertArgs),
    Devices(devices::DevicesArgs),
    /// Measure speed on this machine
    #[command(subcommand)]
    Bench(bench::Bench),
    #[command(subcommand)]
    Eval(eval::Command),
    Compare(compare::CompareArgs),
    Export(export::ExportArgs),
    Judge(judge::JudgeArgs),
    Verify(verify::VerifyArgs),
}

pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let ui = Ui::new(cli.json);
    arm_fault();
    match run(cli, &ui) {
        Ok(status) => status.into(),
        Err(error) => {
            ui.error(&error);
            ExitCode::from(EXIT_ERROR)
        }
    }
}

fn run(cli: Cli, ui: &Ui) -> anyhow::Result<Status> {
    threads::set(cli.threads)?;
    match cli.command {
        Command::Convert(args) => convert::run(&args, ui),
        Command::Devices(args) => devices::run(&args, ui),
        Command::Bench(bench) => bench::run(&bench, ui),
        Command::Eval(command) => eval::run(command, ui),
        Command::Compare(args) => compare::run(&args, ui),
        Command::Export(args) => export::run(&args, ui),
        Command::Judge(args) => judge::run(&args, ui),
        Command::Verify(args) => verify::run(&args, ui),
    }
}

/// Tests let the program die, or run out of space, at a chosen step of writing.
fn arm_fault() {
    let variables =
        [("EXL3_CANDLE_ABORT_AT_WRITE", Fault::Abort), ("EXL3_CANDLE_FULL_AT_WRITE", Fault::DiskFull)];
    for (variable, fault) in variables {
        if let Some(step) = std::env::var(variable).ok().and_then(|step| step.parse().ok()) {
            exl3_candle::bundle::fault::arm(fault, step);
        }
    }
}
