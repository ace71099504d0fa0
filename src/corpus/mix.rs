//! The calibration mix that is bundled with the program.

use serde::Deserialize;

use crate::linalg::Rng;

use super::{Bos, Corpus, CorpusError, Shape, Tokenizer};

const CONFIG: &str = include_str!("../../configs/calibration-default.toml");

/// `(name, text)` of a file of the mix, by its path below `configs/`.
macro_rules! bundled {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../configs/", $name)))),*]
    };
}

const FILES: &[(&str, &str)] = bundled![
    "calibration/northanger-abbey.txt",
    "calibration/code/sample.c",
    "calibration/code/sample.html",
    "calibration/code/sample.js",
    "calibration/code/sample.json",
    "calibration/code/sample.py",
    "calibration/code/sample.rs",
    "calibration/code/sample.sh",
    "calibration/code/sample.sql",
    "calibration/multilingual.txt",
];

/// A calibration mix as its file in `configs/` describes it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mix {
    pub description: String,
    #[serde(rename = "source")]
    pub sources: Vec<MixSource>,
}

/// One source of a mix.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixSource {
    pub name: String,
    pub kind: SourceKind,
    /// Share of the rows, relative to the other sources' weights.
    pub weight: f64,
    /// Paths below `configs/`, each one document; none for random tokens.
    #[serde(default)]
    pub files: Vec<String>,
    pub licence: String,
    pub origin: String,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum SourceKind {
    /// Rows cut from text.
    Text,
    /// Rows of tokens drawn uniformly from the vocabulary, special tokens left out.
    RandomTokens,
}

impl Mix {
    /// Parses and checks the text of a mix file.
    pub fn parse(toml: &str) -> Result<Mix, CorpusError> {
        let error = |found: String| CorpusError::Mix { found };
        let mix: Mix =
            toml::from_str(toml).map_err(|e| error(e.to_string().trim_end().replace('\n', " ")))?;
        for source in &mix.sources {
            let name = &source.name;
            if !(source.weight.is_finite() && source.weight > 0.0) {
                return Err(error(format!(
                    "source \"{name}\" has weight {}, expected one above 0",
                    source.weight
                )));
            }
            if (source.kind == SourceKind::Text) == source.files.is_empty() {
                return Err(error(format!("source \"{name}\": text has files, random tokens have none")));
            }
            if let Some(file) = source.files.iter().find(|file| bundled_text(file).is_none()) {
                return Err(error(format!("source \"{name}\": file \"{file}\" is not bundled")));
            }
        }
        if mix.sources.is_empty() {
            return Err(error("no sources".into()));
        }
        Ok(mix)
    }
}

/// The mix of `configs/calibration-default.toml`, bundled with the program.
///
/// Every source gets its share of the rows. A text source is encoded file by file, each file a
/// document with its own BOS, and cut into rows; the rows it gives are spread evenly over all it
/// has, so that every file is heard. Rows that a short text cannot give come from the other texts,
/// in order. Random rows are drawn from `seed`, each with its own BOS. The order of the rows is
/// that of the sources.
pub fn default_mix(
    tokenizer: &Tokenizer,
    shape: Shape,
    seed: u64,
    vocab: usize,
) -> Result<Corpus, CorpusError> {
    shape.tokens().ok_or(CorpusError::Shape { shape })?;
    let mix = Mix::parse(CONFIG)?;
    let shares = shares(&mix, shape.rows);
    let texts: Vec<Vec<Vec<u32>>> = mix
        .sources
        .iter()
        .map(|source| text_rows(tokenizer, source, shape.cols, vocab))
        .collect::<Result<_, _>>()?;
    let counts = refill(&mix, &shares, &texts).map_err(|(need, have)| CorpusError::MixTooShort {
        shape,
        need,
        have,
    })?;
    let mut rows = Vec::with_capacity(shape.rows);
    let mut random = RandomRows::new(tokenizer, seed, vocab);
    for ((source, available), &count) in mix.sources.iter().zip(texts).zip(&counts) {
        match source.kind {
            SourceKind::Text => {
                rows.extend((0..count).map(|i| available[i * available.len() / count].clone()))
            }
            SourceKind::RandomTokens => {
                for _ in 0..count {
                    rows.push(random.row(shape.cols)?);
                }
            }
        }
    }
    let parts: Vec<String> =
        mix.sources.iter().zip(&counts).map(|(source, count)| format!("{count} {}", source.name)).collect();
    let bos = tokenizer.bos_id().map_or(Bos::Absent, |id| Bos::PerDocument { id });
    let description = format!("bundled mix, {shape} tokens, rows: {}, BOS: {bos}", parts.join(", "));
    Ok(Corpus::new(rows, shape, description, bos))
}

