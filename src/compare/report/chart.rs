//! Charts as SVG: points or lines over two axes, with a legend on top. Colours come from classes,
//! so that a page can give them for light and for dark.

use std::fmt::Write;

const WIDTH: f64 = 440.0;
const LEFT: f64 = 50.0;
const RIGHT: f64 = 14.0;
const PLOT_HEIGHT: f64 = 210.0;
const LEGEND_TOP: f64 = 40.0;
const LEGEND_ROW: f64 = 17.0;
const LEGEND_COLUMNS: usize = 2;
/// Characters of a name that fit into a column of the legend.
const LEGEND_CHARS: usize = 27;
const COLOURS: usize = 8;
/// Prime to the colours, so that 56 series look different.
const SHAPES: usize = 7;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    Linear,
    /// Values that are not above zero are left out.
    Log,
}

pub struct Axis {
    pub label: &'static str,
    pub scale: Scale,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    Points,
    Lines,
}

pub struct Series<'a> {
    pub name: &'a str,
    pub points: Vec<(f64, f64)>,
}

pub struct Chart<'a> {
    /// File name without extension.
    pub id: &'static str,
    pub title: &'static str,
    pub x: Axis,
    pub y: Axis,
    pub mark: Mark,
    pub series: Vec<Series<'a>>,
    /// A value of `y` to be drawn across, with its name.
    pub level: Option<(f64, &'static str)>,
}

/// Which colours a style sheet has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Theme {
    Light,
    /// Light or dark, as the reader prefers.
    Both,
}

const LIGHT: [&str; COLOURS] =
    ["#0067a5", "#c8500a", "#00805b", "#b5478f", "#866a00", "#4a4f57", "#6a4fb0", "#3a8fc4"];
const DARK: [&str; COLOURS] =
    ["#58aef0", "#ff9254", "#42d3a2", "#f09acb", "#e2c24a", "#c9ced6", "#b9a4f2", "#9ad8ff"];

/// The rules of the classes that charts use.
pub fn style(theme: Theme) -> String {
    let mut style = ".chart text{font-family:system-ui,sans-serif;font-size:12px}.chart .title{font-size:14px;font-weight:600}\
                     .series{fill:none;stroke-width:1.8}.grid{stroke-width:1}.dashed{stroke-width:1.4;stroke-dasharray:5 4}"
        .to_owned();
    style += &colours(["#ffffff", "#1c1e21", "#5b616a", "#e3e6ea"], LIGHT);
    if theme == Theme::Both {
        let dark = colours(["#16181b", "#eceef1", "#a5acb6", "#30343a"], DARK);
        style += &format!("@media (prefers-color-scheme:dark){{{dark}}}");
    }
    style
}

fn colours([paper, ink, faint, grid]: [&str; 4], series: [&str; COLOURS]) -> String {
    let mut rules = format!(
        ".paper{{fill:{paper}}}.ink{{fill:{ink}}}.faint{{fill:{faint}}}.grid{{stroke:{grid}}}.dashed{{stroke:{faint}}}"
    );
    for (i, colour) in series.iter().enumerate() {
        rules += &format!(".s{i}{{stroke:{colour}}}");
    }
    rules
}

/// Text that is safe between tags and in attributes.
pub fn escaped(text: &str) -> String {
    let escape = |c: char| match c {
        '&' => "&amp;".to_owned(),
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '"' => "&quot;".to_owned(),
        other => other.to_string(),
    };
    text.chars().map(escape).collect()
}

