//! Who may import whom (ARCHITECTURE.md): read off the `use crate::` lines.

use std::path::Path;

/// Module and what it may use; every module may use itself.
const ALLOWED: &[(&str, &[&str])] = &[
    ("rng", &[]),
    ("files", &[]),
    ("machine", &[]),
    ("ops", &[]),
    ("precision", &["ops"]),
    ("backend", &["precision"]),
    ("parallel", &[]),
    ("mask", &["rng"]),
    ("augment", &["rng"]),
    ("data", &["augment", "rng"]),
    ("loss", &["rng"]),
    ("optim", &["ops"]),
    ("model", &["mask", "ops", "rng"]),
    ("problem", &[]),
    ("method", &["augment", "loss", "mask", "model", "optim", "problem", "rng"]),
    ("checkpoint", &["files", "model", "precision"]),
    ("interop", &["checkpoint", "model"]),
    ("eval", &["augment", "data", "files"]),
    (
        "recipe",
        &[
            "augment",
            "data",
            "engine::config",
            "eval",
            "method",
            "model",
            "ops",
            "optim",
            "parallel::ParallelConfig",
            "precision",
            "problem",
        ],
    ),
    ("plan", &["data", "method", "model", "optim", "parallel::Reduction", "precision", "recipe"]),
    ("report", &["eval", "files", "ops", "plan"]),
    (
        "engine",
        &[
            "augment",
            "checkpoint",
            "data",
            "eval",
            "files",
            "method",
            "model",
            "ops",
            "optim",
            "parallel",
            "plan",
            "precision",
            "recipe",
            "report",
            "rng",
        ],
    ),
];

fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path);
        }
    }
    found
}

#[test]
fn imports_go_down_only() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    for path in files(&src) {
        let relative = path.strip_prefix(&src).unwrap();
        let first = relative.components().next().unwrap().as_os_str().to_string_lossy();
        let module = first.trim_end_matches(".rs");
        let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == module) else { continue };
        let text = std::fs::read_to_string(&path).unwrap();
        // tests may use what they like
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        for line in code.lines().map(str::trim).filter(|line| line.starts_with("use crate::")) {
            let used =
                line["use crate::".len()..].split(['{', ';', ' ']).next().unwrap_or_default().trim_end_matches("::");
            let head = used.split("::").next().unwrap_or_default();
            let fits = |rule: &&str| {
                head == *rule || used.starts_with(*rule) || (rule.starts_with("engine::") && head == "engine")
            };
            if head != module && !allowed.iter().any(fits) {
                wrong.push(format!("{}: {line}", relative.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "imports that go up:\n{}", wrong.join("\n"));
}
