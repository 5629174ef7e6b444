//! Golden cases: reference values from the field's own tools, whatever folder `GOLDEN_DIR` names.
//!
//! `cargo test golden` walks `<dir>/<kind>/<name>.json`, chooses what to run by kind, name and `args`, prints one line a case and fails
//! when a supported case differs. Nothing here knows a shape, a seed or a value of a particular case.

mod adapters;
mod augment;
mod checkpoints;
mod evaluation;
mod losses;
mod models;
mod optim;
mod parameters;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// A tensor as it lies in a file, converted to `f64` (integers exactly).
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f64>,
}

impl Array {
    pub(crate) fn f32(&self) -> Vec<f32> {
        self.values.iter().map(|&v| v as f32).collect()
    }

    pub(crate) fn u8(&self) -> Vec<u8> {
        self.values.iter().map(|&v| v as u8).collect()
    }

    /// The value of a tensor with one element.
    pub(crate) fn item(&self) -> f64 {
        assert_eq!(self.values.len(), 1, "one element expected");
        self.values[0]
    }
}

/// One case: `<kind>/<name>.json` and the tensors beside it.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) manifest: Value,
    pub(crate) tensors: BTreeMap<String, Array>,
    /// The golden folder, which paths in a manifest are relative to.
    pub(crate) root: PathBuf,
}

impl Case {
    pub(crate) fn args(&self) -> &Value {
        &self.manifest["args"]
    }

    pub(crate) fn arg_f64(&self, name: &str) -> f64 {
        self.args()[name].as_f64().unwrap_or_else(|| panic!("{}: args.{name} is no number", self.name))
    }

    pub(crate) fn arg_usize(&self, name: &str) -> usize {
        self.args()[name].as_u64().unwrap_or_else(|| panic!("{}: args.{name} is no count", self.name)) as usize
    }

    pub(crate) fn tensor(&self, name: &str) -> &Array {
        self.tensors.get(name).unwrap_or_else(|| panic!("{}: no tensor `{name}`", self.name))
    }

    pub(crate) fn tolerance(&self, name: &str) -> f64 {
        self.manifest["tolerance"][name].as_f64().unwrap_or_else(|| panic!("{}: no tolerance `{name}`", self.name))
    }
}

/// What became of a case.
pub(crate) enum Outcome {
    /// Every comparison held; the worst one, as a fraction of its tolerance, and what it compared.
    Compared(Checks),
    /// The part of the product that this case tests does not exist yet.
    NotYet(String),
}

/// Comparisons of one case.
#[derive(Default)]
pub(crate) struct Checks {
    pub(crate) count: usize,
    compared: BTreeSet<String>,
    worst: f64,
    worst_what: String,
    failures: Vec<String>,
}

impl Checks {
    /// Notes that `what` differs by `error` where `tolerance` is allowed. NaN fails.
    pub(crate) fn note(&mut self, what: &str, error: f64, tolerance: f64) {
        self.count += 1;
        self.compared.insert(what.to_owned());
        let ratio = if error == 0.0 { 0.0 } else { error / tolerance };
        if ratio > self.worst || ratio.is_nan() {
            self.worst = ratio;
            self.worst_what = format!("{what} {error:.1e}");
        }
        if error.is_nan() || error > tolerance {
            self.failures.push(format!("{what}: differs by {error:.3e}, allowed {tolerance:.3e}"));
        }
    }

    /// Takes over the comparisons of `other`.
    pub(crate) fn merge(&mut self, other: Self) {
        self.count += other.count;
        self.compared.extend(other.compared);
        if other.worst > self.worst || other.worst.is_nan() {
            (self.worst, self.worst_what) = (other.worst, other.worst_what);
        }
        self.failures.extend(other.failures);
    }

    /// Relative difference of two numbers.
    pub(crate) fn relative(&mut self, what: &str, got: f64, expected: f64, tolerance: f64) {
        self.note(what, (got - expected).abs() / expected.abs().max(f64::MIN_POSITIVE), tolerance);
    }

    /// Largest difference divided by the largest expected magnitude (absolute when all expected values are zero).
    pub(crate) fn relative_to_max(&mut self, what: &str, got: &[f32], expected: &Array, tolerance: f64) {
        let largest = expected.values.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        self.note(what, largest_difference(got, expected) / if largest > 0.0 { largest } else { 1.0 }, tolerance);
    }

    /// Largest absolute difference.
    pub(crate) fn absolute(&mut self, what: &str, got: &[f32], expected: &Array, tolerance: f64) {
        self.note(what, largest_difference(got, expected), tolerance);
    }
}

fn largest_difference(got: &[f32], expected: &Array) -> f64 {
    if got.len() != expected.values.len() {
        return f64::INFINITY;
    }
    let differences = got.iter().zip(&expected.values).map(|(&g, &e)| (f64::from(g) - e).abs());
    // `max` would drop a NaN
    differences.fold(0.0, |m, d| if d.is_nan() || d > m { d } else { m })
}

