//! What a source holds: `autodidact data inspect`.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use image::RgbImage;
use serde::Serialize;

use super::decode::Decoded;
use super::error::{ImageError, panic_message};
use super::order::Order;
use super::source::Source;

/// Images whose pixels enter mean and standard deviation; chosen by a fixed order, so a source always gives the same.
const SAMPLE: usize = 2000;

/// Lines shown of a list that may be long.
const SHOWN: usize = 20;

/// What [`inspect`] found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Number of images, readable or not.
    pub images: usize,
    /// Classes and the number of their images.
    pub classes: Vec<(String, usize)>,
    /// Images without a label.
    pub unlabelled: usize,
    /// Widths and heights; none when no image is readable.
    pub sizes: Option<Sizes>,
    /// Formats and colours and the number of their images.
    pub kinds: BTreeMap<String, usize>,
    /// Images that cannot be read.
    pub unreadable: Vec<Unreadable>,
    /// Groups of images with the same size and the same decoded pixels, each in order.
    pub duplicates: Vec<Vec<String>>,
    /// Statistics of the pixels; none when no image is readable.
    pub channels: Option<Channels>,
}

/// Minimum, median and maximum of widths and of heights, after orientation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sizes {
    /// Widths.
    pub width: [u32; 3],
    /// Heights.
    pub height: [u32; 3],
}

/// An image that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unreadable {
    /// Index in the source.
    pub index: usize,
    /// Name of the image.
    pub name: String,
    /// Why.
    pub reason: String,
}

/// Mean and standard deviation of each channel after scaling to `[0, 1]`; every image weighs the same, whatever its size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Channels {
    /// Mean.
    pub mean: [f64; 3],
    /// Standard deviation over all pixels, not of the images' means.
    pub std: [f64; 3],
    /// Images that were measured.
    pub images: usize,
}

/// Decodes every image with all cores and reports. `progress` is called with the number of images done, from any thread.
pub fn inspect(source: &dyn Source, progress: &(dyn Fn(usize) + Sync)) -> Report {
    let num_images = source.len();
    let sample = sample(num_images);
    let next = AtomicUsize::new(0);
    let done = AtomicUsize::new(0);
    let work = || {
        let mut seen = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= num_images {
                return seen;
            }
            seen.push((index, look(source, index, sample[index])));
            progress(done.fetch_add(1, Ordering::Relaxed) + 1);
        }
    };
    let cores = thread::available_parallelism().map_or(1, usize::from).min(num_images.max(1));
    let mut seen: Vec<(usize, Result<Seen, ImageError>)> = thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_else(|payload| resume_unwind(payload))).collect()
    });
    // In order of the images: which thread saw which must not show in sums and lists.
    seen.sort_unstable_by_key(|(index, _)| *index);
    report(source, seen)
}

/// What is kept of a decoded image.
struct Seen {
    size: (u32, u32),
    kind: String,
    digest: blake3::Hash,
    /// Mean and mean square of each channel, of images in the sample.
    moments: Option<[(f64, f64); 3]>,
}

fn sample(num_images: usize) -> Vec<bool> {
    let mut chosen = vec![num_images <= SAMPLE; num_images];
    if num_images > SAMPLE {
        let order = Order::new(0, 0, num_images as u64);
        (0..SAMPLE as u64).for_each(|position| chosen[order.at(position) as usize] = true);
    }
    chosen
}

fn look(source: &dyn Source, index: usize, in_sample: bool) -> Result<Seen, ImageError> {
    let Decoded { image, kind } =
        catch_unwind(AssertUnwindSafe(|| source.decode(index))).unwrap_or_else(|payload| {
            Err(ImageError::Panicked { format: "image", reason: panic_message(payload.as_ref()) })
        })?;
    let mut hash = blake3::Hasher::new();
    hash.update(&image.width().to_le_bytes());
    hash.update(image.as_raw());
    Ok(Seen {
        size: image.dimensions(),
        kind: kind.to_string(),
        digest: hash.finalize(),
        moments: in_sample.then(|| moments(&image)),
    })
}

