//! What a command says: results on stdout, everything else on stderr.

use std::io::{IsTerminal, Write};

use exl3_candle::bundle::BundleError;
use exl3_candle::encode::opencl::OpenClError;
use exl3_candle::pipeline::PipelineError;
use serde::Serialize;

/// Where output goes and in which form.
#[derive(Clone, Copy)]
pub struct Ui {
    json: bool,
}

impl Ui {
    pub fn new(json: bool) -> Self {
        Self { json }
    }

    /// Whether bars and other moving output make sense.
    pub fn is_live(&self) -> bool {
        std::io::stderr().is_terminal()
    }

    /// Prints a command's result: `text` for people, or `value` as one JSON document.
    ///
    /// A reader that went away (`exl3-candle ... | head`) is not an error.
    pub fn result(&self, text: &str, value: &impl Serialize) -> anyhow::Result<()> {
        let rendered = if self.json { serde_json::to_string_pretty(value)? } else { text.to_owned() };
        match writeln!(std::io::stdout(), "{}", rendered.trim_end()) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// A line of progress or explanation on stderr.
    pub fn note(&self, line: &str) {
        let _ = writeln!(std::io::stderr(), "{line}");
    }

    pub fn error(&self, error: &anyhow::Error) {
        let mut text = format!("error: {error}");
        for cause in error.chain().skip(1) {
            text.push_str(&format!("\n  caused by: {cause}"));
        }
        // An error that wraps another transparently hides it from the chain.
        let hint = error.chain().find_map(|cause| {
            let pipeline = cause.downcast_ref::<PipelineError>().and_then(PipelineError::hint);
            let bundle = || cause.downcast_ref::<BundleError>().and_then(BundleError::hint);
            let opencl = || cause.downcast_ref::<OpenClError>().and_then(OpenClError::hint);
            pipeline.or_else(bundle).or_else(opencl)
        });
        if let Some(hint) = hint {
            text.push_str(&format!("\nhint: {hint}"));
        }
        self.note(&text);
    }
}

/// A number of bytes for people.
pub fn bytes_text(bytes: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.2} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

/// A duration for people.
pub fn seconds_text(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}
