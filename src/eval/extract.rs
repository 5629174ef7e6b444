//! Features of many images: what a backbone makes of them, in evaluation mode.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, Tensor, TensorData};

use crate::augment::{Normalize, eval_view};
use crate::data::{ImageError, Source};

/// Images of one forward pass; fixed, so that the bits do not depend on the number of threads.
pub(super) const BATCH: usize = 32;

/// How an image is prepared for evaluation.
#[derive(Clone, Copy, Debug)]
pub struct EvalView {
    /// Height and width in pixels.
    pub size: u32,
    /// Mean of each channel.
    pub mean: [f32; 3],
    /// Standard deviation of each channel.
    pub std: [f32; 3],
}

/// Features of `indices`, in their order, row-major; an image that cannot be read is left out of `kept`.
#[derive(Clone, Debug, Default)]
pub struct Extracted {
    /// Features, `kept.len() * dim`.
    pub values: Vec<f32>,
    /// Width of a feature.
    pub dim: usize,
    /// Index of each row's image in the source.
    pub kept: Vec<usize>,
    /// Images that cannot be read, and why.
    pub unreadable: Vec<(usize, ImageError)>,
}

/// Extracts features on `threads` threads; each builds its own network through `build` and runs it alone. Nothing comes back once `stop` is
/// set.
///
/// # Errors
/// What `build` returns.
pub fn extract<E: Send>(
    source: &dyn Source,
    indices: &[usize],
    view: EvalView,
    device: &Device,
    threads: usize,
    stop: &AtomicBool,
    build: impl Fn() -> Result<Box<dyn FnMut(Tensor<4>) -> Tensor<2>>, E> + Sync,
) -> Result<Option<Extracted>, E> {
    let chunks: Vec<&[usize]> = indices.chunks(BATCH).collect();
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Option<Extracted>>> = Mutex::new(vec![None; chunks.len()]);
    let work = || -> Result<(), E> {
        let mut forward = build()?;
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = chunks.get(number).filter(|_| !stop.load(Ordering::Relaxed)) else { return Ok(()) };
            let part = extract_chunk(source, chunk, view, device, &mut forward);
            done.lock().unwrap_or_else(PoisonError::into_inner)[number] = Some(part);
        }
    };
    let results: Vec<Result<(), E>> = std::thread::scope(|scope| {
        let alone = || match rayon::ThreadPoolBuilder::new().num_threads(1).build() {
            Ok(pool) => pool.install(work),
            Err(_) => work(),
        };
        let threads: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(alone)).collect();
        let joined = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        joined.map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    results.into_iter().collect::<Result<Vec<()>, E>>()?;
    if stop.load(Ordering::Relaxed) {
        return Ok(None);
    }
    let parts = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut all = Extracted::default();
    for part in parts.into_iter().flatten() {
        all.dim = all.dim.max(part.dim);
        all.values.extend(part.values);
        all.kept.extend(part.kept);
        all.unreadable.extend(part.unreadable);
    }
    Ok(Some(all))
}

fn extract_chunk(
    source: &dyn Source,
    chunk: &[usize],
    view: EvalView,
    device: &Device,
    forward: &mut dyn FnMut(Tensor<4>) -> Tensor<2>,
) -> Extracted {
    let normalize = Normalize::new(view.mean, view.std);
    let side = view.size as usize;
    let image_len = 3 * side * side;
    let mut kept = Vec::with_capacity(BATCH);
    let mut unreadable = Vec::new();
    // always a whole batch: short ones are padded with zeros, whose rows are dropped
    let mut pixels = vec![0.0; BATCH * image_len];
    for &index in chunk {
        match source.load(index) {
            Ok(image) => {
                let out = &mut pixels[kept.len() * image_len..][..image_len];
                normalize.write(&eval_view(&image, view.size), out);
                kept.push(index);
            }
            Err(reason) => unreadable.push((index, reason)),
        }
    }
    let features = forward(Tensor::from_data(TensorData::new(pixels, [BATCH, 3, side, side]), device));
    let dim = features.dims()[1];
    let mut values = features.into_data().try_to_vec::<f32>().expect("networks compute in fp32");
    values.truncate(kept.len() * dim);
    Extracted { values, dim, kept, unreadable }
}
