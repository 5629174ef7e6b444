//! How many multiply-adds the layers of a forward pass take.
//!
//! Counted are the products of linear layers, convolutions and attention (queries with keys, weights with values), by the shapes that go through
//! them: whatever a method sends through its networks, and however often, is in the number. Not counted are norms, activations, biases,
//! pooling, the weights of an adapter, and the losses.

use std::cell::Cell;

use burn::tensor::Tensor;

/// Multiply-adds of a forward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Macs {
    /// In products that a gradient flows through.
    pub trained: u64,
    /// In products without: teachers, and layers that stay as they are with nothing trained in front of them.
    pub fixed: u64,
}

impl Macs {
    /// Floating-point operations of a step: a multiply-add is two, and a backward pass takes two products where the forward pass took one.
    #[must_use]
    pub fn flops_of_step(self) -> u64 {
        2 * (3 * self.trained + self.fixed)
    }
}

thread_local! {
    static COUNTED: Cell<Option<Macs>> = const { Cell::new(None) };
}

/// Runs passes on this thread and tells what their layers took.
pub fn counted<R>(passes: impl FnOnce() -> R) -> (R, Macs) {
    COUNTED.set(Some(Macs::default()));
    let result = passes();
    (result, COUNTED.take().unwrap_or_default())
}

/// Runs a pass that is run, and counted, again.
pub fn uncounted<R>(pass: impl FnOnce() -> R) -> R {
    let before = COUNTED.take();
    let result = pass();
    COUNTED.set(before);
    result
}

/// Notes a layer's output, each value of which took `inner` multiply-adds, if somebody counts.
pub(super) fn multiplied<const D: usize>(output: &Tensor<D>, inner: usize) {
    let Some(mut macs) = COUNTED.get() else { return };
    let count = output.dims().iter().product::<usize>() as u64 * inner as u64;
    *(if output.is_tracked() { &mut macs.trained } else { &mut macs.fixed }) += count;
    COUNTED.set(Some(macs));
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::model::{Backbone, BackboneConfig, Pass, Scope};

    /// Of one image through a backbone without its classifier, with weights that are trained or not.
    fn of(backbone: &str, size: usize, device: &Device) -> Macs {
        let config: BackboneConfig = toml::from_str(backbone).unwrap();
        let network = Backbone::new(&config, size as u32, &Scope::new(1, device)).unwrap();
        let image = Tensor::zeros([1, 3, size, size], device);
        counted(|| network.forward(image, &mut Pass::eval())).1
    }

    /// Billions as torchvision has them in its weights' metadata (`_ops`); they count the classifier of 1000 classes, too.
    #[test]
    fn known_networks_take_what_is_published() {
        let known = [
            ("[resnet]\ndepth = 18", 512, 1.814),
            ("[resnet]\ndepth = 50", 2048, 4.089),
            ("[convnext]\ndepths = [3, 3, 9, 3]\ndims = [96, 192, 384, 768]", 768, 4.456),
            ("[vit]\npatch = 16\ndim = 768\ndepth = 12\nheads = 12", 768, 17.564),
        ];
        for (backbone, dim, published) in known {
            let found = of(backbone, 224, &Device::flex());
            assert_eq!(found.trained, 0, "nothing is recorded");
            let billions = (found.fixed + dim * 1000) as f64 / 1e9;
            assert!((billions - published).abs() < 0.0006, "{backbone}: {billions} of {published}");
        }
    }

    #[test]
    fn what_is_trained_counts_three_times() {
        let tiny = "[resnet]\ndepth = 18\nwidth = 0.125\nstem = \"cifar\"";
        let [fixed, trained] = [Device::flex(), Device::flex().autodiff()].map(|device| of(tiny, 16, &device));
        assert_eq!((fixed.trained, trained.fixed), (0, 0));
        assert_eq!(fixed.fixed, trained.trained);
        assert_eq!(trained.flops_of_step(), 3 * fixed.flops_of_step());
    }
}