fn bundled_text(name: &str) -> Option<&'static str> {
    FILES.iter().find(|(file, _)| *file == name).map(|&(_, text)| text)
}

/// Rows of every source: `rows` shared out by weight, the largest remainders first.
fn shares(mix: &Mix, rows: usize) -> Vec<usize> {
    let total: f64 = mix.sources.iter().map(|source| source.weight).sum();
    let exact: Vec<f64> = mix.sources.iter().map(|source| rows as f64 * source.weight / total).collect();
    let mut shares: Vec<usize> = exact.iter().map(|share| share.floor() as usize).collect();
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
    let missing = rows.saturating_sub(shares.iter().sum());
    for &source in order.iter().cycle().take(missing) {
        shares[source] += 1;
    }
    shares
}

/// All rows that a text source has; none for random tokens.
fn text_rows(
    tokenizer: &Tokenizer,
    source: &MixSource,
    cols: usize,
    vocab: usize,
) -> Result<Vec<Vec<u32>>, CorpusError> {
    let mut ids = Vec::new();
    for file in &source.files {
        let text = bundled_text(file)
            .ok_or_else(|| CorpusError::Mix { found: format!("file \"{file}\" is not bundled") })?;
        ids.extend(tokenizer.encode(text)?);
    }
    if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab) {
        return Err(CorpusError::Vocabulary { path: tokenizer.path().into(), id: id.into(), vocab });
    }
    Ok(ids.chunks_exact(cols).map(<[u32]>::to_vec).collect())
}

/// Rows that every source gives when no text gives more than it has; `(need, have)` of the texts
/// together where they are too short.
fn refill(mix: &Mix, shares: &[usize], texts: &[Vec<Vec<u32>>]) -> Result<Vec<usize>, (usize, usize)> {
    let mut counts = shares.to_vec();
    let is_text = |i: usize| mix.sources[i].kind == SourceKind::Text;
    let of_texts = |values: &mut dyn Iterator<Item = (usize, usize)>| -> usize {
        values.filter(|&(i, _)| is_text(i)).map(|(_, value)| value).sum()
    };
    let need = of_texts(&mut shares.iter().copied().enumerate());
    let have = of_texts(&mut texts.iter().map(Vec::len).enumerate());
    let mut missing = 0;
    for i in (0..counts.len()).filter(|&i| is_text(i)) {
        missing += counts[i].saturating_sub(texts[i].len());
        counts[i] = counts[i].min(texts[i].len());
    }
    for i in (0..counts.len()).filter(|&i| is_text(i)) {
        let more = missing.min(texts[i].len() - counts[i]);
        counts[i] += more;
        missing -= more;
    }
    if missing == 0 { Ok(counts) } else { Err((need, have)) }
}

/// Rows of uniform tokens.
struct RandomRows {
    bos: Option<u32>,
    ids: Vec<u32>,
    rng: Rng,
}

impl RandomRows {
    fn new(tokenizer: &Tokenizer, seed: u64, vocab: usize) -> RandomRows {
        RandomRows {
            bos: tokenizer.bos_id(),
            ids: tokenizer.text_ids(vocab),
            rng: Rng::new(seed, "calibration"),
        }
    }

    fn row(&mut self, cols: usize) -> Result<Vec<u32>, CorpusError> {
        if self.ids.is_empty() {
            return Err(CorpusError::Mix { found: "the tokenizer has no tokens to draw from".into() });
        }
        let mut row = Vec::with_capacity(cols);
        row.extend(self.bos);
        while row.len() < cols {
            let draw = (u128::from(self.rng.next_u64()) * self.ids.len() as u128) >> 64;
            row.push(self.ids[draw as usize]);
        }
        Ok(row)
    }
}
