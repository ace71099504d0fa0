//! The encoder on an OpenCL device: `kernels/forward.cl` and `kernels/trace.cl`, or the host's traceback
//! after the forward pass. All variants give the same states as [`Scalar`](super::Scalar).
//!
//! Tiles go through in batches. A batch is four launches (forward and back, twice), sized so that none
//! takes much longer than half a second; the buffers stay within a [`MemoryPolicy`]. Before the first tile
//! of a bit rate some tiles are compared with the CPU encoder's.

mod device;
mod driver;
mod error;
mod memory;
mod source;
mod tune;
mod variant;

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use opencl3::kernel::Kernel;
use rayon::prelude::*;

use super::trace::{Pass, Search, values_of};
use super::{Cpu, EncodeError, TileEncoder, TrellisSpec, check_tiles, half_math};
use crate::format::Codebook;
use crate::linalg::Rng;
use driver::{Argument, Memory, Residence, Running, Session};
use memory::Arena;
use variant::{stride, trace_group};

pub use device::{Arithmetic, DeviceInfo, DeviceKind, devices};
pub use error::OpenClError;
pub use memory::{Estimate, MemoryPolicy};
pub use tune::{Choice, Choices};
pub use variant::{Costs, Traceback, Values, Variant};

/// What a launch should take at most. Drivers reset devices that do not answer for some seconds, and
/// displays stand still meanwhile.
const LAUNCH: Duration = Duration::from_millis(500);
/// Tiles per compute unit beyond which a batch gains nothing.
const TILES_PER_UNIT: usize = 16;
/// Tiles that are compared with the CPU encoder's before a bit rate is used.
const CHECKED_TILES: usize = 6;

/// How long a batch may take, unless said otherwise. Batches are sized to take about a second.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// How the kernels' variant is chosen.
#[derive(Clone, Debug)]
pub enum Tuning {
    /// The likeliest variant for the kind of device.
    Untuned,
    /// This one.
    Fixed(Variant),
    /// The fastest of a few, measured at a bit rate's first use unless the choice is remembered.
    Measured(Choices),
}

/// The encoder on one OpenCL device.
pub struct OpenCl {
    name: String,
    device: DeviceInfo,
    policy: MemoryPolicy,
    state: Mutex<Option<State>>,
}

/// What an open device holds. Dropped without waiting if the device hangs.
struct State {
    session: Session,
    tuning: Tuning,
    arena: Option<Arena>,
    tables: HashMap<Codebook, Table>,
    ready: HashMap<TrellisSpec, Ready>,
}

/// A codebook's values as the kernels want them.
enum Table {
    Halves(Memory<u16>),
    /// Where halves are emulated.
    Floats(Memory<f32>),
}

impl Table {
    fn argument(&self) -> Argument<'_> {
        match self {
            Self::Halves(memory) => Argument::U16(memory),
            Self::Floats(memory) => Argument::F32(memory),
        }
    }
}

/// A bit rate that was compiled and checked.
struct Ready {
    variant: Variant,
    forward: Kernel,
    trace: Kernel,
    /// Tiles of the next batch.
    batch: usize,
    /// Tiles that memory allows at a time.
    most: usize,
    /// Over the latest full batch.
    tiles_per_second: f64,
}

