//! Variants of the kernels: what gives the same states at another speed.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::super::TrellisSpec;
use super::device::{Arithmetic, DeviceInfo, DeviceKind};

/// Variants that are measured at most: each is compiled first, which may take seconds.
const MEASURED: usize = 8;

/// Where the costs of the latest step are kept, see `kernels/forward.cl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Costs {
    Global,
    Double,
    Staged,
}

/// Where the values of the states come from, see `kernels/forward.cl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Values {
    Table,
    Cached,
}

/// Where the path is traced back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Traceback {
    /// By a kernel.
    Device,
    /// On the host, after the costs have been copied.
    Copied,
    /// On the host, from memory that both can see.
    Mapped,
}

/// One variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Variant {
    pub costs: Costs,
    pub values: Values,
    pub traceback: Traceback,
    /// Work-items that share a tile.
    pub work_group: usize,
    /// Neighbouring nodes that a work-item owns.
    pub run: usize,
    /// Work-items that share the candidates of a run.
    pub split: usize,
    /// Sub-group size to ask for; 0 leaves it to the compiler.
    pub sub_group: usize,
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |value: serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let costs = name(serde_json::json!(self.costs));
        let values = name(serde_json::json!(self.values));
        let traceback = name(serde_json::json!(self.traceback));
        let (group, run, split) = (self.work_group, self.run, self.split);
        write!(f, "{values}/{costs}/{traceback}/{group}x{run}")?;
        if split > 1 {
            write!(f, "/{split}")?;
        }
        if self.sub_group > 0 {
            write!(f, "/sg{}", self.sub_group)?;
        }
        Ok(())
    }
}

/// Nodes behind the windows of a ring: of its narrowest steps, and of its widest.
fn node_counts(spec: &TrellisSpec) -> (usize, usize) {
    (1 << (16 - spec.step(1)), 1 << (16 - spec.step(0)))
}

/// Nodes of a row of costs.
pub fn stride(spec: &TrellisSpec) -> usize {
    node_counts(spec).1
}

impl Variant {
    /// Why the variant cannot run, if it cannot.
    pub fn unsuitable(&self, spec: &TrellisSpec, device: &DeviceInfo) -> Option<String> {
        let (fewest, most) = node_counts(spec);
        let owned = self.work_group / self.split * self.run;
        let local = self.local_bytes(spec) as u64;
        if self.work_group > device.max_work_group {
            return Some(format!("work-groups have at most {} items", device.max_work_group));
        }
        if local > device.local_bytes {
            return Some(format!("it needs {local} bytes of local memory; there are {}", device.local_bytes));
        }
        if owned == 0 || owned > fewest {
            return Some(format!("{owned} nodes of a work-group; there are {fewest}"));
        }
        let shared_runs = owned == most && fewest == most && self.split <= 1 << spec.step(0);
        if self.split > 1 && (!shared_runs || self.costs == Costs::Staged) {
            return Some("only work-items with one run each can share it".to_owned());
        }
        if (self.split > 1 || self.costs == Costs::Staged) && device.arithmetic == Arithmetic::Emulated {
            return Some("emulated sums are neither shared nor staged".to_owned());
        }
        let registers = |pairs: usize, limit: usize| pairs / self.work_group > limit;
        if self.values == Values::Cached
            && (device.arithmetic == Arithmetic::Emulated || registers(32768, 64))
        {
            return Some("the values do not fit the registers".to_owned());
        }
        if self.costs == Costs::Staged && registers(most / 2, 32) {
            return Some("the costs do not fit the registers".to_owned());
        }
        if self.sub_group > 0 && !device.sub_group_sizes.contains(&(self.sub_group as u64)) {
            return Some(format!("the device has no sub-groups of {}", self.sub_group));
        }
        None
    }

    /// Local memory of a work-group of the forward pass.
    fn local_bytes(&self, spec: &TrellisSpec) -> usize {
        let costs = match self.costs {
            Costs::Global => 0,
            Costs::Double => 2 * stride(spec),
            Costs::Staged => stride(spec),
        };
        let partial = if self.split > 1 { self.work_group * self.run } else { 0 };
        (costs + partial + spec.len()) * size_of::<u16>()
    }

    /// The variant to take where nothing was measured.
    ///
    /// # Errors
    /// Why the last resort does not run either.
    pub fn untuned(spec: &TrellisSpec, device: &DeviceInfo) -> Result<Self, String> {
        let all = Self::candidates(spec, device);
        if let Some(first) = all.first() {
            return Ok(*first);
        }
        let last_resort = Self { costs: Costs::Global, values: Values::Table, ..Self::small(1) };
        match last_resort.unsuitable(spec, device) {
            None => Ok(last_resort),
            Some(reason) => Err(reason),
        }
    }

    fn small(work_group: usize) -> Self {
        Self {
            costs: Costs::Double,
            values: Values::Table,
            traceback: Traceback::Device,
            work_group,
            run: 8,
            split: 1,
            sub_group: 0,
        }
    }

