//! Progress of a run on the terminal: a bar, or plain lines where there is none.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::metrics::StepRecord;

/// Steps over which the rate is smoothed.
const SMOOTHING: f64 = 20.0;

const PLAIN_BAR: &str = "{bar:12} {wide_msg}";
const COLOUR_BAR: &str = "{bar:12.cyan/blue} {wide_msg}";

/// How progress is shown.
pub enum Style {
    /// A bar on standard error; coloured or not.
    Bar {
        /// Whether to colour it.
        colour: bool,
    },
    /// A plain line every so many steps.
    Lines {
        /// Where to.
        out: Box<dyn Write + Send>,
        /// Steps between two lines; 0 writes the last step only.
        every: u64,
    },
    /// Not at all.
    Silent,
}

impl Style {
    /// Chooses a bar when standard error is a terminal that can redraw a line, else plain lines on standard error.
    /// Colour goes by `NO_COLOR` (<https://no-color.org>: set and not empty).
    pub fn detect(every: u64) -> Self {
        let is_set =
            |name: &str, value: fn(&std::ffi::OsStr) -> bool| std::env::var_os(name).is_some_and(|v| value(&v));
        if std::io::stderr().is_terminal() && !is_set("TERM", |v| v == "dumb") {
            Self::Bar { colour: !is_set("NO_COLOR", |v| !v.is_empty()) }
        } else {
            Self::Lines { out: Box::new(std::io::stderr()), every }
        }
    }
}

enum Display {
    Bar(ProgressBar),
    Lines { out: Box<dyn Write + Send>, every: u64 },
    Silent,
}

/// Shows how far a run is. What it cannot write it drops: a closed terminal must not end a run.
pub struct Progress {
    display: Display,
    total: u64,
    rate: Rate,
}

impl Progress {
    /// Starts to show a run of `total` steps, of which `done` are done.
    pub fn new(style: Style, total: u64, done: u64) -> Self {
        let display = match style {
            Style::Bar { colour } => {
                let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
                let template = if colour { COLOUR_BAR } else { PLAIN_BAR };
                let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
                bar.set_style(style.progress_chars("=> "));
                bar.set_position(done);
                Display::Bar(bar)
            }
            Style::Lines { out, every } => Display::Lines { out, every },
            Style::Silent => Display::Silent,
        };
        Self { display, total, rate: Rate::default() }
    }

    /// Shows a finished step of `images` images.
    pub fn step(&mut self, record: &StepRecord, images: u64) {
        self.step_at(record, images, Instant::now());
    }

    fn step_at(&mut self, record: &StepRecord, images: u64, now: Instant) {
        self.rate.step(now, images);
        let remaining = self.total.saturating_sub(record.step);
        match &mut self.display {
            Display::Bar(bar) => {
                bar.set_position(record.step);
                // 80 columns hold the bar and this; a narrower terminal cuts it
                bar.set_message(format!("{}/{}  {}", record.step, self.total, line(record, &self.rate, remaining)));
            }
            Display::Lines { out, every } => {
                if remaining == 0 || (*every > 0 && record.step.is_multiple_of(*every)) {
                    let StepRecord { step, epoch, .. } = record;
                    let line = line(record, &self.rate, remaining);
                    let _ = writeln!(out, "step {step}/{} (epoch {epoch:.1})  {line}", self.total);
                    let _ = out.flush();
                }
            }
            Display::Silent => {}
        }
    }

    /// Says a line between the others, such as a warning, without tearing the bar.
    pub fn say(&mut self, text: &str) {
        match &mut self.display {
            Display::Bar(bar) => bar.suspend(|| {
                let _ = writeln!(std::io::stderr(), "{text}");
            }),
            Display::Lines { out, .. } => {
                let _ = writeln!(out, "{text}");
            }
            Display::Silent => {}
        }
    }

    /// Stops showing and leaves the last state on the screen.
    pub fn finish(self) {
        if let Display::Bar(bar) = &self.display {
            bar.abandon();
        }
    }
}

/// What a step reached: `loss 4.8123  lr 0.0312  1234 images/s  eta 3m12s`.
fn line(record: &StepRecord, rate: &Rate, remaining: u64) -> String {
    let mut line = format!("loss {:.4}  lr {}", record.loss, short(record.lr));
    // a rate is known after the second step
    if let Some((images_per_s, seconds_per_step)) = rate.smoothed() {
        line = format!("{line}  {} images/s", short(images_per_s));
        if remaining > 0 {
            line = format!("{line}  eta {}", duration(seconds_per_step * remaining as f64));
        }
    }
    line
}

/// Writes a number with three digits, or whole when it is large.
pub(super) fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        size if size >= 0.001 => {
            let digits = (2.0 - size.log10().floor()) as usize;
            format!("{value:.digits$}")
        }
        0.0 => "0".to_owned(),
        _ => format!("{value:.2e}"),
    }
}

