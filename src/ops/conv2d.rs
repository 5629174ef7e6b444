//! 2-D convolution.
//!
//! `y[b, oy, ox, o] = bias[o] + sum over ky, kx, c of x[b, oy s + ky - p, ox s + kx - p, c] * weight[o, c, ky, kx]`,
//! zero outside the image; no dilation, no groups.
//!
//! Activations are channels-last (`[batch, height, width, channels]`): windows are then runs of contiguous values, a 1x1
//! convolution is one matrix product without a copy, and batch norm reduces over rows. Weights keep torch's layout. Two
//! algorithms: [`super::im2col`], and [`super::winograd`] for 3x3 with stride 1 unless [`super::OpsConfig`] forbids it.

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use burn::tensor::ops::ConvOptions;

use super::autocast;
use super::bridge::{Operand, consume, primitive, record, register, slice, wants};
use super::rebuild::Rebuild;
use super::simd::{add_row, column_sums};
use super::{im2col, winograd};

/// Sizes of one convolution.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub(super) batch: usize,
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) channels: usize,
    pub(super) out_channels: usize,
    pub(super) kernel: [usize; 2],
    pub(super) stride: [usize; 2],
    pub(super) padding: [usize; 2],
}

impl Geometry {
    /// Reads the sizes off the tensors' shapes.
    pub(super) fn new(x: [usize; 4], weight: [usize; 4], stride: [usize; 2], padding: [usize; 2]) -> Self {
        let [batch, height, width, channels] = x;
        let [out_channels, in_channels, kh, kw] = weight;
        assert_eq!(channels, in_channels, "convolution over {channels} channels with a weight for {in_channels}");
        assert!(kh > 0 && kw > 0 && stride[0] > 0 && stride[1] > 0, "kernel and stride of a convolution are positive");
        assert!(
            height + 2 * padding[0] >= kh && width + 2 * padding[1] >= kw,
            "kernel {kh}x{kw} is larger than the padded image {height}x{width} + {padding:?}"
        );
        Self { batch, height, width, channels, out_channels, kernel: [kh, kw], stride, padding }
    }

    /// Height of the output.
    pub(super) fn out_height(&self) -> usize {
        (self.height + 2 * self.padding[0] - self.kernel[0]) / self.stride[0] + 1
    }

    /// Width of the output.
    pub(super) fn out_width(&self) -> usize {
        (self.width + 2 * self.padding[1] - self.kernel[1]) / self.stride[1] + 1
    }

    /// Output pixels of all images.
    pub(super) fn pixels(&self) -> usize {
        self.batch * self.out_height() * self.out_width()
    }

    /// Values under the kernel.
    pub(super) fn window(&self) -> usize {
        self.kernel[0] * self.kernel[1] * self.channels
    }

    /// Tells whether each output pixel sees just its own input pixel.
    pub(super) fn is_pointwise(&self) -> bool {
        self.kernel == [1, 1] && self.stride == [1, 1] && self.padding == [0, 0]
    }

    /// Output lines (of all images, numbered through) per block of about `pixels` output pixels.
    pub(super) fn block_lines(&self, pixels: usize) -> usize {
        (pixels / self.out_width()).max(1).min(self.batch * self.out_height())
    }

    /// Cuts the output lines into blocks, by shape alone.
    pub(super) fn blocks(&self, pixels: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
        let (lines, step) = (self.batch * self.out_height(), self.block_lines(pixels).max(1));
        (0..lines).step_by(step).map(move |start| start..(start + step).min(lines))
    }

    fn input_shape(&self) -> [usize; 4] {
        [self.batch, self.height, self.width, self.channels]
    }

    fn weight_shape(&self) -> [usize; 4] {
        [self.out_channels, self.channels, self.kernel[0], self.kernel[1]]
    }

    fn output_shape(&self) -> [usize; 4] {
        [self.batch, self.out_height(), self.out_width(), self.out_channels]
    }
}

