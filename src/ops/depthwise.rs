//! Depthwise 2-D convolution: each channel with a filter of its own.
//!
//! `y[b, oy, ox, c] = bias[c] + sum over ky, kx of x[b, oy + ky - p, ox + kx - p, c] * weight[c, ky, kx]`, zero outside the image;
//! stride 1, no dilation.
//!
//! ```text
//! dx = dy convolved with the filter turned by 180 degrees, padding k - 1 - p
//! dweight[c, ky, kx] = sum over b, oy, ox of dy[b, oy, ox, c] x[b, oy + ky - p, ox + kx - p, c]        dbias = sum of dy
//! ```
//!
//! Activations are channels-last, weights keep torch's layout. A register of channels (8 or 16) of one image is copied between
//! zeros to the cache, where every window is whole; then each output pixel is a sum over the taps in order, eight neighbours at
//! a time. Zeros outside are added like any value. The weight gradient sums lines of at least 256 pixels of an image in `f32`, those in `f64`.

use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use burn::tensor::ops::ConvOptions;

use super::autocast;
use super::bridge::{Operand, consume, primitive, record, register, slice, wants};
use super::conv2d::{to_nchw, to_nhwc};
use super::memory::{buffer, work_area};
use super::simd::{Lanes, add_to_totals, column_sums, vectorized, zero};

/// Neighbouring output pixels whose sums are in registers together.
const TILE: usize = 8;
/// Taps of a line whose gradients are in registers together.
const TAPS: usize = 7;
/// Values in a line of the cache.
const LINE: usize = 16;
/// Pixels per `f32` sum of the weight gradient.
const SUM_PIXELS: usize = 256;

/// Convolves each channel of channels-last images with its own square filter. `[b, h, w, c]`, `[c, 1, k, k]`, `[c]` -> `[b, h', w', c]`
///
/// Worst error in the tests against float64, output and gradients, relative to the largest value: 4.1e-7.
///
/// # Panics
/// Panics if the shapes do not fit together, or if the padding is as large as the kernel.
#[must_use]
pub fn depthwise_conv2d_nhwc(x: Tensor<4>, weight: Tensor<4>, bias: Option<Tensor<1>>, padding: usize) -> Tensor<4> {
    if let Some(half) = autocast::active() {
        let (x, weight, bias) = (half.enter(x), half.enter(weight), bias.map(|bias| half.enter(bias)));
        return half.leave(autocast::off(|| depthwise_conv2d_nhwc(x, weight, bias, padding)));
    }
    let g = Plane::new(x.dims(), weight.dims(), padding);
    if let Some(bias) = &bias {
        assert_eq!(bias.dims(), [g.channels], "bias of a depthwise convolution has one value per channel");
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
        return plain(x, weight, bias, padding);
    };
    let taps = g.taps(weight.slice(), false);
    let mut start = vec![0.0; g.lanes()];
    if let Some(bias) = &bias {
        start[..g.channels].copy_from_slice(bias.slice());
    }
    let mut y = buffer(g.batch * g.out_pixels() * g.channels);
    convolve(g, x.slice(), &taps, &start, aligned(&mut work_area(g.padded() + LINE)), &mut y);
    let saved = (x.share(), weight.share());
    let y = primitive(y, [g.batch, g.out_height(), g.out_width(), g.channels]);
    match bias {
        Some(bias) => record(Depthwise(g), [x, weight, bias], y, |_| saved),
        None => record(Depthwise(g), [x, weight], y, |_| saved),
    }
}

/// Sizes of one convolution.
#[derive(Clone, Copy, Debug)]
struct Plane {
    batch: usize,
    height: usize,
    width: usize,
    channels: usize,
    kernel: usize,
    padding: usize,
}

impl Plane {
    fn new([batch, height, width, channels]: [usize; 4], weight: [usize; 4], padding: usize) -> Self {
        let kernel = weight[2];
        assert_eq!(weight, [channels, 1, kernel, kernel], "a depthwise convolution has one square filter per channel");
        assert!(
            kernel > 0 && padding < kernel,
            "padding {padding} of a depthwise convolution with a kernel of {kernel}"
        );
        assert!(
            height + 2 * padding >= kernel && width + 2 * padding >= kernel,
            "kernel {kernel}x{kernel} is larger than the padded image {height}x{width} + {padding}"
        );
        Self { batch, height, width, channels, kernel, padding }
    }

    /// Sizes of the convolution that makes the input's gradient from the output's.
    fn backward(self) -> Self {
        let (height, width) = (self.out_height(), self.out_width());
        Self { height, width, padding: self.kernel - 1 - self.padding, ..self }
    }

