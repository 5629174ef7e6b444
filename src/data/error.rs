//! What can go wrong with images: [`ImageError`] for one image, [`Error`] for a source or a loader.

use std::io;
use std::path::{Path, PathBuf};

/// Why one image cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The file cannot be opened or read.
    #[error("cannot be read: {0}")]
    Read(String),
    /// The file holds nothing.
    #[error("the file is empty (0 bytes)")]
    Empty,
    /// The file is larger than any image within the pixel limit.
    #[error("the file has {bytes} bytes, more than an image of `data.max_pixels` = {max_pixels} can need")]
    TooManyBytes {
        /// Size of the file.
        bytes: u64,
        /// The limit that was asked for.
        max_pixels: u64,
    },
    /// The content begins like no image format.
    #[error("not an image: {0}")]
    NotAnImage(String),
    /// The content is of a format or kind that is not decoded.
    #[error("{format} image of a kind that is not supported: {reason}")]
    Unsupported {
        /// Name of the format.
        format: &'static str,
        /// The decoder's words.
        reason: String,
    },
    /// The header declares more pixels than allowed; nothing was decoded.
    #[error("{width} x {height} pixels are more than `data.max_pixels` = {max_pixels}")]
    TooManyPixels {
        /// Width in the header.
        width: u32,
        /// Height in the header.
        height: u32,
        /// The limit.
        max_pixels: u64,
    },
    /// Decoding needs more memory than an image within the pixel limit can need.
    #[error("decoding this {format} image needs more memory than `data.max_pixels` = {max_pixels} allows")]
    TooMuchMemory {
        /// Name of the format.
        format: &'static str,
        /// The limit that was asked for.
        max_pixels: u64,
    },
    /// The data ends too early.
    #[error("truncated {format} image: {reason}")]
    Truncated {
        /// Name of the format.
        format: &'static str,
        /// The decoder's words.
        reason: String,
    },
    /// The data contradicts its format.
    #[error("damaged {format} image: {reason}")]
    Damaged {
        /// Name of the format.
        format: &'static str,
        /// The decoder's words.
        reason: String,
    },
    /// The decoder panicked; the panic was caught.
    #[error("the {format} decoder failed on it: {reason}")]
    Panicked {
        /// Name of the format.
        format: &'static str,
        /// The panic's message.
        reason: String,
    },
}

