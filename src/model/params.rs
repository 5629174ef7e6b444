//! Parameters of any module as flat vectors, in module visit order.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Gradients, Tensor, TensorData};

use super::pass::BatchStats;
use super::scope::Kind;

/// Where each saved tensor of a module lies in the flat vectors.
///
/// Weights (trained) and buffers (not trained) have a vector each; the order is that of the module's visit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    entries: Vec<Entry>,
    num_weights: usize,
    num_buffers: usize,
}

/// One saved tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Module path: field names and indices joined by dots.
    pub path: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// First position in the weights or in the buffers, depending on `kind`.
    pub offset: usize,
    /// Number of values.
    pub len: usize,
    /// Trained or not.
    pub kind: Kind,
    /// burn's id.
    pub id: ParamId,
}

impl Entry {
    /// Returns the place in the weights or in the buffers.
    #[must_use]
    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// Adds the bytes of values to a hash.
pub fn hash(hasher: &mut blake3::Hasher, values: &[f32]) {
    for chunk in values.chunks(4096) {
        hasher.update(&chunk.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>());
    }
}

impl Layout {
    /// Lists the parameters of a module that was built with [`Scope`](super::Scope).
    #[must_use]
    pub fn of<M: Module>(module: &M) -> Self {
        let mut lister = Lister::default();
        module.visit(&mut lister);
        lister.layout
    }

    /// Returns the entries in visit order.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the number of trained values.
    #[must_use]
    pub fn num_weights(&self) -> usize {
        self.num_weights
    }

    /// Returns the number of values that are saved but not trained.
    #[must_use]
    pub fn num_buffers(&self) -> usize {
        self.num_buffers
    }

    /// Splits values by name into weights and buffers, for [`Flat::upload`].
    ///
    /// # Errors
    /// When a tensor is missing, has another number of values, or is not part of the module.
    pub fn collect(&self, tensors: &BTreeMap<String, Vec<f32>>) -> Result<(Vec<f32>, Vec<f32>), LoadError> {
        let (mut weights, mut buffers) = (Vec::with_capacity(self.num_weights), Vec::with_capacity(self.num_buffers));
        for entry in &self.entries {
            let values = tensors.get(&entry.path).ok_or_else(|| LoadError::Missing { path: entry.path.clone() })?;
            if values.len() != entry.len {
                return Err(LoadError::Size {
                    path: entry.path.clone(),
                    shape: entry.shape.clone(),
                    expected: entry.len,
                    found: values.len(),
                });
            }
            match entry.kind {
                Kind::Trained => weights.extend_from_slice(values),
                Kind::Buffer => buffers.extend_from_slice(values),
            }
        }
        match tensors.keys().find(|name| !self.entries.iter().any(|entry| entry.path == **name)) {
            Some(name) => Err(LoadError::Unknown { path: name.clone() }),
            None => Ok((weights, buffers)),
        }
    }

    /// Returns zeros for each trained parameter.
    #[must_use]
    pub fn zeros(&self) -> Vec<Vec<f32>> {
        self.entries.iter().filter(|entry| entry.kind == Kind::Trained).map(|entry| vec![0.0; entry.len]).collect()
    }

    /// Puts zeros where a trained parameter has no values.
    #[must_use]
    pub fn filled(&self, values: Vec<Option<Vec<f32>>>) -> Vec<Vec<f32>> {
        let trained = self.entries.iter().filter(|entry| entry.kind == Kind::Trained);
        trained.zip(values).map(|(entry, values)| values.unwrap_or_else(|| vec![0.0; entry.len])).collect()
    }

    /// Returns the entry of a parameter.
    ///
    /// # Panics
    /// When the parameter is of another module.
    #[must_use]
    pub fn entry(&self, id: ParamId) -> &Entry {
        self.entries.iter().find(|entry| entry.id == id).expect("the parameter belongs to this module")
    }

