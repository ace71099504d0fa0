//! The report: one HTML page that needs nothing else, and its charts as SVG and PNG.

mod chart;
mod raster;

use super::{CompareError, Comparison, ModelReport, Size};
use chart::{Axis, Chart, Mark, Scale, Series, Theme, escaped};

const MIB: f64 = (1u64 << 20) as f64;

const PAGE_STYLE: &str = "\
:root{color-scheme:light dark;--paper:#fff;--ink:#1c1e21;--faint:#5b616a;--line:#e3e6ea}\
@media (prefers-color-scheme:dark){:root{--paper:#16181b;--ink:#eceef1;--faint:#a5acb6;--line:#30343a}}\
body{margin:0 auto;padding:1.5rem 1rem 3rem;max-width:66rem;background:var(--paper);color:var(--ink);\
font:16px/1.5 system-ui,sans-serif}\
h1{font-size:1.5rem;line-height:1.25;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2rem 0 .5rem}\
p,li{max-width:46rem}.note{color:var(--faint);font-size:.9rem;overflow-wrap:anywhere;margin:.2rem 0}\
.wide{overflow-x:auto;margin:1rem 0}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}\
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}\
th{color:var(--faint);font-weight:600}th:first-child,td:first-child{text-align:left;padding-left:0}\
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1.5rem;margin:2rem 0}\
.charts svg{width:100%;height:auto;display:block}";

/// A file of the report.
pub struct File {
    /// Relative to the report's folder.
    pub name: String,
    pub content: Vec<u8>,
}

/// The page `report.html` and the charts in `plots/`. `notes` are lines that say what was measured.
pub fn files(comparison: &Comparison, notes: &[String]) -> Result<Vec<File>, CompareError> {
    let charts = charts(comparison);
    let page = page(comparison, notes, &charts);
    let mut files = vec![File { name: "report.html".to_owned(), content: page.into_bytes() }];
    let (both, light) = (chart::style(Theme::Both), chart::style(Theme::Light));
    for chart in &charts {
        let file =
            |extension: &str, content| File { name: format!("plots/{}.{extension}", chart.id), content };
        files.push(file("svg", chart.svg(Some(&both)).into_bytes()));
        files.push(file("png", raster::png(chart.id, &chart.svg(Some(&light)))?));
    }
    Ok(files)
}

const SIZE: Axis = Axis { label: "all tensors, MiB", scale: Scale::Linear };
const RATE: Axis = Axis { label: "bits per weight of the decoder", scale: Scale::Linear };
const LAYER: Axis = Axis { label: "layer", scale: Scale::Linear };
const POSITION: Axis = Axis { label: "position", scale: Scale::Linear };
const KL: Axis = Axis { label: "mean KL, nats (log)", scale: Scale::Log };
const PERPLEXITY: Axis = Axis { label: "perplexity", scale: Scale::Linear };
const ERROR: Axis = Axis { label: "relative error of the hidden state", scale: Scale::Linear };

fn charts(comparison: &Comparison) -> Vec<Chart<'_>> {
    let models = &comparison.models;
    let mib = |m: &ModelReport| m.size.bytes as f64 / MIB;
    let rate = |m: &ModelReport| m.size.bpw_decoder;
    let source = |chart| Chart { level: Some((comparison.source.perplexity, "source")), ..chart };
    let kl_by_size = points(models, "kl-by-size", "KL against size", SIZE, KL, |m| (mib(m), m.kl.mean));
    let kl_by_bpw =
        points(models, "kl-by-bpw", "KL against bits per weight", RATE, KL, |m| (rate(m), m.kl.mean));
    let perplexity_by_size =
        points(models, "perplexity-by-size", "Perplexity against size", SIZE, PERPLEXITY, |m| {
            (mib(m), m.perplexity)
        });
    let perplexity_by_bpw =
        points(models, "perplexity-by-bpw", "Perplexity against bits per weight", RATE, PERPLEXITY, |m| {
            (rate(m), m.perplexity)
        });
    let error_by_layer = lines(models, "error-by-layer", "Error behind each layer", LAYER, ERROR, |m| {
        m.layers.iter().enumerate().map(|(i, probe)| (i as f64, probe.relative_error)).collect()
    });
    let kl_by_position = lines(models, "kl-by-position", "KL by position in a row", POSITION, KL, |m| {
        m.by_position.iter().map(|b| ((b.from + b.to) as f64 / 2.0, b.kl)).collect()
    });
    vec![
        kl_by_size,
        kl_by_bpw,
        source(perplexity_by_size),
        source(perplexity_by_bpw),
        error_by_layer,
        kl_by_position,
    ]
}

/// One point per model.
fn points<'a>(
    models: &'a [ModelReport],
    id: &'static str,
    title: &'static str,
    x: Axis,
    y: Axis,
    at: impl Fn(&ModelReport) -> (f64, f64),
) -> Chart<'a> {
    Chart { mark: Mark::Points, ..lines(models, id, title, x, y, |m| vec![at(m)]) }
}

/// One line per model.
fn lines<'a>(
    models: &'a [ModelReport],
    id: &'static str,
    title: &'static str,
    x: Axis,
    y: Axis,
    at: impl Fn(&ModelReport) -> Vec<(f64, f64)>,
) -> Chart<'a> {
    let series = models.iter().map(|m| Series { name: &m.name, points: at(m) }).collect();
    Chart { id, title, x, y, mark: Mark::Lines, series, level: None }
}