/// Reads a safetensors file; every dtype that occurs in the goldens becomes `f64`.
pub(crate) fn read_tensors(path: &Path) -> BTreeMap<String, Array> {
    use safetensors::{Dtype, SafeTensors};
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let convert = |view: &safetensors::tensor::TensorView<'_>| -> Vec<f64> {
        let data = view.data();
        match view.dtype() {
            Dtype::F32 => data.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect(),
            Dtype::F64 => data.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
            Dtype::I64 => data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect(),
            Dtype::U8 | Dtype::BOOL => data.iter().map(|&b| f64::from(b)).collect(),
            other => panic!("{}: dtype {other:?}", path.display()),
        }
    };
    file.iter()
        .map(|(name, view)| (name.to_owned(), Array { shape: view.shape().to_vec(), values: convert(&view) }))
        .collect()
}

fn folder() -> PathBuf {
    std::env::var_os("GOLDEN_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/golden"), PathBuf::from)
}

/// Says a line past the test harness, which hides what passing tests print.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Kinds whose parts of the product are all there: a case that cannot be run fails.
const COMPLETE: [&str; 4] = ["checkpoints", "losses", "models", "optim"];

/// Outputs of a model that nothing was compared with.
fn forgotten(case: &Case, checks: &Checks) -> Vec<String> {
    let outputs = case.tensors.keys().filter(|name| name.starts_with("out.") || name.contains(".out."));
    outputs.filter(|name| !checks.compared.contains(*name)).cloned().collect()
}

fn run_kind(kind: &str, run: impl Fn(&Case) -> Outcome + std::panic::RefUnwindSafe) {
    let root = folder();
    let mut names: Vec<String> = match std::fs::read_dir(root.join(kind)) {
        Ok(entries) => entries
            .filter_map(|e| e.ok()?.file_name().into_string().ok()?.strip_suffix(".json").map(str::to_owned))
            .collect(),
        Err(_) => Vec::new(),
    };
    let missing = names.is_empty() && std::env::var_os("GOLDEN_DIR").is_some() && !root.is_dir();
    assert!(!missing, "GOLDEN_DIR names {}, which is no folder", root.display());
    if names.is_empty() {
        say(&format!("golden {kind}: skipped, no cases in {} (set GOLDEN_DIR)", root.join(kind).display()));
        return;
    }
    names.sort();
    let (mut passed, mut failed, mut not_yet) = (0, Vec::new(), 0);
    let mut table = String::new();
    for name in names {
        let result = std::panic::catch_unwind(|| {
            let text = std::fs::read_to_string(root.join(kind).join(format!("{name}.json"))).expect("listed just now");
            let manifest = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}.json: {e}"));
            let data = root.join(kind).join(format!("{name}.safetensors"));
            let tensors = if data.exists() { read_tensors(&data) } else { BTreeMap::new() };
            let case = Case { name: name.clone(), manifest, tensors, root: root.clone() };
            match run(&case) {
                Outcome::Compared(mut checks) if kind == "models" => {
                    let forgotten = forgotten(&case, &checks);
                    checks.failures.extend(forgotten.iter().map(|name| format!("{name}: not compared")));
                    Outcome::Compared(checks)
                }
                Outcome::NotYet(why) if COMPLETE.contains(&kind) => panic!("nothing runs this case: {why}"),
                outcome => outcome,
            }
        });
        let line = match result {
            Ok(Outcome::Compared(checks)) if checks.failures.is_empty() && checks.count > 0 => {
                passed += 1;
                format!(
                    "passed   {:>4} checks, worst {:>4.0} % of tolerance ({})",
                    checks.count,
                    100.0 * checks.worst,
                    checks.worst_what
                )
            }
            Ok(Outcome::Compared(checks)) => {
                failed.push(name.clone());
                let reasons =
                    if checks.count == 0 { "nothing was compared".to_owned() } else { checks.failures.join("; ") };
                format!("FAILED   {reasons}")
            }
            Ok(Outcome::NotYet(why)) => {
                not_yet += 1;
                format!("not yet  {why}")
            }
            Err(panic) => {
                failed.push(name.clone());
                let why = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(|&s| s.to_owned()));
                format!("FAILED   {}", why.unwrap_or_else(|| "panicked".to_owned()))
            }
        };
        let _ = writeln!(table, "  {name:<34} {line}");
    }
    say(&format!("golden {kind}: {passed} passed, {} failed, {not_yet} not yet supported\n{table}", failed.len()));
    assert!(failed.is_empty(), "golden {kind}: failed: {}", failed.join(", "));
}

#[test]
fn golden_adapters() {
    run_kind("adapters", adapters::run);
}

#[test]
fn golden_augment() {
    run_kind("augment", augment::run);
}

#[test]
fn golden_checkpoints() {
    run_kind("checkpoints", checkpoints::run);
}

#[test]
fn golden_evaluation() {
    run_kind("evaluation", evaluation::run);
}

#[test]
fn golden_losses() {
    run_kind("losses", losses::run);
}

#[test]
fn golden_models() {
    run_kind("models", models::run);
}

#[test]
fn golden_optim() {
    run_kind("optim", optim::run);
}

#[test]
fn golden_kinds_without_a_runner_are_said() {
    const WITH_RUNNER: [&str; 7] = ["adapters", "augment", "checkpoints", "evaluation", "losses", "models", "optim"];
    let folders = std::fs::read_dir(folder()).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir());
    for kind in folders.filter_map(|entry| entry.file_name().into_string().ok()) {
        if !WITH_RUNNER.contains(&kind.as_str()) {
            run_kind(&kind, |_| Outcome::NotYet("no runner for this kind yet".to_owned()));
        }
    }
}