impl OpenCl {
    /// Opens a device.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn open(device: &DeviceInfo, policy: MemoryPolicy, tuning: Tuning) -> Result<Self, OpenClError> {
        Self::open_with_deadline(device, policy, tuning, DEADLINE)
    }

    /// [`OpenCl::open`], with another time after which a device is taken to hang.
    pub fn open_with_deadline(
        device: &DeviceInfo,
        policy: MemoryPolicy,
        tuning: Tuning,
        deadline: Duration,
    ) -> Result<Self, OpenClError> {
        let session = Session::open(device::handle(device)?, &device.name, deadline)?;
        let state = State { session, tuning, arena: None, tables: HashMap::new(), ready: HashMap::new() };
        Ok(Self {
            name: format!("opencl:{}", device.index),
            device: device.clone(),
            policy,
            state: Mutex::new(Some(state)),
        })
    }

    pub fn device(&self) -> &DeviceInfo {
        &self.device
    }

    /// Compiles and checks the kernels for a trellis, and says which variant was chosen.
    ///
    /// # Errors
    /// No memory for one tile, kernels that do not compile, states that differ from the CPU encoder's.
    pub fn variant(&self, spec: &TrellisSpec) -> Result<Variant, OpenClError> {
        self.with_state(|state| {
            state.prepare(spec, &self.device, &self.policy)?;
            Ok(state.ready[spec].variant)
        })
    }

    fn with_state<R>(
        &self,
        work: impl FnOnce(&mut State) -> Result<R, OpenClError>,
    ) -> Result<R, OpenClError> {
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let Some(open) = state.as_mut() else {
            let reason = "it stopped answering".to_owned();
            return Err(OpenClError::Unsuitable { device: self.device.name.clone(), reason });
        };
        let result = work(open);
        match &result {
            // Giving back what a hanging device still uses may hang as well.
            Err(OpenClError::Deadline { .. }) => std::mem::forget(state.take()),
            Err(_) => open.arena = None,
            Ok(_) => {}
        }
        result
    }
}

impl TileEncoder for OpenCl {
    fn name(&self) -> &str {
        &self.name
    }

    fn encode(&self, spec: &TrellisSpec, tiles: &[f32], states: &mut [u16]) -> Result<(), EncodeError> {
        check_tiles(spec, tiles, states)?;
        self.with_state(|state| {
            state.prepare(spec, &self.device, &self.policy)?;
            state.encode(spec, &self.device, tiles, states)
        })?;
        Ok(())
    }

    fn prepare(&self, spec: &TrellisSpec) -> Result<(), EncodeError> {
        self.variant(spec)?;
        Ok(())
    }

    fn speed(&self, spec: &TrellisSpec) -> Option<f64> {
        let state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        state.as_ref()?.ready.get(spec).map(|ready| ready.tiles_per_second)
    }
}

impl State {
    fn prepare(
        &mut self,
        spec: &TrellisSpec,
        device: &DeviceInfo,
        policy: &MemoryPolicy,
    ) -> Result<(), OpenClError> {
        if self.ready.contains_key(spec) {
            return Ok(());
        }
        let most = policy.most_tiles(spec, device)?;
        let variant = match &self.tuning {
            Tuning::Untuned => Variant::untuned(spec, device)
                .map_err(|reason| OpenClError::Unsuitable { device: device.name.clone(), reason })?,
            Tuning::Fixed(variant) => *variant,
            Tuning::Measured(_) => return self.choose(spec, device, most),
        };
        self.use_variant(spec, device, variant, most)
    }

    /// Takes the remembered variant, or measures the candidates and remembers the fastest.
    fn choose(&mut self, spec: &TrellisSpec, device: &DeviceInfo, most: usize) -> Result<(), OpenClError> {
        let Tuning::Measured(choices) = &self.tuning else { return Ok(()) };
        if let Some(choice) = choices.remembered(device, spec)
            && self.use_variant(spec, device, choice.variant, most).is_ok()
        {
            return Ok(());
        }
        let mut fastest: Option<Choice> = None;
        let mut failure = None;
        for variant in Variant::measured(spec, device) {
            match self.measure(spec, device, variant, most) {
                Ok(tiles_per_second)
                    if fastest.is_none_or(|best| tiles_per_second > best.tiles_per_second) =>
                {
                    fastest = Some(Choice { variant, tiles_per_second });
                }
                Ok(_) => {}
                Err(error @ OpenClError::Deadline { .. }) => return Err(error),
                Err(error) => failure = Some(error),
            }
        }
        let Some(fastest) = fastest else {
            let reason = "no variant of the kernels runs".to_owned();
            let device = device.name.clone();
            return Err(failure.unwrap_or(OpenClError::Unsuitable { device, reason }));
        };
        if let Tuning::Measured(choices) = &mut self.tuning {
            choices.remember(device, spec, fastest);
        }
        self.use_variant(spec, device, fastest.variant, most)
    }

