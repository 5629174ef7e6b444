//! The `[data]` table of a recipe.

use std::fmt;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where the images come from and what to do with those that cannot be read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Kind of source.
    pub source: SourceKind,
    /// Folder, list file or directory of binary files; relative to the working directory. Not used by `sample`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// What to do with an image that cannot be read.
    #[serde(default)]
    pub on_error: OnError,
    /// Stops the run when more than this fraction of the images turned out to be unreadable.
    #[serde(default = "default_max_bad")]
    pub max_bad: f64,
    /// Uses only N images, evenly spread over the source's own order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Learns from this fraction of the labelled images of each class, the same ones for a seed, at least one; for `finetune`. The images of a smaller
    /// fraction are among those of a larger one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_fraction: Option<f64>,
    /// Sets this fraction of the training images of each class aside, to be evaluated on while training; for `finetune`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<f64>,
    /// Loader threads of this process; 0 chooses from the number of cores. Never changes the result.
    #[serde(default)]
    pub workers: usize,
    /// Micro-batches prepared in advance for each rank.
    #[serde(default = "default_prefetch")]
    pub prefetch: usize,
    /// Refuses images with more pixels than this (width x height).
    #[serde(default = "default_max_pixels")]
    pub max_pixels: u64,
    /// Mean of each channel after scaling to [0, 1]; default: ImageNet's.
    #[serde(default = "imagenet_mean")]
    pub mean: [f32; 3],
    /// Standard deviation of each channel after scaling to [0, 1]; default: ImageNet's.
    #[serde(default = "imagenet_std")]
    pub std: [f32; 3],
}

impl DataConfig {
    /// Makes the table with everything else at its default.
    pub fn new(source: SourceKind, path: Option<PathBuf>) -> Self {
        Self {
            source,
            path,
            on_error: OnError::default(),
            max_bad: default_max_bad(),
            limit: None,
            label_fraction: None,
            validation: None,
            workers: 0,
            prefetch: default_prefetch(),
            max_pixels: default_max_pixels(),
            mean: imagenet_mean(),
            std: imagenet_std(),
        }
    }
}

impl fmt::Display for SourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sample => "sample",
            Self::Folder => "folder",
            Self::List => "list",
            Self::Cifar10 => "cifar10",
            Self::Cifar100 => "cifar100",
        })
    }
}

/// Kinds of image sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SourceKind {
    /// The labelled images inside this repository (`datasets/sample-train.tar`), compiled into the binary.
    Sample,
    /// A folder of image files, any nesting; the first level of directories are the classes, if all images lie in some.
    Folder,
    /// A text file: one path a line (relative to the file), optionally a tab and a label.
    List,
    /// CIFAR-10 binary files (`data_batch_*.bin`, `test_batch.bin`).
    Cifar10,
    /// CIFAR-100 binary files (`train.bin`, `test.bin`), fine labels.
    Cifar100,
}

/// What to do with an unreadable image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// Stop and name the file.
    Fail,
    /// Use another image, chosen by the bad one's index alone, and log the bad one to `bad-images.jsonl`.
    #[default]
    Substitute,
}

fn default_max_bad() -> f64 {
    0.01
}

fn default_prefetch() -> usize {
    4
}

fn default_max_pixels() -> u64 {
    100_000_000
}

fn imagenet_mean() -> [f32; 3] {
    [0.485, 0.456, 0.406]
}

fn imagenet_std() -> [f32; 3] {
    [0.229, 0.224, 0.225]
}
