//! What repositories are called.

use std::fmt;
use std::str::FromStr;

use super::HubError;

/// `owner/name` of a model repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoId {
    pub owner: String,
    pub name: String,
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

impl FromStr for RepoId {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let invalid = || HubError::Name { found: text.to_owned() };
        let (owner, name) = text.split_once('/').ok_or_else(invalid)?;
        if !is_name(owner) || !is_name(name) {
            return Err(invalid());
        }
        Ok(Self { owner: owner.to_owned(), name: name.to_owned() })
    }
}

/// The Hub's rule: letters, digits, `-`, `_`, `.`; no dash or dot at an end, none doubled.
fn is_name(text: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let at_end = |c: char| matches!(c, '-' | '.');
    !text.is_empty()
        && text.len() <= 96
        && text.chars().all(is_allowed)
        && !text.starts_with(at_end)
        && !text.ends_with(at_end)
        && !text.contains("--")
        && !text.contains("..")
        && !text.ends_with(".git")
}

/// A repository, and a revision of it if one is named: `owner/name[@revision]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub repo: RepoId,
    /// A branch, a tag or a commit.
    pub revision: Option<String>,
}

impl FromStr for Source {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (text, None),
        };
        if revision.is_some_and(|r| !is_revision(r)) {
            return Err(HubError::Revision { found: revision.unwrap_or_default().to_owned() });
        }
        Ok(Self { repo: repo.parse()?, revision: revision.map(str::to_owned) })
    }
}

/// It becomes a path in the cache, so no part may lead out of it.
pub(super) fn is_revision(text: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/' | '+');
    text.chars().all(is_allowed) && text.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

/// The full name of a commit; anything else is a name that can move.
pub(super) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_from_paths() {
        for text in ["a/b", "meta-llama/Llama-3.2-1B", "x/y@main", "x/y@refs/pr/1", "x_1/y.z@v1.0"] {
            assert!(text.parse::<Source>().is_ok(), "{text}");
        }
        for text in ["a", "a/b/c", "./b", "../b", "/b", "a/", "a/b@", "a/b@../c", "a/b@x y", "-a/b", "a/b..c"]
        {
            assert!(text.parse::<Source>().is_err(), "{text}");
        }
        let source: Source = "x/y@refs/pr/1".parse().unwrap();
        assert_eq!((source.repo.to_string(), source.revision.as_deref()), ("x/y".into(), Some("refs/pr/1")));
    }
}
