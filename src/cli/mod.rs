//! The command line: the only code that reads arguments and the environment, prints, draws bars
//! and picks exit codes. One command per file.

mod ui;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

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
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Verify(verify::VerifyArgs),
}

pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let ui = Ui::new(cli.json);
    let result: anyhow::Result<Status> = match &cli.command {
        Command::Verify(args) => verify::run(args, &ui),
    };
    match result {
        Ok(status) => status.into(),
        Err(error) => {
            ui.error(&error);
            ExitCode::from(EXIT_ERROR)
        }
    }
}
