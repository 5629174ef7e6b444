//! Pooling over channels-last images.
//!
//! Maximum: `y = max of x over the window`, pixels outside the image left out; the gradient goes to the first largest value of the
//! window, row by row (torch's choice). It is found again in the backward pass, so nothing but input and output is kept.
//!
//! Mean over an image: `y = sum over h, w of x / (h w)`, `dx = dy / (h w)`.

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use burn::tensor::ops::MaxPoolOptions;

use super::bridge::{Operand, consume, primitive, record, register, slice};
use super::conv2d::{Geometry, to_nchw, to_nhwc};
use super::memory::{buffer, work_area};
use super::simd::{column_sums, vectorized};

/// Takes the largest value of each window. `[b, h, w, c]` -> `[b, h', w', c]`
///
/// # Panics
/// Panics if the padding is more than half the kernel, or the kernel larger than the padded image.
#[must_use]
pub fn max_pool2d_nhwc(x: Tensor<4>, kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2]) -> Tensor<4> {
    let shape = x.dims();
    let g = Geometry::new(shape, [0, shape[3], kernel[0], kernel[1]], stride, padding);
    assert!(padding[0] * 2 <= kernel[0] && padding[1] * 2 <= kernel[1], "padding {padding:?} leaves empty windows");
    let Some(operand) = Operand::new(x.clone(), x.is_autodiff()) else {
        let options = MaxPoolOptions::new(kernel).with_stride(stride).with_padding(padding);
        return to_nhwc(burn::tensor::module::max_pool2d(to_nchw(x), options));
    };
    let mut y = buffer(g.pixels() * g.channels);
    largest(operand.slice(), g, &mut y);
    let x = operand.share();
    let y = primitive(y, [g.batch, g.out_height(), g.out_width(), g.channels]);
    record(MaxPool(g), [operand], y, |y| (x, y.clone()))
}

#[derive(Debug)]
struct MaxPool(Geometry);

impl Backward<Flex, 1> for MaxPool {
    /// Input and output.
    type State = (FlexTensor, FlexTensor);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let g = self.0;
        let gradient = consume(grads, &ops);
        let mut dx = vec![0.0; g.batch * g.height * g.width * g.channels];
        let mut left = work_area(g.channels);
        distribute(slice(&ops.state.0), slice(&ops.state.1), slice(&gradient), g, &mut left, &mut dx);
        register(grads, &ops, 0, || primitive(dx, [g.batch, g.height, g.width, g.channels]));
    }
}

/// Calls `each(output pixel, first value of an input pixel in its window)`, window by window, row by row.
#[inline(always)]
fn windows(g: Geometry, mut each: impl FnMut(usize, usize, bool)) {
    let mut pixel = 0;
    for image in 0..g.batch {
        for oy in 0..g.out_height() {
            for ox in 0..g.out_width() {
                let mut first = true;
                for ky in 0..g.kernel[0] {
                    for kx in 0..g.kernel[1] {
                        let (y, x) = (oy * g.stride[0] + ky, ox * g.stride[1] + kx);
                        if y < g.padding[0] || x < g.padding[1] {
                            continue;
                        }
                        let (y, x) = (y - g.padding[0], x - g.padding[1]);
                        if y < g.height && x < g.width {
                            each(pixel, ((image * g.height + y) * g.width + x) * g.channels, first);
                            first = false;
                        }
                    }
                }
                pixel += 1;
            }
        }
    }
}

vectorized! {
    /// Writes the largest value of each window; NaN counts as largest.
    fn largest(x: &[f32], g: Geometry, y: &mut [f32]) {
        let _ = FMA;
        windows(g, |pixel, at, first| {
            let (x, y) = (&x[at..at + g.channels], &mut y[pixel * g.channels..][..g.channels]);
            if first {
                y.copy_from_slice(x);
            } else {
                for (y, x) in y.iter_mut().zip(x) {
                    *y = if *x > *y || x.is_nan() { *x } else { *y };
                }
            }
        });
    }

    /// Adds each output's gradient to the first input of its window that equals it.
    fn distribute(x: &[f32], y: &[f32], dy: &[f32], g: Geometry, left: &mut [f32], dx: &mut [f32]) {
        let _ = FMA;
        windows(g, |pixel, at, first| {
            let (x, dx) = (&x[at..at + g.channels], &mut dx[at..at + g.channels]);
            let span = pixel * g.channels..(pixel + 1) * g.channels;
            if first {
                left.copy_from_slice(&dy[span.clone()]);
            }
            for (((x, y), dx), left) in x.iter().zip(&y[span]).zip(dx).zip(left.iter_mut()) {
                let hit = *x == *y;
                *dx += if hit { *left } else { 0.0 };
                *left = if hit { 0.0 } else { *left };
            }
        });
    }
}

