//! Progress of a conversion on stderr: a line per tensor, and a bar where there is a terminal.

use std::cell::Cell;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use exl3_candle::encode::TileEncoder;
use exl3_candle::progress::{Event, Observer, TensorDone};
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use crate::cli::Ui;
use crate::cli::ui::seconds_text;

/// A tensor takes minutes in a large model: the elapsed time shows that there is life.
const TICK: Duration = Duration::from_millis(500);

pub struct Progress<'a> {
    ui: &'a Ui,
    encoder: String,
    /// Counts weights, since units differ in size.
    bar: ProgressBar,
    units: Cell<usize>,
    estimate: Arc<Mutex<Estimate>>,
}

/// When the conversion will end, from the mean speed of this run: progress comes in whole units,
/// minutes apart, which no moving average suits.
#[derive(Default)]
struct Estimate {
    started: Option<Instant>,
    done_weights: u64,
    end: Option<Instant>,
}

impl Estimate {
    fn start(now: Instant) -> Self {
        Self { started: Some(now), ..Self::default() }
    }

    fn advance(&mut self, now: Instant, weights: u64, left_weights: u64) {
        self.done_weights += weights;
        self.end = self.started.filter(|_| self.done_weights > 0).and_then(|started| {
            let left = (now - started).as_secs_f64() * left_weights as f64 / self.done_weights as f64;
            now.checked_add(Duration::try_from_secs_f64(left).ok()?)
        });
    }

    /// Unknown before the first unit of this run is done.
    fn left_seconds(&self, now: Instant) -> Option<f64> {
        self.end.map(|end| end.saturating_duration_since(now).as_secs_f64())
    }
}

impl<'a> Progress<'a> {
    pub fn new(ui: &'a Ui, encoder: &dyn TileEncoder) -> Self {
        let target = if ui.is_live() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(1), target);
        let style = ProgressStyle::with_template("{msg} [{wide_bar}] {percent}% {elapsed}{left}");
        let estimate = Arc::<Mutex<Estimate>>::default();
        let shown = Arc::clone(&estimate);
        let left = move |_: &ProgressState, out: &mut dyn Write| {
            let estimate = shown.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(left) = estimate.left_seconds(Instant::now()) {
                let _ = write!(out, ", {:#} left", HumanDuration(Duration::from_secs(left as u64)));
            }
        };
        let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style.with_key("left", left).progress_chars("=> "));
        if ui.is_live() {
            bar.enable_steady_tick(TICK);
        }
        Self { ui, encoder: encoder.name().to_owned(), bar, units: Cell::new(0), estimate }
    }

    pub fn end(&self) {
        self.bar.finish_and_clear();
    }

    fn say(&self, line: &str) {
        self.bar.suspend(|| self.ui.note(line));
    }

    fn with_estimate<T>(&self, act: impl FnOnce(&mut Estimate) -> T) -> T {
        act(&mut self.estimate.lock().unwrap_or_else(PoisonError::into_inner))
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
                self.with_estimate(|estimate| *estimate = Estimate::start(Instant::now()));
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
                let units = self.units.get();
                let left_weights = self.bar.length().unwrap_or(0).saturating_sub(self.bar.position());
                let left = self.with_estimate(|estimate| {
                    estimate.advance(Instant::now(), weights, left_weights);
                    estimate.left_seconds(Instant::now())
                });
                let eta = match left {
                    Some(left) if unit + 1 < units => format!(", about {} left", about_text(left)),
                    _ => String::new(),
                };
                self.say(&format!("{key} is on disk ({}/{units}{eta})", unit + 1));
            }
            Event::Warning(text) => self.say(&format!("warning: {text}")),
            Event::Finishing => self.bar.set_message("writing the bundle"),
        }
    }
}

/// An estimate deserves no decimals.
fn about_text(seconds: f64) -> String {
    if seconds < 59.5 { format!("{seconds:.0} s") } else { seconds_text(seconds) }
}

fn tensor_line(t: &TensorDone<'_>) -> String {
    let out_scales = if t.out_scales { "" } else { ", no output scales" };
    format!(
        "{:<40} {} bits, proxy error {:.6}, scale {:.4}, {:.1} s{out_scales}",
        t.key, t.bits, t.proxy_error, t.g_scale, t.seconds
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_estimate_follows_the_mean_speed_and_counts_down() {
        let at = |start: Instant, seconds| start + Duration::from_secs(seconds);
        let start = Instant::now();
        let mut estimate = Estimate::start(start);
        assert_eq!(estimate.left_seconds(at(start, 600)), None);
        estimate.advance(at(start, 600), 10, 30);
        assert_eq!(estimate.left_seconds(at(start, 600)), Some(1800.0));
        assert_eq!(estimate.left_seconds(at(start, 1000)), Some(1400.0));
        estimate.advance(at(start, 900), 20, 10);
        assert_eq!(estimate.left_seconds(at(start, 900)), Some(300.0));
        assert_eq!(estimate.left_seconds(at(start, 5000)), Some(0.0));
    }
}
