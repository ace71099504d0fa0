//! What the layout of the code promises, held by a test: modules name lower layers only, `unsafe`
//! stays in the files that need it, the library neither prints nor reads the environment.

use std::fs;
use std::path::Path;

/// A module names only modules of strictly lower layers.
const LAYERS: &[&[&str]] = &[
    &["progress", "linalg"],
    &["format", "hub"],
    &["encode"],
    &["quantize", "source"],
    &["corpus", "model", "bundle"],
    &["plan", "capture"],
    &["pipeline", "verify", "eval", "judge", "export"],
    &["compare"],
];

/// Belongs to the binary, so that the library cannot name it.
const BINARY: &str = "cli";

const UNSAFE_FILES: &[&str] = &[
    "cli/threads.rs",
    "encode/cpu/avx2.rs",
    "encode/cpu/avx512.rs",
    "encode/opencl/driver.rs",
    "linalg/gemm.rs",
    "source/mmap.rs",
];

const PRINTING: &[&str] = &["print", "println", "eprint", "eprintln", "dbg"];
const ENVIRONMENT: &[&str] =
    &["var", "var_os", "vars", "vars_os", "args", "args_os", "set_var", "remove_var"];

#[test]
fn the_code_keeps_its_layout() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut violations = Vec::new();
    let mut files = 0;
    let mut folders = vec![src.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(&src).unwrap().to_str().unwrap().replace('\\', "/");
                violations.extend(check(&name, &fs::read_to_string(&path).unwrap()));
                files += 1;
            }
        }
    }
    assert!(files > 5, "only {files} files found in {}", src.display());
    assert!(violations.is_empty(), "\n{}", violations.join("\n"));
}

#[test]
fn violations_are_found() {
    for (file, source, what) in [
        ("format/bits.rs", "use crate::encode::Tile;", "names encode"),
        ("quantize/mod.rs", "use crate::source;", "names source"),
        ("model/nn.rs", "use crate::{format::Bits, eval::{self, Report}};", "names eval"),
        ("encode/mod.rs", "fn f() { let x = crate::plan::build(); }", "names plan"),
        ("linalg/ldl.rs", "use super::super::format::Bits;", "names format"),
        ("linalg/mod.rs", "use super::{linalg, model};", "names model"),
        ("eval/mod.rs", "use crate::cli::Ui;", "names cli"),
        ("plan/mod.rs", "use exl3_candle::format;", "by its public name"),
        ("cli/mod.rs", "use crate::format::Bits;", "names format"),
        ("helpers/mod.rs", "", "in no layer"),
        ("helpers.rs", "", "in no layer"),
        ("model/nn.rs", "fn f() { unsafe { g() } }", "unsafe"),
        ("plan/mod.rs", "fn f() { println!(\"x\"); }", "println!"),
        ("plan/mod.rs", "fn f() { std::env::var(\"X\"); }", "env::var"),
        ("plan/mod.rs", "fn f() { env::args() }", "env::args"),
        ("plan/mod.rs", "fn f() { g().unwrap(); }", "unwrap()"),
        ("plan/mod.rs", "/* a /* b */ */ fn f() { let c = '\"'; g().unwrap(); } // \"", "unwrap()"),
    ] {
        let found = check(file, source).join("; ");
        assert!(found.contains(what), "{file}: {source}: {found:?} lacks {what:?}");
    }
}

#[test]
fn allowed_code_is_left_alone() {
    for (file, source) in [
        ("quantize/mod.rs", "use crate::{encode::{self, Tile}, format::Bits}; use crate::quantize::x;"),
        ("eval/mod.rs", "use crate::bundle::Reader; pub(crate) fn f() {}"),
        ("encode/cpu/avx2.rs", "use super::super::Tile; fn f() { unsafe { g() } }"),
        ("format/bits.rs", "//! crate::eval, unsafe, println!\nfn f() { let s = \"crate::eval unwrap()\"; }"),
        ("format/bits.rs", "fn f<'a>(x: &'a str) { let r = r#\"unsafe \" println!\"#; let c = '\\''; }"),
        ("format/bits.rs", "#![deny(unsafe_code)]\n#[cfg(test)]\nmod tests { fn f() { g().unwrap(); } }"),
        ("plan/mod.rs", "const X: &str = env!(\"CARGO_PKG_VERSION\"); fn f() { x.unwrap_or(1); }"),
        ("cli/convert.rs", "use exl3_candle::eval; use crate::cli::Ui; fn f() { println!(); env::args(); }"),
        ("main.rs", "mod cli; fn main() { cli::main() }"),
        ("lib.rs", "pub mod format;"),
        ("cli/mod.rs", "fn f() { std::env::var_os(\"X\"); }"),
    ] {
        assert_eq!(check(file, source), Vec::<String>::new(), "{file}: {source}");
    }
}

