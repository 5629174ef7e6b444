//! A folder of image files at any depth, sorted by the bytes of their paths.
//!
//! * Extensions count in any case; names that begin with a dot are skipped, folders too; symbolic links are followed, and
//!   one that leads back to its own ancestor is skipped.
//! * The first-level folders are the classes, if every image lies in one and at least two hold images.
//! * `train/` and `test/` (or `val/`) are the splits, when `train/` holds folders, or stands beside `test/` or `val/`, or
//!   is the only folder; else `train` is a class like any other. The classes are those of `train/` in both splits.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use walkdir::{DirEntry, WalkDir};

use super::decode::{Decoded, decode_file};
use super::error::{Error, ImageError, shorten};
use super::source::{Fingerprint, Source, Split};

const EXTENSIONS: [&str; 8] = ["jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif"];

/// A folder of image files.
#[derive(Debug)]
pub(super) struct Folder {
    root: PathBuf,
    /// Relative to `root`, sorted.
    paths: Vec<Box<Path>>,
    /// One for each path, or none at all.
    labels: Vec<u32>,
    classes: Vec<String>,
    max_pixels: u64,
}

impl Folder {
    pub(super) fn open(path: &Path, split: Split, max_pixels: u64) -> Result<Self, Error> {
        check_folder(path, "folder")?;
        let train = if has_splits(path)? { path.join("train") } else { path.to_owned() };
        let root = match split {
            Split::Train => train.clone(),
            Split::Test => test_folder(path, &train)?,
        };
        let paths = find_images(&root)?;
        let known = (root != train).then(|| classes_of(&train)).transpose()?;
        let (labels, classes) = label(&paths, known, &root)?;
        Ok(Self { root, paths, labels, classes, max_pixels })
    }

    fn path(&self, index: usize) -> PathBuf {
        self.root.join(&self.paths[index])
    }
}

impl Source for Folder {
    fn len(&self) -> usize {
        self.paths.len()
    }

    fn decode(&self, index: usize) -> Result<Decoded, ImageError> {
        decode_file(&self.path(index), self.max_pixels)
    }

    fn label(&self, index: usize) -> Option<u32> {
        assert!(index < self.len(), "image {index} of {}", self.len());
        self.labels.get(index).copied()
    }

    fn name(&self, index: usize) -> String {
        self.path(index).display().to_string()
    }

    fn bytes(&self, index: usize) -> Option<u64> {
        std::fs::metadata(self.path(index)).ok().map(|metadata| metadata.len())
    }

    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn fingerprint(&self) -> String {
        let mut digest = Fingerprint::new("files");
        digest.add_classes(&self.classes);
        for (index, path) in self.paths.iter().enumerate() {
            digest.add_image(path.as_os_str().as_encoded_bytes(), self.bytes(index), self.label(index));
        }
        digest.finish()
    }
}

/// Complains unless `path` is a folder.
pub(super) fn check_folder(path: &Path, source_kind: &'static str) -> Result<(), Error> {
    let metadata = std::fs::metadata(path).map_err(|error| Error::io(path, "look at it", error))?;
    if metadata.is_dir() {
        return Ok(());
    }
    let hint = match path.extension().and_then(OsStr::to_str) {
        Some("txt" | "tsv" | "lst" | "csv") => "a text file of paths is `data.source = \"list\"`",
        Some("tar" | "gz" | "tgz" | "zip" | "bz2" | "xz") => "unpack the archive and set `data.path` to the folder",
        _ => "set `data.path` to the folder that holds it",
    };
    Err(Error::NotAFolder { path: path.to_owned(), source_kind, hint: hint.to_owned() })
}

