//! Rotation and affine maps.

use image::RgbImage;

/// How pixels between the source's pixels are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sampling {
    /// The nearest pixel.
    #[default]
    Nearest,
    /// Four pixels, weighted by distance; outside is black.
    Bilinear,
}

/// An affine map of an image: shear, then scale and rotation about a centre, then a shift.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Affine {
    /// Clockwise, in degrees.
    pub angle: f64,
    /// To the right and down, in pixels.
    pub translate: [f64; 2],
    /// Factor of all lengths.
    pub scale: f64,
    /// Along x and y, in degrees.
    pub shear: [f64; 2],
    /// What stays in its place, in pixels from the upper left corner; the middle by default.
    pub center: Option<[f64; 2]>,
}

impl Affine {
    /// The map that changes nothing.
    pub const IDENTITY: Self = Self { angle: 0.0, translate: [0.0, 0.0], scale: 1.0, shear: [0.0, 0.0], center: None };

    /// The map from a place in the result to one in the source, both relative to the middle: `[a, b, c, d, e, f]` for `(a x + b y + c, d x + e y + f)`.
    /// torchvision's `_get_inverse_affine_matrix`.
    fn inverse(&self, width: u32, height: u32) -> [f64; 6] {
        let [sx, sy] = self.shear.map(f64::to_radians);
        let angle = self.angle.to_radians();
        let [cx, cy] = self.center.map_or([0.0; 2], |[x, y]| [x - 0.5 * f64::from(width), y - 0.5 * f64::from(height)]);
        let [tx, ty] = self.translate;
        let a = (angle - sy).cos() / sy.cos();
        let b = -(angle - sy).cos() * sx.tan() / sy.cos() - angle.sin();
        let c = (angle - sy).sin() / sy.cos();
        let d = -(angle - sy).sin() * sx.tan() / sy.cos() + angle.cos();
        let [a, b, c, d] = [d, -b, -c, a].map(|entry| entry / self.scale);
        [a, b, a * (-cx - tx) + b * (-cy - ty) + cx, c, d, c * (-cx - tx) + d * (-cy - ty) + cy]
    }
}

/// Maps an image, black where the source has nothing: torchvision's `affine` on 8-bit tensors with the same size and no fill, coordinates in
/// `f32` as there, rounded half to even. A scale of zero and other numbers that are none give a black image.
#[must_use]
pub fn affine(image: &RgbImage, map: &Affine, sampling: Sampling) -> RgbImage {
    let (width, height) = image.dimensions();
    let (w, h) = (width as f32, height as f32);
    // to torch's coordinates from -1 to 1 and back, with its roundings
    let [a, b, c, d, e, f] = map.inverse(width, height).map(|entry| entry as f32);
    let ([a, b, c], [d, e, f]) = ([a, b, c].map(|entry| entry / (0.5 * w)), [d, e, f].map(|entry| entry / (0.5 * h)));
    let place = |n: f32, size: f32| ((n + 1.0) * size - 1.0) / 2.0;
    let mut result = RgbImage::new(width, height);
    for (x, y, pixel) in result.enumerate_pixels_mut() {
        let (x, y) = (x as f32 - (w - 1.0) * 0.5, y as f32 - (h - 1.0) * 0.5);
        let (from_x, from_y) = (place(a * x + b * y + c, w), place(d * x + e * y + f, h));
        pixel.0 = match sampling {
            Sampling::Nearest => at(image, from_x.round_ties_even(), from_y.round_ties_even()),
            Sampling::Bilinear => between(image, from_x, from_y),
        };
    }
    result
}

/// Turns an image counter-clockwise by `degrees` about its middle, keeping its size: torchvision's `rotate`.
#[must_use]
pub fn rotate(image: &RgbImage, degrees: f64, sampling: Sampling) -> RgbImage {
    affine(image, &Affine { angle: -degrees, ..Affine::IDENTITY }, sampling)
}

/// The pixel at a whole place; black outside, and where the place is no number.
fn at(image: &RgbImage, x: f32, y: f32) -> [u8; 3] {
    let inside = (0.0..image.width() as f32).contains(&x) && (0.0..image.height() as f32).contains(&y);
    if inside { image.get_pixel(x as u32, y as u32).0 } else { [0; 3] }
}

fn between(image: &RgbImage, x: f32, y: f32) -> [u8; 3] {
    let (left, top) = (x.floor(), y.floor());
    let (right, below) = (x - left, y - top);
    let corners = [
        (at(image, left, top), (1.0 - right) * (1.0 - below)),
        (at(image, left + 1.0, top), right * (1.0 - below)),
        (at(image, left, top + 1.0), (1.0 - right) * below),
        (at(image, left + 1.0, top + 1.0), right * below),
    ];
    std::array::from_fn(|channel| {
        let sum: f32 = corners.iter().map(|(color, weight)| f32::from(color[channel]) * weight).sum();
        sum.round_ties_even() as u8
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::augment::test_images::noise;
    use image::imageops;

    #[test]
    fn quarter_turns() {
        let image = noise(12, 12, 3);
        for sampling in [Sampling::Nearest, Sampling::Bilinear] {
            assert_eq!(rotate(&image, 0.0, sampling), image);
            assert_eq!(rotate(&image, 90.0, sampling), imageops::rotate270(&image));
            assert_eq!(rotate(&image, 180.0, sampling), imageops::rotate180(&image));
            assert_eq!(rotate(&image, -90.0, sampling), imageops::rotate90(&image));
        }
    }

    #[test]
    fn shifts() {
        let image = noise(9, 6, 3);
        let shifted = affine(&image, &Affine { translate: [2.0, -1.0], ..Affine::IDENTITY }, Sampling::Nearest);
        for (x, y, pixel) in shifted.enumerate_pixels() {
            let expected = if x >= 2 && y < 5 { image.get_pixel(x - 2, y + 1).0 } else { [0; 3] };
            assert_eq!(pixel.0, expected, "{x} {y}");
        }
    }

    #[test]
    fn shear_about_the_upper_left_corner_moves_rows() {
        let image = noise(16, 8, 3);
        // one pixel a row
        let map = Affine { shear: [45.0, 0.0], center: Some([0.0, 0.0]), ..Affine::IDENTITY };
        let sheared = affine(&image, &map, Sampling::Bilinear);
        for y in 0..8 {
            // a row's middle is half a pixel below its upper edge, so each moves by a half more
            let mean = |x: u32| {
                let (a, b) = (image.get_pixel(x, y).0[0], image.get_pixel(x + 1, y).0[0]);
                f32::midpoint(f32::from(a), f32::from(b))
            };
            for x in 0..6u32 {
                let got = f32::from(sheared.get_pixel(x, y).0[0]);
                assert!((got - mean(x + y)).abs() <= 0.5, "{x} {y}: {got}, expected {}", mean(x + y));
            }
        }
    }

    #[test]
    fn ugly_maps_and_images() {
        let image = noise(5, 4, 3);
        let maps = [
            Affine { scale: 0.0, ..Affine::IDENTITY },
            Affine { angle: f64::NAN, ..Affine::IDENTITY },
            Affine { translate: [1e300, 0.0], ..Affine::IDENTITY },
            Affine { shear: [90.0, 90.0], ..Affine::IDENTITY },
        ];
        for map in maps {
            for sampling in [Sampling::Nearest, Sampling::Bilinear] {
                assert_eq!(affine(&image, &map, sampling).dimensions(), (5, 4));
                for (width, height) in [(0, 0), (0, 3), (1, 1)] {
                    assert_eq!(affine(&noise(width, height, 1), &map, sampling).dimensions(), (width, height));
                }
            }
        }
    }
}
