//! Times the reduction of a gradient between processes: the canonical tree against MPI's all-reduce.
//!
//!     cargo build --profile dev --features mpi --bench reduce
//!     mpirun -n 2 --bind-to none target/debug/deps/reduce-HASH [ROUNDS]
//!
//! One rank thread a process. Prints, for gradients of 1, 25 and 350 MB, the median seconds of both (taken in turns; the slowest process counts), their ratio, and
//! how many bytes a process sent for the canonical one, over those of a ring, `2 (P - 1) / P` of the gradient.
#![allow(clippy::print_stdout, missing_docs)]

#[cfg(not(feature = "mpi"))]
fn main() {
    println!("nothing to time: this needs `--features mpi`, and to be started by mpirun");
}

#[cfg(feature = "mpi")]
fn main() -> anyhow::Result<()> {
    mpi::run()
}

#[cfg(feature = "mpi")]
mod mpi {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use anyhow::Result;
    use autodidact::parallel::{Collective, Link, Mpi, Node, ProcessRank, Reduction, ThreadRank, Transport};

    #[global_allocator]
    static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

    pub(crate) fn run() -> Result<()> {
        autodidact::ops::keep_pages();
        let rounds = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(5);
        let transport: Arc<dyn Transport> = Arc::new(Mpi::start(Duration::from_mins(2))?);
        let link = Arc::new(Link::new(transport));
        let (process, processes) = (link.process(), link.processes());
        if process == 0 {
            println!("{processes} processes, medians of {rounds} rounds");
            println!("      MB   canonical s       fast s   canonical / fast   bytes sent / ring's");
        }
        for megabytes in [1, 25, 350] {
            let length = megabytes * 1_000_000 / 4;
            let mut seconds = [Vec::new(), Vec::new()];
            let mut sent = 0;
            // the first round is warm-up
            for round in 0..=rounds {
                for (which, reduction) in [Reduction::Canonical, Reduction::Fast].into_iter().enumerate() {
                    let rank = ProcessRank::new(ThreadRank::world(1).remove(0), Arc::clone(&link), reduction);
                    let values = vec![vec![process as f32; length]];
                    rank.all_gather(vec![0.0])?;
                    let (before, start) = (link.bytes_sent(), Instant::now());
                    let total = rank.reduce(processes, vec![Node { level: 0, index: process, values }])?;
                    let own = start.elapsed().as_secs_f64();
                    if which == 0 {
                        sent = link.bytes_sent() - before;
                    }
                    assert_eq!(total.map(|total| total[0][length - 1]), Some((processes * (processes - 1) / 2) as f32));
                    let slowest = rank.all_gather_f64(vec![own])?.into_iter().fold(0.0, f64::max);
                    if round > 0 {
                        seconds[which].push(slowest);
                    }
                }
            }
            let [canonical, fast] = seconds.map(|mut seconds| {
                seconds.sort_by(f64::total_cmp);
                seconds[seconds.len() / 2]
            });
            let ring = 2.0 * (processes - 1) as f64 / processes as f64 * (4 * length) as f64;
            if process == 0 {
                let bytes = sent as f64 / ring.max(1.0);
                println!("{megabytes:8}   {canonical:11.4}   {fast:10.4}   {:16.2}   {bytes:19.3}", canonical / fast);
            }
        }
        link.finish()?;
        Ok(())
    }
}
