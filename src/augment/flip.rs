//! Mirror images.

use image::RgbImage;

/// Mirrors left and right.
pub fn flip_horizontal(image: &mut RgbImage) {
    let row_bytes = 3 * image.width() as usize;
    if row_bytes == 0 {
        return;
    }
    for row in image.chunks_exact_mut(row_bytes) {
        row.as_chunks_mut::<3>().0.reverse();
    }
}

/// Mirrors top and bottom.
pub fn flip_vertical(image: &mut RgbImage) {
    image::imageops::flip_vertical_in_place(image);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::augment::test_images::noise;

    #[test]
    fn flips_agree_with_their_definition_and_undo_themselves() {
        for (width, height) in [(1, 1), (2, 1), (1, 3), (7, 5)] {
            let image = noise(width, height, 1);
            let mut flipped = image.clone();
            flip_horizontal(&mut flipped);
            assert!(flipped.enumerate_pixels().all(|(x, y, p)| p == image.get_pixel(width - 1 - x, y)));
            flip_horizontal(&mut flipped);
            assert_eq!(flipped, image);
            flip_vertical(&mut flipped);
            assert!(flipped.enumerate_pixels().all(|(x, y, p)| p == image.get_pixel(x, height - 1 - y)));
        }
    }

    #[test]
    fn an_empty_image_stays_empty() {
        let mut image = RgbImage::new(0, 3);
        flip_horizontal(&mut image);
        flip_vertical(&mut image);
        assert_eq!(image.dimensions(), (0, 3));
    }
}
