//! How many threads the program uses.
#![allow(unsafe_code)]

/// More are no use on any machine, and each takes memory.
const MAX_THREADS: usize = 4096;

/// `--threads`: rayon would take 0 as "all cores".
pub fn parse(text: &str) -> Result<usize, String> {
    let threads = text.parse::<usize>().ok().filter(|threads| (1..=MAX_THREADS).contains(threads));
    threads.ok_or_else(|| format!("expected a number of threads, 1 to {MAX_THREADS}"))
}

/// Sets the number of threads, all cores if `threads` is `None`. Must come before anything else
/// starts a thread.
///
/// Rows and tiles are spread over threads here, in whole. candle would spread single element-wise
/// operations over a pool of its own as well, behind a lock that all rows wait for; its only switch
/// for that is the environment.
pub fn set(threads: Option<usize>) -> anyhow::Result<()> {
    const CANDLE_THREADS: &str = "CANDLE_NUM_THREADS";
    if std::env::var_os(CANDLE_THREADS).is_none() {
        // SAFETY: no other thread runs yet that could read the environment.
        unsafe { std::env::set_var(CANDLE_THREADS, "1") }
    }
    if let Some(threads) = threads {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build_global()?;
    }
    Ok(())
}