/// Lists the names of the visible folders right below `path`, sorted by bytes.
fn folders_in(path: &Path) -> Result<Vec<Box<OsStr>>, Error> {
    let mut names = Vec::new();
    for entry in walk(path).max_depth(1) {
        match entry {
            Ok(entry) if entry.depth() == 1 && entry.file_type().is_dir() && is_visible(&entry) => {
                names.push(entry.file_name().into());
            }
            Ok(_) => {}
            // A link that leads nowhere or in a circle is no folder.
            Err(error) if error.depth() > 0 => {}
            Err(error) => return Err(walk_error(path, error)),
        }
    }
    names.sort_unstable_by(|a: &Box<OsStr>, b| a.as_encoded_bytes().cmp(b.as_encoded_bytes()));
    Ok(names)
}

fn has_splits(path: &Path) -> Result<bool, Error> {
    let folders = folders_in(path)?;
    let has = |name: &str| folders.iter().any(|folder| &**folder == OsStr::new(name));
    if !has("train") {
        return Ok(false);
    }
    Ok(has("test") || has("val") || folders.len() == 1 || !folders_in(&path.join("train"))?.is_empty())
}

fn test_folder(path: &Path, train: &Path) -> Result<PathBuf, Error> {
    let found = ["test", "val"].iter().map(|name| path.join(name)).find(|folder| folder.is_dir());
    match found {
        Some(folder) if train != path => Ok(folder),
        _ => Err(Error::NoTestSplit {
            path: path.to_owned(),
            hint: "arrange the images as `train/<class>/...` and `test/<class>/...` (or `val/`)".to_owned(),
        }),
    }
}

fn walk(path: &Path) -> WalkDir {
    WalkDir::new(path).follow_links(true)
}

fn is_visible(entry: &DirEntry) -> bool {
    entry.depth() == 0 || !entry.file_name().as_encoded_bytes().starts_with(b".")
}

fn is_image(path: &Path) -> bool {
    let extension = path.extension().and_then(OsStr::to_str);
    extension.is_some_and(|extension| EXTENSIONS.iter().any(|known| extension.eq_ignore_ascii_case(known)))
}

fn walk_error(root: &Path, error: walkdir::Error) -> Error {
    let path = error.path().unwrap_or(root).to_owned();
    let source = error.into_io_error().unwrap_or_else(|| std::io::Error::other("a link leads in a circle"));
    Error::io(&path, "list the folder", source)
}

/// What the walk met.
enum Met {
    /// A file, or a link that leads nowhere: an image behind such a link cannot be read, but it is not absent.
    File(PathBuf),
    /// A folder below the root.
    Folder,
    /// The root itself, or a link to an ancestor.
    Nothing,
}

fn visit(root: &Path) -> impl Iterator<Item = Result<Met, Error>> {
    walk(root).into_iter().filter_entry(is_visible).map(|entry| match entry {
        Ok(entry) if entry.file_type().is_file() => Ok(Met::File(entry.into_path())),
        Ok(entry) => Ok(if entry.depth() > 0 { Met::Folder } else { Met::Nothing }),
        Err(error) if error.loop_ancestor().is_some() => Ok(Met::Nothing),
        Err(error) => match error.path() {
            Some(path) if path.is_symlink() && !path.exists() => {
                Ok(if is_hidden(path) { Met::Nothing } else { Met::File(path.to_owned()) })
            }
            _ => Err(walk_error(root, error)),
        },
    })
}