/// What is wrong with a file, by its path below `src/`.
fn check(file: &str, source: &str) -> Vec<String> {
    let code = without_comments_and_literals(source);
    let tokens = tokens(&code);
    // Unit tests come last in a file, by habit.
    let product = self::tokens(code.split("#[cfg(test)]").next().unwrap_or_default());
    let mut found = Vec::new();
    let module = file.split('/').next().unwrap_or_default().trim_end_matches(".rs");
    let binary = module == BINARY || module == "main";
    if binary || module == "lib" {
        let strangers = named(&tokens, &["crate"]).into_iter().filter(|name| layer(name).is_some());
        found.extend(strangers.filter(|_| binary).map(|name| format!("the binary names {name} as its own")));
    } else if let Some(own) = layer(module) {
        found.extend(dependencies(file, &tokens).into_iter().filter_map(|name| {
            let allowed = name == module || layer(&name).is_some_and(|other| other < own);
            (!allowed).then(|| format!("{module} (layer {own}) names {name}"))
        }));
    } else {
        found.push(format!("module {module} is in no layer"));
    }
    if tokens.contains(&"unsafe") && !UNSAFE_FILES.contains(&file) {
        found.push("unsafe code outside the listed files".into());
    }
    if !binary {
        found.extend(library_manners(&product));
    }
    found.into_iter().map(|what| format!("src/{file}: {what}")).collect()
}

/// What the library must leave to the binary or to its callers.
fn library_manners(tokens: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    if tokens.contains(&"exl3_candle") {
        found.push("the library names itself by its public name".into());
    }
    for window in tokens.windows(4) {
        match window {
            [name, "!", ..] if PRINTING.contains(name) => found.push(format!("{name}! in the library")),
            ["env", ":", ":", name] if ENVIRONMENT.contains(name) => {
                found.push(format!("env::{name} in the library"));
            }
            [".", "unwrap", "(", ")"] => found.push("unwrap() outside tests".into()),
            _ => {}
        }
    }
    found
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|modules| modules.contains(&module))
}

/// Top-level modules that a file names, through `crate::` or as many `super::` as lead there.
fn dependencies(file: &str, tokens: &[&str]) -> Vec<String> {
    let inner = file.trim_end_matches("/mod.rs").trim_end_matches(".rs");
    let depth = inner.split('/').count();
    let root = vec!["super"; depth].join(" : : ");
    let root: Vec<&str> = root.split(' ').collect();
    let through_super = named(tokens, &root).into_iter().filter(|name| layer(name).is_some());
    let through_crate = named(tokens, &["crate"]).into_iter();
    // Macros and items at the root of the crate are nobody's module.
    through_crate.filter(|name| layer(name).is_some() || name == BINARY).chain(through_super).collect()
}

/// First path segments after `prefix::`, those of a `{..}` group included.
fn named(tokens: &[&str], prefix: &[&str]) -> Vec<String> {
    let mut names = Vec::new();
    for at in 0..tokens.len() {
        let path_begins = at == 0 || tokens[at - 1] != ":";
        let Some([":", ":", after @ ..]) = tokens[at..].strip_prefix(prefix) else { continue };
        if !path_begins {
            continue;
        }
        if after.first() != Some(&"{") {
            names.extend(after.first().map(|name| name.to_string()));
            continue;
        }
        let mut depth = 0;
        for pair in after.windows(2) {
            match pair[0] {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                break;
            }
            if depth == 1 && matches!(pair[0], "{" | ",") {
                names.push(pair[1].to_string());
            }
        }
    }
    names
}

/// Identifiers, and every other character that is not white space on its own.
fn tokens(code: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let len = match rest.find(|c| !is_word(c)) {
            Some(0) => first.len_utf8(),
            Some(end) => end,
            None => rest.len(),
        };
        tokens.push(&rest[..len]);
        rest = rest[len..].trim_start();
    }
    tokens
}

/// The source with comments and the insides of string and character literals taken out.
fn without_comments_and_literals(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let in_word = code.chars().last().is_some_and(|c| c.is_alphanumeric() || c == '_');
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if first == '"' {
            quoted(rest, '"')
        } else if first == 'r' && !in_word && raw_string(rest).is_some() {
            raw_string(rest).unwrap_or(1)
        } else if first == '\'' && is_character(rest) {
            quoted(rest, '\'')
        } else {
            code.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        };
        code.push(' ');
        rest = &rest[skipped..];
    }
    code
}

fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    loop {
        let (step, change) = match rest.as_bytes().get(at..at + 2) {
            Some(b"/*") => (2, 1),
            Some(b"*/") => (2, -1),
            Some(_) => (1, 0),
            None => return rest.len(),
        };
        (at, depth) = (at + step, depth + change);
        if depth == 0 {
            return at;
        }
    }
}

fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Length of `r"..."` or `r#"..."#`, if that is what `rest` begins with.
fn raw_string(rest: &str) -> Option<usize> {
    let hashes = rest[1..].bytes().take_while(|&b| b == b'#').count();
    let body = rest[1 + hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(2 + hashes + body.find(&end).map_or(body.len(), |at| at + end.len()))
}

/// Whether a `'` opens a character and not a lifetime.
fn is_character(rest: &str) -> bool {
    let mut chars = rest.chars().skip(1);
    let first = chars.next();
    first == Some('\\') || chars.next() == Some('\'')
}
