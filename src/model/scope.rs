//! Where parameters come from while a network is built.

use std::sync::Arc;

use burn::module::{Param, ParamId};
use burn::tensor::{Device, Tensor, TensorData};

use super::lora::LoraArch;
use super::start::Start;
use crate::rng::{Purpose, Stream};

/// How a parameter is drawn when it is not loaded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// All the same.
    Constant(f64),
    /// Normal with mean 0, redrawn outside `[-2, 2]`: torch's `trunc_normal_`, whose bounds are absolute, so that at the
    /// usual deviation of 0.02 nothing is ever cut.
    TruncatedNormal(f64),
    /// Normal with mean 0.
    Normal(f64),
    /// Uniform in `[-limit, limit]`.
    Uniform(f64),
}

/// What a saved tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The optimizer changes it.
    Trained,
    /// Saved, but without a gradient: running statistics, fixed embeddings.
    Buffer,
}

impl Kind {
    /// Reads the kind off a parameter made by [`Scope`].
    ///
    /// On a device without autodiff no tensor requires a gradient, and burn's own note of it is private, so the lowest bit
    /// of the id says it: ids survive clones, maps, `valid`, `fork` and moves to another device.
    #[must_use]
    pub fn of(id: ParamId) -> Self {
        if id.val() & 1 == 1 { Self::Buffer } else { Self::Trained }
    }

    fn new_id(self) -> ParamId {
        let random = ParamId::new().val();
        ParamId::from(match self {
            Self::Trained => random & !1,
            Self::Buffer => random | 1,
        })
    }
}

/// A place in a network under construction: a path prefix, the run's seed and the device.
///
/// Every parameter is drawn on the host from the keyed stream of `(seed, path)`, so the weights depend on neither the
/// device, nor the order of construction, nor which other parts the network has.
#[derive(Clone, Debug)]
pub struct Scope {
    seed: u64,
    device: Device,
    path: String,
    kind: Kind,
    start: Option<Arc<Start>>,
    adapters: Option<Arc<LoraArch>>,
}

impl Scope {
    /// Opens the root scope. Give a device with autodiff to train, a plain one to evaluate.
    #[must_use]
    pub fn new(seed: u64, device: &Device) -> Self {
        Self { seed, device: device.clone(), path: String::new(), kind: Kind::Trained, start: None, adapters: None }
    }

    /// Enters a part; use the name of the module's field, so that the path equals the module path.
    #[must_use]
    pub fn enter(&self, name: impl std::fmt::Display) -> Self {
        let path = if self.path.is_empty() { name.to_string() } else { format!("{}.{name}", self.path) };
        Self { path, ..self.clone() }
    }

    /// Gives what is built here the weights that are in `start`, instead of drawing them.
    #[must_use]
    pub fn starting_from(&self, start: Option<Arc<Start>>) -> Self {
        Self { start, ..self.clone() }
    }

    /// Makes a twin of what is built here: the same values, but saved and not trained (a teacher).
    #[must_use]
    pub fn untrained(&self) -> Self {
        Self { kind: Kind::Buffer, ..self.clone() }
    }

    /// Gives linear layers that are built here adapters, which alone are trained.
    #[must_use]
    pub fn adapted(&self, arch: &LoraArch) -> Self {
        Self { adapters: Some(Arc::new(arch.clone())), kind: Kind::Buffer, ..self.clone() }
    }

    /// Returns what the adapter of the linear layer here is, if it has one, and its place.
    pub(super) fn adapter(&self) -> Option<(&LoraArch, Self)> {
        let arch = self.adapters.as_deref().filter(|arch| arch.targets(&self.path))?;
        Some((arch, Self { kind: Kind::Trained, adapters: None, ..self.enter("lora") }))
    }

    /// Returns the device parameters live on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Draws a trainable parameter named `name` here.
    #[must_use]
    pub fn param<const D: usize>(&self, name: &str, shape: [usize; D], init: Init) -> Param<Tensor<D>> {
        let tensor = self.tensor(name, shape, init);
        let trained = self.kind == Kind::Trained && self.device.is_autodiff();
        let tensor = if trained { tensor.require_grad() } else { tensor.set_require_grad(false) };
        Param::initialized(self.kind.new_id(), tensor)
    }

