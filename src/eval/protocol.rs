//! The ways in which perplexity is measured elsewhere, by name: how a text is cut into rows, where
//! the BOS is, and which tokens are scored.

/// A protocol of perplexity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// The first 16 rows of 512 tokens; all tokens of a row but its first are scored.
    Rows,
    /// What exllamav3's `eval/ppl.py` does by default: up to 100 rows of 2048 tokens without
    /// overlap, all tokens of a row but its first are scored. The BOS is as the tokenizer says.
    Exllamav3,
    /// What llama.cpp's `llama-perplexity` does by default: all whole chunks of 512 tokens. A BOS,
    /// where the tokenizer wants one, takes the place of the first token of every chunk, and the
    /// tokens behind the first `cols / 2 + 1` are scored.
    LlamaCpp,
}

impl Protocol {
    pub const ALL: [Protocol; 3] = [Protocol::Rows, Protocol::Exllamav3, Protocol::LlamaCpp];

    pub fn name(self) -> &'static str {
        match self {
            Protocol::Rows => "rows",
            Protocol::Exllamav3 => "exllamav3",
            Protocol::LlamaCpp => "llama.cpp",
        }
    }

    /// Tokens of a row.
    pub fn cols(self) -> usize {
        match self {
            Protocol::Rows | Protocol::LlamaCpp => 512,
            Protocol::Exllamav3 => 2048,
        }
    }

    /// The least rows that a text must have, and the most that are used of it.
    pub fn rows(self) -> (usize, usize) {
        // More than any text has, and far from overflow.
        const ALL: usize = 1 << 32;
        match self {
            Protocol::Rows => (16, 16),
            Protocol::Exllamav3 => (1, 100),
            Protocol::LlamaCpp => (1, ALL),
        }
    }

    /// Whether a BOS takes the place of every row's first token.
    pub fn replaces_first_token(self) -> bool {
        self == Protocol::LlamaCpp
    }

    /// The first position of a row of `cols` tokens whose next token is scored.
    pub fn first_scoring(self, cols: usize) -> usize {
        if self == Protocol::LlamaCpp { cols / 2 } else { 0 }
    }
}

/// Rows of tokens, and which of them are scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    rows: Vec<Vec<u32>>,
    protocol: Protocol,
}

impl Windows {
    /// `rows` as cut from a text, and the BOS that the tokenizer wants in front of a document.
    pub fn new(protocol: Protocol, mut rows: Vec<Vec<u32>>, bos: Option<u32>) -> Self {
        if let Some(bos) = bos.filter(|_| protocol.replaces_first_token()) {
            rows.iter_mut().filter_map(|row| row.first_mut()).for_each(|first| *first = bos);
        }
        Self { rows, protocol }
    }

    pub fn rows(&self) -> &[Vec<u32>] {
        &self.rows
    }

    /// The token scored at `position` of `row`, if one is.
    pub(super) fn target(&self, row: usize, position: usize) -> Option<u32> {
        let ids = &self.rows[row];
        let scores = position >= self.protocol.first_scoring(ids.len());
        ids.get(position + 1).copied().filter(|_| scores)
    }

    /// All scored tokens.
    pub fn targets(&self) -> impl Iterator<Item = u32> {
        let positions =
            self.rows.iter().enumerate().flat_map(|(row, ids)| (0..ids.len()).map(move |t| (row, t)));
        positions.filter_map(|(row, position)| self.target(row, position))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_protocol_scores_its_tokens() {
        let rows = || vec![vec![10, 11, 12, 13, 14, 15], vec![20, 21, 22, 23, 24, 25]];
        let scored = |protocol, bos| {
            let windows = Windows::new(protocol, rows(), bos);
            (
                windows.rows().iter().map(|row| row[0]).collect::<Vec<_>>(),
                windows.targets().collect::<Vec<_>>(),
            )
        };
        let all = vec![11, 12, 13, 14, 15, 21, 22, 23, 24, 25];
        assert_eq!(scored(Protocol::Rows, Some(1)), (vec![10, 20], all.clone()));
        assert_eq!(scored(Protocol::Exllamav3, Some(1)), (vec![10, 20], all));
        let second_half = vec![14, 15, 24, 25];
        assert_eq!(scored(Protocol::LlamaCpp, Some(1)), (vec![1, 1], second_half.clone()));
        assert_eq!(scored(Protocol::LlamaCpp, None), (vec![10, 20], second_half));
    }
}