impl Chart<'_> {
    /// The chart as one `svg` element. With `style`, it stands alone.
    pub fn svg(&self, style: Option<&str>) -> String {
        let rows = self.series.len().div_ceil(LEGEND_COLUMNS) as f64;
        let top = LEGEND_TOP + rows * LEGEND_ROW + 14.0;
        let bottom = top + PLOT_HEIGHT;
        let height = bottom + 44.0;
        let x = Range::of(&self.x, self.points().map(|(x, _)| x), (LEFT, WIDTH - RIGHT));
        let levels = self.level.iter().map(|(y, _)| *y);
        let y = Range::of(&self.y, self.points().map(|(_, y)| y).chain(levels), (bottom, top));
        let mut svg = format!(
            "<svg{} class=\"chart\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">\n",
            if style.is_some() { " xmlns=\"http://www.w3.org/2000/svg\"" } else { "" },
            escaped(self.title)
        );
        if let Some(style) = style {
            svg += &format!(
                "<style>{style}</style>\n<rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\"/>\n"
            );
        }
        svg += &format!("<text class=\"ink title\" x=\"8\" y=\"20\">{}</text>\n", escaped(self.title));
        self.legend(&mut svg);
        self.frame(&mut svg, &x, &y, bottom);
        self.marks(&mut svg, &x, &y);
        svg + "</svg>\n"
    }

    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        let all = self.series.iter().flat_map(|series| series.points.iter().copied());
        all.filter(|&(x, y)| self.x.takes(x) && self.y.takes(y))
    }

    fn legend(&self, svg: &mut String) {
        let column = (WIDTH - 8.0) / LEGEND_COLUMNS as f64;
        for (i, series) in self.series.iter().enumerate() {
            let x = 16.0 + (i % LEGEND_COLUMNS) as f64 * column;
            let y = LEGEND_TOP + (i / LEGEND_COLUMNS) as f64 * LEGEND_ROW;
            marker(svg, i, x, y, 4.5);
            let name = escaped(&shortened(series.name));
            let _ = writeln!(svg, "<text class=\"ink\" x=\"{}\" y=\"{}\">{name}</text>", x + 11.0, y + 4.0);
        }
    }

    /// Grid, tick labels and axis labels.
    fn frame(&self, svg: &mut String, x: &Range, y: &Range, bottom: f64) {
        let right = WIDTH - RIGHT;
        for (value, label) in y.ticks() {
            let at = y.at(value);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text class=\"faint\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                LEFT - 6.0,
                at + 4.0
            );
        }
        for (value, label) in x.ticks() {
            let at = x.at(value);
            let _ = writeln!(
                svg,
                "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{bottom:.1}\"/>\
                 <text class=\"faint\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
                bottom - PLOT_HEIGHT,
                bottom + 16.0
            );
        }
        let _ = writeln!(
            svg,
            "<text class=\"faint\" x=\"8\" y=\"{:.1}\">{}</text>\
             <text class=\"faint\" x=\"{right}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            bottom - PLOT_HEIGHT - 8.0,
            escaped(self.y.label),
            bottom + 34.0,
            escaped(self.x.label)
        );
    }

    fn marks(&self, svg: &mut String, x: &Range, y: &Range) {
        if let Some((value, name)) = self.level {
            let at = y.at(value);
            let _ = writeln!(
                svg,
                "<line class=\"dashed\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text class=\"faint\" x=\"{}\" y=\"{:.1}\">{}</text>",
                WIDTH - RIGHT,
                LEFT + 4.0,
                at - 5.0,
                escaped(name)
            );
        }
        for (i, series) in self.series.iter().enumerate() {
            let drawn = series.points.iter().filter(|(px, py)| self.x.takes(*px) && self.y.takes(*py));
            let at: Vec<(f64, f64)> = drawn.map(|(px, py)| (x.at(*px), y.at(*py))).collect();
            if self.mark == Mark::Lines {
                let path: Vec<String> = at.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
                let _ = writeln!(
                    svg,
                    "<polyline class=\"series s{}\" points=\"{}\"/>",
                    i % COLOURS,
                    path.join(" ")
                );
            }
            let size = if self.mark == Mark::Lines { 2.8 } else { 5.5 };
            at.iter().for_each(|(x, y)| marker(svg, i, *x, *y, size));
        }
    }
}

fn shortened(name: &str) -> String {
    let chars: Vec<char> = name.chars().collect();
    if chars.len() <= LEGEND_CHARS {
        return name.to_owned();
    }
    // Names of one family differ at their ends.
    let tail: String = chars[chars.len() - (LEGEND_CHARS - 1)..].iter().collect();
    format!("…{tail}")
}

/// An open shape, so that one does not hide another.
fn marker(svg: &mut String, series: usize, x: f64, y: f64, r: f64) {
    let class = format!("series s{}", series % COLOURS);
    let shape: &[&[(f64, f64)]] = match series % SHAPES {
        0 => {
            let _ = writeln!(svg, "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{r:.1}\"/>");
            return;
        }
        1 => &[&[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9), (-0.9, -0.9)]],
        2 => &[&[(0.0, -1.2), (1.2, 0.0), (0.0, 1.2), (-1.2, 0.0), (0.0, -1.2)]],
        3 => &[&[(0.0, -1.2), (1.1, 0.8), (-1.1, 0.8), (0.0, -1.2)]],
        4 => &[&[(0.0, 1.2), (1.1, -0.8), (-1.1, -0.8), (0.0, 1.2)]],
        5 => &[&[(-0.9, -0.9), (0.9, 0.9)], &[(-0.9, 0.9), (0.9, -0.9)]],
        _ => &[&[(-1.1, 0.0), (1.1, 0.0)], &[(0.0, -1.1), (0.0, 1.1)]],
    };
    let stroke = |corners: &&[(f64, f64)]| {
        let points = corners.iter().map(|(dx, dy)| format!("{:.1} {:.1}", x + dx * r, y + dy * r));
        format!("M{}", points.collect::<Vec<_>>().join("L"))
    };
    let path: String = shape.iter().map(stroke).collect();
    let _ = writeln!(svg, "<path class=\"{class}\" d=\"{path}\"/>");
}

