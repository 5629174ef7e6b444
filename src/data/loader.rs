//! Threads that turn the schedule into micro-batches of normalised views, delivered in order.
//!
//! Workers take the next (step, micro-batch) of a list and put the finished one in its place; the receiver waits for the
//! place that is next. A job may begin only within `prefetch` places of the receiver, which bounds the memory. Nothing in a
//! micro-batch depends on who made it or when, so the number of workers cannot show in the result.
//!
//! An image that cannot be read is replaced by another, chosen by the unreadable one's index alone: the first readable
//! candidate of the stream `(0, Substitute, image, attempt)`. The augmentation keeps the key of the image that was
//! scheduled, so the same substitute has other views in other places.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use image::RgbImage;

use super::bad::{BadImage, BadImages};
use super::config::OnError;
use super::error::{Error, ImageError, panic_message};
use super::order::Schedule;
use super::source::Source;
use crate::augment::Normalize;
use crate::rng::{Purpose, Stream};

/// Substitutes tried for an unreadable image. With half of the images unreadable, one in 65536 finds none.
const MAX_ATTEMPTS: u64 = 16;

/// Pauses between attempts to read a file.
const READ_PAUSES: [Duration; 3] = [Duration::from_millis(50), Duration::from_millis(250), Duration::from_millis(700)];

/// Makes the views of an image; implemented by augmentation and by the fixed transform of evaluations.
pub trait ViewMaker: Send + Sync {
    /// Returns the number of views of each image.
    fn num_views(&self) -> usize;

    /// Returns height and width of a view.
    fn size(&self, view: usize) -> u32;

    /// Writes a view, a function of nothing but the arguments.
    ///
    /// # Shapes
    /// `out` is `[3, size, size]`, and every element is written.
    fn make(&self, image: &RgbImage, epoch: u64, index: u64, view: usize, normalize: &Normalize, out: &mut [f32]);
}

/// One micro-batch in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct HostBatch {
    /// Step that it belongs to.
    pub step: u64,
    /// Place of the micro-batch in the step's global batch.
    pub micro: usize,
    /// Indices of the images that were scheduled; a substitute keeps the index of the image it stands for.
    pub images: Vec<u64>,
    /// Classes of each image, of the substitute where there is one; empty where some image has no label.
    pub labels: Vec<Vec<u32>>,
    /// One for each view of the view maker.
    pub views: Vec<HostView>,
}

/// One view of every image of a micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct HostView {
    /// Height and width.
    pub size: u32,
    /// Normalised pixels, `[images, 3, size, size]`.
    pub pixels: Vec<f32>,
}

/// What a loader delivers, for one rank.
#[derive(Clone)]
pub struct LoaderPlan {
    /// The images.
    pub source: Arc<dyn Source>,
    /// What is made of each.
    pub views: Arc<dyn ViewMaker>,
    /// Seed of the order.
    pub seed: u64,
    /// Images in a global batch.
    pub global: usize,
    /// Images in a micro-batch; divides `global`.
    pub micro: usize,
    /// First step to deliver, counted from the beginning of the run.
    pub first_step: u64,
    /// Number of steps to deliver.
    pub num_steps: u64,
    /// Micro-batches of each step that this rank owns.
    pub micros: Range<usize>,
    /// Threads; 0 chooses the number of cores. More than `prefetch` are not started: they would have nothing to do.
    pub workers: usize,
    /// Micro-batches that may be finished or in work at a time; at least one.
    pub prefetch: usize,
    /// Mean of each channel after scaling to `[0, 1]`.
    pub mean: [f32; 3],
    /// Standard deviation of each channel after scaling to `[0, 1]`.
    pub std: [f32; 3],
    /// What to do with an unreadable image.
    pub on_error: OnError,
    /// Where unreadable images are noted; shared by the ranks of a process.
    pub bad: Arc<BadImages>,
}

