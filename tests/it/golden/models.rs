//! Golden cases of kind `models`: forward passes, gradients and running statistics of networks with given weights.
#![expect(clippy::unwrap_used, reason = "a case that is not as its README says fails")]

mod convnext;
mod resnet;
mod vit;

use std::collections::BTreeMap;

use autodidact::model::params::{Flat, Layout, read_gradients, write};
use autodidact::model::{Kind, Scope};
use burn::module::Module;
use burn::tensor::{Device, Gradients, Tensor, TensorData};
use serde_json::Value;

use super::{Array, Case, Checks, Outcome, read_tensors};

pub(super) fn run(case: &Case) -> Outcome {
    let name = case.name.as_str();
    if name.starts_with("timm_convnext") {
        convnext::timm(case)
    } else if name.starts_with("hf_convnext") {
        convnext::hf(case)
    } else if name.starts_with("timm") && name.contains("dinov3") {
        vit::timm_dinov3(case)
    } else if name.starts_with("hf_dinov3") {
        vit::hf_dinov3(case)
    } else if name.starts_with("timm_vit") {
        vit::timm(case)
    } else if name.starts_with("tv_resnet") && case.manifest.get("generator").is_some() {
        resnet::generated(case)
    } else if name.starts_with("tv_resnet") {
        resnet::torchvision(case)
    } else if name.starts_with("hf_resnet") {
        resnet::hf(case)
    } else if name.starts_with("hf_vitmae") {
        vit::hf_mae(case)
    } else if name.starts_with("hf_vit") || name.starts_with("hf_dinov2") {
        vit::hf(case)
    } else {
        Outcome::NotYet("no runner for this network".to_owned())
    }
}

// ---- weights ---------------------------------------------------------------------------------------------------------

/// Where a tensor of a checkpoint goes: our path, and which of how many parts of its rows for packed projections.
type Place = (String, Option<(usize, usize)>);

fn same_name(name: &str) -> Option<Place> {
    (!name.ends_with("num_batches_tracked")).then(|| (name.to_owned(), None))
}

/// Tensors of a checkpoint by our paths; the parts of packed projections are put together, a bias that is missing is zero.
fn renamed(tensors: &BTreeMap<String, Array>, place: fn(&str) -> Option<Place>) -> BTreeMap<String, Array> {
    let mut out: BTreeMap<String, Array> = BTreeMap::new();
    let mut packed: BTreeMap<String, Vec<Option<Array>>> = BTreeMap::new();
    for (name, array) in tensors {
        match place(name) {
            None => {}
            Some((path, None)) => {
                out.insert(path, array.clone());
            }
            Some((path, Some((part, of)))) => {
                packed.entry(path).or_insert_with(|| vec![None; of])[part] = Some(array.clone());
            }
        }
    }
    for (path, parts) in packed {
        let mut shape = parts.iter().flatten().next().expect("one part has been seen").shape.clone();
        let zeros = Array { values: vec![0.0; shape.iter().product()], shape: shape.clone() };
        shape[0] *= parts.len();
        let filled = parts.into_iter().map(|part| match part {
            None if path.rsplit('.').next() == Some("bias") => zeros.clone(),
            part => part.unwrap_or_else(|| panic!("{path}: a part is missing")),
        });
        let values = filled.flat_map(|part| part.values).collect();
        out.insert(path, Array { shape, values });
    }
    out
}

fn checkpoint(case: &Case) -> BTreeMap<String, Array> {
    read_tensors(&case.root.join(case.manifest["checkpoint"].as_str().expect("the manifest names a checkpoint")))
}

/// `config.json` beside the checkpoint.
fn folder_config(case: &Case) -> Value {
    let path = case.root.join(case.manifest["checkpoint"].as_str().expect("the manifest names a checkpoint"));
    let text =
        std::fs::read_to_string(path.with_file_name("config.json")).unwrap_or_else(|e| panic!("config.json: {e}"));
    serde_json::from_str(&text).unwrap()
}

pub(super) fn load<M: Module>(module: M, tensors: &BTreeMap<String, Array>, device: &Device) -> (M, Layout) {
    let layout = Layout::of(&module);
    let values = tensors.iter().map(|(name, array)| (name.clone(), array.f32())).collect();
    let (weights, buffers) = layout.collect(&values).unwrap_or_else(|e| panic!("{e}"));
    for entry in layout.entries() {
        assert_eq!(entry.shape, tensors[&entry.path].shape, "shape of {}", entry.path);
    }
    (write(module, &layout, &Flat::upload(weights, buffers, device), device), layout)
}

pub(super) fn scope() -> Scope {
    Scope::new(0, &Device::flex().autodiff())
}

// ---- comparisons -----------------------------------------------------------------------------------------------------

fn tensor<const D: usize>(array: &Array, device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(array.f32(), array.shape.clone()), device)
}

