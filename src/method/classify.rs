//! Classification: the supervised end of a pretrained backbone.
//!
//! A linear layer on the pooled features, trained by cross-entropy: alone on a frozen backbone (linear probe; as in MAE, He et al., 2021,
//! <https://arxiv.org/abs/2111.06377>, `main_linprobe.py`, behind a batch norm without affine parameters), with the whole network (`main_finetune.py`), or first alone and then with it (LP-FT,
//! Kumar et al., 2022, <https://arxiv.org/abs/2202.10054>: a new head's first gradients no longer distort the features).
//!
//! Where an image may have several labels, or none, each class is a question of its own: binary cross-entropy, the mean over the classes, with `class_weights` as
//! the weights of the positive images (torch's `binary_cross_entropy_with_logits` and its `pos_weight`).
//!
//! A backbone that is not trained is in evaluation mode: it keeps its running statistics and drops nothing.
//!
//! Deviations: batch norms take their statistics over a micro-batch, and the one in front of the head has an epsilon of 1e-5 (MAE: 1e-6); mixup's partner is in the same micro-batch.

use burn::module::Module;
use burn::tensor::{Tensor, TensorData};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Inputs, Labels, Loss, Method, MicroBatch, Outputs, Progress, RunFacts, Sees, check};
use crate::augment::{Mix, MixConfig};
use crate::loss::{classification, total};
use crate::model::layers::{Affine, BatchNorm, Linear};
use crate::model::params::Layout;
use crate::model::{Backbone, ConfigError, Init, LoraArch, Pass, Scope};
use crate::optim::ParameterRule;
use crate::problem::{MAX_WIDTH, Numbers, Problem, plural};

/// The `[method.classify]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Names of the classes, in the order of the outputs; default: the data's. Given, they must be the data's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<String>,
    /// An image may have several classes, or none; default: as the data's labels are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multi_label: Option<bool>,
    /// What is trained.
    pub train: Train,
    /// Epochs at the start in which the backbone stands still and the head alone learns (may be fractional).
    pub head_epochs: f64,
    /// Batch norm without affine parameters between features and head; default: for a linear probe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_norm: Option<bool>,
    /// Deviation of the head's first weights; its biases start at zero. Default: MAE's, 2e-5, and 0.01 for a linear probe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_std: Option<f64>,
    /// Multiplies the learning rate by this to the power of the layers between a parameter and the head (`BEiT`; MAE's fine-tuning has 0.65 to 0.75); absent: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_decay: Option<f64>,
    /// Share of each target that is spread over all classes; with several labels an image, over yes and no.
    pub label_smoothing: f64,
    /// Weight of each class in the loss, with several labels an image of its positive images alone; empty: all the same.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub class_weights: Vec<f64>,
    /// Weighs each class by images / (classes * images of the class), as scikit-learn's `"balanced"`; with several labels an image by images without it / images with it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub balance_classes: bool,
    /// Mixup and `CutMix`.
    pub mix: MixConfig,
    /// Low-rank adapters, which are trained instead of the backbone's weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
}

/// Low-rank adapters (Hu et al., 2021, <https://arxiv.org/abs/2106.09685>).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LoraConfig {
    /// Rank of an adapter; 8 to 32 are usual.
    pub rank: usize,
    /// An adapter is multiplied by `alpha / rank`; default: twice the rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// Linear layers that get one, by the last part of their path: `qkv`, `proj`, `fc1`, `fc2` of a vision transformer.
    pub targets: Vec<String>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self { rank: 8, alpha: None, targets: ["qkv", "proj"].map(str::to_owned).to_vec() }
    }
}

impl LoraConfig {
    fn arch(&self) -> LoraArch {
        let alpha = self.alpha.unwrap_or(2.0 * self.rank as f64);
        LoraArch { rank: self.rank, alpha, targets: self.targets.clone() }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            classes: Vec::new(),
            multi_label: None,
            train: Train::Full,
            head_epochs: 0.0,
            head_norm: None,
            head_std: None,
            layer_decay: None,
            label_smoothing: 0.0,
            class_weights: Vec::new(),
            balance_classes: false,
            mix: MixConfig::default(),
            lora: None,
        }
    }
}

