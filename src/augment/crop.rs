//! Cropping and resizing.

use std::cell::RefCell;

use fast_image_resize::images::{TypedCroppedImage, TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};
use image::RgbImage;

use super::{CropConfig, Interpolation};
use crate::rng::Stream;

/// A rectangle of pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CropBox {
    /// First row.
    pub top: u32,
    /// First column.
    pub left: u32,
    /// Number of rows.
    pub height: u32,
    /// Number of columns.
    pub width: u32,
}

/// A rectangle drawn by [`CropConfig::draw`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrawnCrop {
    /// The rectangle.
    pub area: CropBox,
    /// No attempt fitted into the image, and the rectangle is the largest central one of an allowed shape.
    pub fallback: bool,
}

impl CropConfig {
    /// Draws the rectangle of a random resized crop: torchvision's `RandomResizedCrop.make_params`.
    ///
    /// Ten attempts with an area uniform in `scale`, a log-uniform aspect ratio and both sides rounded half to even; the first that fits is
    /// placed uniformly. Otherwise the largest central crop whose ratio is within `ratio`. Deviation: the fallback keeps at least
    /// one row and column where torchvision could round to none (an image one pixel wide and a least ratio above 2).
    #[must_use]
    pub fn draw(&self, width: u32, height: u32, stream: &mut Stream) -> DrawnCrop {
        let (image_width, image_height) = (f64::from(width), f64::from(height));
        let [min_ratio, max_ratio] = self.ratio;
        for _ in 0..10 {
            let area = image_width * image_height * stream.uniform(self.scale[0], self.scale[1]);
            let ratio = stream.uniform(min_ratio.ln(), max_ratio.ln()).exp();
            let crop_width = (area * ratio).sqrt().round_ties_even();
            let crop_height = (area / ratio).sqrt().round_ties_even();
            if (1.0..=image_width).contains(&crop_width) && (1.0..=image_height).contains(&crop_height) {
                let (crop_width, crop_height) = (crop_width as u32, crop_height as u32);
                let top = stream.below(u64::from(height - crop_height) + 1) as u32;
                let left = stream.below(u64::from(width - crop_width) + 1) as u32;
                return DrawnCrop {
                    area: CropBox { top, left, height: crop_height, width: crop_width },
                    fallback: false,
                };
            }
        }
        let image_ratio = image_width / image_height;
        let (mut crop_width, mut crop_height) = (width, height);
        if image_ratio < min_ratio {
            crop_height = ((image_width / min_ratio).round_ties_even() as u32).clamp(height.min(1), height);
        } else if image_ratio > max_ratio {
            crop_width = ((image_height * max_ratio).round_ties_even() as u32).clamp(width.min(1), width);
        }
        let (top, left) = ((height - crop_height) / 2, (width - crop_width) / 2);
        DrawnCrop { area: CropBox { top, left, height: crop_height, width: crop_width }, fallback: true }
    }
}

/// Cuts out a rectangle and resizes it to `width` x `height`, antialiased: torchvision's `resized_crop` on 8-bit tensors.
///
/// The pixels around the rectangle do not shine in, as the cut comes first. The resampling is Pillow's and torch's (a horizontal and a
/// vertical convolution with a filter that widens when shrinking, rounded to 8 bits after each). An empty rectangle gives black.
///
/// # Panics
/// When the rectangle is not within the image.
pub fn resized_crop(
    image: &RgbImage,
    area: CropBox,
    width: u32,
    height: u32,
    interpolation: Interpolation,
) -> RgbImage {
    let whole = Span::whole;
    resample(image, area, whole(area.width), whole(area.height), width, height, interpolation)
}