    /// Pairs each saved tensor `<prefix>X` with the trained one `X`: their places in buffers and weights.
    #[must_use]
    pub fn twins(&self, prefix: &str) -> Vec<(std::ops::Range<usize>, std::ops::Range<usize>)> {
        let trained: BTreeMap<&str, &Entry> = self
            .entries
            .iter()
            .filter(|entry| entry.kind == Kind::Trained)
            .map(|entry| (&*entry.path, entry))
            .collect();
        let saved = self.entries.iter().filter(|entry| entry.kind == Kind::Buffer);
        saved
            .filter_map(|entry| Some((entry.range(), trained.get(entry.path.strip_prefix(prefix)?)?.range())))
            .collect()
    }

    /// Returns the places of a layer's running mean and variance in the buffers.
    ///
    /// # Panics
    /// When the statistics come from a layer that is not in this layout.
    #[must_use]
    pub fn places(&self, stats: &BatchStats) -> [std::ops::Range<usize>; 2] {
        [stats.running_mean, stats.running_var].map(|id| {
            let entry = self.entries.iter().find(|entry| entry.id == id).expect("the layer belongs to this module");
            entry.range()
        })
    }
}

/// Weight of a new batch in batch norm's running statistics, torch's default.
const BATCH_NORM_MOMENTUM: f64 = 0.1;

/// Folds the statistics of one batch into the running ones: `0.9 * running + 0.1 * batch`.
pub fn fold(running: &mut [f32], batch: &[f32]) {
    for (running, batch) in running.iter_mut().zip(batch) {
        let folded = (1.0 - BATCH_NORM_MOMENTUM) * f64::from(*running) + BATCH_NORM_MOMENTUM * f64::from(*batch);
        *running = folded as f32;
    }
}

/// Tensors that do not fit a module.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The module has a parameter that was not given.
    #[error("`{path}` is missing")]
    Missing {
        /// Module path.
        path: String,
    },
    /// The sizes differ.
    #[error("`{path}` has {found} values, {expected} are needed for shape {shape:?}")]
    Size {
        /// Module path.
        path: String,
        /// Shape in the module.
        shape: Vec<usize>,
        /// Values in the module.
        expected: usize,
        /// Values given.
        found: usize,
    },
    /// A tensor was given that the module does not have.
    #[error("`{path}` is not part of this network")]
    Unknown {
        /// Name given.
        path: String,
    },
}

/// Reads all trained values.
///
/// # Panics
/// When the layout is of another module.
#[must_use]
pub fn read_weights<M: Module>(module: &M, layout: &Layout) -> Vec<f32> {
    read(module, layout, Kind::Trained, layout.num_weights)
}

/// Reads all values that are saved but not trained.
///
/// # Panics
/// When the layout is of another module.
#[must_use]
pub fn read_buffers<M: Module>(module: &M, layout: &Layout) -> Vec<f32> {
    read(module, layout, Kind::Buffer, layout.num_buffers)
}

fn read<M: Module>(module: &M, layout: &Layout, kind: Kind, len: usize) -> Vec<f32> {
    let mut reader = Reader { at: Cursor::new(layout), kind, values: Vec::with_capacity(len) };
    module.visit(&mut reader);
    reader.values
}

/// All values of a network, on the device: what ranks of one process have in common.
#[derive(Clone, Debug)]
pub struct Flat {
    weights: Tensor<1>,
    buffers: Tensor<1>,
}

impl Flat {
    /// Moves flat vectors to a device; without a copy where the device is the host.
    #[must_use]
    pub fn upload(weights: Vec<f32>, buffers: Vec<f32>, device: &Device) -> Self {
        let device = device.clone().inner();
        let upload = |values: Vec<f32>| {
            let len = values.len();
            Tensor::from_data(TensorData::new(values, [len]), &device)
        };
        Self { weights: upload(weights), buffers: upload(buffers) }
    }
}