/// Delivers micro-batches in order: all of this rank's of a step, then those of the next.
///
/// After an error it ends. Dropping it stops the threads after the image they are at and waits for them.
pub struct Loader {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Loader {
    /// Starts the threads.
    ///
    /// # Errors
    /// When there are fewer images than a global batch takes, or a thread cannot be started.
    ///
    /// # Panics
    /// When `micro` does not divide `global`, or `micros` goes beyond the global batch.
    pub fn start(plan: LoaderPlan) -> Result<Self, Error> {
        let (num_images, global) = (plan.source.len(), plan.global);
        if num_images < global {
            return Err(Error::TooFewImages { num_images, global });
        }
        let schedule = Schedule::new(plan.seed, num_images, global, plan.micro);
        assert!(plan.micros.end <= global / plan.micro, "micro-batches {:?} of {}", plan.micros, global / plan.micro);
        let cores = || thread::available_parallelism().map_or(1, usize::from);
        let prefetch = plan.prefetch.max(1);
        let num_workers = if plan.workers == 0 { cores() } else { plan.workers }.min(prefetch);
        let shared = Arc::new(Shared {
            normalize: Normalize::new(plan.mean, plan.std),
            num_jobs: plan.num_steps * plan.micros.len() as u64,
            prefetch: prefetch as u64,
            schedule,
            plan,
            state: Mutex::default(),
            job_may_begin: Condvar::new(),
            job_is_done: Condvar::new(),
        });
        let mut loader = Self { shared, workers: Vec::with_capacity(num_workers) };
        for worker in 0..num_workers {
            let shared = Arc::clone(&loader.shared);
            let thread = thread::Builder::new().name(format!("loader-{worker}")).spawn(move || shared.work());
            loader.workers.push(thread.map_err(|source| Error::Threads { source })?);
        }
        Ok(loader)
    }
}

impl Iterator for Loader {
    type Item = Result<HostBatch, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut state = self.shared.lock();
        loop {
            if state.stop || state.delivered == self.shared.num_jobs {
                return None;
            }
            let next = state.delivered;
            if let Some(result) = state.done.remove(&next) {
                state.delivered += 1;
                state.stop = result.is_err();
                self.shared.job_may_begin.notify_all();
                return Some(result);
            }
            state = self.shared.job_is_done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.job_may_begin.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches its panics and reports them as a result.
            let _ = worker.join();
        }
    }
}

/// What the receiver and the workers share.
struct Shared {
    plan: LoaderPlan,
    schedule: Schedule,
    normalize: Normalize,
    num_jobs: u64,
    prefetch: u64,
    state: Mutex<State>,
    job_may_begin: Condvar,
    job_is_done: Condvar,
}

