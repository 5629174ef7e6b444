//! Views: from a recipe's table to pixels.

use image::RgbImage;

use super::blur::Blur;
use super::color::ColorStep;
use super::crop::{DrawnCrop, eval_view, resized_crop};
use super::rand_augment::RandomOp;
use super::{CropConfig, Interpolation, ViewConfig, flip, grayscale, solarize};
use crate::rng::{Purpose, Stream};

/// What a view is a function of, beside its image and its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewKey {
    /// Seed of the run.
    pub seed: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Index of the image in its source.
    pub image: u64,
    /// Number of the view among all views of the image.
    pub view: u64,
}

/// Last coordinate of an operation's stream. The numbers are part of the promise of reproducibility: never change one.
#[derive(Clone, Copy)]
enum Operation {
    Crop = 0,
    Flip = 1,
    Jitter = 2,
    Grayscale = 3,
    Blur = 4,
    Solarize = 5,
    RandAugment = 7,
    Erase = 6,
}

impl ViewKey {
    fn stream(self, operation: Operation) -> Stream {
        Stream::new(self.seed, Purpose::Augment, &[self.epoch, self.image, self.view, operation as u64])
    }
}

/// Everything drawn for one view: a plain description that [`View::render`] turns into pixels.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// Height and width in pixels.
    pub size: u32,
    /// Random resized crop and its filter; without it the image is made to fit as [`eval_view`] does.
    pub crop: Option<(DrawnCrop, Interpolation)>,
    /// Horizontal flip.
    pub flip: bool,
    /// Operations of RandAugment in their order.
    pub rand_augment: Vec<RandomOp>,
    /// Steps of the colour jitter in their order.
    pub jitter: Vec<ColorStep>,
    /// Conversion to grey.
    pub grayscale: bool,
    /// Gaussian blur.
    pub blur: Option<Blur>,
    /// Threshold of the solarisation.
    pub solarize: Option<u8>,
}

impl View {
    /// Makes the pixels: crop, flip, RandAugment, jitter, grayscale, blur, solarise, each rounded to 8 bits as in the reference implementations.
    ///
    /// # Panics
    /// When the crop is not within the image, that is, was drawn for another one.
    pub fn render(&self, image: &RgbImage) -> RgbImage {
        let mut view = match self.crop {
            Some((crop, interpolation)) => resized_crop(image, crop.area, self.size, self.size, interpolation),
            None => eval_view(image, self.size),
        };
        if self.flip {
            flip::flip_horizontal(&mut view);
        }
        for op in &self.rand_augment {
            op.apply(&mut view);
        }
        for step in &self.jitter {
            step.apply(&mut view);
        }
        if self.grayscale {
            grayscale::grayscale(&mut view);
        }
        if let Some(blur) = self.blur {
            blur.apply(&mut view);
        }
        if let Some(threshold) = self.solarize {
            solarize::solarize(&mut view, threshold);
        }
        view
    }
}

/// Makes views of one kind.
#[derive(Clone, Debug)]
pub struct Pipeline {
    config: ViewConfig,
}

impl Pipeline {
    /// Takes a table that [`ViewConfig::check`] accepted. Other numbers give odd views, not panics.
    #[must_use]
    pub fn new(config: &ViewConfig) -> Self {
        Self { config: config.clone() }
    }

    /// Draws a view of an image of `width` x `height` pixels. Each operation has its own stream, so that switching one on or off
    /// leaves the draws of the others alone.
    #[must_use]
    pub fn draw(&self, width: u32, height: u32, key: ViewKey) -> View {
        let config = &self.config;
        let crop = |crop: &CropConfig| (crop.draw(width, height, &mut key.stream(Operation::Crop)), crop.interpolation);
        let solarize = config.solarize.as_ref();
        View {
            size: config.size,
            crop: config.crop.as_ref().map(crop),
            flip: key.stream(Operation::Flip).chance(config.flip),
            rand_augment: config
                .rand_augment
                .as_ref()
                .map_or_else(Vec::new, |config| config.draw(&mut key.stream(Operation::RandAugment))),
            jitter: config
                .jitter
                .as_ref()
                .map_or_else(Vec::new, |jitter| jitter.draw(&mut key.stream(Operation::Jitter))),
            grayscale: key.stream(Operation::Grayscale).chance(config.grayscale),
            blur: config.blur.as_ref().and_then(|blur| blur.draw(config.size, &mut key.stream(Operation::Blur))),
            solarize: solarize.filter(|s| key.stream(Operation::Solarize).chance(s.prob)).map(|s| s.threshold),
        }
    }

