//! How many threads the program uses.
#![allow(unsafe_code)]

use std::num::NonZeroUsize;

/// Sets the number of threads, all cores if `threads` is `None`. Must come before anything else
/// starts a thread.
///
/// Rows and tiles are spread over threads here, in whole. candle would spread single element-wise
/// operations over a pool of its own as well, behind a lock that all rows wait for; its only switch
/// for that is the environment.
pub fn set(threads: Option<NonZeroUsize>) -> anyhow::Result<()> {
    const CANDLE_THREADS: &str = "CANDLE_NUM_THREADS";
    if std::env::var_os(CANDLE_THREADS).is_none() {
        // SAFETY: no other thread runs yet that could read the environment.
        unsafe { std::env::set_var(CANDLE_THREADS, "1") }
    }
    if let Some(threads) = threads {
        rayon::ThreadPoolBuilder::new().num_threads(threads.get()).build_global()?;
    }
    Ok(())
}