    fn out_height(&self) -> usize {
        self.height + 2 * self.padding + 1 - self.kernel
    }

    fn out_width(&self) -> usize {
        self.width + 2 * self.padding + 1 - self.kernel
    }

    fn out_pixels(&self) -> usize {
        self.out_height() * self.out_width()
    }

    /// Channels, up to a whole register of eight.
    fn lanes(&self) -> usize {
        self.channels.next_multiple_of(8)
    }

    /// Pixels from one padded line to the next; enough for a whole tile.
    fn pitch(&self) -> usize {
        (self.width + 2 * self.padding).max(TILE + self.kernel - 1)
    }

    /// Values of a padded image with a register of channels.
    fn padded(&self) -> usize {
        (self.height + 2 * self.padding) * self.pitch() * 16
    }

    /// Returns the filters with channels last, `[k * k, lanes]`; `turned` by 180 degrees or not.
    fn taps(&self, weight: &[f32], turned: bool) -> Vec<f32> {
        let (count, lanes) = (self.kernel * self.kernel, self.lanes());
        let mut taps = vec![0.0; count * lanes];
        for (channel, filter) in weight.chunks_exact(count).enumerate() {
            for (tap, value) in filter.iter().enumerate() {
                let tap = if turned { count - 1 - tap } else { tap };
                taps[tap * lanes + channel] = *value;
            }
        }
        taps
    }
}

/// Backward pass; the parents are input, weight and, if there is one, bias.
#[derive(Debug)]
struct Depthwise(Plane);

impl<const N: usize> Backward<Flex, N> for Depthwise {
    /// Input and weight.
    type State = (FlexTensor, FlexTensor);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let g = self.0;
        let gradient = consume(grads, &ops);
        let (dy, x, weight) = (slice(&gradient), slice(&ops.state.0), slice(&ops.state.1));
        if wants(&ops, 0) {
            let back = g.backward();
            let mut dx = buffer(x.len());
            let zeros = vec![0.0; g.lanes()];
            let taps = g.taps(weight, true);
            convolve(back, dy, &taps, &zeros, aligned(&mut work_area(back.padded() + LINE)), &mut dx);
            register(grads, &ops, 0, || primitive(dx, [g.batch, g.height, g.width, g.channels]));
        }
        if wants(&ops, 1) {
            let dw = weight_gradient(g, x, dy);
            register(grads, &ops, 1, || primitive(dw, [g.channels, 1, g.kernel, g.kernel]));
        }
        register(grads, &ops, 2, || primitive(column_sums(dy, g.channels), [g.channels]));
    }
}

fn weight_gradient(g: Plane, x: &[f32], dy: &[f32]) -> Vec<f32> {
    let (count, lanes) = (g.kernel * g.kernel, g.lanes());
    let mut totals = vec![0.0f64; count * lanes];
    let (mut padded, mut above) = (work_area(g.padded() + LINE), work_area(g.out_pixels() * 16 + LINE));
    let mut sums = vec![0.0; count * 16];
    correlate(g, x, dy, aligned(&mut padded), aligned(&mut above), &mut sums, &mut totals);
    let tap = |channel: usize| (0..count).map(move |tap| tap * lanes + channel);
    (0..g.channels).flat_map(tap).map(|at| totals[at] as f32).collect()
}

/// Returns the part that begins with a line of the cache: a register read from two lines takes twice as long.
fn aligned(area: &mut [f32]) -> &mut [f32] {
    let skip = area.as_ptr().align_offset(size_of::<f32>() * LINE).min(LINE);
    &mut area[skip..]
}

/// Calls a function for each register of channels: of 16 where the processor has such and so many are left, else of 8.
macro_rules! each_register {
    ($wide:expr, $fused:expr, $channels:expr, |$first:ident| $f:ident($($arg:expr),*)) => {
        let mut $first = 0;
        while $first < $channels {
            #[cfg(target_arch = "x86_64")]
            if $wide && $channels - $first >= 16 {
                $f(zero::<std::arch::x86_64::__m512>(), $($arg),*);
                $first += 16;
                continue;
            } else if $fused {
                $f(zero::<std::arch::x86_64::__m256>(), $($arg),*);
                $first += 8;
                continue;
            }
            let _ = ($wide, $fused);
            $f(zero::<[f32; 8]>(), $($arg),*);
            $first += 8;
        }
    };
}