/// Sums are integers, so they are exact in any order.
fn moments(image: &RgbImage) -> [(f64, f64); 3] {
    let mut sums = [(0u64, 0u64); 3];
    for pixel in image.pixels() {
        for (sum, &value) in sums.iter_mut().zip(&pixel.0) {
            sum.0 += u64::from(value);
            sum.1 += u64::from(value).pow(2);
        }
    }
    let count = image.as_raw().len() as f64 / 3.0;
    sums.map(|(sum, squares)| (sum as f64 / 255.0 / count, squares as f64 / (255.0 * 255.0) / count))
}

fn report(source: &dyn Source, seen: Vec<(usize, Result<Seen, ImageError>)>) -> Report {
    let mut counts = vec![0; source.classes().len()];
    let mut unlabelled = 0;
    let (mut widths, mut heights) = (Vec::new(), Vec::new());
    let mut kinds = BTreeMap::new();
    let mut unreadable = Vec::new();
    let mut same = HashMap::<blake3::Hash, Vec<usize>>::new();
    let mut measured = Vec::new();
    let images = seen.len();
    for (index, seen) in seen {
        match source.labels(index) {
            Some(labels) => labels.into_iter().for_each(|label| counts[label as usize] += 1),
            None => unlabelled += 1,
        }
        match seen {
            Ok(seen) => {
                widths.push(seen.size.0);
                heights.push(seen.size.1);
                *kinds.entry(seen.kind).or_default() += 1;
                same.entry(seen.digest).or_default().push(index);
                measured.extend(seen.moments);
            }
            Err(reason) => {
                unreadable.push(Unreadable { index, name: source.name(index), reason: reason.to_string() });
            }
        }
    }
    let mut groups: Vec<Vec<usize>> = same.into_values().filter(|group| group.len() > 1).collect();
    groups.sort_unstable();
    Report {
        images,
        classes: source.classes().iter().cloned().zip(counts).collect(),
        unlabelled,
        sizes: spread(widths).zip(spread(heights)).map(|(width, height)| Sizes { width, height }),
        kinds,
        unreadable,
        duplicates: groups
            .into_iter()
            .map(|group| group.into_iter().map(|index| source.name(index)).collect())
            .collect(),
        channels: channels(&measured),
    }
}

fn spread(mut values: Vec<u32>) -> Option<[u32; 3]> {
    values.sort_unstable();
    Some([*values.first()?, values[values.len() / 2], *values.last()?])
}

fn channels(measured: &[[(f64, f64); 3]]) -> Option<Channels> {
    if measured.is_empty() {
        return None;
    }
    let count = measured.len() as f64;
    let mean = [0, 1, 2].map(|c| measured.iter().map(|image| image[c].0).sum::<f64>() / count);
    let squares = [0, 1, 2].map(|c| measured.iter().map(|image| image[c].1).sum::<f64>() / count);
    let std = [0, 1, 2].map(|c| (squares[c] - mean[c] * mean[c]).max(0.0).sqrt());
    Some(Channels { mean, std, images: measured.len() })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "images      {}", self.images)?;
        self.write_classes(f)?;
        if let Some(Sizes { width: [w0, w1, w2], height: [h0, h1, h2] }) = self.sizes {
            writeln!(f, "width       {w0} to {w2}, median {w1}")?;
            writeln!(f, "height      {h0} to {h2}, median {h1}")?;
        }
        for (at, (kind, count)) in self.kinds.iter().enumerate() {
            writeln!(f, "{:<11} {count:>7}  {kind}", if at == 0 { "formats" } else { "" })?;
        }
        self.write_unreadable(f)?;
        self.write_duplicates(f)?;
        if let Some(Channels { mean, std, images }) = self.channels {
            let list = |values: [f64; 3]| values.map(|value| format!("{value:.4}")).join(", ");
            writeln!(f, "\n# measured on {images} images, each weighs the same")?;
            writeln!(f, "[data]\nmean = [{}]\nstd = [{}]", list(mean), list(std))?;
        }
        Ok(())
    }
}