#[derive(Default)]
struct State {
    /// Jobs that have begun.
    begun: u64,
    /// Jobs that the receiver has taken.
    delivered: u64,
    /// Results that the receiver has not taken.
    done: BTreeMap<u64, Result<HostBatch, Error>>,
    stop: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while let Some(job) = self.begin() {
            let result = catch_unwind(AssertUnwindSafe(|| self.assemble(job)))
                .unwrap_or_else(|payload| Some(Err(Error::WorkerPanicked { reason: panic_message(payload.as_ref()) })));
            let Some(result) = result else { return };
            self.lock().done.insert(job, result);
            self.job_is_done.notify_one();
        }
    }

    /// Waits for a job within reach of the receiver; nothing when there is none left or the loader is dropped.
    fn begin(&self) -> Option<u64> {
        let mut state = self.lock();
        while !state.stop && state.begun < self.num_jobs && state.begun >= state.delivered + self.prefetch {
            state = self.job_may_begin.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.stop || state.begun == self.num_jobs {
            return None;
        }
        state.begun += 1;
        Some(state.begun - 1)
    }

    /// Makes a micro-batch; nothing when the loader is dropped meanwhile.
    fn assemble(&self, job: u64) -> Option<Result<HostBatch, Error>> {
        let LoaderPlan { micros, views, .. } = &self.plan;
        let step = self.plan.first_step + job / micros.len() as u64;
        let micro = micros.start + (job % micros.len() as u64) as usize;
        let epoch = self.schedule.epoch(step);
        let images = self.schedule.images(step, micro);
        let mut outputs: Vec<HostView> = (0..views.num_views())
            .map(|view| {
                let size = views.size(view);
                HostView { size, pixels: vec![0.0; images.len() * 3 * (size as usize).pow(2)] }
            })
            .collect();
        let mut labels = Vec::with_capacity(images.len());
        for (place, &index) in images.iter().enumerate() {
            if self.lock().stop {
                return None;
            }
            let made = self.load(index).and_then(|(shown, image)| {
                labels.push(self.plan.source.labels(shown as usize));
                self.make_views(&image, epoch, index, place, &mut outputs)
            });
            if let Err(error) = made {
                return Some(Err(error));
            }
        }
        let labels = labels.into_iter().collect::<Option<Vec<Vec<u32>>>>().unwrap_or_default();
        Some(Ok(HostBatch { step, micro, images, labels, views: outputs }))
    }

    fn make_views(
        &self,
        image: &RgbImage,
        epoch: u64,
        index: u64,
        place: usize,
        outputs: &mut [HostView],
    ) -> Result<(), Error> {
        for (view, output) in outputs.iter_mut().enumerate() {
            let length = 3 * (output.size as usize).pow(2);
            let out = &mut output.pixels[place * length..(place + 1) * length];
            let make = || self.plan.views.make(image, epoch, index, view, &self.normalize, out);
            catch_unwind(AssertUnwindSafe(make)).map_err(|payload| Error::ViewPanicked {
                name: self.plan.source.name(index as usize),
                index,
                view,
                reason: panic_message(payload.as_ref()),
            })?;
        }
        Ok(())
    }

    /// Loads an image or its substitute, and says which it is.
    fn load(&self, index: u64) -> Result<(u64, RgbImage), Error> {
        let reason = match self.decode(index) {
            Ok(image) => return Ok((index, image)),
            Err(reason) => reason,
        };
        let name = self.plan.source.name(index as usize);
        if self.plan.on_error == OnError::Fail {
            // the image is the reason to stop, whatever the list of others says
            let _ = self.note(index, &reason, None);
            return Err(Error::Unreadable { name, index, reason });
        }
        let Some((substitute, image)) = self.substitute(index) else {
            self.note(index, &reason, None)?;
            return Err(Error::NoSubstitute { name, index, reason, attempts: MAX_ATTEMPTS });
        };
        self.note(index, &reason, Some(substitute))?;
        Ok((substitute, image))
    }

    /// Finds the image that takes the place of an unreadable one. Unreadable candidates are passed over and not noted:
    /// they are noted when their own turn comes, with their own substitute.
    fn substitute(&self, index: u64) -> Option<(u64, RgbImage)> {
        let num_images = self.plan.source.len() as u64;
        (0..MAX_ATTEMPTS)
            .map(|attempt| Stream::new(0, Purpose::Substitute, &[index, attempt]).below(num_images))
            .find_map(|candidate| self.decode(candidate).ok().map(|image| (candidate, image)))
    }

    /// Decodes an image; a panic of the source counts as an unreadable image.
    ///
    /// A file that cannot be read is tried again for about a second: a substitute for an image that is only away for a moment would make
    /// the result depend on that moment.
    fn decode(&self, index: u64) -> Result<RgbImage, ImageError> {
        for pause in READ_PAUSES {
            match self.decode_once(index) {
                Err(ImageError::Read(_)) => thread::sleep(pause),
                other => return other,
            }
        }
        self.decode_once(index)
    }

    fn decode_once(&self, index: u64) -> Result<RgbImage, ImageError> {
        catch_unwind(AssertUnwindSafe(|| self.plan.source.load(index as usize))).unwrap_or_else(|payload| {
            Err(ImageError::Panicked { format: "image", reason: panic_message(payload.as_ref()) })
        })
    }

    fn note(&self, index: u64, reason: &ImageError, substitute: Option<u64>) -> Result<(), Error> {
        let source = &self.plan.source;
        self.plan.bad.record(&BadImage {
            index,
            path: source.name(index as usize),
            bytes: source.bytes(index as usize),
            reason: reason.to_string(),
            substitute,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    use super::super::decode::tests::picture;
    use super::super::source::tests::Memory;
    use super::*;

    /// Two views of different sizes: pixels of the image mixed with the key.
    #[derive(Default)]
    struct Keyed {
        made: AtomicUsize,
        pause: Duration,
        panic_at: Option<u64>,
    }

    impl ViewMaker for Keyed {
        fn num_views(&self) -> usize {
            2
        }

        fn size(&self, view: usize) -> u32 {
            [4, 2][view]
        }

        fn make(&self, image: &RgbImage, epoch: u64, index: u64, view: usize, normalize: &Normalize, out: &mut [f32]) {
            assert_ne!(Some(index), self.panic_at, "image {index} is cursed");
            self.made.fetch_add(1, Ordering::SeqCst);
            thread::sleep(self.pause);
            let size = self.size(view);
            let mut stream = Stream::new(5, Purpose::Augment, &[epoch, index, view as u64]);
            let (x, y) = (stream.below(4) as u32, stream.below(4) as u32);
            normalize.write(&image::imageops::crop_imm(image, x, y, size, size).to_image(), out);
        }
    }

    fn memory(num_images: u32, bad: &[usize]) -> Arc<Memory> {
        Arc::new(Memory { images: (0..num_images).map(|seed| picture(8, 8, seed)).collect(), bad: bad.to_vec() })
    }

    fn plan(source: Arc<Memory>) -> LoaderPlan {
        LoaderPlan {
            bad: Arc::new(BadImages::open(None, source.len(), 0.5).unwrap()),
            source,
            views: Arc::new(Keyed::default()),
            seed: 1,
            global: 12,
            micro: 3,
            first_step: 0,
            num_steps: 7,
            micros: 0..4,
            workers: 1,
            prefetch: 3,
            mean: [0.4, 0.5, 0.6],
            std: [0.2, 0.25, 0.3],
            on_error: OnError::Substitute,
        }
    }

    fn run(plan: LoaderPlan) -> Vec<HostBatch> {
        Loader::start(plan).unwrap().collect::<Result<_, _>>().unwrap()
    }

    fn failure(plan: LoaderPlan) -> Error {
        let mut loader = Loader::start(plan).unwrap();
        let error = loader.find_map(Result::err).expect("the loader fails");
        assert!(loader.next().is_none());
        error
    }

    #[test]
    fn workers_and_prefetch_do_not_show() {
        let reference = run(plan(memory(40, &[3, 17])));
        assert_eq!(reference.len(), 28);
        for (workers, prefetch) in [(2, 2), (4, 4), (4, 9), (0, 1), (2, 100)] {
            let found = run(LoaderPlan { workers, prefetch, ..plan(memory(40, &[3, 17])) });
            assert!(found == reference, "{workers} workers, prefetch {prefetch}");
        }
    }

    #[test]
    fn ranks_and_restarts_deliver_parts_of_the_same_run() {
        let reference = run(plan(memory(40, &[3])));
        for first_step in 0..7 {
            let num_steps = 7 - first_step;
            let found = run(LoaderPlan { first_step, num_steps, workers: 2, ..plan(memory(40, &[3])) });
            assert!(found == reference[first_step as usize * 4..], "from step {first_step}");
        }
        for micros in [0..1, 1..3, 3..4] {
            let found = run(LoaderPlan { micros: micros.clone(), workers: 2, ..plan(memory(40, &[3])) });
            let expected: Vec<_> = reference.iter().filter(|batch| micros.contains(&batch.micro)).cloned().collect();
            assert!(found == expected, "{micros:?}");
        }
    }

    #[test]
    fn batches_follow_the_schedule_and_hold_normalised_views() {
        let source = memory(40, &[]);
        let schedule = Schedule::new(1, 40, 12, 3);
        let normalize = Normalize::new([0.4, 0.5, 0.6], [0.2, 0.25, 0.3]);
        for (at, batch) in run(plan(Arc::clone(&source))).iter().enumerate() {
            assert_eq!((batch.step, batch.micro), (at as u64 / 4, at % 4));
            assert_eq!(batch.images, schedule.images(batch.step, batch.micro));
            assert_eq!(batch.views.iter().map(|view| view.pixels.len()).collect::<Vec<_>>(), [3 * 48, 3 * 12]);
            let mut out = vec![0.0; 48];
            let index = batch.images[2];
            let image = &source.images[index as usize];
            Keyed::default().make(image, batch.step / 3, index, 0, &normalize, &mut out);
            assert_eq!(batch.views[0].pixels[96..], out);
        }
        let mut out = [0.0; 3];
        normalize.write(&RgbImage::from_pixel(1, 1, image::Rgb([0, 255, 51])), &mut out);
        let expected = |value: f32, mean: f32, std: f32| (value * (1.0 / 255.0) - mean) / std;
        assert_eq!(out, [expected(0.0, 0.4, 0.2), expected(255.0, 0.5, 0.25), expected(51.0, 0.6, 0.3)]);
    }

    #[test]
    fn a_substitute_is_chosen_by_the_bad_index_alone() {
        let dir = tempfile::tempdir().unwrap();
        let list = dir.path().join("bad-images.jsonl");
        let bad_indices = [0, 1, 2, 3, 4, 5, 6, 7];
        let source = memory(24, &bad_indices);
        let bad = Arc::new(BadImages::open(Some(&list), 24, 0.5).unwrap());
        let batches = run(LoaderPlan { bad: Arc::clone(&bad), num_steps: 6, workers: 2, ..plan(Arc::clone(&source)) });
        assert_eq!(bad.count(), 8);
        let text = std::fs::read_to_string(&list).unwrap();
        let lines: Vec<BadImage> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 8);
        let normalize = Normalize::new([0.4, 0.5, 0.6], [0.2, 0.25, 0.3]);
        let mut met = 0;
        for batch in batches {
            for (place, &index) in batch.images.iter().enumerate() {
                let Some(line) = lines.iter().find(|line| line.index == index) else { continue };
                met += 1;
                let substitute = line.substitute.unwrap() as usize;
                assert!(!bad_indices.contains(&substitute));
                assert_eq!((line.path.as_str(), line.bytes), (format!("memory/{index}").as_str(), Some(0)));
                let mut out = vec![0.0; 48];
                let image = &source.images[substitute];
                Keyed::default().make(image, batch.step / 2, index, 0, &normalize, &mut out);
                assert_eq!(batch.views[0].pixels[place * 48..(place + 1) * 48], out);
            }
        }
        assert_eq!(met, 24);
    }

    #[test]
    fn unreadable_images_can_stop_the_run() {
        let error = failure(LoaderPlan { on_error: OnError::Fail, workers: 2, ..plan(memory(40, &[5])) });
        let message = error.to_string();
        assert!(message.starts_with("memory/5 (image 5): the file is empty (0 bytes)\nhint: "), "{message}");
        let all: Vec<usize> = (0..40).collect();
        assert!(matches!(failure(plan(memory(40, &all))), Error::NoSubstitute { .. }));
        let few = Arc::new(BadImages::open(None, 40, 0.05).unwrap());
        let error = failure(LoaderPlan { bad: few, ..plan(memory(40, &[5, 6, 7])) });
        assert!(matches!(error, Error::TooManyBad { bad: 3, num_images: 40, .. }), "{error}");
        let error = Loader::start(plan(memory(11, &[]))).err().unwrap();
        assert!(error.to_string().starts_with("11 images make no batch of 12\nhint: "), "{error}");
    }

    #[test]
    fn a_panic_in_a_view_is_an_error_that_names_the_image() {
        let views = Arc::new(Keyed { panic_at: Some(9), ..Keyed::default() });
        let message = failure(LoaderPlan { views, workers: 2, ..plan(memory(40, &[])) }).to_string();
        assert!(message.starts_with("making view 0 of memory/9 (image 9) failed: "), "{message}");
        assert!(message.contains("image 9 is cursed"), "{message}");
    }

    #[test]
    fn no_more_than_prefetch_micro_batches_are_made_ahead() {
        let views = Arc::new(Keyed::default());
        let plan = LoaderPlan { views: Arc::clone(&views) as _, workers: 4, prefetch: 5, ..plan(memory(40, &[])) };
        let mut loader = Loader::start(plan).unwrap();
        for taken in 0..4 {
            let bound = (taken + 5) * 3 * 2; // micro-batches x images x views
            let deadline = Instant::now() + Duration::from_secs(20);
            while views.made.load(Ordering::SeqCst) < bound {
                assert!(Instant::now() < deadline, "the loader works ahead");
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(Duration::from_millis(20));
            assert_eq!(views.made.load(Ordering::SeqCst), bound);
            loader.next().unwrap().unwrap();
        }
    }

    #[test]
    fn dropping_stops_within_an_image() {
        let views = Arc::new(Keyed { pause: Duration::from_millis(20), ..Keyed::default() });
        let plan =
            LoaderPlan { views: Arc::clone(&views) as _, workers: 2, micro: 12, micros: 0..1, ..plan(memory(40, &[])) };
        let loader = Loader::start(plan).unwrap();
        while views.made.load(Ordering::SeqCst) == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        let (made, start) = (views.made.load(Ordering::SeqCst), Instant::now());
        drop(loader);
        assert!(start.elapsed() < Duration::from_secs(5));
        assert!(views.made.load(Ordering::SeqCst) - made <= 8, "two workers finish the image they are at");
        // A micro-batch has 24 views; neither was finished.
        assert!(views.made.load(Ordering::SeqCst) < 24);
    }
}