/// Averages each channel over each image. `[b, h, w, c]` -> `[b, c]`
///
/// # Panics
/// Panics if an image has no pixels.
#[must_use]
pub fn mean_pool_nhwc(x: Tensor<4>) -> Tensor<2> {
    let [b, h, w, c] = x.dims();
    assert!(h * w > 0, "mean over an image without pixels");
    let Some(operand) = Operand::new(x.clone(), x.is_autodiff()) else {
        return x.reshape([b, h * w, c]).mean_dim(1).reshape([b, c]);
    };
    let mut y = Vec::with_capacity(b * c);
    for image in operand.slice().chunks_exact((h * w * c).max(1)) {
        y.extend(column_sums(image, c).into_iter().map(|sum| sum / (h * w) as f32));
    }
    record(MeanPool([b, h, w, c]), [operand], primitive(y, [b, c]), |_| ())
}

#[derive(Debug)]
struct MeanPool([usize; 4]);

impl Backward<Flex, 1> for MeanPool {
    type State = ();

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let [b, h, w, c] = self.0;
        let gradient = consume(grads, &ops);
        let mut dx = buffer(b * h * w * c);
        for (image, dy) in dx.chunks_exact_mut((h * w * c).max(1)).zip(slice(&gradient).chunks_exact(c.max(1))) {
            for pixel in image.chunks_exact_mut(c.max(1)) {
                for (dx, dy) in pixel.iter_mut().zip(dy) {
                    *dx = *dy / (h * w) as f32;
                }
            }
        }
        register(grads, &ops, 0, || primitive(dx, self.0));
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::super::testing::{assert_close, assert_same_bits, flatten, gradients, probe, values, wide};
    use super::*;

    /// Images, kernel, stride, padding.
    type Pair = [usize; 2];
    const CASES: [([usize; 4], Pair, Pair, Pair); 5] = [
        ([2, 12, 11, 19], [3, 3], [2, 2], [1, 1]),
        ([1, 1, 1, 1], [1, 1], [1, 1], [0, 0]),
        ([1, 7, 5, 8], [2, 3], [2, 1], [1, 0]),
        ([0, 4, 4, 3], [3, 3], [2, 2], [1, 1]),
        ([1, 9, 9, 64], [5, 5], [1, 1], [2, 2]),
    ];

    fn images([b, h, w, c]: [usize; 4]) -> Vec<f32> {
        // Few different values, so that windows have ties.
        values(b * h * w * c, 1).into_iter().map(|x| (x * 6.0).round()).collect()
    }

    #[test]
    fn largest_values_are_burns() {
        for (shape, kernel, stride, padding) in CASES {
            let x = images(shape);
            let ours = |t: &[Tensor<1>]| flatten(max_pool2d_nhwc(t[0].clone().reshape(shape), kernel, stride, padding));
            assert_same_bits(&[&x], ours);
            if shape[0] == 0 {
                continue;
            }
            let burns = gradients(&[&x], |t| {
                let options = MaxPoolOptions::new(kernel).with_stride(stride).with_padding(padding);
                let y = burn::tensor::module::max_pool2d(to_nchw(t[0].clone().reshape(shape)), options);
                flatten(to_nhwc(y))
            });
            assert_close("max", &gradients(&[&x], ours), &burns.iter().map(|v| wide(v)).collect::<Vec<_>>(), 1e-6);
        }
    }

    #[test]
    fn mean_against_float64() {
        for shape in [[2, 7, 7, 33], [1, 1, 1, 1], [3, 20, 20, 8]] {
            let [b, h, w, c] = shape;
            let x = values(b * h * w * c, 1);
            let ours = |t: &[Tensor<1>]| flatten(mean_pool_nhwc(t[0].clone().reshape(shape)));
            assert_same_bits(&[&x], ours);
            let (dy, n) = (wide(&probe(b * c)), (h * w) as f64);
            let pixels =
                |image: usize, channel: usize| (0..h * w).map(move |pixel| (image * h * w + pixel) * c + channel);
            let (mut y, mut dx) = (vec![0.0; b * c], vec![0.0; x.len()]);
            for (image, channel) in (0..b).flat_map(|image| (0..c).map(move |channel| (image, channel))) {
                for at in pixels(image, channel) {
                    y[image * c + channel] += f64::from(x[at]) / n;
                    dx[at] = dy[image * c + channel] / n;
                }
            }
            assert_close("mean", &gradients(&[&x], ours), &[y, dx], 1e-6);
        }
        let none = mean_pool_nhwc(Tensor::<4>::zeros([0, 2, 2, 3], &Device::flex()));
        assert_eq!(none.dims(), [0, 3]);
    }
}