impl Flat {
    /// Moves weights and buffers to the host; what nobody else has is not copied.
    #[must_use]
    pub fn into_host(self) -> (Vec<f32>, Vec<f32>) {
        (into_host(self.weights), into_host(self.buffers))
    }

    /// Copies the trained values.
    #[must_use]
    pub fn weights(&self) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.weights.dims()[0]);
        append(&mut values, self.weights.clone());
        values
    }

    /// Copies the values that are saved but not trained.
    #[must_use]
    pub fn buffers(&self) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.buffers.dims()[0]);
        append(&mut values, self.buffers.clone());
        values
    }
}

/// Puts values into a module, as new leaf tensors on `device` with the same ids.
///
/// The parameters are views of `flat` where the backend has views (flex does), so that any number of networks cost the memory of one.
/// Trained parameters require a gradient if the device has autodiff, and share no node with the old ones.
///
/// # Panics
/// When layout or values are of another module.
#[must_use]
pub fn write<M: Module>(module: M, layout: &Layout, flat: &Flat, device: &Device) -> M {
    assert_eq!(flat.weights.dims(), [layout.num_weights], "weights of another network");
    assert_eq!(flat.buffers.dims(), [layout.num_buffers], "buffers of another network");
    module.map(&mut Writer { at: Cursor::new(layout), flat, device })
}

/// Lets go of the trained values of a module, which has empty tensors in their place until [`write()`] gives it new ones.
#[must_use]
pub fn release<M: Module>(module: M, layout: &Layout, device: &Device) -> M {
    module.map(&mut Releaser { at: Cursor::new(layout), device: &device.clone().inner() })
}

/// Takes the gradient of each trained parameter out, in the layout's order; zero where a parameter has none. The memory that the backend
/// computed it in is handed on, not copied, where that is the host's.
///
/// # Panics
/// When the layout is of another module.
#[must_use]
pub fn read_gradients<M: Module>(module: &M, layout: &Layout, gradients: &mut Gradients) -> Vec<Vec<f32>> {
    let mut sums = Vec::new();
    add_gradients(module, layout, gradients, &mut sums);
    layout.filled(sums)
}

/// Takes the gradients of those trained parameters out that have one, and adds them to those taken before, in the layout's order.
///
/// # Panics
/// When the layout is of another module.
pub fn add_gradients<M: Module>(
    module: &M,
    layout: &Layout,
    gradients: &mut Gradients,
    sums: &mut Vec<Option<Vec<f32>>>,
) {
    let trained = layout.entries.iter().filter(|entry| entry.kind == Kind::Trained).count();
    sums.resize(trained, None);
    let mut reader = GradientReader { at: Cursor::new(layout), gradients, sums: sums.iter_mut() };
    module.visit(&mut reader);
    assert!(reader.sums.next().is_none(), "gradients of another network");
}

/// Moves the values of a tensor to the host in row-major order, without a copy where they lie there so and nobody else has them.
fn into_host<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().expect("weights are f32")
}

/// Appends the values of a tensor in row-major order.
fn append<const D: usize>(values: &mut Vec<f32>, tensor: Tensor<D>) {
    values.extend_from_slice(tensor.into_data().as_slice().expect("weights are f32"));
}

#[derive(Default)]
struct Lister {
    path: Vec<String>,
    layout: Layout,
}

impl ModuleVisitor for Lister {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape = param.dims().to_vec();
        let (len, kind) = (shape.iter().product(), Kind::of(param.id));
        let total = match kind {
            Kind::Trained => &mut self.layout.num_weights,
            Kind::Buffer => &mut self.layout.num_buffers,
        };
        let offset = *total;
        *total += len;
        self.layout.entries.push(Entry { path: self.path.join("."), shape, offset, len, kind, id: param.id });
    }
}

/// Walks the layout in step with a visit.
struct Cursor<'a> {
    entries: std::slice::Iter<'a, Entry>,
}

