//! Progress of a conversion on stderr: a line per tensor, and a bar where there is a terminal.

use std::cell::Cell;
use std::time::Duration;

use exl3_candle::encode::TileEncoder;
use exl3_candle::progress::{Event, Observer, TensorDone};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::Ui;

/// A tensor takes minutes in a large model: the elapsed time shows that there is life.
const TICK: Duration = Duration::from_millis(500);

pub struct Progress<'a> {
    ui: &'a Ui,
    encoder: &'static str,
    /// Counts weights, since units differ in size.
    bar: ProgressBar,
    units: Cell<usize>,
}

impl<'a> Progress<'a> {
    pub fn new(ui: &'a Ui, encoder: &dyn TileEncoder) -> Self {
        let target = if ui.is_live() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(1), target);
        let style = ProgressStyle::with_template("{msg} [{wide_bar}] {percent}% {elapsed} + {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
        if ui.is_live() {
            bar.enable_steady_tick(TICK);
        }
        Self { ui, encoder: encoder.name(), bar, units: Cell::new(0) }
    }

    pub fn end(&self) {
        self.bar.finish_and_clear();
    }

    fn say(&self, line: &str) {
        self.bar.suspend(|| self.ui.note(line));
    }

    fn stage(&self, unit: usize, stage: &str, key: &str) {
        self.bar.set_message(format!("{}/{} {stage} {key}", unit + 1, self.units.get()));
    }
}

impl Observer for Progress<'_> {
    fn event(&self, event: Event<'_>) {
        match event {
            Event::Planned { units, committed, weights, committed_weights } => {
                self.units.set(units);
                self.bar.set_length(weights);
                self.bar.set_position(committed_weights);
                self.bar.reset_eta();
                let resumed =
                    if committed > 0 { format!(", {committed} of them done before") } else { String::new() };
                self.say(&format!("{units} units{resumed}; encoder {}", self.encoder));
            }
            Event::Replaying { unit, until } => {
                self.bar.set_message(format!("replaying layer {} of {until}", unit + 1));
            }
            Event::UnitStarted { unit, key } => self.stage(unit, "capture", key),
            Event::Captured { unit, key } => self.stage(unit, "quantize", key),
            Event::Tensor(tensor) => self.say(&tensor_line(&tensor)),
            Event::UnitCommitted { unit, key, weights } => {
                self.bar.inc(weights);
                let left = self.bar.eta().as_secs_f64();
                let units = self.units.get();
                let eta = if unit + 1 < units { format!(", about {left:.0} s left") } else { String::new() };
                self.say(&format!("{key} is on disk ({}/{units}{eta})", unit + 1));
            }
            Event::Warning(text) => self.say(&format!("warning: {text}")),
            Event::Finishing => self.bar.set_message("writing the bundle"),
        }
    }
}

fn tensor_line(t: &TensorDone<'_>) -> String {
    let out_scales = if t.out_scales { "" } else { ", no output scales" };
    format!(
        "{:<40} {} bits, proxy error {:.6}, scale {:.4}, {:.1} s{out_scales}",
        t.key, t.bits, t.proxy_error, t.g_scale, t.seconds
    )
}