fn page(comparison: &Comparison, notes: &[String], charts: &[Chart<'_>]) -> String {
    let source = &comparison.source;
    let title = format!("Quantizations of {}", escaped(&source.name));
    let notes: String =
        notes.iter().map(|note| format!("<p class=\"note\">{}</p>\n", escaped(note))).collect();
    let charts: String = charts.iter().map(|chart| format!("<div>{}</div>\n", chart.svg(None))).collect();
    let head = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
         <title>{title}</title>\n<style>{PAGE_STYLE}{}</style>\n</head>\n<body>\n<h1>{title}</h1>\n",
        chart::style(Theme::Both)
    );
    let intro = format!(
        "<p>How far each model is from its source on the same text. The source has a perplexity of {:.3} \u{b1} {:.3}. \
         Computed in bf16 it differs from itself by {:.6} nats; a KL of that size means nothing, and the excess is \
         what lies above.</p>\n",
        source.perplexity, source.perplexity_standard_error, source.bf16_floor.mean
    );
    [
        head,
        intro,
        notes,
        "<div class=\"wide\">".to_owned(),
        main_table(comparison),
        "</div>\n<div class=\"charts\">\n".to_owned(),
        charts,
        "</div>\n<h2>Distribution of the KL over positions</h2>\n<div class=\"wide\">".to_owned(),
        distribution_table(comparison),
        "</div>\n<h2>KL by confidence of the source</h2>\n<p class=\"note\">Mean KL in nats over the positions where the \
         source gives its most likely token a probability in this range.</p>\n<div class=\"wide\">"
            .to_owned(),
        confidence_table(comparison),
        "</div>\n".to_owned(),
        DEFINITIONS.to_owned(),
        "</body>\n</html>\n".to_owned(),
    ]
    .concat()
}

const DEFINITIONS: &str = "<h2>What the numbers are</h2>\n<ul>\n\
<li>KL: mean over all positions of KL(source || model) of the distributions of the next token, in nats, with its \
standard error as if positions were independent; reverse: KL(model || source).</li>\n\
<li>Top-k: mean share of the source's k most likely tokens that are among the model's k.</li>\n\
<li>Size: all tensors. Bits per weight: stored bits of the linears over their weights, of the decoder and of the \
head.</li>\n\
<li>Error behind a layer: norm of the difference of the hidden states over the norm of the source's, all layers \
before included.</li>\n\
<li>rtn-int4-g128: every decoder linear of the source rounded to nearest in groups of 128 inputs, 4 bits with an f16 \
scale and a 4-bit zero point; no search, no calibration, the head as in the source.</li>\n</ul>\n";

fn main_table(comparison: &Comparison) -> String {
    let top = comparison.models.first().map_or(0, |m| m.top_k.k);
    let columns = [
        "model",
        "format",
        "MiB",
        "bits decoder",
        "head",
        "KL",
        "excess",
        "top-1",
        &format!("top-{top}"),
        "perplexity",
    ]
    .map(str::to_owned);
    let source = &comparison.source;
    let size = |name: &str, format: &str, size: &Size| {
        vec![
            name.to_owned(),
            format.to_owned(),
            format!("{:.2}", size.bytes as f64 / MIB),
            format!("{:.3}", size.bpw_decoder),
            size.bpw_head.map_or("tied".to_owned(), |rate| format!("{rate:.3}")),
        ]
    };
    let mut first = size(&source.name, "source", &source.size);
    first.extend(["-"; 4].map(str::to_owned));
    first.push(format!("{:.3}", source.perplexity));
    let mut rows = vec![first];
    rows.extend(comparison.models.iter().map(|m| {
        let mut row = size(&m.name, m.kind.name(), &m.size);
        row.extend([
            format!("{:.5} \u{b1} {:.5}", m.kl.mean, m.kl.standard_error),
            format!("{:.5}", m.excess_kl),
            format!("{:.4}", m.top1),
            format!("{:.4}", m.top_k.agreement),
            format!("{:.3}", m.perplexity),
        ]);
        row
    }));
    table(&columns, &rows)
}

fn distribution_table(comparison: &Comparison) -> String {
    let columns =
        ["model", "median", "90 %", "99 %", "max", "reverse mean", "reverse 99 %"].map(str::to_owned);
    let row = |m: &ModelReport| {
        let (kl, reverse) = (&m.kl, &m.reverse_kl);
        let numbers = [kl.median, kl.p90, kl.p99, kl.max, reverse.mean, reverse.p99];
        std::iter::once(m.name.clone()).chain(numbers.map(|x| format!("{x:.5}"))).collect()
    };
    table(&columns, &comparison.models.iter().map(row).collect::<Vec<_>>())
}

fn confidence_table(comparison: &Comparison) -> String {
    let Some(first) = comparison.models.first() else { return String::new() };
    let ranges = first.by_confidence.iter().map(|b| format!("{} to {}", b.from, b.to));
    let columns: Vec<String> = std::iter::once("model".to_owned()).chain(ranges).collect();
    let number = |kl: f64| if kl.is_nan() { "-".to_owned() } else { format!("{kl:.5}") };
    let positions = first.by_confidence.iter().map(|b| b.positions.to_string());
    let mut rows = vec![std::iter::once("positions".to_owned()).chain(positions).collect::<Vec<_>>()];
    rows.extend(comparison.models.iter().map(|m| {
        std::iter::once(m.name.clone()).chain(m.by_confidence.iter().map(|b| number(b.kl))).collect()
    }));
    table(&columns, &rows)
}

fn table(columns: &[String], rows: &[Vec<String>]) -> String {
    let cells = |tag: &str, cells: &[String]| -> String {
        cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell))).collect()
    };
    let body: String = rows.iter().map(|row| format!("<tr>{}</tr>\n", cells("td", row))).collect();
    format!("<table>\n<thead><tr>{}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n", cells("th", columns))
}