/// Resizes so that the shorter side is `shorter`, and cuts `crop` x `crop` pixels from the centre: torchvision's `Resize(shorter)` and
/// `CenterCrop(crop)` on 8-bit tensors.
///
/// The longer side is rounded down, the position of the cut half to even, and a cut larger than the resized image is filled up with
/// black. Only the pixels that are kept are computed, so an extremely long image costs no memory. An empty image gives black.
pub fn resize_center_crop(image: &RgbImage, shorter: u32, crop: u32, interpolation: Interpolation) -> RgbImage {
    let (width, height) = image.dimensions();
    let short_side = width.min(height);
    if short_side == 0 || shorter == 0 {
        return RgbImage::new(crop, crop);
    }
    let resized = |side: u32| {
        if side == short_side { shorter } else { (f64::from(shorter) * f64::from(side) / f64::from(short_side)) as u32 }
    };
    let (columns, rows) = (Kept::of(resized(width), crop), Kept::of(resized(height), crop));
    let area = CropBox { top: 0, left: 0, height, width };
    let (across, down) = (columns.span_in(width), rows.span_in(height));
    let view = resample(image, area, across, down, columns.count, rows.count, interpolation);
    if view.dimensions() == (crop, crop) {
        return view;
    }
    let mut padded = RgbImage::new(crop, crop);
    image::imageops::replace(&mut padded, &view, i64::from(columns.padding), i64::from(rows.padding));
    padded
}

/// The evaluation view: an image of `size` x `size` is used as it is; any other is resized, its shorter side to `size * 256 / 224` for
/// `size` of at least 64 and to `size` below, and centre-cropped, with the bicubic filter.
///
/// 256 to 224 is the usual evaluation on ImageNet (He et al. 2016); small views (CIFAR) are not cropped, since they lose too much.
/// Bicubic, because it is the default for training crops: features are compared at the sharpness that they were trained with.
pub fn eval_view(image: &RgbImage, size: u32) -> RgbImage {
    if image.dimensions() == (size, size) {
        return image.clone();
    }
    resize_center_crop(image, eval_shorter(size), size, Interpolation::Bicubic)
}

/// Returns what the shorter side of an image is resized to for [`eval_view`].
pub fn eval_shorter(size: u32) -> u32 {
    if size < 64 { size } else { (f64::from(size) * 256.0 / 224.0).round() as u32 }
}

/// What a centre crop keeps of one resized axis.
struct Kept {
    resized: u32,
    start: u32,
    count: u32,
    /// Black pixels before.
    padding: u32,
}

impl Kept {
    fn of(resized: u32, crop: u32) -> Self {
        if crop > resized {
            return Self { resized, start: 0, count: resized, padding: (crop - resized) / 2 };
        }
        let start = (f64::from(resized - crop) / 2.0).round_ties_even() as u32;
        Self { resized, start, count: crop, padding: 0 }
    }

    /// The part of the `side` original pixels that the kept ones cover.
    fn span_in(&self, side: u32) -> Span {
        // multiplied first, so that the end of the resized axis is exactly the end of the original one
        let at = |kept: u32| f64::from(kept) * f64::from(side) / f64::from(self.resized);
        let start = at(self.start);
        Span { start, len: at(self.start + self.count) - start }
    }
}

/// A stretch of one axis in pixels and fractions.
#[derive(Clone, Copy)]
struct Span {
    start: f64,
    len: f64,
}

impl Span {
    fn whole(side: u32) -> Self {
        Self { start: 0.0, len: f64::from(side) }
    }

    /// Whether the stretch is already `count` whole pixels.
    fn is_aligned(self, count: u32) -> bool {
        self.len == f64::from(count) && self.start.fract() == 0.0
    }
}

thread_local! {
    /// Keeps its buffers between calls.
    static RESIZER: RefCell<(Resizer, Vec<u8>)> = RefCell::default();
}