    /// Tiles per second of a variant, after it gave the right states.
    fn measure(
        &mut self,
        spec: &TrellisSpec,
        device: &DeviceInfo,
        variant: Variant,
        most: usize,
    ) -> Result<f64, OpenClError> {
        self.use_variant(spec, device, variant, most)?;
        let count = (device.compute_units as usize * 2).clamp(CHECKED_TILES, most.max(CHECKED_TILES));
        let tiles = normal_tiles(spec, count);
        let mut states = vec![0; tiles.len()];
        let mut best = 0.0f64;
        for _ in 0..2 {
            let started = Instant::now();
            self.encode(spec, device, &tiles, &mut states)?;
            best = best.max(count as f64 / started.elapsed().as_secs_f64());
        }
        Ok(best)
    }

    fn use_variant(
        &mut self,
        spec: &TrellisSpec,
        device: &DeviceInfo,
        variant: Variant,
        most: usize,
    ) -> Result<(), OpenClError> {
        if let Some(reason) = variant.unsuitable(spec, device) {
            return Err(OpenClError::Unsuitable { device: device.name.clone(), reason });
        }
        let options = variant.options(spec, device);
        let forward = self.session.build(&source::forward(), &options, "forward")?;
        let trace = self.session.build(&source::trace(), &options, "trace")?;
        self.fill_table(spec.codebook(), device.arithmetic)?;
        let batch = most.min(device.compute_units as usize);
        let ready = Ready { variant, forward, trace, batch, most, tiles_per_second: 0.0 };
        self.ready.insert(*spec, ready);
        let checked = self.check(spec, device);
        if checked.is_err() {
            self.ready.remove(spec);
        }
        checked
    }

    fn fill_table(&mut self, codebook: Codebook, arithmetic: Arithmetic) -> Result<(), OpenClError> {
        if self.tables.contains_key(&codebook) {
            return Ok(());
        }
        let values = codebook.values();
        let table = if arithmetic == Arithmetic::Emulated {
            let values: Vec<f32> = values.into_iter().map(f32::from).collect();
            Table::Floats(self.session.filled(&values)?)
        } else {
            let bits: Vec<u16> = values.iter().map(|value| value.to_bits()).collect();
            Table::Halves(self.session.filled(&bits)?)
        };
        self.tables.insert(codebook, table);
        Ok(())
    }

    /// Compares some tiles with the CPU encoder's.
    fn check(&mut self, spec: &TrellisSpec, device: &DeviceInfo) -> Result<(), OpenClError> {
        let tiles = checked_tiles(spec);
        let mut expected = vec![0; tiles.len()];
        let mut found = vec![0; tiles.len()];
        let on_cpu = Cpu::detect().encode(spec, &tiles, &mut expected);
        on_cpu.map_err(|error| OpenClError::Unsuitable {
            device: device.name.clone(),
            reason: format!("the tiles of the check cannot be encoded: {error}"),
        })?;
        self.encode(spec, device, &tiles, &mut found)?;
        let differs = |tile: &usize| {
            let range = tile * spec.len()..(tile + 1) * spec.len();
            expected[range.clone()] != found[range]
        };
        match (0..tiles.len() / spec.len()).find(differs) {
            None => Ok(()),
            Some(tile) => Err(OpenClError::WrongResult {
                device: device.name.clone(),
                bits: spec.bits(),
                tile,
                variant: self.ready[spec].variant.to_string(),
            }),
        }
    }