/// Writes seconds as `42s`, `3m12s`, `2h05m` or `3d04h`.
pub(super) fn duration(seconds: f64) -> String {
    let s = Duration::try_from_secs_f64(seconds.round()).map_or(0, |d| d.as_secs());
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{:02}h", s / 86_400, s % 86_400 / 3600),
    }
}

/// Smoothed speed. The first step is left out: it pays for start-up, first touch of memory and empty queues.
#[derive(Default)]
struct Rate {
    last: Option<Instant>,
    steps: u32,
    /// Averages per step.
    seconds: f64,
    images: f64,
}

impl Rate {
    fn step(&mut self, now: Instant, images: u64) {
        if let Some(last) = self.last.replace(now) {
            self.steps += 1;
            // a plain mean at first, so that few steps do not weigh the first of them too much
            let share = (1.0 / f64::from(self.steps)).max(1.0 / SMOOTHING);
            let mix = |average: &mut f64, value: f64| *average += share * (value - *average);
            mix(&mut self.seconds, now.saturating_duration_since(last).as_secs_f64());
            mix(&mut self.images, images as f64);
        }
    }

    /// Returns images per second and seconds per step.
    fn smoothed(&self) -> Option<(f64, f64)> {
        (self.seconds > 0.0).then(|| (self.images / self.seconds, self.seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Screen(Arc<Mutex<Vec<u8>>>);

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Screen {
        fn lines(&self) -> Vec<String> {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap().lines().map(str::to_owned).collect()
        }
    }

    fn record(step: u64) -> StepRecord {
        StepRecord {
            step,
            epoch: step as f64 / 50.0,
            loss: 4.81234,
            lr: 0.03124,
            grad_norm: 1.0,
            images: 64 * step,
            parts: BTreeMap::new(),
            embedding_spread: None,
            embedding_rank: None,
            loss_scale: None,
            overflows: 0,
            skipped: 0,
            time_s: 0.0,
            images_per_s: 0.0,
            pace: None,
        }
    }

    #[test]
    fn plain_lines_with_a_rate_that_leaves_the_first_step_out() {
        let (screen, start) = (Screen::default(), Instant::now());
        let mut progress = Progress::new(Style::Lines { out: Box::new(screen.clone()), every: 2 }, 7, 0);
        // the first step takes a minute, all others half a second
        for step in 1..=7 {
            progress.step_at(&record(step), 64, start + Duration::from_millis(60_000 + 500 * (step - 1)));
        }
        progress.say("note");
        progress.finish();
        assert_eq!(
            screen.lines(),
            [
                "step 2/7 (epoch 0.0)  loss 4.8123  lr 0.0312  128 images/s  eta 3s",
                "step 4/7 (epoch 0.1)  loss 4.8123  lr 0.0312  128 images/s  eta 2s",
                "step 6/7 (epoch 0.1)  loss 4.8123  lr 0.0312  128 images/s  eta 1s",
                "step 7/7 (epoch 0.1)  loss 4.8123  lr 0.0312  128 images/s",
                "note",
            ]
        );
    }

    #[test]
    fn no_rate_before_the_second_step_and_none_when_clocks_stand_still() {
        let (screen, start) = (Screen::default(), Instant::now());
        let mut progress = Progress::new(Style::Lines { out: Box::new(screen.clone()), every: 1 }, 3, 0);
        progress.step_at(&record(1), 64, start);
        progress.step_at(&record(2), 64, start);
        assert!(screen.lines().iter().all(|line| line.ends_with("lr 0.0312")), "{:?}", screen.lines());
    }

    #[test]
    fn a_change_of_speed_shows_within_the_smoothing_window() {
        let mut rate = Rate::default();
        let mut now = Instant::now();
        for seconds in [1; 50].into_iter().chain([2; 60]) {
            rate.step(now, 10);
            now += Duration::from_secs(seconds);
        }
        let (images_per_s, _) = rate.smoothed().unwrap();
        assert!((images_per_s - 5.0).abs() < 0.3, "{images_per_s}");
    }

    #[test]
    fn bars_are_valid() {
        for template in [PLAIN_BAR, COLOUR_BAR] {
            assert!(ProgressStyle::with_template(template).is_ok());
        }
    }

    #[test]
    fn silent_and_broken_outputs_do_no_harm() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
        }
        for style in [Style::Silent, Style::Lines { out: Box::new(Broken), every: 1 }] {
            let mut progress = Progress::new(style, 2, 0);
            progress.step(&record(1), 64);
            progress.say("x");
            progress.finish();
        }
    }

    #[test]
    fn numbers_and_durations_are_short() {
        let numbers = [0.0, 0.031_24, 0.5, 1.0, 12.34, 1234.5, 1e-6, -0.25].map(short);
        assert_eq!(numbers, ["0", "0.0312", "0.500", "1.00", "12.3", "1234", "1.00e-6", "-0.250"]);
        let durations = [0.2, 59.6, 192.0, 7500.0, 273_600.0, f64::NAN, -1.0].map(duration);
        assert_eq!(durations, ["0s", "1m00s", "3m12s", "2h05m", "3d04h", "0s", "0s"]);
    }
}