vectorized! {
    /// Convolves all images; `taps` as [`Plane::taps`] has them, `start` is what a sum begins with, `[lanes]`.
    fn convolve(g: Plane, x: &[f32], taps: &[f32], start: &[f32], padded: &mut [f32], y: &mut [f32]) {
        if g.channels == 0 {
            return;
        }
        let (inputs, outputs) = (g.height * g.width * g.channels, g.out_pixels() * g.channels);
        padded.fill(0.0);
        let mut width = 0;
        for image in 0..g.batch {
            let x = &x[image * inputs..(image + 1) * inputs];
            let y = &mut y[image * outputs..(image + 1) * outputs];
            each_register!(WIDE, FMA, g.channels, |first| convolve_image(g, x, taps, start, padded, &mut width, first, y));
        }
    }

    /// Adds the gradients of all taps to `totals`, `[k * k, lanes]`.
    fn correlate(
        g: Plane, x: &[f32], dy: &[f32], padded: &mut [f32], above: &mut [f32], sums: &mut [f32], totals: &mut [f64],
    ) {
        if g.channels == 0 {
            return;
        }
        let (inputs, outputs) = (g.height * g.width * g.channels, g.out_pixels() * g.channels);
        padded.fill(0.0);
        above.fill(0.0);
        let mut width = 0;
        for image in 0..g.batch {
            let x = &x[image * inputs..(image + 1) * inputs];
            let dy = &dy[image * outputs..(image + 1) * outputs];
            each_register!(WIDE, FMA, g.channels, |first| correlate_image(
                g, x, dy, padded, &mut width, above, first, sums, totals
            ));
        }
    }
}

/// Copies a register of channels of an image between zeros. The last register may have fewer; what its other lanes compute is not used.
#[inline(always)]
fn pad<V: Lanes>(zero: V, g: Plane, x: &[f32], first: usize, padded: &mut [f32], width: &mut usize) {
    if *width != V::WIDTH {
        padded.fill(0.0); // the zeros lie elsewhere
        *width = V::WIDTH;
    }
    let count = V::WIDTH.min(g.channels - first);
    for line in 0..g.height {
        let to = ((line + g.padding) * g.pitch() + g.padding) * V::WIDTH;
        let from = &x[line * g.width * g.channels..(line + 1) * g.width * g.channels];
        copy(zero, from, g.channels, first, count, &mut padded[to..to + g.width * V::WIDTH]);
    }
}

/// Copies `count` channels of each pixel.
#[inline(always)]
fn copy<V: Lanes>(zero: V, from: &[f32], channels: usize, first: usize, count: usize, to: &mut [f32]) {
    for (from, to) in from.chunks_exact(channels).zip(to.chunks_exact_mut(V::WIDTH)) {
        if count == V::WIDTH {
            zero.load(&from[first..]).store(to);
        } else {
            to[..count].copy_from_slice(&from[first..first + count]);
        }
    }
}

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one loop in parts")]
fn convolve_image<V: Lanes>(
    zero: V,
    g: Plane,
    x: &[f32],
    taps: &[f32],
    start: &[f32],
    padded: &mut [f32],
    width: &mut usize,
    first: usize,
    y: &mut [f32],
) {
    pad(zero, g, x, first, padded, width);
    let (lanes, columns, pitch) = (g.lanes(), g.out_width(), g.pitch() * V::WIDTH);
    let start = zero.load(&start[first..]);
    let count = V::WIDTH.min(g.channels - first);
    for row in 0..g.out_height() {
        for tile in (0..columns).step_by(TILE) {
            // the last tile starts earlier: it repeats some sums, and gets them right again
            let left = tile.min(columns.saturating_sub(TILE));
            let mut sums = [start; TILE];
            for ky in 0..g.kernel {
                let line = &padded[(row + ky) * pitch + left * V::WIDTH..][..(TILE + g.kernel - 1) * V::WIDTH];
                for kx in 0..g.kernel {
                    let tap = zero.load(&taps[(ky * g.kernel + kx) * lanes + first..]);
                    let window = &line[kx * V::WIDTH..][..TILE * V::WIDTH];
                    for t in 0..TILE {
                        sums[t] = sums[t].add_product(zero.load(&window[t * V::WIDTH..]), tap);
                    }
                }
            }
            for t in 0..TILE {
                if t < columns {
                    let to = &mut y[(row * columns + left + t) * g.channels + first..][..count];
                    if count == V::WIDTH {
                        sums[t].store(to);
                    } else {
                        let mut values = [0.0; 16];
                        sums[t].store(&mut values);
                        to.copy_from_slice(&values[..count]);
                    }
                }
            }
        }
    }
}

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one loop in parts")]
fn correlate_image<V: Lanes>(
    zero: V,
    g: Plane,
    x: &[f32],
    dy: &[f32],
    padded: &mut [f32],
    width: &mut usize,
    above: &mut [f32],
    first: usize,
    sums: &mut [f32],
    totals: &mut [f64],
) {
    pad(zero, g, x, first, padded, width);
    let count = V::WIDTH.min(g.channels - first);
    copy(zero, dy, g.channels, first, count, above);
    let (columns, pitch, lanes) = (g.out_width(), g.pitch() * V::WIDTH, g.lanes());
    let lines = SUM_PIXELS.div_ceil(columns.max(1));
    let sums = &mut sums[..g.kernel * g.kernel * V::WIDTH];
    for block in (0..g.out_height()).step_by(lines) {
        sums.fill(0.0);
        for row in block..(block + lines).min(g.out_height()) {
            let above = &above[row * columns * V::WIDTH..(row + 1) * columns * V::WIDTH];
            for ky in 0..g.kernel {
                let line = &padded[(row + ky) * pitch..(row + ky + 1) * pitch];
                let mut kx = 0;
                while kx < g.kernel {
                    let sums = &mut sums[(ky * g.kernel + kx) * V::WIDTH..];
                    let line = &line[kx * V::WIDTH..];
                    if g.kernel - kx >= TAPS {
                        correlate_line::<V, TAPS>(zero, line, above, sums);
                        kx += TAPS;
                    } else {
                        correlate_line::<V, 1>(zero, line, above, sums);
                        kx += 1;
                    }
                }
            }
        }
        for (sums, totals) in sums.chunks_exact(V::WIDTH).zip(totals.chunks_exact_mut(lanes)) {
            add_to_totals(&mut totals[first..first + count], sums);
        }
    }
}

