//! Speed of the augmentations on one thread, on random pixels: `cargo bench --profile dev --bench augment [filter]`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use autodidact::augment::{
    BlurConfig, BlurFilter, CropConfig, IMAGENET_MEAN, IMAGENET_STD, Interpolation, JitterConfig, MultiView, Normalize,
    SolarizeConfig, ViewConfig, adjust_brightness, adjust_contrast, adjust_hue, adjust_saturation, eval_view,
    flip_horizontal, gaussian_blur, grayscale, solarize,
};
use autodidact::rng::{Purpose, Stream};
use image::{Rgb, RgbImage};

fn main() {
    // cargo passes `--bench`; whatever else is given selects operations
    let filter = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    let images = [noise(224, 224), noise(500, 375)];
    say(&format!("{:<34} {:>14} {:>14}", "images/s, one thread", "224 x 224", "500 x 375"));
    for (name, operation) in operations() {
        if name.contains(&filter) {
            let [small, photo] = images.each_ref().map(|image| rate(|number| operation(image, number)));
            say(&format!("{name:<34} {small:>14.0} {photo:>14.0}"));
        }
    }
}

#[expect(clippy::print_stdout, reason = "the table is the purpose")]
fn say(line: &str) {
    println!("{line}");
}

type Operation = Box<dyn Fn(&RgbImage, u64)>;

fn operations() -> Vec<(&'static str, Operation)> {
    vec![
        ("copy", in_place(|_| ())),
        ("flip", in_place(flip_horizontal)),
        ("brightness", in_place(|image| adjust_brightness(image, 1.3))),
        ("contrast", in_place(|image| adjust_contrast(image, 1.3))),
        ("saturation", in_place(|image| adjust_saturation(image, 1.3))),
        ("hue", in_place(|image| adjust_hue(image, 0.1))),
        ("grayscale", in_place(grayscale)),
        ("blur, kernel 23, sigma 2.0", in_place(|image| gaussian_blur(image, 23, 2.0))),
        ("blur, kernel 23, sigma 1.0", in_place(|image| gaussian_blur(image, 23, 1.0))),
        ("blur, kernel 23, sigma 0.3", in_place(|image| gaussian_blur(image, 23, 0.3))),
        ("solarize", in_place(|image| solarize(image, 128))),
        ("normalize", normalize()),
        ("random crop to 224, bilinear", views(&[crop_only(224, Interpolation::Bilinear)])),
        ("random crop to 224, bicubic", views(&[crop_only(224, Interpolation::Bicubic)])),
        ("random crop to 96, bicubic", views(&[crop_only(96, Interpolation::Bicubic)])),
        ("evaluation view of 224", Box::new(|image, _| drop(black_box(eval_view(image, 224))))),
        ("SimCLR: 2 views of 224", views(&[simclr()])),
        ("DINO: 2 of 224 and 8 of 96", views(&dino())),
    ]
}

fn in_place(change: impl Fn(&mut RgbImage) + 'static) -> Operation {
    Box::new(move |image, _| {
        let mut image = image.clone();
        change(&mut image);
        black_box(image);
    })
}

fn normalize() -> Operation {
    let normalizer = Normalize::new(IMAGENET_MEAN, IMAGENET_STD);
    Box::new(move |image, _| {
        let mut out = vec![0.0; image.len()];
        normalizer.write(image, &mut out);
        black_box(out);
    })
}

fn views(configs: &[ViewConfig]) -> Operation {
    let views = MultiView::new(configs);
    Box::new(move |image, number| {
        for view in 0..views.num_views() {
            black_box(views.apply(image, 0, 0, number, view));
        }
    })
}

fn crop_only(size: u32, interpolation: Interpolation) -> ViewConfig {
    let crop = Some(CropConfig { scale: [0.08, 1.0], ratio: [0.75, 4.0 / 3.0], interpolation });
    ViewConfig {
        count: 1,
        size,
        crop,
        flip: 0.0,
        rand_augment: None,
        jitter: None,
        grayscale: 0.0,
        blur: None,
        solarize: None,
        erase: None,
    }
}

/// SimCLR (Chen et al. 2020), appendix A.
fn simclr() -> ViewConfig {
    ViewConfig {
        count: 2,
        flip: 0.5,
        rand_augment: None,
        jitter: Some(JitterConfig { prob: 0.8, brightness: 0.8, contrast: 0.8, saturation: 0.8, hue: 0.2 }),
        grayscale: 0.2,
        blur: Some(BlurConfig { prob: 0.5, sigma: [0.1, 2.0], filter: BlurFilter::Gaussian, kernel: None }),
        ..crop_only(224, Interpolation::Bicubic)
    }
}

/// DINO (Caron et al. 2021): two global and eight local views.
fn dino() -> Vec<ViewConfig> {
    let view = |count, size, scale, blur, solarize| ViewConfig {
        count,
        size,
        crop: Some(CropConfig { scale, ratio: [0.75, 4.0 / 3.0], interpolation: Interpolation::Bicubic }),
        flip: 0.5,
        rand_augment: None,
        jitter: Some(JitterConfig { prob: 0.8, brightness: 0.4, contrast: 0.4, saturation: 0.2, hue: 0.1 }),
        grayscale: 0.2,
        blur: Some(BlurConfig { prob: blur, sigma: [0.1, 2.0], filter: BlurFilter::Gaussian, kernel: None }),
        solarize: Some(SolarizeConfig { prob: solarize, threshold: 128 }),
        erase: None,
    };
    vec![view(1, 224, [0.4, 1.0], 1.0, 0.0), view(1, 224, [0.4, 1.0], 0.1, 0.2), view(8, 96, [0.05, 0.4], 0.5, 0.0)]
}

fn noise(width: u32, height: u32) -> RgbImage {
    let mut stream = Stream::new(0, Purpose::Evaluation, &[]);
    RgbImage::from_fn(width, height, |_, _| {
        let [r, g, b, ..] = stream.bits().to_le_bytes();
        Rgb([r, g, b])
    })
}

/// Calls a second: the best of five runs of a tenth of a second, since other programs only ever slow a run down.
fn rate(operation: impl Fn(u64)) -> f64 {
    operation(0);
    let run = || {
        let start = Instant::now();
        let mut calls = 0;
        while start.elapsed() < Duration::from_millis(100) {
            operation(calls);
            calls += 1;
        }
        calls as f64 / start.elapsed().as_secs_f64()
    };
    (0..5).map(|_| run()).fold(0.0, f64::max)
}
