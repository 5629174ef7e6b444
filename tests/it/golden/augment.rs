//! Golden cases of kind `augment`.
//!
//! The library follows the 8-bit tensor back end of torchvision (`out.<i>.u8`); the Pillow and the `f32` results of the same cases are
//! not compared.

use autodidact::augment::{
    Affine, Blur, BlurFilter, ColorStep, CropBox, CropConfig, DrawnCrop, Interpolation, Normalize, Sampling, View,
    adjust_brightness, adjust_contrast, adjust_hue, adjust_saturation, adjust_sharpness, affine, autocontrast,
    box_blur, equalize, flip_horizontal, flip_vertical, gaussian_blur, grayscale, posterize, resize_center_crop,
    resized_crop, rotate, solarize,
};
use autodidact::rng::{Purpose, Stream};
use image::RgbImage;
use serde_json::Value;

use super::{Array, Case, Checks, Outcome};

pub(super) fn run(case: &Case) -> Outcome {
    let name = case.name.as_str();
    let starts = |prefix: &str| name.starts_with(prefix);
    if starts("rrc_stats") {
        return crop_statistics(case);
    }
    if starts("pipeline") {
        return pipeline(case);
    }
    if starts("normalize") {
        return normalize(case);
    }
    let interpolation = if name.contains("bicubic") { Interpolation::Bicubic } else { Interpolation::Bilinear };
    let sampling = if name.contains("nearest") { Sampling::Nearest } else { Sampling::Bilinear };
    let change: Change = if starts("flips") {
        in_place(|image, args| match args["op"].as_str() {
            Some("h") => flip_horizontal(image),
            Some("v") => flip_vertical(image),
            other => panic!("unknown flip {other:?}"),
        })
    } else if starts("adjust_brightness") {
        in_place(|image, args| adjust_brightness(image, number(args, "factor")))
    } else if starts("adjust_contrast") {
        in_place(|image, args| adjust_contrast(image, number(args, "factor")))
    } else if starts("adjust_saturation") {
        in_place(|image, args| adjust_saturation(image, number(args, "factor")))
    } else if starts("adjust_hue") {
        in_place(|image, args| adjust_hue(image, number(args, "factor")))
    } else if starts("color_jitter_fixed") {
        let factors = fixed_factors(case);
        in_place(move |image, args| ordered(factors, args).iter().for_each(|step| step.apply(image)))
    } else if starts("rgb_to_grayscale") {
        in_place(|image, _| grayscale(image))
    } else if starts("gaussian_blur") {
        in_place(|image, args| gaussian_blur(image, count(args, "kernel"), number(args, "sigma")))
    } else if starts("solarize") {
        in_place(|image, args| solarize(image, count(args, "threshold") as u8))
    } else if starts("resized_crop") {
        Box::new(move |image, args| {
            let size = counts(&args["size"]);
            resized_crop(image, rectangle(args), size[1], size[0], interpolation)
        })
    } else if starts("resize_center_crop") {
        Box::new(move |image, args| {
            resize_center_crop(image, count(args, "resize"), count(args, "crop"), interpolation)
        })
    } else if starts("pil_gaussian_blur") {
        in_place(|image, args| box_blur(image, number(args, "radius")))
    } else if starts("posterize") {
        in_place(|image, args| posterize(image, count(args, "bits")))
    } else if starts("autocontrast") {
        in_place(|image, _| autocontrast(image))
    } else if starts("equalize") {
        in_place(|image, _| equalize(image))
    } else if starts("sharpness") {
        in_place(|image, args| adjust_sharpness(image, number(args, "factor")))
    } else if starts("rotate") {
        Box::new(move |image, args| rotate(image, number(args, "angle"), sampling))
    } else if starts("affine") {
        Box::new(move |image, args| {
            let pair = |key: &str| [0, 1].map(|i| args[key][i].as_f64().expect("a number"));
            let map = Affine {
                angle: number(args, "angle"),
                translate: pair("translate"),
                scale: number(args, "scale"),
                shear: pair("shear"),
                center: None,
            };
            affine(image, &map, sampling)
        })
    } else {
        return Outcome::NotYet("no such operation".to_owned());
    };
    // Pillow's filter has no tensor back end
    let back_end = if starts("pil_") { "pil" } else { "u8" };
    let mut checks = Checks::default();
    for args in case.args()["cases"].as_array().expect("args.cases is a list") {
        let i = count(args, "i");
        let image = image_of(case.tensor(&format!("in.{}", args["image"].as_str().expect("a name"))));
        compare(&mut checks, case, &format!("out.{i}.{back_end}"), &change(&image, args));
    }
    Outcome::Compared(checks)
}

/// An operation as a function of an image and the case's arguments.
type Change = Box<dyn Fn(&RgbImage, &Value) -> RgbImage>;

fn in_place(change: impl Fn(&mut RgbImage, &Value) + 'static) -> Change {
    Box::new(move |image, args| {
        let mut image = image.clone();
        change(&mut image, args);
        image
    })
}