/// Finds the images below `root`, relative to it, sorted by the bytes of their paths.
fn find_images(root: &Path) -> Result<Vec<Box<Path>>, Error> {
    let mut images: Vec<Box<Path>> = Vec::new();
    let mut others = BTreeMap::<String, usize>::new();
    let mut num_folders = 0;
    for met in visit(root) {
        match met? {
            Met::File(path) if is_image(&path) => {
                images.push(path.strip_prefix(root).expect("the walk began at the root").into());
            }
            Met::File(path) => *others.entry(extension_of(&path)).or_default() += 1,
            Met::Folder => num_folders += 1,
            Met::Nothing => {}
        }
    }
    if images.is_empty() {
        return Err(no_images(root, num_folders, &others));
    }
    images.sort_unstable_by(|a, b| a.as_os_str().as_encoded_bytes().cmp(b.as_os_str().as_encoded_bytes()));
    Ok(images)
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

fn extension_of(path: &Path) -> String {
    path.extension().map_or_else(String::new, |extension| extension.to_string_lossy().to_ascii_lowercase())
}

fn no_images(root: &Path, num_folders: usize, others: &BTreeMap<String, usize>) -> Error {
    let path = root.to_owned();
    if num_folders == 0 && others.is_empty() {
        return Error::EmptyFolder { path };
    }
    let mut kinds: Vec<_> = others.iter().collect();
    kinds.sort_by_key(|&(_, &count)| std::cmp::Reverse(count));
    let named = |(extension, count): &(&String, &usize)| {
        if extension.is_empty() { format!("{count} without extension") } else { format!("{count} .{extension}") }
    };
    let list = kinds.iter().take(5).map(named).collect::<Vec<_>>().join(", ");
    let num_files: usize = others.values().sum();
    let files = if num_files == 1 { "file" } else { "files" };
    let list = if list.is_empty() { String::new() } else { format!(" ({list})") };
    let hint = match kinds.first().map(|(extension, _)| extension.as_str()) {
        Some("bin") => "CIFAR's binary files are `data.source = \"cifar10\"` or `\"cifar100\"`",
        Some("tar" | "gz" | "tgz" | "zip") => "unpack the archives first",
        Some("heic" | "heif" | "avif" | "jp2" | "jxl") => "convert the images to JPEG or PNG first",
        _ => "set `data.path` to the folder that holds the images, or give the files one of these extensions",
    };
    Error::NoImages {
        path,
        seen: format!("{num_files} {files}{list}"),
        extensions: EXTENSIONS.join(" "),
        hint: hint.to_owned(),
    }
}

/// Returns the first-level folders that hold an image; stops looking into a folder at its first.
fn classes_of(root: &Path) -> Result<Vec<Box<OsStr>>, Error> {
    let mut classes = Vec::new();
    for name in folders_in(root)? {
        for met in visit(&root.join(&*name)) {
            if matches!(met?, Met::File(path) if is_image(&path)) {
                classes.push(name);
                break;
            }
        }
    }
    Ok(classes)
}

/// Returns the first folder of a relative path, if the path has one.
fn first_folder(path: &Path) -> Option<&OsStr> {
    let mut parts = path.iter();
    let first = parts.next()?;
    parts.next().map(|_| first)
}

/// Labels the images by their first-level folders; `known` are the classes if another split decides them.
fn label(paths: &[Box<Path>], known: Option<Vec<Box<OsStr>>>, root: &Path) -> Result<(Vec<u32>, Vec<String>), Error> {
    let unlabelled = Ok((Vec::new(), Vec::new()));
    let Some(folders) = paths.iter().map(|path| first_folder(path)).collect::<Option<Vec<_>>>() else {
        return unlabelled;
    };
    let classes = known.unwrap_or_else(|| {
        let mut classes: Vec<Box<OsStr>> = folders.iter().map(|&folder| folder.into()).collect();
        classes.sort_unstable_by(|a, b| a.as_encoded_bytes().cmp(b.as_encoded_bytes()));
        classes.dedup();
        classes
    });
    if classes.len() < 2 {
        return unlabelled;
    }
    let names: Vec<String> = classes.iter().map(|class| class.to_string_lossy().into_owned()).collect();
    let place = |folder: &&OsStr| {
        classes
            .binary_search_by(|class| class.as_encoded_bytes().cmp(folder.as_encoded_bytes()))
            .map(|class| u32::try_from(class).expect("fewer folders than 2^32"))
            .map_err(|_| Error::UnknownClass {
                path: root.to_owned(),
                class: folder.to_string_lossy().into_owned(),
                known: shorten(&names),
            })
    };
    let labels = folders.iter().map(place).collect::<Result<_, _>>()?;
    Ok((labels, names))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::decode::tests::{encode, picture};
    use super::*;

    const MAX: u64 = 1 << 20;

    /// Writes a PNG at a path, whatever the extension, making folders as needed.
    fn put(root: &Path, path: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, encode(&picture(4, 3, 1).into(), image::ImageFormat::Png)).unwrap();
    }

    fn tree(paths: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        paths.iter().for_each(|path| put(dir.path(), path));
        dir
    }

    fn train(root: &Path) -> Folder {
        Folder::open(root, Split::Train, MAX).unwrap()
    }

    fn names(folder: &Folder) -> Vec<&str> {
        folder.paths.iter().map(|path| path.to_str().unwrap()).collect()
    }

    fn labels(folder: &Folder) -> Vec<Option<u32>> {
        (0..folder.len()).map(|index| folder.label(index)).collect()
    }

    fn failure(root: &Path, split: Split) -> String {
        Folder::open(root, split, MAX).err().unwrap().to_string()
    }

    #[test]
    fn images_are_found_at_any_depth_and_sorted_by_bytes() {
        let dir = tree(&["b/x.JPG", "b/deep/er/y.Jpeg", "a-/z.webp", "a/q.tif", "a/.hidden.png", ".cache/c.png"]);
        fs::write(dir.path().join("a/notes.txt"), "no image").unwrap();
        let folder = train(dir.path());
        // By components `a/q` would come before `a-/z`; by bytes `-` (0x2d) is below `/` (0x2f).
        assert_eq!(names(&folder), ["a-/z.webp", "a/q.tif", "b/deep/er/y.Jpeg", "b/x.JPG"]);
        assert_eq!(folder.classes(), ["a", "a-", "b"]);
        assert_eq!(labels(&folder), [Some(1), Some(0), Some(2), Some(2)]);
        assert_eq!(folder.load(3).unwrap(), picture(4, 3, 1));
        assert_eq!(folder.name(3), dir.path().join("b/x.JPG").display().to_string());
    }

    #[test]
    fn a_flat_folder_and_a_single_class_have_no_labels() {
        for paths in [&["a.png", "b.png"][..], &["only/a.png", "only/b.png"], &["x/a.png", "y/b.png", "c.png"]] {
            let dir = tree(paths);
            let folder = train(dir.path());
            assert!(folder.classes().is_empty(), "{paths:?}");
            assert_eq!(folder.label(0), None);
        }
    }

    #[test]
    fn splits_share_the_training_classes() {
        let dir = tree(&["train/cat/a.png", "train/dog/b.png", "train/eel/c.png", "val/eel/d.png", "val/cat/e.png"]);
        let (learn, held) = (train(dir.path()), Folder::open(dir.path(), Split::Test, MAX).unwrap());
        assert_eq!(learn.classes(), held.classes());
        assert_eq!(labels(&held), [Some(0), Some(2)]);
        put(dir.path(), "test/cat/f.png"); // preferred to val
        assert_eq!(names(&Folder::open(dir.path(), Split::Test, MAX).unwrap()), ["cat/f.png"]);
        put(dir.path(), "test/fox/g.png");
        let message = failure(dir.path(), Split::Test);
        assert!(message.contains("class `fox`") && message.contains("`cat`, `dog`, `eel`"), "{message}");
    }

    #[test]
    fn a_class_may_be_called_train() {
        let dir = tree(&["car/a.png", "plane/b.png", "train/c.png"]);
        assert_eq!(train(dir.path()).classes(), ["car", "plane", "train"]);
        let message = failure(dir.path(), Split::Test);
        assert!(message.contains("no test images") && message.contains("hint:"), "{message}");
        let only = tree(&["train/a.png", "train/b.png"]);
        assert_eq!(names(&train(only.path())), ["a.png", "b.png"]);
    }

    #[test]
    fn failures_say_what_and_where() {
        let dir = tree(&["good/a.png"]);
        let message = failure(&dir.path().join("god"), Split::Train);
        assert!(message.contains("god: no such file or folder") && message.contains("holds `good`"), "{message}");
        let message = failure(&dir.path().join("good/a.png"), Split::Train);
        assert!(message.contains("is a file"), "{message}");
        fs::create_dir(dir.path().join("empty")).unwrap();
        assert!(failure(&dir.path().join("empty"), Split::Train).contains("the folder is empty"));
        let other = tempfile::tempdir().unwrap();
        for name in ["a.txt", "b.txt", "c.csv", "README"] {
            fs::write(other.path().join(name), "text").unwrap();
        }
        let message = failure(other.path(), Split::Train);
        assert!(message.contains("no image found among 4 files (2 .txt, 1 without extension, 1 .csv)"), "{message}");
        assert!(message.contains("jpg jpeg png webp bmp tif tiff gif"), "{message}");
    }

    #[test]
    fn fingerprint_follows_names_sizes_and_labels_but_not_the_place() {
        let paths = ["a/x.png", "b/y.png"];
        let (one, two) = (tree(&paths), tree(&paths));
        let reference = train(one.path()).fingerprint();
        assert_eq!(reference, train(two.path()).fingerprint());
        fs::write(two.path().join("a/x.png"), "changed").unwrap();
        assert_ne!(reference, train(two.path()).fingerprint());
        fs::rename(one.path().join("b"), one.path().join("c")).unwrap();
        assert_ne!(reference, train(one.path()).fingerprint());
    }

    #[test]
    fn one_bad_file_is_an_error_of_that_image_only() {
        let dir = tree(&["a.png", "c.png"]);
        fs::write(dir.path().join("b.jpg"), "").unwrap();
        let folder = train(dir.path());
        assert_eq!(folder.len(), 3);
        assert_eq!(folder.load(1).unwrap_err(), ImageError::Empty);
        assert!(folder.load(0).is_ok() && folder.load(2).is_ok());
    }

    #[cfg(unix)]
    mod unix {
        use std::os::unix::ffi::OsStrExt;
        use std::os::unix::fs::{PermissionsExt, symlink};

        use super::*;

        #[test]
        fn links_are_followed_without_circles() {
            let elsewhere = tree(&["x/a.png"]);
            let dir = tree(&["b/b.png"]);
            symlink(elsewhere.path().join("x"), dir.path().join("a")).unwrap();
            symlink(dir.path(), dir.path().join("b/loop")).unwrap();
            symlink("b.png", dir.path().join("b/c.png")).unwrap();
            symlink("nowhere.png", dir.path().join("b/d.png")).unwrap();
            let folder = train(dir.path());
            assert_eq!(names(&folder), ["a/a.png", "b/b.png", "b/c.png", "b/d.png"]);
            assert_eq!(folder.load(2).unwrap(), folder.load(1).unwrap());
            assert!(matches!(folder.load(3), Err(ImageError::Read(_))));
        }

        #[test]
        fn names_need_not_be_utf8() {
            let dir = tree(&["a.png"]);
            let name = OsStr::from_bytes(b"\xff\xfe.png");
            fs::copy(dir.path().join("a.png"), dir.path().join(name)).unwrap();
            let folder = train(dir.path());
            assert_eq!(folder.len(), 2);
            assert!(folder.load(1).is_ok());
            assert!(folder.name(1).contains('\u{fffd}'));
        }

        #[test]
        #[expect(clippy::print_stderr, reason = "says why the test does nothing")]
        fn permission_is_named() {
            let dir = tree(&["a/a.png", "b/b.png"]);
            let mode = |path: &str, mode| {
                fs::set_permissions(dir.path().join(path), fs::Permissions::from_mode(mode)).unwrap();
            };
            mode("a", 0);
            if fs::read_dir(dir.path().join("a")).is_ok() {
                eprintln!("skipped: this user may read everything");
                return;
            }
            let message = failure(dir.path(), Split::Train);
            mode("a", 0o755);
            assert!(message.contains("permission denied"), "{message}");
            mode("b/b.png", 0);
            let found = train(dir.path()).load(1).unwrap_err().to_string();
            assert!(found.to_lowercase().contains("permission denied"), "{found}");
        }
    }
}
