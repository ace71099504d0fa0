//! `exl3-candle judge` and `eval judge`: the decision head of a dual-head model.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use exl3_candle::corpus::{self, Tokenizer};
use exl3_candle::judge::{self, Agreement, DecisionHead, JudgeError, Kind};
use serde::Serialize;

use super::measured::Opened;
use super::{Status, Ui, values};

/// Answer questions about a text with the decision head of a dual-head model
#[derive(Args)]
pub struct JudgeArgs {
    /// Folder of the model, plain or quantized
    model: PathBuf,
    /// The whole prompt, as the head was trained on it
    #[arg(long, value_name = "TEXT")]
    text: String,
    /// Only this kind of question, such as noul, score or choice [default: all]
    #[arg(long, value_name = "NAME")]
    kind: Option<String>,
    /// How many answers the question has: the first N of its kind [default: all]
    #[arg(long, value_name = "N", requires = "kind", allow_negative_numbers = true, value_parser = values::whole::<usize>)]
    options: Option<usize>,
}

/// Compare the decisions of a quantized model with its source's
#[derive(Args)]
pub struct EvalJudgeArgs {
    /// Folder of the source model
    source: PathBuf,
    /// Folder of the quantized model
    model: PathBuf,
    /// Prompts: the lines of a text, or JSON lines with a "text" field
    #[arg(long, value_name = "FILE")]
    text_file: PathBuf,
}

pub fn run(args: &JudgeArgs, ui: &Ui) -> anyhow::Result<Status> {
    let (opened, head) = open(&args.model, ui)?;
    let kinds = wanted(&head, args)?;
    let ids = corpus::load_tokenizer(&args.model)?.encode(&args.text)?;
    let tokens = ids.len();
    let states = judge::last_states(&opened.model, opened.weights()?.as_ref(), &[ids])?;
    let options = |kind: &Kind| args.options.unwrap_or(kind.labels.len());
    let decide = |kind| Decision::new(kind, head.probabilities(&states[0], kind, options(kind)));
    let decisions: Vec<Decision<'_>> = kinds.into_iter().map(decide).collect();
    let text = decisions.iter().map(Decision::lines).collect::<Vec<_>>().join("\n");
    let output = JudgeOutput { model: &args.model, tokens, adapter_missing: head.adapter(), decisions };
    ui.result(&text, &output)?;
    Ok(Status::Done)
}

/// The model and its head. An adapter that is not applied is told: its numbers would be others.
fn open(dir: &Path, ui: &Ui) -> anyhow::Result<(Opened, DecisionHead)> {
    let opened = Opened::new(dir)?;
    let head = DecisionHead::open(dir, opened.model.hidden_size())?;
    if let Some(adapter) = head.adapter() {
        ui.note(&format!(
            "warning: {}: the decision head was trained with the adapter in \"{adapter}\", which is not applied; \
             merge it into the weights before conversion",
            dir.display()
        ));
    }
    Ok((opened, head))
}

fn wanted<'a>(head: &'a DecisionHead, args: &JudgeArgs) -> anyhow::Result<Vec<&'a Kind>> {
    let Some(name) = &args.kind else { return Ok(head.kinds().iter().collect()) };
    let Some(kind) = head.kinds().iter().find(|kind| kind.name == *name) else {
        let names: Vec<&str> = head.kinds().iter().map(|kind| kind.name.as_str()).collect();
        bail!("the decision head has no kind \"{name}\"; expected one of {}", names.join(", "));
    };
    let slots = kind.labels.len();
    match args.options {
        Some(options) if options > slots => bail!("{name} has {slots} answers, not {options}"),
        _ => Ok(vec![kind]),
    }
}

#[derive(Serialize)]
struct JudgeOutput<'a> {
    model: &'a Path,
    tokens: usize,
    adapter_missing: Option<&'a str>,
    decisions: Vec<Decision<'a>>,
}

#[derive(Serialize)]
struct Decision<'a> {
    kind: &'a str,
    answer: &'a str,
    expected: Option<f64>,
    answers: Vec<Answer<'a>>,
}

#[derive(Serialize)]
struct Answer<'a> {
    label: &'a str,
    probability: f64,
}

impl<'a> Decision<'a> {
    fn new(kind: &'a Kind, probabilities: Vec<f64>) -> Self {
        let answer = |(label, &probability): (&'a String, &f64)| Answer { label, probability };
        Self {
            kind: &kind.name,
            answer: &kind.labels[judge::argmax(&probabilities)],
            expected: kind.expected(&probabilities),
            answers: kind.labels.iter().zip(&probabilities).map(answer).collect(),
        }
    }

    fn lines(&self) -> String {
        let expected = self.expected.map(|mean| format!(", {mean:.3} on average")).unwrap_or_default();
        let answers =
            self.answers.iter().map(|Answer { label, probability }| format!("{label} {probability:.4}"));
        let answers = answers.collect::<Vec<_>>().join("  ");
        format!("{:<7} {}{expected}\n        {answers}", self.kind, self.answer)
    }
}

pub fn run_eval(args: &EvalJudgeArgs, ui: &Ui) -> anyhow::Result<Status> {
    let (source, head) = open(&args.source, ui)?;
    let quantized = Opened::new(&args.model)?;
    if DecisionHead::open(&args.model, quantized.model.hidden_size())? != head {
        return Err(JudgeError::Heads.into());
    }
    // One text, one encoding: the source's.
    let texts = encoded(&corpus::load_tokenizer(&args.source)?, &args.text_file)?;
    let p = judge::last_states(&source.model, source.weights()?.as_ref(), &texts)?;
    let q = judge::last_states(&quantized.model, quantized.weights()?.as_ref(), &texts)?;
    let kinds = judge::agreement(&head, &p, &q);
    let line = |kind: &Agreement| {
        let Agreement { kind, top1, kl_mean, max_difference } = kind;
        format!("{kind:<7} top-1 {top1:.4}, kl {kl_mean:.6} nats, largest difference {max_difference:.4}")
    };
    let mut lines: Vec<String> = kinds.iter().map(line).collect();
    lines.push(format!("texts   {}", texts.len()));
    let output = EvalOutput { source: &args.source, model: &args.model, texts: texts.len(), kinds };
    ui.result(&lines.join("\n"), &output)?;
    Ok(Status::Done)
}

fn encoded(tokenizer: &Tokenizer, file: &Path) -> anyhow::Result<Vec<Vec<u32>>> {
    let documents = corpus::documents(file)?;
    Ok(documents.iter().map(|text| tokenizer.encode(text)).collect::<Result<_, _>>()?)
}

#[derive(Serialize)]
struct EvalOutput<'a> {
    source: &'a Path,
    model: &'a Path,
    texts: usize,
    kinds: Vec<Agreement>,
}