impl<'a> Cursor<'a> {
    fn new(layout: &'a Layout) -> Self {
        Self { entries: layout.entries.iter() }
    }

    fn next(&mut self, id: ParamId) -> &'a Entry {
        self.entries.next().filter(|entry| entry.id == id).expect("the layout is of this module")
    }
}

struct Reader<'a> {
    at: Cursor<'a>,
    kind: Kind,
    values: Vec<f32>,
}

impl ModuleVisitor for Reader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.at.next(param.id).kind == self.kind {
            append(&mut self.values, param.val());
        }
    }
}

struct Releaser<'a> {
    at: Cursor<'a>,
    device: &'a Device,
}

impl ModuleMapper for Releaser<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.at.next(param.id).kind {
            Kind::Trained => Param::initialized(param.id, Tensor::empty([0; D], self.device)),
            Kind::Buffer => param,
        }
    }
}

struct Writer<'a> {
    at: Cursor<'a>,
    flat: &'a Flat,
    device: &'a Device,
}

impl ModuleMapper for Writer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let entry = self.at.next(param.id);
        let flat = match entry.kind {
            Kind::Trained => &self.flat.weights,
            Kind::Buffer => &self.flat.buffers,
        };
        let shape: [usize; D] = entry.shape.as_slice().try_into().expect("the layout is of this module");
        let view = flat.clone().slice([entry.range()]).reshape(shape);
        let autodiff = self.device.is_autodiff();
        let tensor = if autodiff { Tensor::from_inner(view) } else { view };
        let trained = entry.kind == Kind::Trained && autodiff;
        Param::initialized(entry.id, if trained { tensor.require_grad() } else { tensor })
    }
}

struct GradientReader<'a> {
    at: Cursor<'a>,
    gradients: &'a mut Gradients,
    sums: std::slice::IterMut<'a, Option<Vec<f32>>>,
}