    /// Encodes any number of tiles of a prepared trellis.
    fn encode(
        &mut self,
        spec: &TrellisSpec,
        device: &DeviceInfo,
        tiles: &[f32],
        states: &mut [u16],
    ) -> Result<(), OpenClError> {
        let (mut tiles, mut states) = (tiles, states);
        while !tiles.is_empty() {
            let ready = &self.ready[spec];
            let wanted = ready.batch.min(tiles.len() / spec.len());
            let residence = match ready.variant.traceback {
                Traceback::Mapped => Residence::HostVisible,
                _ => Residence::Device,
            };
            let count = Arena::reserve(&mut self.arena, &self.session, spec, wanted, residence)?;
            let weights = count * spec.len();
            let started = Instant::now();
            match self.batch(spec, device, &tiles[..weights], &mut states[..weights]) {
                Ok(longest) => self.adapt(spec, device, count, longest, started.elapsed()),
                // Some drivers allocate at the first launch.
                Err(error) if error.is_memory() && count > 1 => {
                    self.arena = None;
                    self.limit(spec, count / 2);
                    continue;
                }
                Err(error) => return Err(error),
            }
            if count < wanted {
                self.limit(spec, count);
            }
            tiles = &tiles[weights..];
            states = &mut states[weights..];
        }
        Ok(())
    }

    fn limit(&mut self, spec: &TrellisSpec, most: usize) {
        if let Some(ready) = self.ready.get_mut(spec) {
            ready.most = most;
            ready.batch = ready.batch.min(most);
        }
    }

    /// Sizes the next batch so that its longest launch takes about [`LAUNCH`].
    fn adapt(
        &mut self,
        spec: &TrellisSpec,
        device: &DeviceInfo,
        count: usize,
        longest: Duration,
        whole: Duration,
    ) {
        let Some(ready) = self.ready.get_mut(spec) else { return };
        ready.tiles_per_second = count as f64 / whole.as_secs_f64();
        if longest > LAUNCH {
            let share = LAUNCH.as_secs_f64() / longest.as_secs_f64();
            ready.batch = ((count as f64 * share) as usize).max(1);
        } else if longest < LAUNCH / 2 && count == ready.batch {
            ready.batch = (2 * count).min(ready.most).min(device.compute_units as usize * TILES_PER_UNIT);
        }
    }

    /// Encodes tiles that fit the arena, and says how long the longest launch took.
    fn batch(
        &mut self,
        spec: &TrellisSpec,
        device: &DeviceInfo,
        tiles: &[f32],
        states: &mut [u16],
    ) -> Result<Duration, OpenClError> {
        let Some(arena) = self.arena.as_mut() else { return Ok(Duration::ZERO) };
        let job = Batch {
            session: &self.session,
            ready: &self.ready[spec],
            table: &self.tables[&spec.codebook()],
            spec,
            device,
            count: tiles.len() / spec.len(),
        };
        self.session.write(&mut arena.tiles, tiles)?;
        match job.ready.variant.traceback {
            Traceback::Device => job.traced_on_device(arena, states),
            Traceback::Copied | Traceback::Mapped => job.traced_on_host(arena, tiles, states),
        }
    }
}

/// One batch of tiles in the arena.
struct Batch<'a> {
    session: &'a Session,
    ready: &'a Ready,
    table: &'a Table,
    spec: &'a TrellisSpec,
    device: &'a DeviceInfo,
    count: usize,
}