impl Axis {
    fn takes(&self, value: f64) -> bool {
        value.is_finite() && (self.scale == Scale::Linear || value > 0.0)
    }
}

/// The values of an axis, and where they lie.
struct Range {
    scale: Scale,
    /// Logarithms for a logarithmic axis.
    low: f64,
    high: f64,
    start: f64,
    end: f64,
}

impl Range {
    /// Room for all `values` and a margin on both sides.
    fn of(axis: &Axis, values: impl Iterator<Item = f64>, (start, end): (f64, f64)) -> Self {
        let values = values.map(|value| if axis.scale == Scale::Log { value.log10() } else { value });
        let (low, high) =
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        let (low, high) = if low > high { (0.0, 1.0) } else { (low, high) };
        let margin = if high > low { (high - low) * 0.07 } else { low.abs() * 0.1 + 0.1 };
        Self { scale: axis.scale, low: low - margin, high: high + margin, start, end }
    }

    fn at(&self, value: f64) -> f64 {
        let value = if self.scale == Scale::Log { value.log10() } else { value };
        self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)
    }

    /// Round values inside the range, with their labels.
    fn ticks(&self) -> Vec<(f64, String)> {
        if self.scale == Scale::Linear {
            return linear_ticks(self.low, self.high);
        }
        let decades = self.low.floor() as i32..=self.high.ceil() as i32;
        let of = |factors: &[f64]| -> Vec<f64> {
            let all = decades.clone().flat_map(|decade| factors.iter().map(move |f| f * 10f64.powi(decade)));
            all.filter(|tick| (self.low..=self.high).contains(&tick.log10())).collect()
        };
        let fine = of(&[1.0, 2.0, 5.0]);
        let ticks = if fine.len() > 8 { of(&[1.0]) } else { fine };
        if ticks.len() < 2 {
            return linear_ticks(10f64.powf(self.low), 10f64.powf(self.high));
        }
        ticks.into_iter().map(|tick| (tick, label(tick, tick))).collect()
    }
}

fn linear_ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let rough = (high - low) / 6.0;
    let decade = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|f| f * decade).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(rough);
    let (first, last) = ((low / step).ceil() as i64, (high / step).floor() as i64);
    (first..=last).map(|i| (i as f64 * step, label(i as f64 * step, step))).collect()
}

/// A tick with the decimals of the step.
fn label(value: f64, step: f64) -> String {
    let decimals = (-step.log10() - 1e-9).ceil().max(0.0) as usize;
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: Scale, low: f64, high: f64) -> Vec<String> {
        let axis = Axis { label: "", scale };
        let range = Range::of(&axis, [low, high].into_iter(), (0.0, 1.0));
        range.ticks().into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(labels(Scale::Linear, 0.0, 10.0), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(labels(Scale::Linear, 2.05, 2.25), ["2.05", "2.10", "2.15", "2.20", "2.25"]);
        assert_eq!(labels(Scale::Log, 0.04, 0.7), ["0.05", "0.1", "0.2", "0.5"]);
        assert_eq!(
            labels(Scale::Log, 1e-6, 1.0),
            ["0.000001", "0.00001", "0.0001", "0.001", "0.01", "0.1", "1"]
        );
        assert_eq!(
            labels(Scale::Log, 0.31, 0.33),
            ["0.310", "0.315", "0.320", "0.325", "0.330"],
            "no decade inside"
        );
        assert_eq!(labels(Scale::Linear, 3.0, 3.0).len(), 5, "one value");
    }

    #[test]
    fn values_that_cannot_be_drawn_are_left_out() {
        let axis = |scale| Axis { label: "<y>", scale };
        let points = vec![(1.0, 0.0), (2.0, f64::NAN), (3.0, 5.0)];
        let chart = Chart {
            id: "x",
            title: "a < b",
            x: axis(Scale::Linear),
            y: axis(Scale::Log),
            mark: Mark::Points,
            series: vec![Series { name: "\"&\"", points }],
            level: None,
        };
        let svg = chart.svg(None);
        assert_eq!(svg.matches("<circle").count(), 2, "one in the legend, one in the plot");
        assert!(svg.contains("a &lt; b") && svg.contains("&lt;y&gt;") && svg.contains("&quot;&amp;&quot;"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