impl ModuleVisitor for GradientReader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.at.next(param.id).kind == Kind::Buffer {
            return;
        }
        let sum = self.sums.next().expect("one for each trained parameter");
        let Some(gradient) = param.val().grad_remove(self.gradients).map(into_host) else { return };
        match sum {
            Some(sum) => sum.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient),
            None => *sum = Some(gradient),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::TensorData;

    use super::*;
    use crate::model::layers::{Affine, BatchNorm, Linear};
    use crate::model::{Noise, Pass, Scope};
    use Kind::{Buffer, Trained};

    #[derive(Module, Debug)]
    struct Net {
        used: Linear,
        norm: BatchNorm,
        unused: Linear,
    }

    fn net(device: &Device) -> Net {
        let scope = Scope::new(1, device);
        Net {
            used: Linear::torch_default(2, 3, true, &scope.enter("used")),
            norm: BatchNorm::new(3, Affine::Full, &scope.enter("norm")),
            unused: Linear::torch_default(2, 2, false, &scope.enter("unused")),
        }
    }

    #[test]
    fn layouts_list_weights_and_buffers_apart_on_any_device() {
        for device in [Device::flex(), Device::flex().autodiff()] {
            let layout = Layout::of(&net(&device));
            let list: Vec<_> = layout.entries().iter().map(|e| (e.path.as_str(), e.offset, e.len, e.kind)).collect();
            assert_eq!(
                list,
                [
                    ("used.weight", 0, 6, Trained),
                    ("used.bias", 6, 3, Trained),
                    ("norm.weight", 9, 3, Trained),
                    ("norm.bias", 12, 3, Trained),
                    ("norm.running_mean", 0, 3, Buffer),
                    ("norm.running_var", 3, 3, Buffer),
                    ("unused.weight", 15, 4, Trained),
                ]
            );
            assert_eq!((layout.num_weights(), layout.num_buffers()), (19, 6));
        }
    }

    #[test]
    fn gradients_are_flat_and_zero_where_unused() {
        let device = Device::flex().autodiff();
        let net = net(&device);
        let layout = Layout::of(&net);
        let x = Tensor::<2>::from_data([[1.0f32, 2.0], [3.0, 5.0]], &device);
        let mut gradients = net.used.forward(x).sum().backward();
        let out = read_gradients(&net, &layout, &mut gradients).concat();
        assert_eq!(out[..9], [4.0, 7.0, 4.0, 7.0, 4.0, 7.0, 2.0, 2.0, 2.0]);
        assert_eq!(out[9..], [0.0; 10]);
    }

    #[test]
    fn written_parameters_are_new_leaves() {
        let device = Device::flex().autodiff();
        let old = net(&device);
        let layout = Layout::of(&old);
        let weights: Vec<f32> = (0..19u8).map(f32::from).collect();
        let new = write(old.clone(), &layout, &Flat::upload(weights.clone(), vec![7.0; 6], &device), &device);
        assert_eq!((read_weights(&new, &layout), read_buffers(&new, &layout)), (weights, vec![7.0; 6]));
        assert!(new.used.weight.val().is_require_grad() && !new.norm.running_mean.val().is_require_grad());
        let x = Tensor::<2>::from_data([[1.0f32, 2.0]], &device);
        let gradients = new.used.forward(x).sum().backward();
        assert!(new.used.weight.val().grad(&gradients).is_some());
        assert!(old.used.weight.val().grad(&gradients).is_none(), "no node is shared with the old network");
        let plain = write(old, &layout, &Flat::upload(vec![0.0; 19], vec![0.0; 6], &Device::flex()), &Device::flex());
        assert!(!plain.used.weight.val().is_autodiff());
    }

    #[test]
    fn running_statistics_fold_as_in_torch() {
        let net = net(&Device::flex());
        let layout = Layout::of(&net);
        let mut pass = Pass::train(Noise { seed: 0, step: 0, rows: vec![(0, 0), (1, 0)] });
        let x = Tensor::from_data(TensorData::new(vec![1.0f32, 2.0, 3.0, 3.0, 6.0, 9.0], [2, 3]), &Device::flex());
        let _ = net.norm.forward::<2>(x, &mut pass);
        let mut buffers = read_buffers(&net, &layout);
        for stats in pass.take_batch_stats() {
            let [mean, var] = layout.places(&stats);
            for (place, values) in [(mean, stats.mean), (var, stats.var)] {
                let mut batch = Vec::new();
                append(&mut batch, values);
                fold(&mut buffers[place], &batch);
            }
        }
        let expected = [0.2, 0.4, 0.6, 0.9 + 0.1 * 2.0, 0.9 + 0.1 * 8.0, 0.9 + 0.1 * 18.0];
        assert!(buffers.iter().zip(expected).all(|(b, e)| (f64::from(*b) - e).abs() < 1e-6), "{buffers:?}");
    }

    #[test]
    fn wrong_tensors_are_named() {
        let layout = Layout::of(&net(&Device::flex()));
        let mut tensors: BTreeMap<String, Vec<f32>> =
            layout.entries().iter().map(|entry| (entry.path.clone(), vec![1.0; entry.len])).collect();
        assert_eq!(layout.collect(&tensors).unwrap(), (vec![1.0; 19], vec![1.0; 6]));
        tensors.insert("extra".to_owned(), vec![]);
        assert_eq!(layout.collect(&tensors).unwrap_err().to_string(), "`extra` is not part of this network");
        tensors.remove("extra");
        tensors.insert("used.bias".to_owned(), vec![0.0; 2]);
        let message = "`used.bias` has 2 values, 3 are needed for shape [3]";
        assert_eq!(layout.collect(&tensors).unwrap_err().to_string(), message);
        tensors.remove("used.bias");
        assert_eq!(layout.collect(&tensors).unwrap_err().to_string(), "`used.bias` is missing");
    }
}