fn number(args: &Value, key: &str) -> f64 {
    args[key].as_f64().unwrap_or_else(|| panic!("`{key}` is no number"))
}

fn count(args: &Value, key: &str) -> u32 {
    args[key].as_u64().unwrap_or_else(|| panic!("`{key}` is no count")) as u32
}

fn counts(list: &Value) -> Vec<u32> {
    list.as_array().expect("a list").iter().map(|v| v.as_u64().expect("a count") as u32).collect()
}

fn rectangle(args: &Value) -> CropBox {
    let [top, left, height, width] = ["top", "left", "height", "width"].map(|key| count(args, key));
    CropBox { top, left, height, width }
}

fn image_of(array: &Array) -> RgbImage {
    let [height, width, 3] = array.shape[..] else { panic!("an image is HWC, found {:?}", array.shape) };
    RgbImage::from_raw(width as u32, height as u32, array.u8()).expect("a buffer of that size")
}

/// Compares in levels; the tolerance is `u8_max_abs`, or `abs` for exact operations.
fn compare(checks: &mut Checks, case: &Case, name: &str, got: &RgbImage) {
    let expected = case.tensor(name);
    let shape = [got.height() as usize, got.width() as usize, 3];
    assert_eq!(expected.shape, shape, "{}: shape of {name}", case.name);
    let tolerance = &case.manifest["tolerance"];
    let levels = tolerance["u8_max_abs"].as_f64().or_else(|| tolerance["abs"].as_f64()).expect("a tolerance");
    let mut values: Vec<f32> = got.iter().map(|&v| f32::from(v)).collect();
    if let Some(fraction) = tolerance["max_fraction_outside"].as_f64() {
        // that part of the values may be anything
        let mut free = (fraction * values.len() as f64) as usize;
        for (value, &expected) in values.iter_mut().zip(&expected.values) {
            if free > 0 && (f64::from(*value) - expected).abs() > levels {
                *value = expected as f32;
                free -= 1;
            }
        }
    }
    checks.absolute(name, &values, expected, levels);
}

/// The four steps of `color_jitter_fixed`; their factors stand in the sentence `what`, by the operations' names.
fn fixed_factors(case: &Case) -> [f64; 4] {
    let what = case.manifest["what"].as_str().expect("what");
    ["brightness", "contrast", "saturation", "hue"].map(|operation| {
        let after = what.split(operation).nth(1).unwrap_or_else(|| panic!("{}: no {operation} in `what`", case.name));
        let text: String =
            after.trim_start().chars().take_while(|c| c.is_ascii_digit() || "+-.e".contains(*c)).collect();
        text.trim_end_matches('.')
            .parse()
            .unwrap_or_else(|_| panic!("{}: no factor of {operation} in `what`", case.name))
    })
}

fn ordered([brightness, contrast, saturation, hue]: [f64; 4], args: &Value) -> Vec<ColorStep> {
    let step = |number| match number {
        0 => ColorStep::Brightness(brightness),
        1 => ColorStep::Contrast(contrast),
        2 => ColorStep::Saturation(saturation),
        3 => ColorStep::Hue(hue),
        other => panic!("unknown jitter step {other}"),
    };
    counts(&args["order"]).into_iter().map(step).collect()
}

fn normalize(case: &Case) -> Outcome {
    let image = image_of(case.tensor("in"));
    let mut checks = Checks::default();
    for (name, expected) in case.tensors.iter().filter(|(name, _)| name.starts_with("out.")) {
        // mean and standard deviation stand in the meaning: "(u8/255 - (m, m, m))/(s, s, s)"
        let meaning = case.manifest["tensors"][name]["meaning"].as_str().expect("a meaning");
        let triples: Vec<[f32; 3]> = meaning.split('(').filter_map(triple).collect();
        let [mean, std] = triples[..] else { panic!("{}: no mean and deviation in `{meaning}`", case.name) };
        let mut got = vec![0.0; expected.values.len()];
        Normalize::new(mean, std).write(&image, &mut got);
        checks.absolute(name, &got, expected, case.tolerance("abs"));
    }
    Outcome::Compared(checks)
}

fn triple(text: &str) -> Option<[f32; 3]> {
    let numbers: Option<Vec<f32>> = text.split(')').next()?.split(',').map(|n| n.trim().parse().ok()).collect();
    numbers?.try_into().ok()
}