/// Convolves channels-last images. `[b, h, w, c]`, `[o, c, kh, kw]`, `[o]` -> `[b, h', w', o]`
///
/// Worst errors in the tests against float64, output and gradients, relative to the largest value: 8.4e-7 by matrix product,
/// 1.4e-6 by Winograd's algorithm (3x3,
/// stride 1, padding 1, channels in multiples of 8); see [`super::OpsConfig::exact`].
///
/// # Panics
/// Panics if the shapes do not fit together.
#[must_use]
pub fn conv2d_nhwc(
    x: Tensor<4>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    stride: [usize; 2],
    padding: [usize; 2],
) -> Tensor<4> {
    conv2d_after_norm(x, None, weight, bias, stride, padding)
}

/// [`conv2d_nhwc`], whose backward pass builds its input again where that comes from [`super::batch_norm_rebuilt`].
///
/// # Panics
/// As [`conv2d_nhwc`].
#[must_use]
pub fn conv2d_after_norm(
    x: Tensor<4>,
    rebuild: Option<Rebuild>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    stride: [usize; 2],
    padding: [usize; 2],
) -> Tensor<4> {
    if let Some(half) = autocast::active() {
        // what is rounded is not what a norm put out, so it is kept
        let (x, weight, bias) = (half.enter(x), half.enter(weight), bias.map(|bias| half.enter(bias)));
        return half.leave(autocast::off(|| conv2d_after_norm(x, None, weight, bias, stride, padding)));
    }
    let g = Geometry::new(x.dims(), weight.dims(), stride, padding);
    let fast = !super::config::is_exact() && winograd::applies(&g);
    run(x, rebuild, weight, bias, g, fast)
}

/// Convolves with a chosen algorithm.
pub(super) fn run(
    x: Tensor<4>,
    rebuild: Option<Rebuild>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    g: Geometry,
    fast: bool,
) -> Tensor<4> {
    if let Some(bias) = &bias {
        assert_eq!(bias.dims(), [g.out_channels], "bias of a convolution has one value per output channel");
    }
    let graph = x.is_autodiff() || weight.is_autodiff() || bias.as_ref().is_some_and(Tensor::is_autodiff);
    let operands = || {
        let bias = match &bias {
            Some(bias) => Some(Operand::new(bias.clone(), graph)?),
            None => None,
        };
        Some((Operand::new(x.clone(), graph)?, Operand::new(weight.clone(), graph)?, bias))
    };
    let Some((x, weight, bias)) = operands() else {
        return plain(x, weight, bias, g.stride, g.padding);
    };
    let mut y = if fast {
        winograd::forward(x.slice(), weight.slice(), &g)
    } else {
        im2col::forward(x.slice(), weight.slice(), &g)
    };
    let saved = (rebuild.map_or_else(|| Input::Kept(x.share()), Input::Rebuilt), weight.share());
    let op = Convolution { g, fast };
    match bias {
        Some(bias) => {
            add_row(&mut y, bias.slice());
            record(op, [x, weight, bias], primitive(y, g.output_shape()), |_| saved)
        }
        None => record(op, [x, weight], primitive(y, g.output_shape()), |_| saved),
    }
}

/// What the backward pass has of the input.
#[derive(Clone, Debug)]
enum Input {
    Kept(FlexTensor),
    Rebuilt(Rebuild),
}

/// Backward pass; the parents are input, weight and, if there is one, bias.
#[derive(Debug)]
struct Convolution {
    g: Geometry,
    fast: bool,
}