/// What is trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Train {
    /// The whole network.
    #[default]
    Full,
    /// The head alone.
    Linear,
}

/// Backbone and head.
#[derive(Module, Debug)]
pub struct Classify {
    backbone: Backbone,
    head_norm: Option<BatchNorm>,
    head: Linear,
    #[module(skip)]
    config: Config,
}

impl Config {
    fn is_multi_label(&self) -> bool {
        self.multi_label == Some(true)
    }

    /// Tells whether the backbone stands still in a step.
    fn is_frozen(&self, progress: &Progress) -> bool {
        self.train == Train::Linear || progress.step < steps(self.head_epochs, progress.steps_per_epoch)
    }
}

/// As the groups of parameters count them (`ParameterRule::freeze_epochs`).
fn steps(epochs: f64, steps_per_epoch: u64) -> u64 {
    (epochs * steps_per_epoch as f64).round() as u64
}

/// Mixes each image with its partner, the image as far from the end of the batch as it is from the beginning.
///
/// # Shapes
/// `[images, 3, size, size]` to the same.
///
/// # Panics
/// When there is not a mix for each image.
#[must_use]
pub fn mixed(images: Tensor<4>, mixes: &[Mix]) -> Tensor<4> {
    let [count, _, size, _] = images.dims();
    assert_eq!(count, mixes.len(), "a mix for each image");
    if mixes.iter().all(|mix| *mix == Mix::None) {
        return images;
    }
    let mut weights = vec![0.0; count * size * size];
    weights.chunks_exact_mut(size * size).zip(mixes).for_each(|(out, mix)| mix.weights(size, out));
    let own = Tensor::<4>::from_data(TensorData::new(weights, [count, 1, size, size]), &images.device());
    let partners = images.clone().flip([0]);
    images * own.clone() + partners * (own.neg() + 1.0)
}

impl Method for Classify {
    type Config = Config;

    const SEES: Sees = Sees::MicroBatch;
    const SUPERVISED: bool = true;