impl Batch<'_> {
    fn traced_on_device(&self, arena: &Arena, states: &mut [u16]) -> Result<Duration, OpenClError> {
        let started = Instant::now();
        // The queue is in order: the last launch is done when all are. A failure of one is its failure.
        let running =
            [self.forward(arena, 1)?, self.trace(arena, 1)?, self.forward(arena, 2)?, self.trace(arena, 2)?];
        running.into_iter().rev().try_for_each(|running| self.session.wait(running))?;
        let both_passes = started.elapsed();
        self.session.read(&arena.states, 0, states)?;
        Ok(both_passes / 2)
    }

    fn traced_on_host(
        &self,
        arena: &mut Arena,
        tiles: &[f32],
        states: &mut [u16],
    ) -> Result<Duration, OpenClError> {
        let started = Instant::now();
        self.session.wait(self.forward(arena, 1)?)?;
        let first = started.elapsed();
        let mut start = vec![0u16; self.count];
        self.searches(
            arena,
            tiles,
            |_| Pass::free(self.spec.len()),
            &mut start,
            1,
            |search, start| {
                start[0] = search.closing_node() as u16;
            },
        )?;
        self.session.write(&mut arena.start, &start)?;
        let started = Instant::now();
        self.session.wait(self.forward(arena, 2)?)?;
        let second = started.elapsed();
        let closed = |tile: usize| Pass::closed(start[tile].into());
        self.searches(arena, tiles, closed, states, self.spec.len(), |search, states| {
            search.trace(search.pass.start.unwrap_or(0), states);
        })?;
        Ok(first.max(second))
    }

    /// Lets the host trace every tile back; `out` has `width` elements for each.
    fn searches(
        &self,
        arena: &Arena,
        tiles: &[f32],
        pass: impl Fn(usize) -> Pass + Sync,
        out: &mut [u16],
        width: usize,
        trace: impl Fn(Search<'_>, &mut [u16]) + Sync,
    ) -> Result<(), OpenClError> {
        let values = values_of(self.spec);
        let rows = self.spec.len() * stride(self.spec);
        let mut search_all = |history: &[u16]| {
            out.par_chunks_mut(width).zip(tiles.par_chunks_exact(self.spec.len())).enumerate().for_each(
                |(tile, (out, weights))| {
                    let weights: Vec<f32> = weights.iter().map(|&w| half_math::round(w)).collect();
                    let history = &history[tile * rows..(tile + 1) * rows];
                    let pass = pass(tile);
                    trace(Search { spec: self.spec, values, weights: &weights, pass, history }, out);
                },
            );
        };
        let len = self.count * rows;
        match self.ready.variant.traceback {
            Traceback::Mapped => self.session.mapped(&arena.history, len, search_all),
            _ => {
                let mut history = vec![0; len];
                self.session.read(&arena.history, 0, &mut history)?;
                search_all(&history);
                Ok(())
            }
        }
    }

    /// Starts `forward` for a pass.
    fn forward(&self, arena: &Arena, pass: i32) -> Result<Running, OpenClError> {
        let arguments = [
            Argument::F32(&arena.tiles),
            self.table.argument(),
            Argument::U16(&arena.start),
            Argument::U16(&arena.history),
            Argument::Int(pass),
        ];
        let size = self.ready.variant.work_group;
        self.session.launch(&self.ready.forward, &arguments, self.count, size)
    }

    /// Starts `trace` for a pass.
    fn trace(&self, arena: &Arena, pass: i32) -> Result<Running, OpenClError> {
        let arguments = [
            Argument::F32(&arena.tiles),
            self.table.argument(),
            Argument::U16(&arena.history),
            Argument::U16(&arena.start),
            Argument::U16(&arena.states),
            Argument::Int(pass),
        ];
        self.session.launch(&self.ready.trace, &arguments, self.count, trace_group(self.device))
    }
}

/// Normal noise of unit variance.
fn normal_tiles(spec: &TrellisSpec, count: usize) -> Vec<f32> {
    let mut rng = Rng::new(0, "opencl");
    (0..count * spec.len()).map(|_| rng.normal()).collect()
}

/// Tiles in which a device shows what it rounds wrongly: noise of several magnitudes (ties, subnormal
/// costs, overflow), zeros.
fn checked_tiles(spec: &TrellisSpec) -> Vec<f32> {
    const MAGNITUDES: [f32; CHECKED_TILES] = [1.0, 1.0, 0.05, 0.0, 1e-6, 3e4];
    let mut tiles = normal_tiles(spec, CHECKED_TILES);
    for (tile, magnitude) in tiles.chunks_exact_mut(spec.len()).zip(MAGNITUDES) {
        tile.iter_mut().for_each(|w| *w *= magnitude);
    }
    tiles
}