impl<const N: usize> Backward<Flex, N> for Convolution {
    /// Input and weight.
    type State = (Input, FlexTensor);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Self { g, fast } = self;
        let gradient = consume(grads, &ops);
        let (dy, weight) = (slice(&gradient), slice(&ops.state.1));
        let rebuilt;
        let x = match &ops.state.0 {
            Input::Kept(x) => slice(x),
            Input::Rebuilt(rebuild) => {
                rebuilt = rebuild.values();
                rebuilt.as_slice()
            }
        };
        let (dx, dw) = if fast {
            winograd::backward(x, weight, dy, &g, wants(&ops, 0), wants(&ops, 1))
        } else {
            let dx = wants(&ops, 0).then(|| im2col::input_gradient(weight, dy, &g));
            (dx, wants(&ops, 1).then(|| im2col::weight_gradient(x, dy, &g)))
        };
        if let Some(dx) = dx {
            register(grads, &ops, 0, || primitive(dx, g.input_shape()));
        }
        if let Some(dw) = dw {
            register(grads, &ops, 1, || primitive(dw, g.weight_shape()));
        }
        register(grads, &ops, 2, || primitive(column_sums(dy, g.out_channels), [g.out_channels]));
    }
}

/// The same by burn's operations.
pub(super) fn plain(
    x: Tensor<4>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    stride: [usize; 2],
    padding: [usize; 2],
) -> Tensor<4> {
    let options = ConvOptions::new(stride, padding, [1, 1], 1);
    to_nhwc(burn::tensor::module::conv2d(to_nchw(x), weight, bias, options))
}

/// Views torch's layout as channels-last. `[b, c, h, w]` -> `[b, h, w, c]`
#[must_use]
pub fn to_nhwc(x: Tensor<4>) -> Tensor<4> {
    x.permute([0, 2, 3, 1])
}

