//! The OpenCL devices of this machine.

use std::ops::Deref;
use std::sync::{Mutex, MutexGuard, PoisonError};

use exl3_candle::encode::opencl::{DeviceInfo, MemoryPolicy, devices};

/// With this variable set, a machine without a device fails the tests that need one. CI sets it.
const REQUIRE: &str = "EXL3_CANDLE_REQUIRE_OPENCL";

/// Devices for one test at a time: not every driver bears to be started, and to compile, in several
/// threads.
pub struct Devices {
    devices: Vec<DeviceInfo>,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Devices {
    type Target = [DeviceInfo];

    fn deref(&self) -> &[DeviceInfo] {
        &self.devices
    }
}

/// All devices; none on a machine without OpenCL, unless they are required.
pub fn opencl_devices() -> Devices {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let devices = devices().unwrap_or_else(|error| {
        assert!(std::env::var_os(REQUIRE).is_none(), "{REQUIRE} is set, but: {error}");
        eprintln!("not tested: {error}");
        Vec::new()
    });
    Devices { devices, _turn: turn }
}

pub fn policy(limit_bytes: Option<u64>) -> MemoryPolicy {
    MemoryPolicy { reserve_bytes: 0, limit_bytes, host_available_bytes: 4 << 30 }
}