    fn build(config: &Config, inputs: &Inputs<'_>, scope: &Scope) -> Result<Self, ConfigError> {
        if config.classes.len() < if config.is_multi_label() { 1 } else { 2 } {
            let problem = format!("a classifier of {}", plural(config.classes.len(), "class"));
            return Err(ConfigError::new(
                "method.classify.classes",
                problem,
                "use labelled images of two classes or more",
            ));
        }
        let linear = config.train == Train::Linear;
        let place = scope.enter("backbone");
        let place = match &config.lora {
            Some(lora) => place.adapted(&lora.arch()),
            None if linear => place.untrained(),
            None => place,
        };
        let backbone = Backbone::new(inputs.backbone, inputs.views[0].size, &place)?;
        for target in config.lora.iter().flat_map(|lora| &lora.targets) {
            let end = format!("{target}.lora.a");
            let is_adapted =
                |path: &str| path.strip_suffix(&end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
            if !Layout::of(&backbone).entries().iter().any(|entry| is_adapted(&entry.path)) {
                let problem = format!("`{target}` is no linear layer of this backbone");
                let hint = "vision transformers have `qkv`, `proj`, `fc1` and `fc2`, ConvNeXts `fc1` and `fc2`, residual networks none";
                return Err(ConfigError::new("method.classify.lora.targets", problem, hint));
            }
        }
        let dim = backbone.dim();
        let std = config.head_std.unwrap_or(if linear { 0.01 } else { 2e-5 });
        let weight = Init::TruncatedNormal(std);
        Ok(Self {
            head_norm: config
                .head_norm
                .unwrap_or(linear)
                .then(|| BatchNorm::new(dim, Affine::None, &scope.enter("head_norm"))),
            head: Linear::new(dim, config.classes.len(), weight, Some(Init::Zeros), &scope.enter("head")),
            backbone,
            config: config.clone(),
        })
    }

    fn check(config: &Config, inputs: &Inputs<'_>, found: &mut Numbers) {
        let at = |key: &str| format!("method.classify.{key}");
        check::one_view("classify", "classifies", inputs, found);
        found.not_negative(&at("head_epochs"), config.head_epochs);
        if let Some(std) = config.head_std {
            found.not_negative(&at("head_std"), std);
        }
        if let Some(decay) = config.layer_decay.filter(|decay| !(*decay > 0.0 && *decay <= 1.0)) {
            found.limit(&at("layer_decay"), decay, "greater than 0 and at most 1");
        }
        found.momentum(&at("label_smoothing"), config.label_smoothing);
        for (key, value) in [("mix.mixup", config.mix.mixup), ("mix.cutmix", config.mix.cutmix)] {
            found.not_negative(&at(key), value);
        }
        found.probability(&at("mix.prob"), config.mix.prob);
        found.probability(&at("mix.switch_prob"), config.mix.switch_prob);
        if config.mix.is_on() && inputs.micro == 1 {
            let message = "`batch.micro` is 1, but mixup and CutMix mix the images of a micro-batch";
            found.push(Problem::at("batch.micro", message).hint("use at least 2; 32 and more work well"));
        }
        if config.head_norm.unwrap_or(config.train == Train::Linear) {
            check::images_to_normalise("classify", inputs, found);
        }
        if config.train == Train::Linear {
            let without_effect =
                [("head_epochs", config.head_epochs != 0.0, "the backbone stands still in all of them")];
            for (key, given, why) in without_effect {
                if given {
                    let key = at(key);
                    let message = format!("`{key}` has no effect with `train = \"linear\"`: {why}");
                    found.push(Problem::at(key, message).hint("remove it, or set `train = \"full\"`"));
                }
            }
        } else {
            check::lone_pixels("classify", inputs, inputs.micro, found);
        }
        if let Some(lora) = &config.lora {
            found.size(&at("lora.rank"), lora.rank, MAX_WIDTH);
            lora.alpha.map(|alpha| found.positive(&at("lora.alpha"), alpha));
            if lora.targets.is_empty() || lora.targets.iter().any(|target| target.trim_matches('.').is_empty()) {
                let key = at("lora.targets");
                let hint = "write `targets = [\"qkv\", \"proj\"]`";
                found.push(Problem::at(&key, format!("`{key}` names no layer")).hint(hint));
            }
            let other = [("train", config.train == Train::Linear, "adapters are trained with the head")];
            for (key, _, why) in other.into_iter().filter(|(_, given, _)| *given) {
                let key = at(key);
                let message = format!("`{key}` does not go with `method.classify.lora`: {why}");
                found.push(Problem::at(&key, message).against("method.classify.lora").hint("remove one of them"));
            }
        }
        for (index, &weight) in config.class_weights.iter().enumerate() {
            found.not_negative(&at(&format!("class_weights.{index}")), weight);
        }
        if config.balance_classes && !config.class_weights.is_empty() {
            let key = at("class_weights");
            let message = format!("`{key}` are given, and `balance_classes` is true");
            found.push(Problem::at(key, message).against("method.classify.balance_classes").hint("remove one of them"));
        }
    }

    fn suits(config: &Config, labels: &Labels, found: &mut Numbers) {
        let classes = &labels.classes;
        if labels.several && config.multi_label == Some(false) {
            let key = "method.classify.multi_label";
            let message = format!("`{key}` is false, but the list of `data` has images of several labels or of none");
            let hint = "remove the key, or leave one label in each line (a tab at the end of a line means none of the classes)";
            found.push(Problem::at(key, message).against("data.path").hint(hint));
            return;
        }
        let several = labels.several || config.is_multi_label();
        let known = classes.iter().filter(|(_, images)| *images > 0).count();
        if known < if several { 1 } else { 2 } {
            let message = match known {
                0 => "`data` has no labels to learn from".to_owned(),
                _ => format!(
                    "all images of `data` are of one class, `{}`",
                    classes.iter().find(|(_, images)| *images > 0).map_or("", |(name, _)| name)
                ),
            };
            let hint = "use a folder with a sub-folder for each class, a list with labels, CIFAR or the sample; `pretrain` learns without labels";
            found.push(Problem::at("data", message).hint(hint));
            return;
        }
        let names: Vec<&String> = classes.iter().map(|(name, _)| name).collect();
        if !config.classes.is_empty() && !config.classes.iter().eq(names.iter().copied()) {
            let longest = config.classes.len().max(names.len());
            let differs =
                (0..longest).find(|&index| config.classes.get(index) != names.get(index).copied()).unwrap_or(0);
            let shown = |name: Option<&String>| name.map_or_else(|| "none".to_owned(), |name| format!("`{name}`"));
            let message = format!(
                "`method.classify.classes` are not those of the data: class {differs} is {} here and {} there",
                shown(config.classes.get(differs)),
                shown(names.get(differs).copied())
            );
            found.push(Problem::at("method.classify.classes", message).hint("remove it: the data's are used"));
        }
        let (key, weights) = ("method.classify.class_weights", &config.class_weights);
        if !weights.is_empty() && weights.len() != classes.len() {
            let message =
                format!("`{key}` has {}, the data has {} classes", plural(weights.len(), "weight"), classes.len());
            let hint = "one for each class in their order, or `balance_classes = true`";
            found.push(Problem::at(key, message).hint(hint));
        } else if !weights.is_empty() && !weights.iter().zip(classes).any(|(&w, (_, images))| w > 0.0 && *images > 0) {
            found.push(Problem::at(key, format!("`{key}` gives every class with images the weight 0")));
        }
    }

    fn resolve(config: &mut Config, facts: &RunFacts) -> Vec<String> {
        let mut notes = Vec::new();
        let classes = &facts.labels.classes;
        config.classes = classes.iter().map(|(name, _)| name.clone()).collect();
        let several = *config.multi_label.get_or_insert(facts.labels.several);
        if several {
            notes.push(format!(
                "an image may have several of {} or none: each is learnt by binary cross-entropy",
                plural(classes.len(), "class")
            ));
        }
        let linear = config.train == Train::Linear;
        if let Some(decay) = config.layer_decay.take_if(|_| linear || config.lora.is_some()) {
            notes.push(format!(
                "`method.classify.layer_decay` is {decay}, which has no effect: the backbone's own weights stand still"
            ));
        }
        config.head_norm.get_or_insert(linear);
        config.head_std.get_or_insert(if linear { 0.01 } else { 2e-5 });
        if std::mem::take(&mut config.balance_classes) {
            let images: usize = classes.iter().map(|(_, images)| images).sum();
            let share = |&(_, own): &(String, usize)| match own {
                // no positive image is weighed
                0 if several => 1.0,
                0 => 0.0,
                _ if several => (facts.images - own) as f64 / own as f64,
                _ => images as f64 / (classes.len() * own) as f64,
            };
            let weights: Vec<f64> = classes.iter().map(share).collect();
            let (least, most) = weights.iter().fold((f64::MAX, 0.0f64), |(l, m), &w| (l.min(w), m.max(w)));
            notes.push(format!("`method.classify.class_weights`: balanced, from {least:.3} to {most:.3}"));
            config.class_weights = weights;
        }
        let empty: Vec<&str> = classes.iter().filter(|(_, n)| *n == 0).map(|(name, _)| name.as_str()).collect();
        if let Some(first) = empty.first() {
            notes.push(format!("{} without a training image, `{first}` the first", plural(empty.len(), "class")));
        }
        notes
    }

    fn classes(config: &Config) -> &[String] {
        &config.classes
    }

    fn rules(config: &Config) -> Vec<ParameterRule> {
        if config.train == Train::Linear {
            return Vec::new();
        }
        let tokens = "backbone.cls_token|backbone.reg_token|backbone.pos_embed";
        // timm's `no_weight_decay`
        let mut rules = vec![ParameterRule { weight_decay: Some(0.0), ..ParameterRule::matching(tokens) }];
        let backbone = || ParameterRule::matching("backbone.*");
        if let Some(decay) = config.layer_decay {
            rules.push(ParameterRule { layer_decay: Some(decay), ..backbone() });
        }
        if config.head_epochs > 0.0 {
            rules.push(ParameterRule { freeze_epochs: Some(config.head_epochs), ..backbone() });
        }
        rules
    }

    fn encode(&self, batch: &MicroBatch, pass: &mut Pass) -> Outputs {
        assert_eq!(batch.labels.len(), batch.images.len(), "labels for each image: `suits` asked for them");
        let Progress { seed, step, .. } = batch.progress;
        let images = batch.views[0].clone();
        let [count, _, size, _] = images.dims();
        let mixes = self.config.mix.draw(seed, step, &batch.images, size);
        let shares: Vec<f64> = mixes.iter().map(|mix| mix.share(size)).collect();
        let images = mixed(images, &mixes);
        let features = if self.config.is_frozen(&batch.progress) {
            self.backbone.forward(images, &mut Pass::eval()).pooled.detach()
        } else {
            self.backbone.forward(images, pass).pooled
        };
        let logits = self.logits(features, pass); // [b, classes]
        let classes = self.config.classes.len();
        let smoothing = self.config.label_smoothing;
        let targets = if self.config.is_multi_label() {
            classification::multi_label_targets(&batch.labels, &shares, classes, smoothing)
        } else {
            let labels: Vec<u32> = batch.labels.iter().map(|labels| labels[0]).collect();
            classification::targets(&labels, &shares, classes, smoothing)
        };
        let targets = Tensor::from_data(TensorData::new(targets, [count, classes]), &logits.device());
        Outputs { tensors: vec![logits], constants: vec![targets] }
    }

    fn loss(&self, outputs: Outputs, _progress: &Progress) -> Loss {
        let [logits]: [Tensor<2>; 1] = outputs.tensors.try_into().expect("`encode` returns one tensor");
        let [targets]: [Tensor<2>; 1] = outputs.constants.try_into().expect("`encode` returns one constant");
        let [images, classes] = logits.dims();
        let weights = &self.config.class_weights;
        if self.config.is_multi_label() {
            let weights = (!weights.is_empty()).then(|| {
                let weights: Vec<f32> = weights.iter().map(|&weight| weight as f32).collect();
                Tensor::from_data(TensorData::new(weights, [classes]), &logits.device())
            });
            let losses = classification::binary_cross_entropy(logits, targets, weights);
            return Loss::new(total(losses), images as f64);
        }
        if weights.is_empty() {
            return Loss::new(total(classification::cross_entropy(logits, targets, None)), images as f64);
        }
        // as torch: divided by the weights of the labels before smoothing
        let smoothing = self.config.label_smoothing;
        let host = targets.to_data().try_to_vec::<f32>().expect("targets are f32");
        let count: f64 = host
            .chunks_exact(classes)
            .flat_map(|row| row.iter().zip(weights))
            .map(|(&target, weight)| weight * (f64::from(target) - smoothing / classes as f64) / (1.0 - smoothing))
            .sum();
        let weights = weights.iter().map(|&weight| weight as f32).collect();
        let weights = Tensor::from_data(TensorData::new(weights, [classes]), &logits.device());
        Loss::new(total(classification::cross_entropy(logits, targets, Some(weights))), count)
    }

    fn backbone(&self) -> &Backbone {
        &self.backbone
    }

    fn scores(&self, images: Tensor<4>, pass: &mut Pass) -> Option<Tensor<2>> {
        let features = self.backbone.forward(images, pass).pooled;
        Some(self.logits(features, pass))
    }
}

impl Classify {
    fn logits(&self, features: Tensor<2>, pass: &mut Pass) -> Tensor<2> {
        let features = match &self.head_norm {
            Some(norm) => norm.forward(features, pass),
            None => features,
        };
        self.head.forward(features)
    }
}