/// Views channels-last as torch's layout. `[b, h, w, c]` -> `[b, c, h, w]`
#[must_use]
pub fn to_nchw(x: Tensor<4>) -> Tensor<4> {
    x.permute([0, 3, 1, 2])
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};
    use proptest::prelude::*;

    use super::super::testing::{
        assert_close, assert_same_bits, error, flat, flatten, gradients, probe, read, values, wide,
    };
    use super::*;

    /// Output, gradient of input, of weight, of bias; the definition, in float64.
    fn definition(x: &[f32], w: &[f32], bias: &[f32], g: &Geometry) -> Vec<Vec<f64>> {
        let (x, w, bias) = (wide(x), wide(w), wide(bias));
        let dy = wide(&probe(g.pixels() * g.out_channels));
        let mut y = vec![0.0; dy.len()];
        let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; w.len()], vec![0.0; bias.len()]);
        for b in 0..g.batch {
            for (oy, ox) in pairs(g.out_height(), g.out_width()) {
                for o in 0..g.out_channels {
                    let to = ((b * g.out_height() + oy) * g.out_width() + ox) * g.out_channels + o;
                    y[to] = bias[o];
                    db[o] += dy[to];
                    for (ky, kx) in pairs(g.kernel[0], g.kernel[1]) {
                        let (iy, ix) = (oy * g.stride[0] + ky, ox * g.stride[1] + kx);
                        if iy < g.padding[0] || ix < g.padding[1] {
                            continue;
                        }
                        let (iy, ix) = (iy - g.padding[0], ix - g.padding[1]);
                        if iy >= g.height || ix >= g.width {
                            continue;
                        }
                        for c in 0..g.channels {
                            let from = ((b * g.height + iy) * g.width + ix) * g.channels + c;
                            let tap = ((o * g.channels + c) * g.kernel[0] + ky) * g.kernel[1] + kx;
                            y[to] += x[from] * w[tap];
                            dx[from] += dy[to] * w[tap];
                            dw[tap] += dy[to] * x[from];
                        }
                    }
                }
            }
        }
        vec![y, dx, dw, db]
    }

    fn pairs(a: usize, b: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..a).flat_map(move |i| (0..b).map(move |j| (i, j)))
    }

    fn case(x: [usize; 4], o: usize, kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2]) -> Geometry {
        Geometry::new(x, [o, x[3], kernel[0], kernel[1]], stride, padding)
    }

    fn inputs(g: &Geometry) -> [Vec<f32>; 3] {
        let window = g.window();
        let scale = 1.0 / (window.max(1) as f32).sqrt();
        let w = values(g.out_channels * window, 2).into_iter().map(|w| w * scale).collect();
        [values(g.batch * g.height * g.width * g.channels, 1), w, values(g.out_channels, 3)]
    }

    fn by_ours(t: &[Tensor<1>], g: Geometry, fast: bool) -> Tensor<1> {
        let (x, w) = (t[0].clone().reshape(g.input_shape()), t[1].clone().reshape(g.weight_shape()));
        flatten(run(x, None, w, t.get(2).cloned(), g, fast))
    }

    /// Runs one algorithm against the definition and returns the worst error.
    fn check(g: Geometry, fast: bool, tolerance: f64) -> f64 {
        let [x, w, bias] = inputs(&g);
        let found = gradients(&[&x, &w, &bias], |t| by_ours(t, g, fast));
        assert_close(&format!("{g:?} fast {fast}"), &found, &definition(&x, &w, &bias, &g), tolerance)
    }

    #[test]
    fn matrix_product_against_float64() {
        let cases = [
            case([2, 9, 7, 5], 6, [3, 3], [1, 1], [1, 1]),
            case([2, 9, 7, 5], 3, [3, 3], [2, 2], [1, 1]),
            case([3, 17, 20, 3], 16, [7, 7], [2, 2], [3, 3]),
            case([2, 8, 8, 24], 40, [1, 1], [1, 1], [0, 0]),
            case([2, 9, 9, 24], 40, [1, 1], [2, 2], [0, 0]),
            case([2, 16, 16, 3], 24, [4, 4], [4, 4], [0, 0]),
            case([1, 1, 1, 1], 1, [1, 1], [1, 1], [0, 0]),
            case([1, 1, 1, 2], 3, [3, 3], [1, 1], [1, 1]),
            case([1, 2, 5, 2], 3, [2, 4], [1, 3], [2, 5]),
            case([40, 4, 4, 64], 64, [3, 3], [1, 1], [1, 1]),
            case([3, 32, 32, 16], 16, [3, 3], [1, 1], [1, 1]),
        ];
        let worst = cases.into_iter().map(|g| check(g, false, 2e-6)).fold(0.0, f64::max);
        eprintln!("matrix product: worst {worst:.1e}");
    }

    #[test]
    fn winograd_against_float64() {
        let cases = [
            case([2, 8, 8, 8], 8, [3, 3], [1, 1], [1, 1]),
            case([9, 32, 32, 16], 24, [3, 3], [1, 1], [1, 1]),
            case([5, 14, 14, 32], 16, [3, 3], [1, 1], [1, 1]),
            case([3, 7, 5, 16], 16, [3, 3], [1, 1], [1, 1]),
            case([40, 4, 4, 64], 64, [3, 3], [1, 1], [1, 1]),
            case([1, 1, 1, 8], 8, [3, 3], [1, 1], [1, 1]),
            case([2, 5, 6, 256], 64, [3, 3], [1, 1], [1, 1]),
            // filters by piece: forward, and in both directions with ragged pieces
            case([3, 4, 4, 136], 72, [3, 3], [1, 1], [1, 1]),
            case([2, 4, 4, 360], 328, [3, 3], [1, 1], [1, 1]),
        ];
        let worst = cases.into_iter().map(|g| check(g, true, 4e-6)).fold(0.0, f64::max);
        eprintln!("winograd: worst {worst:.1e}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn any_shape(b in 0usize..4, h in 1usize..12, w in 1usize..12, c in 1usize..9, o in 1usize..9,
                     k in (1usize..4, 1usize..4), s in (1usize..4, 1usize..4), p in (0usize..3, 0usize..3)) {
            prop_assume!(h + 2 * p.0 >= k.0 && w + 2 * p.1 >= k.1 && b > 0);
            check(case([b, h, w, c], o, [k.0, k.1], [s.0, s.1], [p.0, p.1]), false, 2e-6);
            check(case([b, h, w, 8], 8, [3, 3], [1, 1], [1, 1]), true, 4e-6);
        }
    }

    #[test]
    fn agrees_with_burn() {
        for g in [case([2, 12, 12, 16], 8, [3, 3], [1, 1], [1, 1]), case([2, 12, 12, 3], 8, [5, 5], [2, 2], [2, 2])] {
            let [x, w, bias] = inputs(&g);
            let burns = gradients(&[&x, &w, &bias], |t| {
                let (x, w) = (t[0].clone().reshape(g.input_shape()), t[1].clone().reshape(g.weight_shape()));
                flatten(plain(x, w, Some(t[2].clone()), g.stride, g.padding))
            });
            let burns: Vec<_> = burns.iter().map(|values| wide(values)).collect();
            for fast in [false, winograd::applies(&g)] {
                let ours = gradients(&[&x, &w, &bias], |t| by_ours(t, g, fast));
                assert_close("against burn", &ours, &burns, 1e-5);
            }
        }
    }

    #[test]
    fn same_bits_however_called() {
        for (g, fast) in [
            (case([3, 9, 10, 8], 16, [3, 3], [1, 1], [1, 1]), true),
            (case([3, 9, 10, 8], 16, [3, 3], [2, 2], [1, 1]), false),
            (case([3, 9, 10, 8], 16, [1, 1], [1, 1], [0, 0]), false),
        ] {
            let [x, w, bias] = inputs(&g);
            assert_same_bits(&[&x, &w, &bias], |t| by_ours(t, g, fast));
        }
    }

    #[test]
    fn views_are_as_good_as_copies() {
        let device = Device::flex();
        let (x, w) = (values(2 * 8 * 10 * 12, 1), values(8 * 8 * 9, 2));
        let nchw = flat(&x, &device).reshape([2, 12, 8, 10]).slice([0..2, 2..10, 0..8, 1..9]);
        let w = flat(&w, &device).reshape([8, 8, 3, 3]);
        let copy = to_nhwc(nchw.clone());
        let copy = flat(&read(copy.clone()), &device).reshape(copy.dims());
        let expected = read(conv2d_nhwc(copy, w.clone(), None, [1, 1], [1, 1]));
        assert_eq!(read(conv2d_nhwc(to_nhwc(nchw.clone()), w.clone(), None, [1, 1], [1, 1])), expected);
        assert_eq!(read(conv2d_nhwc(to_nhwc(nchw), w, None, [1, 1], [1, 1])), expected);
    }

    #[test]
    fn no_images() {
        for g in [case([0, 8, 8, 8], 8, [3, 3], [1, 1], [1, 1]), case([0, 8, 8, 3], 8, [1, 1], [1, 1], [0, 0])] {
            let [x, w, _] = inputs(&g);
            let device = Device::flex();
            let (x, w) = (flat(&x, &device).reshape(g.input_shape()), flat(&w, &device).reshape(g.weight_shape()));
            let y = run(x, None, w, None, g, winograd::applies(&g));
            assert_eq!(y.dims(), g.output_shape());
        }
    }

    #[test]
    fn constants_take_no_gradient_and_half_precision_falls_back() {
        let g = case([2, 6, 6, 8], 8, [3, 3], [1, 1], [1, 1]);
        let [x, w, _] = inputs(&g);
        let autodiff = Device::flex().autodiff();
        let images = flat(&x, &Device::flex()).reshape(g.input_shape()); // as the loader makes them
        let weight = flat(&w, &autodiff).reshape(g.weight_shape()).require_grad();
        let y = run(images.clone(), None, weight.clone(), None, g, true);
        let grads = y.sum().backward();
        assert!(weight.grad(&grads).is_some());

        let half = run(images.cast(DType::F16), None, weight.inner().cast(DType::F16), None, g, true);
        assert_eq!(half.dtype(), DType::F16);
        assert!(error(&read(half.cast(DType::F32)), &definition(&x, &w, &[0.0; 8], &g)[0]) < 1e-2);
    }
}