    /// Makes the view of `image` that `key` names.
    pub fn apply(&self, image: &RgbImage, key: ViewKey) -> RgbImage {
        self.draw(image.width(), image.height(), key).render(image)
    }
}

/// Makes all views of an image: `count` views of each table, table after table.
#[derive(Clone, Debug)]
pub struct MultiView {
    /// One entry a view.
    views: Vec<Pipeline>,
}

impl MultiView {
    /// Takes the `[[views]]` tables of a recipe, accepted by [`ViewConfig::check`].
    #[must_use]
    pub fn new(configs: &[ViewConfig]) -> Self {
        Self { views: configs.iter().flat_map(|c| std::iter::repeat_n(Pipeline::new(c), c.count)).collect() }
    }

    /// Number of views of one image.
    pub fn num_views(&self) -> usize {
        self.views.len()
    }

    /// Height and width of a view in pixels.
    ///
    /// # Panics
    /// When there is no such view.
    pub fn size_of(&self, view: usize) -> u32 {
        self.views[view].config.size
    }

    /// Erases boxes of view number `view` once it is normalised, where its table says so.
    ///
    /// # Shapes
    /// `pixels`: `[3, size, size]`.
    ///
    /// # Panics
    /// When there is no such view.
    pub fn erase(&self, pixels: &mut [f32], seed: u64, epoch: u64, index: u64, view: usize) {
        let ViewConfig { erase, size, .. } = &self.views[view].config;
        if let Some(erase) = erase {
            let key = ViewKey { seed, epoch, image: index, view: view as u64 };
            erase.apply(pixels, *size as usize, &mut key.stream(Operation::Erase));
        }
    }