/// Adds the products of a line of gradients with the values under `N` neighbouring taps.
#[inline(always)]
fn correlate_line<V: Lanes, const N: usize>(zero: V, line: &[f32], above: &[f32], sums: &mut [f32]) {
    let mut kept = [zero; N];
    for j in 0..N {
        kept[j] = zero.load(&sums[j * V::WIDTH..]);
    }
    for (at, dy) in above.chunks_exact(V::WIDTH).enumerate() {
        let dy = zero.load(dy);
        let window = &line[at * V::WIDTH..][..N * V::WIDTH];
        for j in 0..N {
            kept[j] = kept[j].add_product(zero.load(&window[j * V::WIDTH..]), dy);
        }
    }
    for j in 0..N {
        kept[j].store(&mut sums[j * V::WIDTH..]);
    }
}

/// The same by burn's operations.
fn plain(x: Tensor<4>, weight: Tensor<4>, bias: Option<Tensor<1>>, padding: usize) -> Tensor<4> {
    let channels = x.dims()[3];
    let options = ConvOptions::new([1, 1], [padding; 2], [1, 1], channels);
    to_nhwc(burn::tensor::module::conv2d(to_nchw(x), weight, bias, options))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::super::testing::{assert_close, assert_same_bits, flat, flatten, gradients, probe, read, values, wide};
    use super::*;

    /// Images, kernel, padding.
    const CASES: [([usize; 4], usize, usize); 12] = [
        ([2, 9, 11, 19], 7, 3),
        ([1, 1, 1, 1], 7, 3),
        ([2, 7, 7, 24], 7, 3),
        ([1, 2, 30, 16], 7, 3),
        ([1, 40, 17, 8], 7, 3),
        ([1, 5, 6, 31], 3, 1),
        ([3, 8, 8, 12], 5, 0),
        ([1, 4, 9, 40], 1, 0),
        ([1, 6, 5, 9], 4, 3),
        ([1, 12, 10, 3], 9, 8),
        ([1, 3, 3, 33], 15, 7),
        ([2, 1, 300, 17], 7, 3),
    ];

    fn inputs(shape: [usize; 4], kernel: usize) -> [Vec<f32>; 3] {
        let scale = 1.0 / kernel as f32;
        let weight = values(shape[3] * kernel * kernel, 2).into_iter().map(|w| 2.0 * w * scale).collect();
        [values(shape.iter().product(), 1), weight, values(shape[3], 3)]
    }

    fn run(t: &[Tensor<1>], shape: [usize; 4], kernel: usize, padding: usize, by_burn: bool) -> Tensor<1> {
        let (x, weight) = (t[0].clone().reshape(shape), t[1].clone().reshape([shape[3], 1, kernel, kernel]));
        let bias = t.get(2).cloned();
        flatten(if by_burn { plain(x, weight, bias, padding) } else { depthwise_conv2d_nhwc(x, weight, bias, padding) })
    }

    /// Output and gradients by the formula, in float64.
    fn definition(inputs: &[Vec<f32>; 3], shape: [usize; 4], kernel: usize, padding: usize) -> Vec<Vec<f64>> {
        let [batch, height, width, channels] = shape;
        let [x, w, bias] = inputs.each_ref().map(|values| wide(values));
        let (rows, columns) = (height + 2 * padding + 1 - kernel, width + 2 * padding + 1 - kernel);
        let dy = wide(&probe(batch * rows * columns * channels));
        let mut y = vec![0.0; dy.len()];
        let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; w.len()], vec![0.0; bias.len()]);
        for to in 0..y.len() {
            let (c, column) = (to % channels, to / channels % columns);
            let (row, image) = (to / channels / columns % rows, to / channels / columns / rows);
            y[to] = bias[c];
            db[c] += dy[to];
            for (ky, kx) in (0..kernel).flat_map(|ky| (0..kernel).map(move |kx| (ky, kx))) {
                let (iy, ix) = (row + ky, column + kx);
                if (padding..height + padding).contains(&iy) && (padding..width + padding).contains(&ix) {
                    let from = ((image * height + iy - padding) * width + ix - padding) * channels + c;
                    let tap = (c * kernel + ky) * kernel + kx;
                    y[to] += x[from] * w[tap];
                    dx[from] += dy[to] * w[tap];
                    dw[tap] += dy[to] * x[from];
                }
            }
        }
        vec![y, dx, dw, db]
    }

    #[test]
    fn against_float64_and_burn() {
        let mut worst = 0.0f64;
        for (shape, kernel, padding) in CASES {
            let inputs = inputs(shape, kernel);
            let leaves: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            let found = gradients(&leaves, |t| run(t, shape, kernel, padding, false));
            let expected = definition(&inputs, shape, kernel, padding);
            worst = worst.max(assert_close(&format!("{shape:?} {kernel} {padding}"), &found, &expected, 2e-6));
            let burns = gradients(&leaves, |t| run(t, shape, kernel, padding, true));
            assert_close("against burn", &found, &burns.iter().map(|v| wide(v)).collect::<Vec<_>>(), 1e-5);
        }
        eprintln!("depthwise: worst {worst:.1e}");
    }

    #[test]
    fn same_bits_however_called() {
        for (shape, kernel, padding) in CASES {
            let inputs = inputs(shape, kernel);
            let leaves: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            assert_same_bits(&leaves, |t| run(t, shape, kernel, padding, false));
            assert_same_bits(&leaves[..2], |t| run(t, shape, kernel, padding, false));
        }
    }

    #[test]
    fn an_image_does_not_depend_on_its_neighbours() {
        let (shape, kernel) = ([2, 6, 9, 20], 7);
        let [x, weight, bias] = inputs(shape, kernel);
        let on = |x: &[f32], batch: usize| {
            let t = [x, &weight, &bias].map(|values| flat(values, &Device::flex()));
            read(run(&t, [batch, 6, 9, 20], kernel, 3, false))
        };
        let (both, half) = (on(&x, 2), x.len() / 2);
        assert_eq!(on(&x[half..], 1), both[half..]);
        let mut broken = x.clone();
        broken[0] = f32::NAN;
        assert_eq!(on(&broken, 2)[half..], both[half..]);
    }

    #[test]
    fn nothing_in_nothing_out() {
        let device = Device::flex();
        for shape in [[0, 4, 4, 8], [2, 4, 4, 0]] {
            let weight = Tensor::<4>::ones([shape[3], 1, 3, 3], &device);
            assert_eq!(depthwise_conv2d_nhwc(Tensor::zeros(shape, &device), weight, None, 1).dims(), shape);
        }
    }

    #[test]
    fn views_are_as_good_as_copies() {
        let device = Device::flex();
        let view = flat(&values(2 * 12 * 5 * 6, 1), &device).reshape([2, 12, 5, 6]).permute([0, 2, 3, 1]);
        let copy = flat(&read(view.clone()), &device).reshape([2, 5, 6, 12]);
        let weight = || flat(&values(12 * 9, 2), &device).reshape([12, 1, 3, 3]);
        let on = |x| read(depthwise_conv2d_nhwc(x, weight(), None, 1));
        assert_eq!(on(view), on(copy));
    }

    #[test]
    #[should_panic(expected = "one square filter per channel")]
    fn a_filter_per_channel() {
        let device = Device::flex();
        let _ =
            depthwise_conv2d_nhwc(Tensor::ones([1, 4, 4, 8], &device), Tensor::ones([8, 8, 3, 3], &device), None, 1);
    }
}