/// Resamples the rectangle `across` x `down` (relative to `area`; the filter sees all of `area` and nothing else) to `width` x `height`.
///
/// Two calls of `fast_image_resize`, which on its own goes down before it goes across: torch and Pillow go across first, and the order
/// shows in the rounding. Its sums are whole numbers (8-bit values times 16-bit weights), so every instruction set gives the same
/// bits.
fn resample(
    image: &RgbImage,
    area: CropBox,
    across: Span,
    down: Span,
    width: u32,
    height: u32,
    interpolation: Interpolation,
) -> RgbImage {
    let mut output = RgbImage::new(width, height);
    if area.width == 0 || area.height == 0 || width == 0 || height == 0 {
        return output;
    }
    let filter = match interpolation {
        Interpolation::Bilinear => FilterType::Bilinear,
        Interpolation::Bicubic => FilterType::CatmullRom,
    };
    RESIZER.with_borrow_mut(|(resizer, buffer)| {
        if across.is_aligned(width) || down.is_aligned(height) {
            convolve(resizer, image, image.width(), area, &mut output, filter, across, down);
            return;
        }
        // the rows that the vertical filter reaches: the wider filter's support is 2, one more for rounding
        let reach = 2.0 * (down.len / f64::from(height)).max(1.0) + 1.0;
        let first = (down.start - reach).floor().max(0.0);
        let end = (down.start + down.len + reach).ceil().min(f64::from(area.height));
        let rows = (end - first) as u32;
        buffer.resize(3 * width as usize * rows as usize, 0);
        let mut between = RgbImage::from_raw(width, rows, std::mem::take(buffer)).expect("sized above");
        let reached = CropBox { top: area.top + first as u32, height: rows, ..area };
        convolve(resizer, image, image.width(), reached, &mut between, filter, across, Span::whole(rows));
        let down = Span { start: down.start - first, len: down.len };
        let all = CropBox { top: 0, left: 0, height: rows, width };
        convolve(resizer, &between, width, all, &mut output, filter, Span::whole(width), down);
        *buffer = between.into_raw();
    });
    output
}