/// Why a source cannot be opened, or why a loader stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The source needs a path and the recipe has none.
    #[error(
        "`data.path` is not set, and `data.source = \"{source_kind}\"` needs it\nhint: set `data.path = \"{example}\"`"
    )]
    NoPath {
        /// The recipe's `data.source`.
        source_kind: &'static str,
        /// A plausible value.
        example: &'static str,
    },
    /// Nothing is there.
    #[error("{}: no such file or folder\nhint: {hint}", path.display())]
    Missing {
        /// What was looked for.
        path: PathBuf,
        /// What to do.
        hint: String,
    },
    /// A folder was expected.
    #[error("{}: is a file, and `data.source = \"{source_kind}\"` needs a folder\nhint: {hint}", path.display())]
    NotAFolder {
        /// What was found.
        path: PathBuf,
        /// The recipe's `data.source`.
        source_kind: &'static str,
        /// What to do.
        hint: String,
    },
    /// A file was expected.
    #[error("{}: is a folder, and `data.source = \"list\"` needs a text file\nhint: set `data.source = \"folder\"` to use every image in it", path.display())]
    NotAFile {
        /// What was found.
        path: PathBuf,
    },
    /// The folder has no entries.
    #[error("{}: the folder is empty\nhint: put images there, or set `data.path` to the folder that holds them", path.display())]
    EmptyFolder {
        /// The folder.
        path: PathBuf,
    },
    /// The folder has files, none of them images.
    #[error("{}: no image found among {seen} (looked for {extensions}, any case, at any depth)\nhint: {hint}", path.display())]
    NoImages {
        /// The folder.
        path: PathBuf,
        /// Number and kinds of the other files.
        seen: String,
        /// Extensions that count as images.
        extensions: String,
        /// What to do.
        hint: String,
    },
    /// The operating system refuses access.
    #[error("{}: permission denied\nhint: make it readable for the user who runs this, `ls -ld` shows its owner and mode", path.display())]
    Permission {
        /// What cannot be read.
        path: PathBuf,
    },
    /// Another failure of the file system.
    #[error("{}: cannot {action}: {source}\nhint: check that the disk is mounted and healthy, then run again", path.display())]
    Io {
        /// What was being read or written.
        path: PathBuf,
        /// What was being done, an infinitive.
        action: &'static str,
        /// The operating system's error.
        source: io::Error,
    },
    /// Test images were asked for and the source has none.
    #[error("{}: no test images\nhint: {hint}", path.display())]
    NoTestSplit {
        /// The source.
        path: PathBuf,
        /// What to do.
        hint: String,
    },
    /// A class of the test images does not exist among the training images.
    #[error("{}: class `{class}` is not a class of the training images ({known})\nhint: give both splits the same class names", path.display())]
    UnknownClass {
        /// The test folder or list.
        path: PathBuf,
        /// The class.
        class: String,
        /// Some of the classes that exist.
        known: String,
    },
    /// A line of a list file is wrong.
    #[error("{}:{line}: {problem}\nhint: {hint}", path.display())]
    List {
        /// The list file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// A list file holds no path.
    #[error("{}: the list names no image\nhint: write one path a line, relative to the list, optionally a tab and a label", path.display())]
    EmptyList {
        /// The list file.
        path: PathBuf,
    },
    /// CIFAR's binary files are not there.
    #[error("{}: {wanted} not found\nhint: {hint}", path.display())]
    CifarMissing {
        /// The folder.
        path: PathBuf,
        /// Names that were looked for.
        wanted: &'static str,
        /// What to do.
        hint: String,
    },
    /// A binary file of CIFAR has an impossible size or label.
    #[error("{}: {problem}\nhint: copy the file again, or unpack the archive again: it is incomplete or of another kind", path.display())]
    CifarDamaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A tar archive of images cannot be indexed.
    #[error("{archive}: {problem}\nhint: {hint}")]
    Archive {
        /// Name of the archive.
        archive: String,
        /// What is wrong.
        problem: String,
        /// What to do.
        hint: &'static str,
    },
    /// `data.limit` is zero.
    #[error("`data.limit` is 0, no image is left\nhint: set `data.limit` to the number of images to use, or remove it")]
    ZeroLimit,
    /// An epoch would have no whole batch.
    #[error(
        "{num_images} images make no batch of {global}\nhint: set `batch.global` to at most {num_images}, or add images"
    )]
    TooFewImages {
        /// Images in the source.
        num_images: usize,
        /// Images in a global batch.
        global: usize,
    },
    /// An image cannot be read and the recipe says to stop.
    #[error("{name} (image {index}): {reason}\nhint: repair or remove it, or set `data.on_error = \"substitute\"`")]
    Unreadable {
        /// Name of the image.
        name: String,
        /// Index of the image.
        index: u64,
        /// Why.
        reason: ImageError,
    },
    /// An image cannot be read and neither can its substitutes.
    #[error(
        "{name} (image {index}): {reason}, and none of its {attempts} substitutes can be read\nhint: check that the disk is mounted and readable: so many failures are rarely the images' fault"
    )]
    NoSubstitute {
        /// Name of the image.
        name: String,
        /// Index of the image.
        index: u64,
        /// Why the image itself cannot be read.
        reason: ImageError,
        /// How many substitutes were tried.
        attempts: u64,
    },
    /// More images than allowed cannot be read.
    #[error(
        "{bad} of {num_images} images cannot be read ({:.3} %), more than `data.max_bad` = {max_bad} ({:.3} %) allows{}\nhint: repair or remove them and delete the list, or raise `data.max_bad`",
        percent(*bad, *num_images), 100.0 * max_bad, listed(listed_in.as_deref())
    )]
    TooManyBad {
        /// Images found unreadable so far.
        bad: usize,
        /// Images in the source.
        num_images: usize,
        /// The limit, a fraction.
        max_bad: f64,
        /// The file that lists them.
        listed_in: Option<PathBuf>,
    },
    /// Code that makes views panicked; the panic was caught.
    #[error(
        "making view {view} of {name} (image {index}) failed: {reason}\nhint: this is a defect of the program: please report it with this message and the image"
    )]
    ViewPanicked {
        /// Name of the image.
        name: String,
        /// Index of the image.
        index: u64,
        /// Number of the view.
        view: usize,
        /// The panic's message.
        reason: String,
    },
    /// A loader thread panicked outside of decoding and views; the panic was caught.
    #[error(
        "a loader thread failed: {reason}\nhint: this is a defect of the program: please report it with this message"
    )]
    WorkerPanicked {
        /// The panic's message.
        reason: String,
    },
    /// A thread could not be started.
    #[error(
        "cannot start a loader thread: {source}\nhint: lower `data.workers`, or raise the limit of processes (`ulimit -u`)"
    )]
    Threads {
        /// The operating system's error.
        source: io::Error,
    },
}

impl Error {
    /// Sorts an error of the file system into the variants that say what to do.
    pub(crate) fn io(path: &Path, action: &'static str, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::Permission { path: path.to_owned() },
            io::ErrorKind::NotFound => Self::missing(path),
            _ => Self::Io { path: path.to_owned(), action, source },
        }
    }

    /// Says that `path` is missing and what its nearest existing ancestor holds.
    pub(crate) fn missing(path: &Path) -> Self {
        let hint = match path.ancestors().skip(1).map(or_here).find(|ancestor| ancestor.is_dir()) {
            Some(ancestor) => format!("{} exists and holds {}", ancestor.display(), some_entries(ancestor)),
            None => "check the path: none of its parent folders exist".to_owned(),
        };
        Self::Missing { path: path.to_owned(), hint }
    }
}

/// The parent of a bare name is the empty path, meaning the working directory.
fn or_here(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

/// Names up to six visible entries of a folder.
fn some_entries(folder: &Path) -> String {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| !name.starts_with('.'))
        .collect();
    names.sort_unstable();
    shorten(&names)
}

/// Joins up to six names as code and says how many more there are.
pub(crate) fn shorten(names: &[String]) -> String {
    const SHOWN: usize = 6;
    if names.is_empty() {
        return "nothing".to_owned();
    }
    let mut text = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}

fn percent(part: usize, whole: usize) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

fn listed(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| format!("; they are listed in {}", path.display()))
}

/// Returns the message of a caught panic.
pub(crate) fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "panic without a message".to_owned())
}