    /// Makes a saved tensor named `name` here that is not trained (running statistics, fixed embeddings).
    #[must_use]
    pub fn buffer<const D: usize>(&self, name: &str, values: Vec<f32>, shape: [usize; D]) -> Param<Tensor<D>> {
        let values = self.given(&self.enter(name).path, &shape).unwrap_or(values);
        let tensor = Tensor::from_data(TensorData::new(values, shape), &self.device);
        Param::initialized(Kind::Buffer.new_id(), tensor.set_require_grad(false))
    }

    fn given(&self, path: &str, shape: &[usize]) -> Option<Vec<f32>> {
        self.start.as_ref()?.get(path, shape).map(<[f32]>::to_vec)
    }

    fn tensor<const D: usize>(&self, name: &str, shape: [usize; D], init: Init) -> Tensor<D> {
        let path = self.enter(name).path;
        if let Some(values) = self.given(&path, &shape) {
            return Tensor::from_data(TensorData::new(values, shape), &self.device);
        }
        let mut stream = Stream::with_path(self.seed, Purpose::Weights, &path, &[]);
        let mut draw: Box<dyn FnMut() -> f64> = match init {
            Init::Zeros => Box::new(|| 0.0),
            Init::Ones => Box::new(|| 1.0),
            Init::Constant(value) => Box::new(move || value),
            Init::Normal(std) => Box::new(move || std * stream.normal()),
            Init::TruncatedNormal(std) => Box::new(move || {
                loop {
                    let value = std * stream.normal();
                    if value.abs() <= 2.0 {
                        return value;
                    }
                }
            }),
            Init::Uniform(limit) => Box::new(move || stream.uniform(-limit, limit)),
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| draw() as f32).collect();
        Tensor::from_data(TensorData::new(values, shape), &self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values<const D: usize>(param: &Param<Tensor<D>>) -> Vec<f32> {
        param.val().into_data().try_to_vec().unwrap()
    }

    #[test]
    fn a_draw_depends_on_seed_and_path_alone() {
        let plain = Scope::new(1, &Device::flex());
        let a = values(&plain.enter("a").param("weight", [4, 5], Init::Normal(1.0)));
        let b = values(&plain.enter("b").param("weight", [4, 5], Init::Normal(1.0)));
        assert_ne!(a, b, "another path");
        let recorded = Scope::new(1, &Device::flex().autodiff());
        assert_eq!(
            values(&recorded.enter("b").param("weight", [4, 5], Init::Normal(1.0))),
            b,
            "another order and device"
        );
        assert_eq!(values(&recorded.enter("a").param("weight", [4, 5], Init::Normal(1.0))), a);
        assert_ne!(values(&Scope::new(2, &Device::flex()).enter("a").param("weight", [4, 5], Init::Normal(1.0))), a);
    }

    #[test]
    fn the_kind_outlives_devices_and_maps() {
        use burn::module::Module;
        for device in [Device::flex(), Device::flex().autodiff()] {
            let scope = Scope::new(1, &device);
            for _ in 0..8 {
                let trained = scope.param("weight", [2], Init::Ones);
                let buffer = scope.buffer("b", vec![0.0; 2], [2]);
                assert_eq!(trained.val().is_require_grad(), device.is_autodiff());
                assert!(!buffer.val().is_require_grad());
                assert_eq!((Kind::of(trained.id), Kind::of(buffer.id)), (Kind::Trained, Kind::Buffer));
                assert_eq!(Kind::of(buffer.valid().fork(&Device::flex()).map(|t| t * 2.0).id), Kind::Buffer);
            }
        }
    }

    #[test]
    fn truncation_is_absolute() {
        let wide = values(&Scope::new(3, &Device::flex()).param("w", [4000], Init::TruncatedNormal(1.5)));
        assert!(wide.iter().all(|v| v.abs() <= 2.0) && wide.iter().any(|v| v.abs() > 1.9));
        let usual = values(&Scope::new(3, &Device::flex()).param("w", [4000], Init::TruncatedNormal(0.02)));
        let var = usual.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 4000.0;
        assert!((var.sqrt() - 0.02).abs() < 0.001, "{var}");
    }
}
