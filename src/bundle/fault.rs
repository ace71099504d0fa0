//! A switch for tests: die, or run out of space, at the n-th step of durable writing.
//!
//! Crash safety can only be tested by crashing between any two steps. The switch is compiled
//! into every build, so that what is tested is what is shipped; unset, it costs one atomic load.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What happens at the chosen step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process aborts, as if killed.
    Abort,
    /// The write fails, as on a full disk.
    DiskFull,
}

/// Steps left until the fault; 0 when no fault is set.
static STEPS_LEFT: AtomicU64 = AtomicU64::new(0);
static IS_ABORT: AtomicBool = AtomicBool::new(false);

/// Sets `fault` at the `step`-th step from now, counted from 1; 0 clears it.
#[doc(hidden)]
pub fn arm(fault: Fault, step: u64) {
    IS_ABORT.store(fault == Fault::Abort, Ordering::SeqCst);
    STEPS_LEFT.store(step, Ordering::SeqCst);
}

/// Steps left until the armed fault, 0 when it has happened or none is armed.
#[doc(hidden)]
pub fn steps_left() -> u64 {
    STEPS_LEFT.load(Ordering::SeqCst)
}

/// One step that can be the last.
pub(super) fn step() -> io::Result<()> {
    step_leaving(|| {})
}

/// One step that can be the last; `wreck` leaves behind what a kill in its midst would.
pub(super) fn step_leaving(wreck: impl FnOnce()) -> io::Result<()> {
    if steps_left() == 0 || STEPS_LEFT.fetch_sub(1, Ordering::SeqCst) != 1 {
        return Ok(());
    }
    wreck();
    if IS_ABORT.load(Ordering::SeqCst) {
        std::process::abort();
    }
    Err(io::ErrorKind::StorageFull.into())
}
