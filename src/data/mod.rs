//! Images: sources, decoding, order, loader.
mod bad;
mod cifar;
mod config;
mod decode;
mod error;
mod folder;
mod inspect;
mod list;
mod loader;
mod order;
mod portion;
mod sample;
mod shard;
mod source;

pub use bad::{BadImage, BadImages};
pub use config::{DataConfig, OnError, SourceKind};
pub use decode::{Decoded, Kind, decode};
pub use error::{Error, ImageError};
pub use inspect::{Channels, Report, Sizes, Unreadable, inspect};
pub use loader::{HostBatch, HostView, Loader, LoaderPlan, ViewMaker};
pub use order::{Order, Schedule};
pub use portion::Portion;
pub use source::{Source, Split, open, open_test};