pub(super) fn input(case: &Case) -> Tensor<4> {
    tensor::<4>(case.tensor("x"), &Device::flex().autodiff()).require_grad()
}

pub(super) fn values<const D: usize>(x: &Tensor<D>) -> Vec<f32> {
    x.clone().into_data().try_to_vec().unwrap()
}

fn tolerance(case: &Case, kind: &str) -> f64 {
    case.manifest["tolerance"][kind].as_f64().unwrap_or_else(|| case.tolerance("rel_to_max"))
}

/// Outputs under the names of the case, flat enough for any rank.
struct Outputs<'a> {
    case: &'a Case,
    prefix: &'static str,
    checks: Checks,
    scalar: Tensor<1>,
}

impl<'a> Outputs<'a> {
    fn new(case: &'a Case, prefix: &'static str) -> Self {
        let scalar = Tensor::zeros([1], &Device::flex().autodiff());
        Self { case, prefix, checks: Checks::default(), scalar }
    }

    /// Compares an output if the case has it, and adds its probe to the scalar; `mean` divides by the root of the count.
    fn add<const D: usize>(&mut self, name: &str, got: &Tensor<D>, divide: bool) {
        let Some(expected) = self.case.tensors.get(&format!("{}out.{name}", self.prefix)) else { return };
        let what = format!("{}out.{name}", self.prefix);
        let shape_fits = expected.shape.iter().filter(|&&n| n != 1).eq(got.dims().iter().filter(|&&n| n != 1));
        assert!(shape_fits, "{what}: shape {:?}, expected {:?}", got.dims(), expected.shape);
        self.checks.relative_to_max(&what, &values(got), expected, tolerance(self.case, "rel_to_max"));
        if let Some(probe) = self.case.tensors.get(&format!("{}probe.{name}", self.prefix)) {
            let count = probe.values.len();
            let probe = Tensor::<1>::from_data(TensorData::new(probe.f32(), [count]), &Device::flex().autodiff());
            let scale = if divide { (count as f64).powf(-0.5) } else { 1.0 };
            self.scalar = self.scalar.clone() + (got.clone().reshape([count]) * probe).sum() * scale;
        }
    }

    /// Goes backward; returns the gradients of the parameters and the input by path.
    fn backward<M: Module>(&self, x: &Tensor<4>, module: &M, layout: &Layout) -> BTreeMap<String, Vec<f32>> {
        let mut gradients = self.scalar.backward();
        let mut out = BTreeMap::from([("x".to_owned(), values(&x.grad(&gradients).expect("the input is a leaf")))]);
        out.extend(gradients_of(module, layout, &mut gradients));
        out
    }
}

fn gradients_of<M: Module>(module: &M, layout: &Layout, gradients: &mut Gradients) -> BTreeMap<String, Vec<f32>> {
    let trained = layout.entries().iter().filter(|entry| entry.kind == Kind::Trained);
    trained.map(|entry| entry.path.clone()).zip(read_gradients(module, layout, gradients)).collect()
}

/// Returns the gradient of a tensor on disk with `len` values from those of our parameters.
fn gradient_on_disk(
    gradients: &BTreeMap<String, Vec<f32>>,
    name: &str,
    len: usize,
    place: fn(&str) -> Option<Place>,
) -> Vec<f32> {
    let (path, part) = place(name).unwrap_or_else(|| (name.to_owned(), None));
    let whole = gradients.get(&path).unwrap_or_else(|| panic!("no parameter `{path}` for `{name}`"));
    match part {
        Some((part, of)) => whole.chunks(whole.len() / of).nth(part).unwrap().to_vec(),
        // The position of a class token that is folded into the token has the token's gradient.
        None if path == "pos_embed" && whole.len() < len => {
            gradients["cls_token"].iter().chain(whole).copied().collect()
        }
        None => whole.clone(),
    }
}

/// Compares every gradient of the case; `noise` bounds what rounding does to one (relative to its maximum).
fn compare_gradients(
    case: &Case,
    prefix: &str,
    checks: &mut Checks,
    gradients: &BTreeMap<String, Vec<f32>>,
    place: fn(&str) -> Option<Place>,
    noise: impl Fn(&str, &[f32]) -> f64,
) {
    let wanted = |(name, expected): &(&String, &Array)| name.starts_with(prefix) && !expected.values.is_empty();
    for (name, expected) in case.tensors.iter().filter(wanted) {
        let got = gradient_on_disk(gradients, &name[prefix.len()..], expected.values.len(), place);
        let tolerance = tolerance(case, "grad_rel_to_max").max(noise(&name[prefix.len()..], &got));
        checks.relative_to_max(name, &got, expected, tolerance);
    }
}

fn no_noise(_: &str, _: &[f32]) -> f64 {
    0.0
}