/// Resamples `across` x `down` of the rectangle `area` of an image to the whole of `target`.
///
/// The typed calls keep `fast_image_resize` from being compiled here for its twenty other pixel types, which took minutes.
#[expect(clippy::too_many_arguments, reason = "one call of a library, spelt out once")]
fn convolve(
    resizer: &mut Resizer,
    pixels: &[u8],
    width: u32,
    area: CropBox,
    target: &mut RgbImage,
    filter: FilterType,
    across: Span,
    down: Span,
) {
    let height = (pixels.len() / 3) as u32 / width;
    let source = TypedImageRef::<U8x3>::from_buffer(width, height, pixels).expect("a buffer fits its image");
    let source = TypedCroppedImage::from_ref(&source, area.left, area.top, area.width, area.height);
    let source = source.expect("the rectangle is within the image");
    let (to_width, to_height) = target.dimensions();
    let mut target = TypedImage::<U8x3>::from_buffer(to_width, to_height, target).expect("a buffer fits its image");
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(filter));
    let options = options.crop(across.start, down.start, across.len, down.len);
    resizer.resize_typed(&source, &mut target, &options).expect("the part is within the image");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::augment::test_images::noise;
    use crate::rng::Purpose;

    fn config() -> CropConfig {
        CropConfig { scale: [0.08, 1.0], ratio: [0.75, 4.0 / 3.0], interpolation: Interpolation::Bicubic }
    }

    fn draw(width: u32, height: u32, number: u64) -> DrawnCrop {
        config().draw(width, height, &mut Stream::new(1, Purpose::Augment, &[number]))
    }

    proptest! {
        #[test]
        fn drawn_rectangles_are_within_the_image(width in 1u32..700, height in 1u32..700, number: u64) {
            let CropBox { top, left, height: h, width: w } = draw(width, height, number).area;
            prop_assert!(h >= 1 && w >= 1 && top + h <= height && left + w <= width);
        }
    }

    #[test]
    fn area_and_ratio_are_distributed_as_stated() {
        let n = 4000;
        let crops: Vec<_> = (0..n).map(|i| draw(224, 224, i)).collect();
        assert!(crops.iter().filter(|c| c.fallback).count() < 4);
        let mean = |value: fn(&CropBox) -> f64| crops.iter().map(|c| value(&c.area)).sum::<f64>() / n as f64;
        assert!((mean(|a| f64::from(a.width * a.height) / 50_176.0) - 0.48).abs() < 0.02);
        assert!(mean(|a| (f64::from(a.width) / f64::from(a.height)).ln()).abs() < 0.02);
        assert!(crops.iter().all(|c| (0.07..=1.0).contains(&(f64::from(c.area.width * c.area.height) / 50_176.0))));
    }

    #[test]
    fn images_of_no_allowed_shape_fall_back_to_the_centre() {
        assert_eq!(
            draw(1, 5000, 0),
            DrawnCrop { area: CropBox { top: 2499, left: 0, height: 1, width: 1 }, fallback: true }
        );
        assert_eq!(
            draw(5000, 1, 0),
            DrawnCrop { area: CropBox { top: 0, left: 2499, height: 1, width: 1 }, fallback: true }
        );
        assert_eq!(draw(0, 0, 0).area, CropBox { top: 0, left: 0, height: 0, width: 0 });
        // too long for an area of at least 0.9: 100 rows and 4 / 3 as many columns, from the middle
        let config = CropConfig { scale: [0.9, 1.0], ..config() };
        let crop = config.draw(600, 100, &mut Stream::new(1, Purpose::Augment, &[]));
        assert_eq!(crop, DrawnCrop { area: CropBox { top: 0, left: 233, height: 100, width: 133 }, fallback: true });
        // torchvision would round to zero rows
        let config = CropConfig { ratio: [9.0, 10.0], ..config };
        assert_eq!(config.draw(1, 9, &mut Stream::new(1, Purpose::Augment, &[])).area.height, 1);
    }

    /// Pillow's resampling in double precision, rounded after each pass.
    fn resized_by_definition(image: &RgbImage, width: u32, height: u32, interpolation: Interpolation) -> RgbImage {
        let (support, filter): (f64, fn(f64) -> f64) = match interpolation {
            Interpolation::Bilinear => (1.0, |x| (1.0 - x.abs()).max(0.0)),
            Interpolation::Bicubic => (2.0, |x| match x.abs() {
                x if x < 1.0 => (1.5 * x - 2.5) * x * x + 1.0,
                x if x < 2.0 => ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0,
                _ => 0.0,
            }),
        };
        let resize_row = |row: Vec<[f64; 3]>, len: u32| -> Vec<[f64; 3]> {
            let scale = row.len() as f64 / f64::from(len);
            let wide = scale.max(1.0);
            let pixel = |x: u32| {
                let centre = (f64::from(x) + 0.5) * scale;
                let weight = |i: usize| {
                    let distance = i as f64 + 0.5 - centre;
                    if distance.abs() < support * wide { filter(distance / wide) } else { 0.0 }
                };
                let norm: f64 = (0..row.len()).map(weight).sum();
                [0, 1, 2].map(|c| {
                    let sum: f64 = row.iter().enumerate().map(|(i, p)| weight(i) * p[c]).sum();
                    (sum / norm).round().clamp(0.0, 255.0)
                })
            };
            (0..len).map(pixel).collect()
        };
        let rows: Vec<_> =
            image.rows().map(|row| resize_row(row.map(|p| p.0.map(f64::from)).collect(), width)).collect();
        let columns: Vec<_> =
            (0..width as usize).map(|x| resize_row(rows.iter().map(|row| row[x]).collect(), height)).collect();
        RgbImage::from_fn(width, height, |x, y| image::Rgb(columns[x as usize][y as usize].map(|v| v as u8)))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn resizing_agrees_with_the_definition(
            (width, height) in (1u32..40, 1u32..40), (to_width, to_height) in (1u32..40, 1u32..40), bilinear: bool,
        ) {
            let interpolation = if bilinear { Interpolation::Bilinear } else { Interpolation::Bicubic };
            let image = noise(width, height, u64::from(width));
            let area = CropBox { top: 0, left: 0, height, width };
            let got = resized_crop(&image, area, to_width, to_height, interpolation);
            let expected = resized_by_definition(&image, to_width, to_height, interpolation);
            // weights of 16 bits differ from exact ones where a sum is close to a half (often, when the factor is a small fraction);
            // a bicubic second pass, whose weights add up to 1.25 in magnitude, can make two levels of one
            prop_assert!(got.iter().zip(expected.iter()).all(|(&g, &e)| g.abs_diff(e) <= 2));
        }

        #[test]
        fn a_centre_crop_equals_resizing_all_and_cutting(
            (width, height) in (1u32..60, 1u32..60), shorter in 1u32..40, crop in 1u32..50,
        ) {
            let image = noise(width, height, 3);
            let got = resize_center_crop(&image, shorter, crop, Interpolation::Bicubic);
            let short_side = width.min(height);
            let (all_width, all_height) = (width * shorter / short_side, height * shorter / short_side);
            let all = resized_crop(&image, CropBox { top: 0, left: 0, height, width }, all_width, all_height, Interpolation::Bicubic);
            let offset = |resized: u32| {
                if crop > resized { -i64::from((crop - resized) / 2) } else { (f64::from(resized - crop) / 2.0).round_ties_even() as i64 }
            };
            let (left, top) = (offset(all_width), offset(all_height));
            for (x, y, pixel) in got.enumerate_pixels() {
                let seen = (u32::try_from(i64::from(x) + left), u32::try_from(i64::from(y) + top));
                let expected = match seen {
                    (Ok(x), Ok(y)) if x < all_width && y < all_height => all.get_pixel(x, y).0,
                    _ => [0; 3],
                };
                // two levels at most, for the reason above
                prop_assert!(pixel.0.iter().zip(expected).all(|(&g, e)| g.abs_diff(e) <= 2), "{x} {y}");
            }
        }
    }

    #[test]
    fn what_lies_around_the_rectangle_does_not_shine_in() {
        let image = RgbImage::from_fn(9, 9, |x, y| {
            image::Rgb(if (3..6).contains(&x) && (3..6).contains(&y) { [100; 3] } else { [255; 3] })
        });
        for interpolation in [Interpolation::Bilinear, Interpolation::Bicubic] {
            let view = resized_crop(&image, CropBox { top: 3, left: 3, height: 3, width: 3 }, 8, 7, interpolation);
            assert!(view.pixels().all(|p| p.0 == [100; 3]));
        }
    }

    #[test]
    fn evaluation_views() {
        let image = noise(32, 32, 1);
        assert_eq!(eval_view(&image, 32), image);
        for (width, height, size) in
            [(1, 1, 224), (1, 5000, 224), (5000, 1, 32), (40, 30, 32), (500, 375, 224), (7, 9, 1), (64, 64, 64)]
        {
            assert_eq!(eval_view(&noise(width, height, 1), size).dimensions(), (size, size));
        }
        assert_eq!(eval_view(&RgbImage::new(0, 7), 5), RgbImage::new(5, 5));
        assert_eq!(eval_view(&image, 0).dimensions(), (0, 0));
        assert_eq!(eval_view(&RgbImage::new(200_000, 1), 224).dimensions(), (224, 224));
    }

    #[test]
    fn an_image_of_the_right_size_passes_unchanged() {
        let image = noise(20, 30, 1);
        let same =
            resized_crop(&image, CropBox { top: 0, left: 0, height: 30, width: 20 }, 20, 30, Interpolation::Bicubic);
        assert_eq!(same, image);
        assert_eq!(
            resized_crop(&image, CropBox { top: 2, left: 3, height: 0, width: 4 }, 2, 2, Interpolation::Bicubic),
            RgbImage::new(2, 2)
        );
    }
}
