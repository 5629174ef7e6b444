//! Convolution as a matrix product over gathered windows.
//!
//! Row `(image, oy, ox)` of the column matrix holds the window that output pixel sees, `(ky, kx, channel)` in order, zero where
//! it hangs over the border. With `W` reordered to `[ky * kx * channels, out]` (and its transpose: products are fastest with both factors row-major),
//!
//! ```text
//! y = col W        dW = col^T dy        dcol = dy W^T, added back to where the windows came from
//! ```
//!
//! The matrix is never whole: it is built for [`BLOCK`] output pixels at a time, which stay in the cache. A 1x1 convolution
//! with stride 1 has `col = x`.

use super::conv2d::Geometry;
use super::gemm::{Matrix, matmul, product, transpose, transposed};
use super::memory::{WorkArea, buffer, work_area};
use super::simd::add_assign;

/// Output pixels per block (at least one line of an image).
const BLOCK: usize = 256;

/// Computes the convolution of `x` `[batch, h, w, channels]` with `weight` `[out, channels, kh, kw]`.
pub(super) fn forward(x: &[f32], weight: &[f32], g: &Geometry) -> Vec<f32> {
    let window = g.window();
    if g.is_pointwise() {
        let weight = transposed(weight, g.out_channels, window);
        return product(Matrix::new(x, g.pixels(), window), Matrix::new(&weight, window, g.out_channels));
    }
    let mut y = buffer(g.pixels() * g.out_channels);
    let weight = window_major(weight, g);
    let weight = Matrix::new(&weight, window, g.out_channels);
    let mut columns = work_area(g.block_lines(BLOCK) * g.out_width() * window);
    let mut block = work_area(g.block_lines(BLOCK) * g.out_width() * g.out_channels);
    for lines in g.blocks(BLOCK) {
        let pixels = lines.len() * g.out_width();
        let columns = &mut columns[..pixels * window];
        gather(x, g, lines.clone(), columns);
        let start = lines.start * g.out_width() * g.out_channels;
        let block = &mut block[..pixels * g.out_channels];
        matmul(block, g.out_channels, Matrix::new(columns, pixels, window), weight, false);
        y[start..start + block.len()].copy_from_slice(block); // as `gemm::matmul_by_blocks` says
    }
    y
}

/// Computes the gradient of the input.
pub(super) fn input_gradient(weight: &[f32], dy: &[f32], g: &Geometry) -> Vec<f32> {
    let window = g.window();
    if g.is_pointwise() {
        let dy = Matrix::new(dy, g.pixels(), g.out_channels);
        return product(dy, Matrix::new(weight, g.out_channels, window));
    }
    let mut dx = vec![0.0; g.batch * g.height * g.width * g.channels];
    let weight = out_major(weight, g);
    let weight = Matrix::new(&weight, g.out_channels, window);
    let mut columns = work_area(g.block_lines(BLOCK) * g.out_width() * window);
    for lines in g.blocks(BLOCK) {
        let pixels = lines.len() * g.out_width();
        let columns = &mut columns[..pixels * window];
        let dy = Matrix::new(&dy[lines.start * g.out_width() * g.out_channels..], pixels, g.out_channels);
        matmul(columns, window, dy, weight, false);
        scatter(columns, g, lines, &mut dx);
    }
    dx
}

/// Computes the gradient of the weight.
pub(super) fn weight_gradient(x: &[f32], dy: &[f32], g: &Geometry) -> Vec<f32> {
    let window = g.window();
    if g.is_pointwise() {
        let mut dw = buffer(g.out_channels * window);
        let (x, dy) = (Matrix::new(x, g.pixels(), window), Matrix::new(dy, g.pixels(), g.out_channels));
        matmul(&mut dw, window, dy.t(), x, false);
        return dw;
    }
    let mut columns = work_area(g.block_lines(BLOCK) * g.out_width() * window);
    let mut sums = work_area(g.out_channels * window);
    sums.fill(0.0);
    for lines in g.blocks(BLOCK) {
        let pixels = lines.len() * g.out_width();
        let columns = &mut columns[..pixels * window];
        gather(x, g, lines.clone(), columns);
        let dy = Matrix::new(&dy[lines.start * g.out_width() * g.out_channels..], pixels, g.out_channels);
        matmul(&mut sums, g.out_channels, Matrix::new(columns, pixels, window).t(), dy, true);
    }
    torch_order(&sums, g)
}

