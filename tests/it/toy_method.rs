//! A whole method, as CONTRIBUTING.md shows it: it lives outside the library only so that no user finds it in a recipe.
//! In `src/method/toy.rs` its imports would start with `crate::` and `super::`, and it would have a line in `methods!` and a recipe.

use autodidact::loss::l2_normalize;
use autodidact::method::{Inputs, Loss, Method, MicroBatch, Outputs, Progress, Sees, learner};
use autodidact::model::layers::Affine;
use autodidact::model::params::Flat;
use autodidact::model::{Backbone, ConfigError, LastLayer, Noise, Pass, ProjectionHead, ProjectionHeadArch, Scope};
use autodidact::problem::{Numbers, Problem};
use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};
use serde::Deserialize;

/// The `[method.toy]` table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// Width of the projections.
    pub out: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { out: 64 }
    }
}

/// Pulls the projections of two views together; the batch norm at the end keeps different images apart.
#[derive(Module, Debug)]
pub(crate) struct Toy {
    backbone: Backbone,
    head: ProjectionHead,
}

impl Method for Toy {
    type Config = Config;

    const SEES: Sees = Sees::MicroBatch; // a sum over images

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &scope.enter("backbone"))?;
        let arch =
            ProjectionHeadArch::mlp(backbone.dim(), 2 * config.out, config.out, 2, LastLayer::Norm(Affine::None));
        let head = ProjectionHead::new(&arch, &scope.enter("head"));
        Ok(Self { backbone, head })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        if config.out == 0 || inputs.num_views() != 2 {
            found.push(Problem::at("method.toy", "`method.toy` needs 2 views and a width"));
        }
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        let images = Tensor::cat(batch.views.clone(), 0); // [2 * micro, 3, h, w]
        let projections = self.head.forward(self.backbone.forward(images, pass).pooled, pass);
        Outputs { tensors: projections.chunk(2, 0), constants: Vec::new() }
    }

    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let [first, second]: [Tensor<2>; 2] = outputs.tensors.try_into().expect("`encode` returns two tensors");
        let images = first.dims()[0] as f64;
        let shown = first.clone();
        let apart = l2_normalize(first, 1e-6) - l2_normalize(second, 1e-6);
        Loss::new(apart.square().sum(), images).with_embeddings(shown)
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }
}

#[test]
fn the_method_of_the_guide_is_one() {
    let device = Device::flex().autodiff();
    let backbone = toml::from_str("[resnet]\ndepth = 18\nwidth = 0.0625\nstem = \"cifar\"").unwrap();
    let views = [toml::from_str("count = 2\nsize = 8").unwrap()];
    let inputs = Inputs { backbone: &backbone, views: &views, global: 4, micro: 4 };
    let mut found = Numbers::default();
    Toy::check(&Config::default(), &inputs, &mut found);
    let network = Toy::build(&Config::default(), &inputs, &Scope::new(1, &device)).unwrap();
    let mut learner = learner(network, &device);

    let view = |shift: usize| {
        let pixels: Vec<f32> = (0..4 * 3 * 64).map(|i| ((i * 37 + shift) % 101) as f32 / 50.0 - 1.0).collect();
        Tensor::<4>::from_data(TensorData::new(pixels, [4, 3, 8, 8]), &device)
    };
    let progress = Progress { seed: 1, step: 0, steps: 10, steps_per_epoch: 5 };
    let batch = MicroBatch { progress, images: vec![0, 1, 2, 3], labels: Vec::new(), views: vec![view(0), view(3)] };
    let rows = (0..2).flat_map(|view| (0..4).map(move |image| (image, view))).collect();
    let noise = Noise { seed: 1, step: 0, rows };
    let mut means = Vec::new();
    for _ in 0..6 {
        let outputs = learner.encode(&batch, &mut Pass::train(noise.clone()));
        let loss = learner.loss(outputs, &progress);
        means.push(loss.sum.clone().into_scalar::<f32>() / loss.count as f32);
        let gradient = learner.gradients(&mut loss.sum.backward()).concat();
        assert_eq!(gradient.len(), learner.layout().num_weights());
        let moved = learner.weights().iter().zip(&gradient).map(|(w, g)| w - 0.05 * g / loss.count as f32).collect();
        learner.set(&Flat::upload(moved, learner.buffers(), &device));
    }
    assert!(means[0] < 4.0 && means[5] < 0.9 * means[0], "it learns: {means:?}");
}

#[test]
fn the_guide_shows_it_word_for_word() {
    let own = include_str!("toy_method.rs");
    let start = own.find("/// The `[method.toy]` table.").unwrap();
    let method = &own[start..own.find("\n#[test]").unwrap()];
    let guide = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/CONTRIBUTING.md")).unwrap();
    let method = method.trim_end().replace("pub(crate)", "pub");
    assert!(guide.contains(&method), "copy the method into CONTRIBUTING.md");
}