    /// The variants that are worth a measurement on a device of this kind, the likeliest first.
    pub fn candidates(spec: &TrellisSpec, device: &DeviceInfo) -> Vec<Self> {
        let mut all = match device.kind {
            DeviceKind::Cpu => Self::for_processors(spec),
            _ => Self::for_graphics(spec, device),
        };
        all.retain(|variant| variant.unsuitable(spec, device).is_none());
        all
    }

    /// The candidates that are measured at a bit rate's first use.
    pub fn measured(spec: &TrellisSpec, device: &DeviceInfo) -> Vec<Self> {
        let mut candidates = Self::candidates(spec, device);
        candidates.truncate(MEASURED);
        candidates
    }

    /// On a processor a work-item is a lane or a turn of a loop: few of them, with long runs.
    fn for_processors(spec: &TrellisSpec) -> Vec<Self> {
        let longest = node_counts(spec).0.min(1024);
        // Host and device are the same processors: what is traced back need not be copied.
        [(16, 16), (16, 8), (64, 8), (16, 4), (16, 2)]
            .into_iter()
            .filter(|(group, run)| group * run <= longest)
            .flat_map(|(group, run)| {
                [Traceback::Mapped, Traceback::Device].map(|traceback| Self {
                    run,
                    traceback,
                    ..Self::small(group)
                })
            })
            .collect()
    }

    /// Registers first: a work-group of 512 holds the whole codebook in them.
    fn for_graphics(spec: &TrellisSpec, device: &DeviceInfo) -> Vec<Self> {
        use {Costs::*, Values::*};
        let (fewest, _) = node_counts(spec);
        let sub_group =
            device.sub_group_sizes.iter().find(|&&size| size == 16).map_or(0, |&size| size as usize);
        [
            (Cached, Double, 512, 8),
            (Cached, Staged, 512, 8),
            (Cached, Global, 512, 8),
            (Cached, Double, 512, 4),
            (Cached, Staged, 512, 4),
            (Cached, Global, 1024, 8),
            (Table, Staged, 256, 8),
            (Table, Staged, 256, 4),
            (Table, Double, 256, 8),
            (Table, Double, 256, 4),
            (Table, Global, 256, 8),
            (Table, Global, 256, 4),
            (Table, Global, 64, 4),
        ]
        .into_iter()
        // Intel's compiler, the one that lets a kernel ask for a sub-group size, spills there at 1 bit.
        .filter(|(values, _, work_group, _)| {
            *values != Cached || *work_group <= 512 || device.sub_group_sizes.is_empty()
        })
        .map(|(values, costs, work_group, run)| {
            let split = (work_group * run / fewest).max(1);
            // How many lanes the registers hold is the compiler's to know.
            let sub_group = if values == Cached { 0 } else { sub_group };
            Self { costs, values, run, split, sub_group, ..Self::small(work_group) }
        })
        .collect()
    }

    /// Every variant that runs on the device: what a sweep measures.
    pub fn all(spec: &TrellisSpec, device: &DeviceInfo) -> Vec<Self> {
        let mut all = Self::candidates(spec, device);
        all.extend(Self::for_graphics(spec, device));
        for size in [16, 32] {
            let sized: Vec<_> = all.iter().map(|variant| Self { sub_group: size, ..*variant }).collect();
            all.extend(sized);
        }
        if let Some(&first) = all.first() {
            let elsewhere = [Traceback::Copied, Traceback::Mapped];
            all.extend(elsewhere.map(|traceback| Self { traceback, ..first }));
        }
        all.retain(|variant| variant.unsuitable(spec, device).is_none());
        let mut seen = std::collections::HashSet::new();
        all.retain(|variant| seen.insert(*variant));
        all
    }

    /// What the kernels are compiled with.
    pub fn options(&self, spec: &TrellisSpec, device: &DeviceInfo) -> String {
        let arithmetic = match device.arithmetic {
            Arithmetic::Emulated => 0,
            Arithmetic::Native => 1,
            Arithmetic::Ptx => 2,
        };
        let values = match self.values {
            Values::Table => 0,
            Values::Cached => 1,
        };
        let costs = match self.costs {
            Costs::Global => 0,
            Costs::Double => 1,
            Costs::Staged => 2,
        };
        let half_rate = u8::from(spec.bits().is_half_integer());
        let mut options = format!(
            "-DARITHMETIC={arithmetic} -DVALUES={values} -DCOSTS={costs} -DBITS={} -DHALF_RATE={half_rate} \
             -DLEN={} -DWORK_GROUP={} -DRUN={} -DSPLIT={} -DTRACE_GROUP={}",
            spec.step(0),
            spec.len(),
            self.work_group,
            self.run,
            self.split,
            trace_group(device),
        );
        if self.sub_group > 0 {
            options.push_str(&format!(" -DSUB_GROUP={}", self.sub_group));
        }
        options
    }
}

/// Work-items that look at the candidates of one node together.
pub fn trace_group(device: &DeviceInfo) -> usize {
    match device.kind {
        DeviceKind::Cpu => 1,
        _ => 32,
    }
}