/// One row of a window: which columns of the input it covers and where they sit in the row.
struct Run {
    /// First value of the input, or nothing if the row is outside.
    from: Option<usize>,
    /// Values of the row before and up to the end of the covered part.
    covered: std::ops::Range<usize>,
}

/// Lists the window rows of output line `line`, left to right, top to bottom.
fn runs(g: &Geometry, line: usize) -> impl Iterator<Item = Run> {
    let g = *g;
    let (image, oy) = (line / g.out_height(), line % g.out_height());
    let [kh, kw] = g.kernel;
    (0..g.out_width()).flat_map(move |ox| {
        let left = ox * g.stride[1]; // in the padded line
        let first = g.padding[1].saturating_sub(left).min(kw);
        let last = (g.width + g.padding[1]).saturating_sub(left).min(kw).max(first);
        (0..kh).map(move |ky| {
            let y = oy * g.stride[0] + ky;
            let inside = last > first && y >= g.padding[0] && y - g.padding[0] < g.height;
            let from = inside
                .then(|| ((image * g.height + y - g.padding[0]) * g.width + left + first - g.padding[1]) * g.channels);
            Run { from, covered: first * g.channels..last * g.channels }
        })
    })
}

/// Fills the column matrix of some output lines.
fn gather(x: &[f32], g: &Geometry, lines: std::ops::Range<usize>, columns: &mut [f32]) {
    let row = g.kernel[1] * g.channels;
    if row == 0 {
        return;
    }
    let mut rows = columns.chunks_exact_mut(row);
    for line in lines {
        for (run, row) in runs(g, line).zip(&mut rows) {
            match run.from {
                None => row.fill(0.0),
                Some(from) => {
                    row[..run.covered.start].fill(0.0);
                    row[run.covered.clone()].copy_from_slice(&x[from..from + run.covered.len()]);
                    row[run.covered.end..].fill(0.0);
                }
            }
        }
    }
}

/// Adds the column matrix of some output lines to where [`gather`] took it from.
fn scatter(columns: &[f32], g: &Geometry, lines: std::ops::Range<usize>, dx: &mut [f32]) {
    let row = g.kernel[1] * g.channels;
    if row == 0 {
        return;
    }
    let mut rows = columns.chunks_exact(row);
    for line in lines {
        for (run, row) in runs(g, line).zip(&mut rows) {
            if let Some(from) = run.from {
                add_assign(&mut dx[from..from + run.covered.len()], &row[run.covered]);
            }
        }
    }
}

/// Reorders `[out, channels, kh, kw]` to `[kh, kw, channels, out]`.
fn window_major(weight: &[f32], g: &Geometry) -> WorkArea {
    let by_tap = out_major(weight, g);
    transposed(&by_tap, g.out_channels, g.window())
}

/// Reorders `[out, channels, kh, kw]` to `[out, kh, kw, channels]`.
fn out_major(weight: &[f32], g: &Geometry) -> WorkArea {
    let taps = g.kernel[0] * g.kernel[1];
    let mut out = work_area(weight.len());
    for (from, to) in weight.chunks_exact(g.window().max(1)).zip(out.chunks_exact_mut(g.window().max(1))) {
        transpose(from, taps, taps, to, g.channels);
    }
    out
}

/// Reorders `[kh, kw, channels, out]` to `[out, channels, kh, kw]`.
fn torch_order(sums: &[f32], g: &Geometry) -> Vec<f32> {
    let taps = g.kernel[0] * g.kernel[1];
    let by_tap = transposed(sums, g.window(), g.out_channels);
    let mut out = buffer(sums.len());
    for (from, to) in by_tap.chunks_exact(g.window().max(1)).zip(out.chunks_exact_mut(g.window().max(1))) {
        transpose(from, g.channels, g.channels, to, taps);
    }
    out
}
