//! The one memory map of the crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use memmap2::Mmap;

/// Maps `file` read-only.
pub(super) fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is read-only and private to `Shard`, which hands out byte slices only; any
    // byte pattern is a valid u8. That the file is neither truncated nor rewritten while it is
    // mapped is the caller's side of the bargain, as for every reader of model files: weights are
    // written once, under a temporary name, and then renamed.
    unsafe { Mmap::map(file) }
}