    /// Makes view number `view` of image number `index`, decoded as `image`.
    ///
    /// # Panics
    /// When there is no such view.
    pub fn apply(&self, image: &RgbImage, seed: u64, epoch: u64, index: u64, view: usize) -> RgbImage {
        self.views[view].apply(image, ViewKey { seed, epoch, image: index, view: view as u64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::augment::test_images::noise;
    use crate::augment::{BlurConfig, BlurFilter, JitterConfig, RandAugmentConfig, SolarizeConfig};

    fn config() -> ViewConfig {
        ViewConfig {
            count: 1,
            size: 24,
            crop: Some(CropConfig {
                scale: [0.08, 1.0],
                ratio: [0.75, 4.0 / 3.0],
                interpolation: Interpolation::Bicubic,
            }),
            flip: 0.5,
            rand_augment: None,
            jitter: Some(JitterConfig { prob: 0.8, brightness: 0.8, contrast: 0.8, saturation: 0.8, hue: 0.2 }),
            grayscale: 0.2,
            blur: Some(BlurConfig { prob: 0.5, sigma: [0.1, 2.0], filter: BlurFilter::Gaussian, kernel: None }),
            solarize: Some(SolarizeConfig { prob: 0.2, threshold: 128 }),
            erase: None,
        }
    }

    fn plain(size: u32) -> ViewConfig {
        ViewConfig {
            count: 1,
            size,
            crop: None,
            flip: 0.0,
            rand_augment: None,
            jitter: None,
            grayscale: 0.0,
            blur: None,
            solarize: None,
            erase: None,
        }
    }

    const KEY: ViewKey = ViewKey { seed: 1, epoch: 2, image: 3, view: 0 };

    #[test]
    fn a_view_is_a_function_of_its_key() {
        let (image, pipeline) = (noise(50, 40, 1), Pipeline::new(&config()));
        let reference = pipeline.apply(&image, KEY);
        assert_eq!(reference.dimensions(), (24, 24));
        for other in [
            ViewKey { seed: 0, ..KEY },
            ViewKey { epoch: 0, ..KEY },
            ViewKey { image: 0, ..KEY },
            ViewKey { view: 1, ..KEY },
        ] {
            assert_ne!(pipeline.apply(&image, other), reference, "{other:?}");
        }
        assert_eq!(pipeline.apply(&image, KEY), reference);
        let (pipeline, image) = (&pipeline, &image);
        let elsewhere = std::thread::scope(|scope| scope.spawn(move || pipeline.apply(image, KEY)).join());
        assert_eq!(elsewhere.expect("no panic"), reference);
    }

    #[test]
    fn operations_do_not_share_draws() {
        let all = Pipeline::new(&config()).draw(50, 40, KEY);
        let without_jitter = Pipeline::new(&ViewConfig { jitter: None, flip: 1.0, ..config() }).draw(50, 40, KEY);
        assert_eq!(View { jitter: all.jitter.clone(), flip: all.flip, ..without_jitter }, all);
    }

    #[test]
    fn probabilities_are_kept() {
        let pipeline = Pipeline::new(&config());
        let views: Vec<_> = (0..4000).map(|image| pipeline.draw(50, 40, ViewKey { image, ..KEY })).collect();
        let frequency = |happens: fn(&View) -> bool| views.iter().filter(|v| happens(v)).count() as f64 / 4000.0;
        for (got, expected) in [
            (frequency(|v| v.flip), 0.5),
            (frequency(|v| !v.jitter.is_empty()), 0.8),
            (frequency(|v| v.grayscale), 0.2),
            (frequency(|v| v.blur.is_some()), 0.5),
            (frequency(|v| v.solarize.is_some()), 0.2),
            (frequency(|v| v.flip && v.grayscale), 0.1),
        ] {
            assert!((got - expected).abs() < 0.03, "{got} {expected}");
        }
    }

    #[test]
    fn a_plain_table_leaves_an_image_of_its_size_as_it_is() {
        let image = noise(32, 32, 1);
        assert_eq!(Pipeline::new(&plain(32)).apply(&image, KEY), image);
    }

    #[test]
    fn ugly_images_become_views() {
        for (width, height) in [(1, 1), (1, 5000), (5000, 1), (3, 2), (0, 0)] {
            for size in [1, 2, 24, 70] {
                let rand_augment = Some(RandAugmentConfig { num_ops: 3, magnitude: 30, num_magnitude_bins: 31 });
                for config in
                    [ViewConfig { size, ..config() }, plain(size), ViewConfig { size, rand_augment, ..config() }]
                {
                    for view in 0..8 {
                        let made = Pipeline::new(&config).apply(&noise(width, height, 1), ViewKey { view, ..KEY });
                        assert_eq!(made.dimensions(), (size, size));
                    }
                }
            }
        }
    }

    #[test]
    fn views_are_numbered_table_after_table() {
        let views =
            MultiView::new(&[ViewConfig { count: 2, ..config() }, ViewConfig { count: 3, size: 12, ..config() }]);
        assert_eq!((0..views.num_views()).map(|v| views.size_of(v)).collect::<Vec<_>>(), [24, 24, 12, 12, 12]);
        let image = noise(50, 40, 1);
        let made: Vec<_> = (0..5).map(|v| views.apply(&image, 1, 2, 3, v)).collect();
        assert_eq!(made[0], Pipeline::new(&config()).apply(&image, KEY));
        assert!(made[0] != made[1] && made[2] != made[3] && made[3] != made[4]);
        assert_eq!(made[4].dimensions(), (12, 12));
    }
}