impl Report {
    fn write_classes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.classes.is_empty() {
            return writeln!(f, "classes     none: the images have no labels");
        }
        writeln!(f, "classes     {}", self.classes.len())?;
        for (name, count) in self.classes.iter().take(SHOWN) {
            writeln!(f, "{:<11} {count:>7}  {name}", "")?;
        }
        write_rest(f, self.classes.len())?;
        if self.unlabelled > 0 {
            writeln!(f, "unlabelled  {}", self.unlabelled)?;
        }
        Ok(())
    }

    fn write_unreadable(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "unreadable  {}", self.unreadable.len())?;
        for Unreadable { index, name, reason } in self.unreadable.iter().take(SHOWN) {
            writeln!(f, "{:<11} {name} (image {index}): {reason}", "")?;
        }
        write_rest(f, self.unreadable.len())
    }

    fn write_duplicates(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let extra: usize = self.duplicates.iter().map(|group| group.len() - 1).sum();
        writeln!(f, "duplicates  {extra} (same pixels after decoding as an earlier image)")?;
        for group in self.duplicates.iter().take(SHOWN) {
            writeln!(f, "{:<11} {}", "", group.join(" = "))?;
        }
        write_rest(f, self.duplicates.len())
    }
}

fn write_rest(f: &mut fmt::Formatter<'_>, length: usize) -> fmt::Result {
    if length > SHOWN { writeln!(f, "{:<11} and {} more", "", length - SHOWN) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use image::{DynamicImage, ImageFormat, Rgb};

    use super::super::config::SourceKind;
    use super::super::decode::tests::{encode, picture};
    use super::super::source::tests::{Memory, config};
    use super::super::source::{Split, open};
    use super::*;

    #[test]
    fn a_dirty_folder_is_described() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for class in ["cat", "dog"] {
            fs::create_dir(root.join(class)).unwrap();
        }
        let image: DynamicImage = picture(10, 6, 1).into();
        fs::write(root.join("cat/a.png"), encode(&image, ImageFormat::Png)).unwrap();
        fs::write(root.join("cat/same.bmp"), encode(&image, ImageFormat::Bmp)).unwrap();
        fs::write(root.join("dog/b.jpg"), encode(&picture(20, 30, 2).into(), ImageFormat::Jpeg)).unwrap();
        fs::write(root.join("dog/c.jpg"), "<html>").unwrap();
        let source = open(&config(SourceKind::Folder, root), Split::Train).unwrap();
        let done = AtomicUsize::new(0);
        let report = inspect(source.as_ref(), &|count| {
            done.fetch_max(count, Ordering::SeqCst);
        });
        assert_eq!(done.into_inner(), 4);
        assert_eq!(report.classes, [("cat".to_owned(), 2), ("dog".to_owned(), 2)]);
        assert_eq!(report.sizes, Some(Sizes { width: [10, 10, 20], height: [6, 6, 30] }));
        assert_eq!(
            report.kinds.keys().collect::<Vec<_>>(),
            ["BMP, RGB, 8 bits", "JPEG, RGB, 8 bits", "PNG, RGB, 8 bits"]
        );
        assert_eq!((report.unreadable.len(), report.unreadable[0].index), (1, 3));
        assert_eq!(report.duplicates.len(), 1);
        let text = report.to_string();
        for part in
            ["images      4", "cat", "width       10 to 20, median 10", "c.jpg (image 3): not an image", "mean = ["]
        {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert_eq!(report, inspect(source.as_ref(), &|_| {}));
    }

    #[test]
    fn every_image_weighs_the_same_in_mean_and_std() {
        // One black pixel and a large white image: mean 1/2, standard deviation 1/2.
        let images = vec![RgbImage::new(1, 1), RgbImage::from_pixel(50, 50, Rgb([255; 3]))];
        let channels = inspect(&Memory { images, bad: vec![] }, &|_| {}).channels.unwrap();
        assert_eq!((channels.mean, channels.std, channels.images), ([0.5; 3], [0.5; 3], 2));
        let none = inspect(&Memory { images: vec![RgbImage::new(1, 1)], bad: vec![0] }, &|_| {});
        assert_eq!((none.channels, none.sizes), (None, None));
        assert!(none.to_string().contains("unreadable  1"));
    }

    #[test]
    fn the_sample_is_fixed_and_has_its_size() {
        assert_eq!(sample(10), [true; 10]);
        let chosen = sample(10_000);
        assert_eq!(chosen.iter().filter(|&&chosen| chosen).count(), SAMPLE);
        assert_eq!(chosen, sample(10_000));
    }
}