fn pipeline(case: &Case) -> Outcome {
    let args = case.args();
    let mut checks = Checks::default();
    let image = image_of(case.tensor("in"));
    let area = counts(&args["box"]);
    let area = CropBox { top: area[0], left: area[1], height: area[2], width: area[3] };
    let view = View {
        size: count(args, "size"),
        crop: Some((DrawnCrop { area, fallback: false }, Interpolation::Bilinear)),
        flip: args["flip"].as_bool().expect("flip"),
        rand_augment: Vec::new(),
        jitter: ordered(["b", "c", "s", "h"].map(|key| number(args, key)), args),
        grayscale: args["gray"].as_bool().expect("gray"),
        blur: (!args["kernel"].is_null()).then(|| Blur {
            filter: BlurFilter::Gaussian,
            kernel: count(args, "kernel"),
            sigma: number(args, "sigma"),
        }),
        solarize: args["solarize"].as_u64().map(|threshold| threshold as u8),
    };
    let bare = View {
        flip: false,
        rand_augment: Vec::new(),
        jitter: Vec::new(),
        grayscale: false,
        blur: None,
        solarize: None,
        ..view.clone()
    };
    let flipped = View { flip: view.flip, ..bare.clone() };
    let jittered = View { jitter: view.jitter.clone(), ..flipped.clone() };
    let grey = View { grayscale: view.grayscale, ..jittered.clone() };
    let blurred = View { blur: view.blur, ..grey.clone() };
    let stages = [
        ("0_crop", &bare),
        ("1_flip", &flipped),
        ("2_jitter", &jittered),
        ("3_gray", &grey),
        ("4_blur", &blurred),
        ("5_solarize", &view),
    ];
    for (stage, view) in stages {
        compare(&mut checks, case, &format!("stage.u8.{stage}"), &view.render(&image));
    }
    let expected = case.tensor("final.u8");
    let mut got = vec![0.0; expected.values.len()];
    let normalize = Normalize::new(autodidact::augment::IMAGENET_MEAN, autodidact::augment::IMAGENET_STD);
    normalize.write(&view.render(&image), &mut got);
    checks.absolute("final.u8", &got, expected, case.tolerance("final_abs"));
    Outcome::Compared(checks)
}

/// Compares distributions, since the draws of another generator cannot agree. More draws than the reference made, so that the noise of
/// the comparison is the reference's.
fn crop_statistics(case: &Case) -> Outcome {
    const DRAWS: u64 = 200_000;
    let args = case.args();
    let (height, width) = (count(args, "H"), count(args, "W"));
    let pair = |key: &str| [0, 1].map(|i| args[key][i].as_f64().unwrap_or_else(|| panic!("args.{key} is a pair")));
    let config = CropConfig { scale: pair("scale"), ratio: pair("ratio"), interpolation: Interpolation::Bilinear };
    let crops: Vec<DrawnCrop> =
        (0..DRAWS).map(|i| config.draw(width, height, &mut Stream::new(0, Purpose::Evaluation, &[i]))).collect();
    let boxes = || crops.iter().map(|c| c.area);
    let areas: Vec<f64> =
        boxes().map(|b| f64::from(b.width) * f64::from(b.height) / (f64::from(width) * f64::from(height))).collect();
    let aspects: Vec<f64> = boxes().map(|b| (f64::from(b.width) / f64::from(b.height)).ln()).collect();
    let tops: Vec<f64> =
        boxes().filter(|b| b.height < height).map(|b| f64::from(b.top) / f64::from(height - b.height)).collect();
    let lefts: Vec<f64> =
        boxes().filter(|b| b.width < width).map(|b| f64::from(b.left) / f64::from(width - b.width)).collect();

    let mut checks = Checks::default();
    let close = case.tolerance("quantile_abs");
    let levels = &case.tensor("quantile_levels").values;
    checks.absolute("area_quantiles", &quantiles(&areas, levels), case.tensor("area_quantiles"), close);
    checks.absolute("log_aspect_quantiles", &quantiles(&aspects, levels), case.tensor("log_aspect_quantiles"), close);
    let fallbacks = crops.iter().filter(|c| c.fallback).count() as f64 / DRAWS as f64;
    let deviation = |values: &[f64]| covariance(values, values).sqrt();
    let correlation = covariance(&areas, &aspects) / (deviation(&areas) * deviation(&aspects));
    for (name, got, tolerance) in [
        ("fallback_fraction", fallbacks, case.tolerance("fallback_abs")),
        ("mean_area", mean(&areas), close),
        ("std_area", deviation(&areas), close),
        ("mean_log_aspect", mean(&aspects), close),
        ("mean_rel_top", mean(&tops), close),
        ("mean_rel_left", mean(&lefts), close),
        ("area_aspect_correlation", correlation, close),
    ] {
        checks.note(name, (got - case.tensor(name).item()).abs(), tolerance);
    }
    Outcome::Compared(checks)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn covariance(a: &[f64], b: &[f64]) -> f64 {
    let (mean_a, mean_b) = (mean(a), mean(b));
    a.iter().zip(b).map(|(a, b)| (a - mean_a) * (b - mean_b)).sum::<f64>() / a.len() as f64
}

/// Quantiles, interpolated linearly between order statistics.
fn quantiles(values: &[f64], levels: &[f64]) -> Vec<f32> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |level: &f64| {
        let position = level * (sorted.len() - 1) as f64;
        let (below, above) = (sorted[position.floor() as usize], sorted[position.ceil() as usize]);
        (below + (above - below) * position.fract()) as f32
    };
    levels.iter().map(at).collect()
}
