//! Measures of what a network learnt.
//!
//! Everything here takes [`Features`] on the host, whatever device computed them, and returns plain numbers in double
//! precision. Results depend neither on the number of threads nor on the order in which they finish.

mod accuracy;
mod alignment;
mod cka;
mod classification;
mod config;
mod extract;
mod features;
mod health;
mod knn;
mod lidar;
mod linalg;
mod logistic;
mod multi_label;
mod rank;
mod store;

pub use accuracy::{chance, top_k_accuracy};
pub use alignment::{alignment, embedding_std, uniformity};
pub use cka::linear_cka;
pub use classification::{ClassResult, Classification, Classified};
pub use config::EvalConfig;
pub use extract::{EvalView, Extracted, extract};
pub use features::{EvalError, Features};
pub use health::{Warning, health, plateau};
pub use knn::{Knn, Votes};
pub use lidar::{Lidar, lidar};
pub use logistic::{LinearClassifier, LogisticRegression};
pub use multi_label::{LabelResult, MultiLabel};
pub use rank::{rankme, singular_values};
pub use store::{Container, NoFeatures, PART, Part, Parts, StoreError, join, write_npy};
